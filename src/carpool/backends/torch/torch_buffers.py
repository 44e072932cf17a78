"""The memory of one instance that stays where it is: inputs on their way in, and outputs on their way out."""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch

from carpool.backends.torch_datatypes import as_tensor, carried
from carpool.backends.torch_device import Device
from carpool.config.model import TensorConfig
from carpool.types import DATATYPES, Array

_KEPT = 8  # buffers of one shape that wait for the next batch; what is beyond goes back to the system

Part: TypeAlias = Mapping[str, Array | torch.Tensor]
"""The inputs of one request."""


class Inputs(Protocol):
    def rows(self, count: int) -> list[torch.Tensor]:
        """The first rows of every input on the device, in the order of the settings."""

    def gather(self, parts: Sequence[Part], count: int) -> None:
        """The inputs of these requests, one behind the other, into those rows."""


def bytes_of(tensors: Sequence[TensorConfig], largest: int | None) -> int:
    """What the inputs of the largest batch take."""
    return sum(
        (largest or 1) * math.prod(tensor.dims) * carried(DATATYPES[tensor.datatype]).itemsize
        for tensor in tensors
    )


class FixedInputs:
    """One buffer on the device for the largest batch, whose first rows serve the smaller ones, and one to
    gather in. Rows behind the batch keep what an earlier one left there: they are computed and dropped."""

    def __init__(self, device: Device, tensors: Sequence[TensorConfig], largest: int | None) -> None:
        self._batched = largest is not None
        self._staged: dict[str, torch.Tensor] = {}
        self._static: dict[str, torch.Tensor] = {}
        self._views: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor in tensors:
            shape = tensor.dims if largest is None else (largest, *tensor.dims)
            dtype = carried(DATATYPES[tensor.datatype])
            self._staged[tensor.name] = device.staging(shape, dtype)
            self._static[tensor.name] = device.zeros(shape, dtype)

    def rows(self, count: int) -> list[torch.Tensor]:
        return [static for _, static in self._of(count).values()]

    def gather(self, parts: Sequence[Part], count: int) -> None:
        """All rows of one input in one call into pinned memory, and one copy from there. Each call gives up
        the interpreter and has to get it back, so that few calls matter more than few bytes."""
        for name, (staged, static) in self._of(count).items():
            torch.cat([as_tensor(part[name]) for part in parts], out=staged)
            static.copy_(staged, non_blocking=True)

    def _of(self, count: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        views = self._views.get(count)
        if views is None:
            whole = slice(None, count if self._batched else None)
            views = self._views[count] = {
                name: (staged[whole], self._static[name][whole]) for name, staged in self._staged.items()
            }
        return views


class VaryingInputs:
    """For tensors whose shape differs from request to request: each batch has new ones."""

    def __init__(self, device: Device, tensors: Sequence[TensorConfig]) -> None:
        self._device = device
        self._names = [tensor.name for tensor in tensors]
        self._rows: list[torch.Tensor] = []

    def rows(self, count: int) -> list[torch.Tensor]:  # noqa: ARG002 - all of them are this batch's
        return self._rows

    def gather(self, parts: Sequence[Part], count: int) -> None:  # noqa: ARG002
        self._rows = [
            torch.cat([as_tensor(part[name]) for part in parts]).to(self._device.place)
            for name in self._names
        ]


class Answers:
    """Host memory for outputs. An array that is handed out belongs to whoever has it, and its memory is used
    again once that array and all its parts are gone: nothing is copied, and nothing grows when answers are
    taken away as fast as they come."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def copy(self, outputs: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
        """On their way: they are there when the device was waited for."""
        arrays: dict[str, Array] = {}
        for name in names:
            output = outputs[name]
            free = self._free[output.shape, output.dtype]
            memory = free.pop() if free else self._device.staging(output.shape, output.dtype)
            memory.copy_(output, non_blocking=True)
            array = memory.numpy()
            weakref.finalize(array, _give_back, free, memory).atexit = False
            arrays[name] = array
        return arrays

    def close(self) -> None:
        self._free.clear()


def _give_back(free: list[torch.Tensor], memory: torch.Tensor) -> None:
    """From whichever thread lets go of the array last."""
    if len(free) < _KEPT:
        free.append(memory)
