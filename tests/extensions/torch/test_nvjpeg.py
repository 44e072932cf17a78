"""The decoder's C interface, with a pretended library: sizes, planes, failures."""

from __future__ import annotations

import ctypes
import gc
from ctypes import POINTER, c_int, c_size_t, c_ubyte, c_void_p, cast
from typing import Any

import numpy as np
import pytest
import torch

from carpool.backends.backend import PictureForm, PlacedRectangle
from carpool.errors import InvalidInput
from carpool.extensions.torch.torch_pictures import DevicePictures, NoDecoder, Nvjpeg, declared

CPU = torch.device("cpu")
BAD, GREY, NO_MEMORY = 0xEE, 0xAA, 0xDD


def written(height: int, width: int, value: int, kind: int = 0) -> torch.Tensor:
    """A file of the pretended format: its size, the value of its first plane, and what is wrong with it."""
    return torch.tensor([kind, height, width, value], dtype=torch.uint8)


class Library:
    """What is called, as functions that take any types: the real ones are told theirs as well."""

    def __init__(self, *, engine: bool = True, states: bool = True) -> None:
        self.batches: list[int] = []  # that it was made ready for
        self.open = 0

        def create(backend: int, _d: Any, _p: Any, _flags: int, handle: Any) -> int:
            if backend != 3 or not engine:
                return 7
            self.open += 1
            cast(handle, POINTER(c_void_p))[0] = 41
            return 0

        def create_state(handle: Any, state: Any) -> int:
            if not states:
                return 6
            assert value_of(handle) == 41
            self.open += 1
            cast(state, POINTER(c_void_p))[0] = 42
            return 0

        def destroy(_handle: Any) -> int:
            self.open -= 1
            return 0

        def initialize(_handle: Any, state: Any, count: int, _threads: int, form: int) -> int:
            assert (value_of(state), form) == (42, 3)
            self.batches.append(count)
            return 0

        self.nvjpegCreateEx = kept(create)
        self.nvjpegDestroy = kept(destroy)
        self.nvjpegJpegStateCreate = kept(create_state)
        self.nvjpegJpegStateDestroy = kept(destroy)
        self.nvjpegGetImageInfo = kept(self._info)
        self.nvjpegDecodeBatchedInitialize = kept(initialize)
        self.nvjpegDecodeBatched = kept(self._decode)

    def _info(
        self, _handle: Any, data: int, length: int, components: Any, _s: Any, widths: Any, heights: Any
    ) -> int:
        kind, height, width, _ = ctypes.string_at(data, length)
        cast(components, POINTER(c_int))[0] = 1 if kind == GREY else 3
        widths[0], heights[0] = width, height
        return {BAD: 3, NO_MEMORY: 5}.get(kind, 0)

    def _decode(
        self, _handle: Any, _state: Any, data: Any, lengths: Any, destinations: Any, _stream: Any
    ) -> int:
        count = self.batches[-1]
        files, sizes = cast(data, POINTER(c_void_p)), cast(lengths, POINTER(c_size_t))
        numbers = cast(destinations, POINTER(c_size_t))
        for row in range(count):
            _, height, width, value = ctypes.string_at(files[row], sizes[row])
            for plane in range(3):
                assert numbers[8 * row + 4 + plane] == width
                at = cast(numbers[8 * row + plane], POINTER(c_ubyte * (height * width)))[0]
                ctypes.memset(at, value + plane, height * width)
        return 0


def value_of(pointer: Any) -> int:
    return int(pointer.value if isinstance(pointer, c_void_p) else pointer)


def kept(function: Any) -> Any:
    """As ctypes' functions: one can be told types."""

    class Function:
        argtypes: tuple[Any, ...] = ()

        def __call__(self, *given: Any) -> int:
            assert len(given) == len(self.argtypes)
            return int(function(*given))

    return Function()


def decoder(library: Library) -> Nvjpeg:
    return Nvjpeg(declared(library), CPU)


def test_pictures_of_all_sizes_come_back_in_their_order() -> None:
    decode = decoder(Library())
    sizes = [(4, 6), (2, 3), (4, 6), (6, 4), (2, 3)]
    pictures = decode([written(*size, 10 * number) for number, size in enumerate(sizes)])
    for number, (picture, (height, width)) in enumerate(zip(pictures, sizes, strict=True)):
        assert picture.shape == (3, height, width)
        assert picture.is_contiguous()
        for plane in range(3):
            assert torch.all(picture[plane] == 10 * number + plane)


def test_it_is_made_ready_for_a_size_of_batch_once() -> None:
    library = Library()
    decode = decoder(library)
    for count in (2, 2, 3, 3, 2):
        decode([written(2, 2, 5)] * count)
    assert library.batches == [2, 3, 2]


@pytest.mark.parametrize("kind", [BAD, GREY])
def test_what_it_cannot_read_fails_the_batch_and_the_next_one_is_fine(kind: int) -> None:
    decode = decoder(Library())
    with pytest.raises(RuntimeError):
        decode([written(2, 2, 5), written(2, 2, 5, kind)])
    assert torch.all(decode([written(2, 2, 5)])[0][0] == 5)


def place(width: int, height: int) -> PlacedRectangle:
    return PlacedRectangle(0, 0, width, height, 0, 0, 2, 2, "bilinear")


def test_a_bad_file_costs_its_neighbours_nothing() -> None:
    def on_cpu(_file: Any) -> np.ndarray[Any, Any]:
        raise InvalidInput("bad")

    pictures = DevicePictures(CPU, PictureForm(2, 2, True), place, on_cpu, decoder(Library()))
    into = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    files = [written(2, 2, 50), written(2, 2, 60), written(2, 2, 0, BAD), written(2, 2, 70)]
    errors = pictures.fill([file.numpy() for file in files], into)
    assert set(errors) == {2}
    assert [int(row[0, 0, 0]) for row in into] == [50, 60, 0, 70]


def test_one_that_goes_on_failing_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    by_cpu: list[int] = []

    def on_cpu(file: Any) -> np.ndarray[Any, Any]:
        by_cpu.append(int(file[3]))
        return np.full((2, 2, 3), file[3], np.uint8)

    library = Library()
    pictures = DevicePictures(CPU, PictureForm(2, 2, True), place, on_cpu, decoder(library))
    into = torch.zeros(2, 3, 2, 2, dtype=torch.uint8)

    def fill(value: int, kind: int = 0) -> None:
        files = [written(2, 2, value), written(2, 2, value, kind)]
        assert not pictures.fill([file.numpy() for file in files], into)
        assert [int(row[0, 0, 0]) for row in into] == [value, value]

    fill(10, NO_MEMORY)
    fill(20)
    assert (by_cpu, library.batches) == ([10, 10], [2])  # the first attempt says little
    fill(30, NO_MEMORY)
    fill(40, NO_MEMORY)
    assert "got no memory" in caplog.text
    fill(50)
    assert by_cpu == [10, 10, 30, 30, 40, 40, 50, 50]
    assert library.batches == [2]


def test_what_one_decoder_does_not_read_the_next_is_asked_for() -> None:
    grey = torch.full((3, 2, 2), 90, dtype=torch.uint8)
    asked = []

    def other(files: list[torch.Tensor]) -> list[torch.Tensor]:
        asked.append(len(files))
        if any(file[0] == BAD for file in files):
            raise RuntimeError("bad")
        return [grey] * len(files)

    def on_cpu(_file: Any) -> np.ndarray[Any, Any]:
        raise InvalidInput("bad")

    pictures = DevicePictures(CPU, PictureForm(2, 2, True), place, on_cpu, decoder(Library()), other)
    into = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    files = [written(2, 2, 50), written(2, 2, 0, GREY), written(2, 2, 0, BAD), written(2, 2, 70)]
    assert set(pictures.fill([file.numpy() for file in files], into)) == {2}
    assert [int(row[0, 0, 0]) for row in into] == [50, 90, 0, 70]
    assert asked == [1, 1]


@pytest.mark.parametrize("lacking", [{"engine": False}, {"states": False}])
def test_without_the_engine_there_is_no_decoder(lacking: dict[str, bool]) -> None:
    library = Library(**lacking)
    with pytest.raises(NoDecoder):
        decoder(library)
    assert library.open == 0


def test_what_it_holds_is_given_back() -> None:
    library = Library()
    decode = decoder(library)
    assert library.open == 2
    del decode
    gc.collect()
    assert library.open == 0
