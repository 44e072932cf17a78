"""NVIDIA's JPEG decoder, called directly: a handle for each instance of a model.

torchvision decodes one batch at a time, behind one lock for the whole process, and the host's part of that is
most of it. Here every instance decodes for itself, into memory that is taken at once for the whole batch, in
its own stream. The library is the one that torchvision has loaded; it is used as its C interface says.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import AbstractContextManager, nullcontext
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import torch

_HARDWARE = 3  # of its ways to decode: the engine that does nothing else
_PLANES = 3  # of its formats: RGB, one plane after the other
_COLOURS = 3
_MOST_COMPONENTS = 4
_DESTINATION = 2 * _MOST_COMPONENTS  # numbers for one picture: where its planes go, bytes in a line of each
_OK = 0
_CANNOT = {1: "is not set up", 5: "got no memory", 7: "has no engine here", 9: "has no such way here"}
"""Of its answers those that are nobody's file's fault; the others are about what it was given."""


class NoDecoder(Exception):
    """This machine cannot decode in this way, or no longer."""


def loaded_library() -> Any:
    """As torchvision brought it along; raises `NoDecoder`."""
    import torchvision.io  # noqa: F401  loads it

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if "libnvjpeg" in Path(path).name:
            return declared(ctypes.CDLL(path))
    raise NoDecoder("torchvision was built without nvJPEG")


def declared(library: Any) -> Any:
    """With the types of what is called, so that pointers are not cut off."""
    library.nvjpegCreateEx.argtypes = (c_int, c_void_p, c_void_p, c_uint, POINTER(c_void_p))
    library.nvjpegDestroy.argtypes = (c_void_p,)
    library.nvjpegJpegStateCreate.argtypes = (c_void_p, POINTER(c_void_p))
    library.nvjpegJpegStateDestroy.argtypes = (c_void_p,)
    sizes = (POINTER(c_int),) * 4
    library.nvjpegGetImageInfo.argtypes = (c_void_p, c_void_p, c_size_t, *sizes)
    library.nvjpegDecodeBatchedInitialize.argtypes = (c_void_p, c_void_p, c_int, c_int, c_int)
    library.nvjpegDecodeBatched.argtypes = (c_void_p,) * 6
    return library


class Nvjpeg:
    """Decodes batches, for one thread at a time. What it cannot read raises RuntimeError for the batch."""

    # Seen on an H200: of several threads that begin at once, beside graphs that run, some are told that there
    # is no memory, while nearly all of it is free. Whoever is told so has to decode in another way.

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._handle, self._state = c_void_p(), c_void_p()
        with _current(device):
            if library.nvjpegCreateEx(_HARDWARE, None, None, 0, byref(self._handle)) != _OK:
                raise NoDecoder("the device has no engine for JPEGs")
            if library.nvjpegJpegStateCreate(self._handle, byref(self._state)) != _OK:
                library.nvjpegDestroy(self._handle)
                raise NoDecoder("the device's engine for JPEGs cannot be used")
        self._batch = 0  # that it is ready for
        self._components, self._sampling = c_int(), c_int()
        self._widths, self._heights = (c_int * _MOST_COMPONENTS)(), (c_int * _MOST_COMPONENTS)()
        ending = weakref.finalize(self, _destroy, library, self._handle, self._state)
        ending.atexit = False  # by then the driver may be gone

    def __call__(self, files: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each as [3, h, w], in the current stream: the files must stay where they are until that is done."""
        count = len(files)
        addresses = [file.data_ptr() for file in files]
        lengths = [file.numel() for file in files]
        pictures, destinations = self._room(list(map(self._size, addresses, lengths)))
        library = self._library
        if count != self._batch:
            self._batch = 0
            self._check(library.nvjpegDecodeBatchedInitialize(self._handle, self._state, count, 1, _PLANES))
            self._batch = count
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        numbers = (np.array(addresses, np.uint64), np.array(lengths, np.uint64), destinations)
        places = (c_void_p(array.ctypes.data) for array in numbers)
        self._check(library.nvjpegDecodeBatched(self._handle, self._state, *places, c_void_p(stream)))
        return pictures

    def _size(self, address: int, length: int) -> tuple[int, int]:
        """Height and width of a picture in colour."""
        found = (byref(self._components), byref(self._sampling), self._widths, self._heights)
        self._check(self._library.nvjpegGetImageInfo(self._handle, address, length, *found))
        if self._components.value != _COLOURS:
            raise RuntimeError("not a JPEG of three colours")
        return self._heights[0], self._widths[0]

    def _room(self, sizes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], np.ndarray[Any, Any]]:
        """Memory for all pictures, taken once for each size, and where each of their planes goes."""
        pictures: list[torch.Tensor] = [torch.empty(0)] * len(sizes)
        destinations = np.zeros((len(sizes), _DESTINATION), np.uint64)
        rows_of: dict[tuple[int, int], list[int]] = {}
        for row, size in enumerate(sizes):
            rows_of.setdefault(size, []).append(row)
        for (height, width), rows in rows_of.items():
            block = torch.empty(len(rows), _COLOURS, height, width, dtype=torch.uint8, device=self._device)
            planes = np.arange(len(rows) * _COLOURS, dtype=np.uint64) * np.uint64(height * width)
            destinations[rows, :_COLOURS] = (planes + np.uint64(block.data_ptr())).reshape(-1, _COLOURS)
            destinations[rows, _MOST_COMPONENTS : _MOST_COMPONENTS + _COLOURS] = width
            for row, picture in zip(rows, block.unbind(), strict=True):
                pictures[row] = picture
        return pictures, destinations

    def _check(self, status: int) -> None:
        if status in _CANNOT:
            raise NoDecoder(f"nvJPEG {_CANNOT[status]}")
        if status != _OK:
            raise RuntimeError(f"nvJPEG answered {status}")


def _current(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _destroy(library: Any, handle: c_void_p, state: c_void_p) -> None:
    library.nvjpegJpegStateDestroy(state)
    library.nvjpegDestroy(handle)
