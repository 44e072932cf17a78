"""The classification extension: an output's best k values as "value:index[:label]" strings."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from carpool.types import Array, Datatype, Tensor


def classify(tensor: Tensor, k: int, labels: Sequence[str] = (), *, batched: bool = True) -> Tensor:
    """Per batch row, the k highest values in descending order; ties keep the lower index first."""
    values = _numbers(tensor)
    row_shape = values.shape[1:] if batched else values.shape
    row_count = values.shape[0] if batched and values.ndim else 1
    rows = values.reshape(row_count, math.prod(row_shape))
    k = min(k, rows.shape[1])
    shape = (row_count, k) if batched else (k,)
    found = np.empty((row_count, k), dtype=object)
    for row, numbers in enumerate(rows):
        for column, index in enumerate(_best(numbers, k)):
            found[row, column] = _describe(numbers[index], index, labels)
    return Tensor(tensor.name, Datatype.BYTES, shape, found.reshape(shape))


def _numbers(tensor: Tensor) -> Array:
    if tensor.datatype is Datatype.BF16:
        widened: Array = (tensor.data.astype(np.uint32) << 16).view(np.float32)
        return widened
    return tensor.data


def _best(numbers: Array, k: int) -> list[int]:
    keys = np.where(np.isnan(numbers), -np.inf, numbers) if numbers.dtype.kind == "f" else numbers
    # sorting the reversed row, then reversing, keeps equal values in index order
    order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
    best: list[int] = order[:k].tolist()
    return best


def _describe(value: np.generic, index: int, labels: Sequence[str]) -> bytes:
    number = f"{float(value):f}" if value.dtype.kind == "f" else str(int(value))
    label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
    return f"{number}:{index}{label}".encode()
