"""Models that come with the package, so that the first answer needs no download."""

from __future__ import annotations

from pathlib import Path


def demo_models() -> Path:
    """A repository like any other; see the README in each model's folder for where it comes from."""
    return Path(__file__).parent / "models"
