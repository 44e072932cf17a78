"""Finds models whose ONNX file fixes its batch, and has the file rewritten for batches of any size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from carpool.config.fingerprint import content_digest
from carpool.config.model import ModelConfig
from carpool.config.onnx_outputs import read_shapes
from carpool.config.repository import ModelVersion
from carpool.errors import CarpoolError


class Rebatched(NamedTuple):
    """Says which file runs. `words` are empty where nothing was to be done; `refused` says why it is still
    the one with the fixed batch."""

    version: ModelVersion
    words: str = ""
    refused: str = ""
    rows: int = 0  # of the file's own batch, to which smaller ones can be filled up


def rebatched(config: ModelConfig, version: ModelVersion) -> Rebatched:
    """Returns the version with a file for any batch, where its own fixes one, its settings do not want single
    requests, and the other file is proven."""
    file = version.file
    if file is None or file.suffix != ".onnx" or config.max_batch in (0, 1) or config.inputs:
        return Rebatched(version)
    try:
        batch = _fixed_batch(file)
    except (OSError, ValueError):
        return Rebatched(version)  # the runtime will say what is wrong with it
    if batch is None:
        return Rebatched(version)
    from carpool.engine.loading.rebatching import with_batches  # few files fix their batch

    try:
        made, words, refused = with_batches(file, content_digest(file), batch)
    except (OSError, CarpoolError) as error:
        made, words, refused = None, "", f"the rewritten file cannot be stored: {error}"
    if made is None:
        refused = f"the file fixes the batch to {batch}, and {refused}"
        return Rebatched(version, refused=refused, rows=batch if _all_begin_with(file, batch) else 0)
    return Rebatched(replace(version, file=made), words)


def _fixed_batch(file: Path) -> int | None:
    """Returns the number that all inputs and outputs begin with, if they take pictures or the like."""
    inputs, outputs = read_shapes(file)
    firsts = {shape[0] if shape else 0 for shape in inputs.values()}
    image = any(len(shape) >= 3 for shape in inputs.values())
    if len(firsts) != 1 or not image or not outputs:
        return None
    (batch,) = firsts
    return batch if batch >= 1 else None


def _all_begin_with(file: Path, batch: int) -> bool:
    return all(shape[:1] == (batch,) for shapes in read_shapes(file) for shape in shapes.values())
