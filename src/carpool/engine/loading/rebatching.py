"""Gives a model whose ONNX file fixes its batch, as most exporters' defaults do, batches of any size.

The file is rewritten (config/onnx_batches.py), and the new one takes its place only if a batch of different
inputs answers what the file itself answers to each of them.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Timer
from time import time
from typing import Any

import numpy as np

from carpool.backends.agreement import how_far
from carpool.backends.onnxruntime import ONNX_TYPES
from carpool.config.onnx_batches import NoBatch, with_any_batch
from carpool.config.server import usual_folder
from carpool.types import Array, Datatype

_RULE = 4  # of rewriting: what an earlier one made or refused does not count
_ROWS = 3  # different inputs in one batch; one more where the file has just as many
_LARGEST = 1 << 30
_MOST_KEPT = 16  # beside those that were used within a day: another server may be about to open them
_USED_S = 86_400.0
_CLOSE = 1e-3  # of an answer's size: kernels add in another order in batches
_SAME = 1e-6  # the engine's own noise
_SHARE = 0.1  # of what is between the answers to different inputs: rows that are mixed up are as far off
_QUIET = 4
_LONGEST_S = 20.0  # of the whole proof: a graph may have no end
_TOO_LONG = f"to try it with noise takes more than {_LONGEST_S:g} s"
_LOUD = (1.0, 255.0)  # the largest value of noise


def with_batches(file: Path, digest: str, batch: int) -> tuple[Path | None, str, str]:
    """Returns the proven file and words about it, or why there is none. What an earlier start has found is
    kept, by the file's content."""
    found = _made(file, digest, batch)
    if found[0] is not None and not _used(found[0]):
        _made.cache_clear()
        found = _made(file, digest, batch)
    return found


@lru_cache(maxsize=64)
def _made(file: Path, digest: str, batch: int) -> tuple[Path | None, str, str]:
    folder = usual_folder("cache") / "rebatched"
    told, target = folder / f"{digest}-{_RULE}.json", folder / f"{digest}-{_RULE}.onnx"
    with suppress(OSError, ValueError):
        found = json.loads(told.read_text("utf-8"))
        if found["refused"] or target.is_file():
            return (None if found["refused"] else target), str(found["words"]), str(found["refused"])
    words, refused = "", ""
    if file.stat().st_size > _LARGEST:
        return None, "", f"it is larger than the {_LARGEST >> 30} GiB that are rewritten"
    try:
        data = file.read_bytes()
        new, reshapes = with_any_batch(data, batch)
        refused = _refused(data, new, batch)
        words = (
            f"its file fixes the batch to {batch}; with {reshapes} changed Reshapes it takes any batch, and "
        )
        words += f"{_ROWS} different inputs in one answered what each answers alone"
    except (NoBatch, ValueError) as error:
        refused = str(error)
    folder.mkdir(parents=True, exist_ok=True)
    if not refused:
        _write(target, new)
        _forget(folder)
    if refused != _TOO_LONG:  # which may be the machine's doing
        _write(told, json.dumps({"words": words, "refused": refused}).encode())
    return (None if refused else target), words, refused


def _write(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    Path(name).replace(target)


def _used(made: Path) -> bool:
    """Says that it is used now; returns whether it is still there, since all servers of a user share the
    folder."""
    with suppress(FileNotFoundError):
        os.utime(made)
        return True
    return False


def _forget(folder: Path) -> None:
    """Removes those that were used longest ago. A file that a server has open stays readable to it."""
    used: dict[Path, float] = {}
    for file in folder.glob("*.onnx"):
        with suppress(FileNotFoundError):  # another server removed it meanwhile
            used[file] = file.stat().st_mtime
    for old in sorted(used, key=used.__getitem__, reverse=True)[_MOST_KEPT:]:
        if used[old] < time() - _USED_S:
            old.unlink(missing_ok=True)


# ---- the proof


def _refused(before: bytes, after: bytes, batch: int) -> str:
    """Returns why the rewritten file is not used; empty: it answers as the other one."""
    try:
        own, new = _session(before), _session(after)
    except Exception as error:  # the runtime's exceptions have no base class of their own
        return f"rewritten it does not load: {_line(error)}"
    options = _options()
    timer = Timer(_LONGEST_S, lambda: setattr(options, "terminate", True))
    timer.daemon = True
    timer.start()
    try:
        return _compared(own, new, batch, options)
    finally:
        timer.cancel()


def _compared(own: Any, new: Any, batch: int, options: Any) -> str:
    differs = False
    for loud in _LOUD:
        rows = [_noise(own, number, loud) for number in range(_ROWS + (batch == _ROWS))]
        try:
            singles = _answers(own, rows, batch, options)
            stacked = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
            together = new.run(None, stacked, options)
        except Exception as error:  # as above
            if options.terminate:
                return _TOO_LONG
            return f"rewritten it fails with a batch of {len(rows)}: {_line(error)}"
        for place, output in enumerate(own.get_outputs()):
            wanted = np.concatenate([single[place] for single in singles])
            off = how_far(wanted, together[place])
            apart = min(how_far(wanted[:1], wanted[1:2]), how_far(wanted[:1], wanted[2:3]))
            if off > _CLOSE or (off > _SAME and off > _SHARE * apart):
                return f'rewritten its output "{output.name}" is another in a batch than alone'
            differs |= apart > 0
    return "" if differs else "its answers to different noise are the same, which proves nothing"


def _answers(
    own: Any, rows: Sequence[Mapping[str, Array]], batch: int, options: Any
) -> list[Sequence[Array]]:
    """Returns what the file answers to each row: alone, or as the first of a batch of its size."""
    found = list[Sequence[Array]]()
    for row in rows:
        filled = {name: np.repeat(value, batch, axis=0) for name, value in row.items()}
        found.append([answer[:1] for answer in own.run(None, filled, options)])
    return found


def _noise(session: Any, number: int, loud: float) -> dict[str, Array]:
    random = np.random.default_rng((_RULE, number))
    return {one.name: _values(random, one, loud, 1 / (number + 1)) for one in session.get_inputs()}


def _values(random: np.random.Generator, one: Any, loud: float, power: float) -> Array:
    shape = (1, *(side if isinstance(side, int) and side > 0 else 64 for side in one.shape[1:]))
    datatype = ONNX_TYPES[one.type]
    if datatype in (Datatype.BYTES, Datatype.BF16):
        raise ValueError(f"its input is {datatype.value}")
    if datatype.dtype.kind == "f":
        return (random.random(shape) ** power * loud).astype(datatype.dtype)
    return random.integers(0, 256 if datatype is Datatype.UINT8 else 2, shape).astype(datatype.dtype)


def _session(data: bytes) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _QUIET
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _options() -> Any:
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = _QUIET
    return options


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).rpartition("Status Message: ")[2]
    return text[:300].rstrip(".")
