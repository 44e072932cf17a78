"""The class names that belong to a model's outputs, from the files its settings name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from carpool.config.model import ModelConfig
from carpool.observe.logs import logger

log = logger("engine")

_LARGEST_FILE = 4 << 20


def read_labels(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Class names by output: the output's own file, else the model's, which is for its first output."""
    labels: dict[str, Sequence[str]] = {}
    for index, output in enumerate(config.outputs):
        name = output.labels or (config.labels if index == 0 else None)
        if name is None:
            continue
        folder = config.path if config.path.is_dir() else config.path.parent
        lines = _lines(folder, name)
        if lines is None:
            log.warning("labels-not-found", model=config.name, file=name)
        else:
            labels[output.name] = lines
    return labels


def _lines(folder: Path, name: str) -> list[str] | None:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return None
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(_LARGEST_FILE).splitlines()
