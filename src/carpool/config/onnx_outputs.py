"""Reads the shapes that an ONNX file declares for its inputs and outputs.

A runtime reports what it infers. Where that contradicts the file it leaves the length open, and an answer of
any length would fit.
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from carpool.config.model import DYNAMIC, ModelSignature, TensorSignature
from carpool.config.protobuf_fields import fields_in, read_varint, walk
from carpool.config.regular_file import open_regular

_GRAPH, _INPUT, _OUTPUT = 7, 11, 12  # of ModelProto, of GraphProto
_NAME, _TYPE = 1, 2  # of ValueInfoProto
_TENSOR, _SHAPE, _DIM, _LENGTH = 1, 2, 1, 1  # of TypeProto, its Tensor, TensorShapeProto, its Dimension
_LARGEST = 1 << 14
_MOST = 1024  # outputs


def as_declared(
    signature: ModelSignature, file: Path | None, left_out: frozenset[str] = frozenset()
) -> ModelSignature:
    """Returns the signature with the lengths that the file declares for its outputs, but for those that are
    `left_out`, which are declared elsewhere."""
    if file is None or file.suffix != ".onnx":
        return signature
    try:
        declared = read_outputs(file)
    except (OSError, ValueError):
        return signature
    kept = (
        tensor if tensor.name in left_out else _narrowed(tensor, declared.get(tensor.name))
        for tensor in signature.outputs
    )
    return replace(signature, outputs=tuple(kept))


def _narrowed(tensor: TensorSignature, declared: tuple[int, ...] | None) -> TensorSignature:
    if declared is None or len(declared) != len(tensor.shape):
        contradicts = declared is not None and not tensor.shape  # what is left of a contradiction
        return replace(tensor, shape=declared) if declared is not None and contradicts else tensor
    lengths = zip(tensor.shape, declared, strict=True)
    shape = tuple(said if inferred == DYNAMIC else inferred for inferred, said in lengths)
    return replace(tensor, shape=shape)


Shapes: TypeAlias = Mapping[str, tuple[int, ...]]


def read_outputs(file: Path) -> Shapes:
    """Returns the declared shape of each output that has one. Raises OSError, and ValueError for no ONNX."""
    return _read(file, (_OUTPUT,))[_OUTPUT]


def read_shapes(file: Path) -> tuple[Shapes, Shapes]:
    """Returns the declared shapes of inputs, weights with a default among them, and of outputs. Raises as
    `read_outputs`."""
    found = _read(file, (_INPUT, _OUTPUT))
    return found[_INPUT], found[_OUTPUT]


def _read(file: Path, wanted: Collection[int]) -> Mapping[int, Shapes]:
    found: dict[int, dict[str, tuple[int, ...]]] = {number: {} for number in wanted}
    with open_regular(file) as data:
        for number, length in walk(data, os.fstat(data.fileno()).st_size):
            if number != _GRAPH:
                continue
            for inner, size in walk(data, length):
                if inner in found and size <= _LARGEST and len(found[inner]) < _MOST:
                    said = dict(fields_in(data.read(size)))
                    shape = _shape(said.get(_TYPE, b""))
                    if shape is not None:
                        found[inner][said.get(_NAME, b"").decode("utf-8", "replace")] = shape
    return found


def _shape(kind: bytes) -> tuple[int, ...] | None:
    shape = dict(fields_in(dict(fields_in(kind)).get(_TENSOR, b""))).get(_SHAPE)
    if shape is None:
        return None
    return tuple(_length(dim) for number, dim in fields_in(shape) if number == _DIM)


def _length(dim: bytes) -> int:
    for number, value in fields_in(dim):
        if number == _LENGTH:
            length = read_varint(io.BytesIO(value))
            return length if length < 1 << 40 else DYNAMIC
    return DYNAMIC
