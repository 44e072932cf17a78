"""Memory of a GPU that one process allocates and another maps, by CUDA's driver.

PyTorch can share its own, and counts in files who has it: a process that is killed never counts down, and
what it had is never free again. Here one process owns the memory, and the other's end, however it comes,
changes nothing for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_HANDLE_BYTES = 64
_LAZILY = 1  # peers are made accessible when the memory is mapped


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * _HANDLE_BYTES),)


@cache
def _driver() -> Any:
    """OSError where there is none."""
    driver = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_ulonglong
    driver.cuMemAlloc_v2.argtypes = (ctypes.POINTER(address), ctypes.c_size_t)
    driver.cuMemFree_v2.argtypes = (address,)
    driver.cuIpcGetMemHandle.argtypes = (ctypes.POINTER(_Handle), address)
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(address), _Handle, ctypes.c_uint)
    driver.cuIpcCloseMemHandle.argtypes = (address,)
    return driver


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise RuntimeError(f"{name} failed with {code}")


@contextmanager
def _on(gpu: int) -> Iterator[None]:
    """The driver works in the context of the thread that calls it: PyTorch's, which it makes at first use."""
    with torch.cuda.device(gpu):
        torch.cuda.synchronize()
        yield


class CudaMemory:
    """Given back when nobody has it any more: who reads a part of it keeps all of it."""

    def __init__(self, gpu: int, address: int, size: int, handle: bytes, give_back: str) -> None:
        self.gpu, self.address, self.size, self.handle = gpu, address, size, handle
        self.place = torch.device("cuda", gpu)
        self._give_back = give_back

    @classmethod
    def allocated(cls, gpu: int, size: int) -> CudaMemory:
        """RuntimeError where there is not so much, or where this driver does not share it."""
        address, handle = ctypes.c_ulonglong(), _Handle()
        with _on(gpu):
            _call("cuMemAlloc_v2", ctypes.byref(address), size)
            try:
                _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
            except RuntimeError:
                _call("cuMemFree_v2", address)
                raise
        return cls(gpu, address.value, size, bytes(handle), "cuMemFree_v2")

    @classmethod
    def mapped(cls, gpu: int, handle: bytes, size: int) -> CudaMemory:
        """In another process."""
        address = ctypes.c_ulonglong()
        with _on(gpu):
            opened = _Handle.from_buffer_copy(handle)
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _LAZILY)
        return cls(gpu, address.value, size, handle, "cuIpcCloseMemHandle")

    def __del__(self) -> None:
        """What fails here leaves memory that goes with the process; nobody could do anything about it."""
        try:
            with _on(self.gpu):
                _call(self._give_back, self.address)
        except Exception:
            """The device, or the interpreter, is gone already."""
