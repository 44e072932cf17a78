"""Tensors in the typed fields of `contents`, for clients that do not send raw bytes."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from carpool.errors import InvalidInput
from carpool.types import Datatype
from carpool.wire.v2 import TensorHead

_LENGTH = struct.Struct("<I")
_INT, _UINT = "int_contents", "uint_contents"
_FIELDS: Mapping[Datatype, str] = {
    Datatype.BOOL: "bool_contents",
    Datatype.INT8: _INT,
    Datatype.INT16: _INT,
    Datatype.INT32: _INT,
    Datatype.INT64: "int64_contents",
    Datatype.UINT8: _UINT,
    Datatype.UINT16: _UINT,
    Datatype.UINT32: _UINT,
    Datatype.UINT64: "uint64_contents",
    Datatype.FP32: "fp32_contents",
    Datatype.FP64: "fp64_contents",
    Datatype.BYTES: "bytes_contents",
}
"""FP16 and BF16 have no typed form."""


def to_bytes(head: TensorHead, elements: int, contents: Any) -> bytes:
    """The tensor as raw contents would carry it; `contents` is an InferTensorContents."""
    owner = f"input '{head.name}'"
    field = _FIELDS.get(head.datatype)
    if field is None:
        raise InvalidInput(
            f"{owner} is {head.datatype.value}, which only raw_input_contents can carry",
            field=f"{owner}.contents",
        )
    for given, _ in contents.ListFields():
        if given.name != field:
            raise InvalidInput(
                f"{owner} is {head.datatype.value}, whose values go into {field}, not into {given.name}",
                field=f"{owner}.contents.{given.name}",
            )
    values: Sequence[Any] = getattr(contents, field)
    if len(values) != elements:
        raise InvalidInput(
            f"{owner}.contents.{field} has {len(values)} values,"
            f" but shape {list(head.shape)} needs {elements}",
            field=f"{owner}.contents.{field}",
        )
    return _strings(values) if head.datatype is Datatype.BYTES else _numbers(head, values, field)


def _strings(values: Sequence[bytes]) -> bytes:
    return b"".join(piece for value in values for piece in (_LENGTH.pack(len(value)), value))


def _numbers(head: TensorHead, values: Sequence[Any], field: str) -> bytes:
    dtype = head.datatype.dtype
    if dtype.kind in "iu" and dtype.itemsize < 4 and values:  # wider ones fill their field
        limits = np.iinfo(dtype)
        if min(values) < limits.min or max(values) > limits.max:
            raise InvalidInput(
                f"input '{head.name}' holds a value out of range for {head.datatype.value}",
                field=f"input '{head.name}'.contents.{field}",
            )
    return np.fromiter(values, dtype, len(values)).tobytes()
