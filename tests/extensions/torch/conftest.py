"""Fixtures that end what the tests of PyTorch models start."""

from __future__ import annotations

from backends.conftest import looked_for_anew, opened

__all__ = ["looked_for_anew", "opened"]
