"""onnxruntime's tensors: which datatype is which, and the two kinds that numpy does not hold as they are."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from carpool.errors import InvalidInput
from carpool.types import Array, Datatype

ONNX_TYPES = {
    "tensor(bool)": Datatype.BOOL,
    "tensor(uint8)": Datatype.UINT8,
    "tensor(uint16)": Datatype.UINT16,
    "tensor(uint32)": Datatype.UINT32,
    "tensor(uint64)": Datatype.UINT64,
    "tensor(int8)": Datatype.INT8,
    "tensor(int16)": Datatype.INT16,
    "tensor(int32)": Datatype.INT32,
    "tensor(int64)": Datatype.INT64,
    "tensor(float16)": Datatype.FP16,
    "tensor(float)": Datatype.FP32,
    "tensor(double)": Datatype.FP64,
    "tensor(bfloat16)": Datatype.BF16,
    "tensor(string)": Datatype.BYTES,
}
_BFLOAT16 = 16  # its number in the ONNX format


def to_ort(values: Any, name: str, datatype: Datatype, array: Array) -> Any:
    """What the runtime takes for this input; `values` is its class OrtValue."""
    if datatype is Datatype.BF16:
        return values.ortvalue_from_numpy_with_onnx_type(np.asarray(array, order="C"), _BFLOAT16)
    return _text(name, array) if datatype is Datatype.BYTES else array


def as_value(values: Any, item: Any) -> Any:
    return values.ortvalue_from_numpy(np.asarray(item, order="C")) if isinstance(item, np.ndarray) else item


def from_ort(answer: Any, datatype: Datatype) -> Array:
    if datatype is Datatype.BF16:
        return _bits(answer)
    array: Array = answer if isinstance(answer, np.ndarray) else answer.numpy()
    return _utf8(array) if datatype is Datatype.BYTES else array


def _bits(value: Any) -> Array:
    """A copy of the 16-bit patterns; the runtime refuses to make a numpy array of what numpy lacks."""
    shape = tuple(value.shape())
    data = np.empty(shape, Datatype.BF16.dtype)
    if math.prod(shape):
        ctypes.memmove(data.ctypes.data, value.data_ptr(), data.nbytes)
    return data


def _text(name: str, array: Array) -> Array:
    """ONNX strings are text: left as bytes, they would arrive as the text b'…'."""
    text = np.empty(array.shape, dtype=object)
    text.ravel()[:] = [_decoded(name, item) for item in array.ravel()]
    return text


def _decoded(name: str, item: Any) -> str:
    try:
        return item if isinstance(item, str) else bytes(item).decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            f"input '{name}' holds bytes that are not UTF-8, and an ONNX model takes only text",
            field=name,
        ) from None


def _utf8(array: Array) -> Array:
    encoded = np.empty(array.shape, dtype=object)
    encoded.ravel()[:] = [item.encode() for item in array.ravel()]
    return encoded
