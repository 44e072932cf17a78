"""The classification extension: of an output, the best k values as strings "value:index[:label]"."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from carpool.types import Array, Datatype, RequestedOutput, Tensor
from carpool.wire.strings import Between, go_on

_SORTED_WHOLE: Final = 1024  # values of a row: up to here, finding the best costs more than sorting all
FEW_VALUES: Final = 16 * 1024
"""To look through at once: what is more takes a loop milliseconds."""
_FEW_CLASSES: Final = 1024  # to write


@dataclass(slots=True)
class ClassifiedTensor(Tensor):
    """An output as the model gave it, with the classes that were asked for."""

    classes: Tensor


def any_takes_long(asked: Sequence[RequestedOutput], outputs: Sequence[Tensor]) -> bool:
    """Returns whether the classes that are asked for are still to be found, and better not in a loop."""
    wanted = {output.name: output.classification for output in asked if output.classification}
    values = classes = 0
    for tensor in outputs if wanted else ():
        k, size = wanted.get(tensor.name, 0), tensor.data.size
        if k and not isinstance(tensor, ClassifiedTensor):
            values += size
            classes += min(size, k * (tensor.shape[0] if tensor.shape else 1))
    return values > FEW_VALUES or classes > _FEW_CLASSES


def with_classes(
    asked: Sequence[RequestedOutput],
    outputs: Sequence[Tensor],
    labels: Mapping[str, Sequence[str]],
    between: Between = go_on,
    *,
    batched: bool,
) -> list[Tensor]:
    """Returns the outputs, those with their classes of which classes are asked for. In any thread."""
    wanted = {output.name: output.classification for output in asked}
    found: list[Tensor] = []
    for tensor in outputs:
        k = wanted.get(tensor.name, 0)
        if k and tensor.datatype is not Datatype.BYTES:
            classes = classify(tensor, k, labels.get(tensor.name, ()), between, batched=batched)
            tensor = ClassifiedTensor(tensor.name, tensor.datatype, tensor.shape, tensor.data, classes)
        found.append(tensor)
    return found


def classify(
    tensor: Tensor, k: int, labels: Sequence[str] = (), between: Between = go_on, *, batched: bool = True
) -> Tensor:
    """Per batch row, the k highest values in descending order; ties keep the lower index first."""
    if isinstance(tensor, ClassifiedTensor):
        return tensor.classes
    values = tensor.data
    if tensor.datatype is Datatype.BF16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    row_shape = values.shape[1:] if batched else values.shape
    row_count = values.shape[0] if batched and values.ndim else 1
    rows = values.reshape(row_count, math.prod(row_shape))
    k = min(k, rows.shape[1])
    best = _best(rows, k, between)
    numbers = np.take_along_axis(rows, best, axis=1).tolist()
    found = np.empty((row_count, k), dtype=object)
    is_float = rows.dtype.kind == "f"
    for row, (indices, chosen) in enumerate(zip(best.tolist(), numbers, strict=True)):
        between()
        for column, (index, value) in enumerate(zip(indices, chosen, strict=True)):
            number = f"{value:f}" if is_float else str(int(value))
            label = f":{labels[index]}" if index < len(labels) and labels[index] else ""
            found[row, column] = f"{number}:{index}{label}".encode()
    shape = (row_count, k) if batched else (k,)
    return Tensor(tensor.name, Datatype.BYTES, shape, found.reshape(shape))


def _best(rows: Array, k: int, between: Between = go_on) -> Array:
    """Returns the indices of each row's k highest values. NaN counts as less than any number."""
    size = rows.shape[1]
    if not k or not rows.size:
        return np.zeros((rows.shape[0], k), np.int64)
    if rows.dtype.kind == "f":
        absent = np.isnan(rows)
        if absent.any():
            rows = np.where(absent, -np.inf, rows)
    best: Array
    if k == 1:
        best = rows.argmax(axis=1)[:, None]
    elif size <= _SORTED_WHOLE:
        # Sorting the reversed row, then reversing, keeps equal values in the order of their indices.
        best = size - 1 - np.argsort(rows[:, ::-1], axis=1, kind="stable")[:, : -k - 1 : -1]
    else:
        best = np.stack([_best_of(row, k, between) for row in rows])
    return best


def _best_of(row: Array, k: int, between: Between) -> Array:
    """Looks for the k-th value, and sorts only what is not below it."""
    between()
    least = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > least)
    indices = np.sort(np.concatenate((above, np.flatnonzero(row == least)[: k - len(above)])))
    order = k - 1 - np.argsort(row[indices][::-1], kind="stable")[::-1]
    best: Array = indices[order]
    return best
