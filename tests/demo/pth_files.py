"""Files as torch wrote them before 1.6, put together instruction by instruction: torch is not here."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

REBUILD = ("torch._utils", "_rebuild_tensor_v2")
STORAGES = {np.dtype("<f4"): "FloatStorage", np.dtype("<i8"): "LongStorage"}


def head(**changed: Any) -> bytes:
    facts = {"magic": 0x1950A86A20F9469CFC6C, "protocol": 1001, "little_endian": True} | changed
    machine = {"little_endian": facts["little_endian"]}
    return b"".join(pickle.dumps(part, 2) for part in (facts["magic"], facts["protocol"], machine))


def pickled(value: bytes) -> bytes:
    return b"\x80\x02" + value + b"."


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    data = value.encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little", signed=True)


def tuple_of(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(function: tuple[str, str], *arguments: bytes) -> bytes:
    return name(*function) + tuple_of(*arguments) + b"R"


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return b"}" + b"".join(text(key) + value + b"s" for key, value in items.items())


def tensor(
    key: str,
    storage: np.ndarray[Any, Any],
    shape: tuple[int, ...] | None = None,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> bytes:
    """A tensor over a flat storage, as its pickle describes it; strides count elements."""
    shape = (storage.size,) if shape is None else shape
    strides = (
        tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))) if strides is None else strides
    )
    kind = name("torch", STORAGES[storage.dtype])
    described = tuple_of(text("storage"), kind, text(key), text("cpu"), number(storage.size), b"N") + b"Q"
    sizes, steps = (tuple_of(*map(number, numbers)) for numbers in (shape, strides))
    hooks = call(("collections", "OrderedDict"))
    return call(REBUILD, described, number(offset), sizes, steps, b"\x89", hooks)


def pth(named: Mapping[str, bytes], storages: Mapping[str, np.ndarray[Any, Any]], **changed: Any) -> bytes:
    raw = b"".join(data.size.to_bytes(8, "little") + data.tobytes() for data in storages.values())
    return head(**changed) + pickled(dictionary(named)) + pickle.dumps(list(storages), 2) + raw
