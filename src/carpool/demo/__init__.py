"""Models and pictures to try Carpool with; they come with the package: docs/models.md."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent
_MODELS = ("nanodet", "efficientnet_lite0", "open_nsfw", "u2netp")  # in the order in which they are shown


def bundled_models() -> Path:
    """A repository like any other; see the README in each model's folder for where it comes from."""
    return _HERE / "models"


def ocr_models() -> Path:
    """Returns another repository: a finder of text, a reader of lines, and the pipeline of both."""
    return _HERE / "ocr"


def text_model() -> Path:
    """Returns the folder of a model that writes what a line says. It needs PyTorch."""
    return _HERE / "reader"


def demo_models() -> list[Path]:
    """Returns the folder of each model that is here, the detector first. The wheel has the detector alone,
    the wheel carpool-demos puts the others beside it."""
    return [folder for name in _MODELS if (folder := bundled_models() / name).is_dir()]


def pictures() -> list[Path]:
    """Photos to ask about; the README beside them says whose they are."""
    return sorted((_HERE / "pictures").glob("*.jpg"))
