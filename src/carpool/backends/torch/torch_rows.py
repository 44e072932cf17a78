"""What an encoder in a process of its own hands over, as PyTorch has it: in the memory of the host, or in
that of a GPU where encoder and decoders share one."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from carpool.backends.torch.cuda_memory import CudaMemory
from carpool.backends.torch.torch_device import PRECISIONS
from carpool.memory.host_rows import HostRows, RowForm
from carpool.observe.logs import logger
from carpool.types import Array

_log = logger("runner")
_HANDLE = "handle"
_DATATYPES = {str(dtype).removeprefix("torch."): dtype for dtype in PRECISIONS.values()}


def form_of(encoded: torch.Tensor) -> RowForm:
    shape = tuple(encoded.shape[1:])
    datatype = str(encoded.dtype).removeprefix("torch.")
    return RowForm(datatype, encoded.element_size() * math.prod(shape), len(encoded), shape)


def make(form: RowForm, file: int, pieces: int, gpu: int | None) -> HostRows | CudaRows:
    form.check(TorchHostRows.item_bytes(form.datatype), pieces)
    if gpu is not None:
        try:
            return CudaRows(form, CudaMemory.allocated(gpu, pieces * form.piece_bytes))
        except (OSError, RuntimeError) as error:  # some containers and drivers share nothing
            _log.warning("rows-through-the-host", gpu=gpu, error=str(error))
    return TorchHostRows.grown(form, file, pieces)


def opened(form: RowForm, file: int, told: Mapping[str, Any]) -> HostRows | CudaRows:
    if _HANDLE not in told:
        return TorchHostRows(form, file)
    return CudaRows(form, CudaMemory.mapped(told["gpu"], bytes.fromhex(told[_HANDLE]), told["bytes"]))


class TorchHostRows(HostRows):
    @staticmethod
    def item_bytes(datatype: str) -> int:
        return _DATATYPES[datatype].itemsize if datatype in _DATATYPES else 0

    def _flat(self, rows: torch.Tensor) -> Array:
        flat: Array = rows.cpu().contiguous().view(torch.uint8).flatten().numpy()
        return flat

    def _formed(self, view: Array, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor's memory holds `view` for as long as there is a tensor over it."""
        return torch.from_numpy(view).view(_DATATYPES[self._form.datatype]).view(shape)


class _Lent:
    """A part of a GPU's memory in the words that PyTorch takes over without a copy. It keeps this object for
    as long as there is a tensor over it, and this object the memory."""

    def __init__(self, memory: CudaMemory, offset: int, size: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (memory.address + offset, False),
            "version": 3,
        }


class CudaRows:
    """As `HostRows`. What `put` wrote is on the device when it returns, and whoever reads it on a stream of
    another process begins after that: nobody has to wait for an event of the other."""

    def __init__(self, form: RowForm, memory: CudaMemory) -> None:
        self._form = form
        self._memory = memory
        self._pieces = memory.size // form.piece_bytes
        self.told: Mapping[str, Any] = {
            _HANDLE: memory.handle.hex(),
            "gpu": memory.gpu,
            "bytes": memory.size,
        }

    def put(self, pieces: Sequence[int], encoded: Sequence[torch.Tensor]) -> list[int]:
        for piece, rows in zip(pieces, encoded, strict=True):
            self.rows(piece, len(rows), lambda: None).copy_(rows)
        torch.cuda.current_stream(self._memory.place).synchronize()
        return [len(rows) for rows in encoded]

    def rows(self, piece: int, count: int, left: Callable[[], object]) -> torch.Tensor:
        if not (0 <= piece < self._pieces and 0 < count <= self._form.most):
            raise ValueError(f"piece {piece} of {self._pieces} cannot have {count} rows")
        lent = _Lent(self._memory, piece * self._form.piece_bytes, count * self._form.row_bytes)
        weakref.finalize(lent, left).atexit = False
        flat = torch.as_tensor(lent, device=self._memory.place)
        return flat.view(_DATATYPES[self._form.datatype]).view(count, *self._form.shape)
