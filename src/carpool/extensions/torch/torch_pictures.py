"""Pictures' files into a model's uint8 input, on its device: a whole batch is decoded, then resized, at once;
and what a detector makes of them, down to the boxes that stay.

On CUDA the chip's own decoder reads JPEGs: through a handle of the instance's own, and what that cannot read
through torchvision. What neither reads is decoded on the CPU, which also says what is wrong with a file. On a
CPU that is the way of all of them.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from carpool.backends.backend import Cut, Decode, FileToKeep, PictureForm, Place, Seen
from carpool.errors import CarpoolError
from carpool.types import Array

# ---- NVIDIA's JPEG decoder, called directly: a handle for each instance of a model
# torchvision decodes one batch at a time, behind one lock for the whole process, and the host's part of
# that is most of it. Here every instance decodes for itself, into memory that is taken at once for the
# whole batch, in its own stream. The library is the one that torchvision has loaded; it is used as its C
# interface says.

_HARDWARE = 3  # of its ways to decode: the engine that does nothing else
_PLANES = 3  # of its formats: RGB, one plane after the other
_COLOURS = 3
_MOST_COMPONENTS = 4
_DESTINATION = 2 * _MOST_COMPONENTS  # numbers for one picture: where its planes go, bytes in a line of each
_OK = 0
_CANNOT = {1: "is not set up", 5: "got no memory", 7: "has no engine here", 9: "has no such way here"}
"""The status codes that no file causes; the others are about the file that it was given."""


class NoDecoder(Exception):
    """This machine cannot decode in this way, or no longer."""


def loaded_library() -> Any:
    """Returns the library as torchvision brought it along; raises `NoDecoder`."""
    import torchvision.io  # noqa: F401  loads it

    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if "libnvjpeg" in Path(path).name:
            return declared(ctypes.CDLL(path))
    raise NoDecoder("torchvision was built without nvJPEG")


def declared(library: Any) -> Any:
    """Declares the types of what is called, so that pointers are not cut off."""
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

    # Observed on an H200: of several threads that begin at once, beside graphs that run, some get the error
    # that there is no memory, while nearly all of it is free. Such a thread has to decode in another way.

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library = library
        self._device = device
        self._handle, self._state = c_void_p(), c_void_p()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
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
        found = (byref(self._components), byref(self._sampling), self._widths, self._heights)
        self._check(self._library.nvjpegGetImageInfo(self._handle, address, length, *found))
        if self._components.value != _COLOURS:
            raise RuntimeError("not a JPEG of three colours")
        return self._heights[0], self._widths[0]

    def _room(self, sizes: list[tuple[int, int]]) -> tuple[list[torch.Tensor], np.ndarray[Any, Any]]:
        """Takes memory for all pictures, once for each size, and returns where each of their planes goes."""
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


def _destroy(library: Any, handle: c_void_p, state: c_void_p) -> None:
    library.nvjpegJpegStateDestroy(state)
    library.nvjpegDestroy(handle)


# ---- pictures of any size into rows of the input: on a CPU, or without the fused kernel


@dataclass(frozen=True, slots=True)
class CpuResize:
    form: PictureForm
    place: Place

    def __call__(self, sources: Sequence[torch.Tensor], rows: Sequence[int], into: torch.Tensor) -> None:
        """Sources are uint8 [3, h, w], each for the row of `into` with its number."""
        import cv2

        kernels = {"area": cv2.INTER_AREA, "bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
        form = self.form
        for source, row in zip(sources, rows, strict=True):
            at = self.place(source.shape[2], source.shape[1])
            part = source[:, at.top : at.top + at.height, at.left : at.left + at.width].permute(1, 2, 0)
            pixels = part.cpu().contiguous().numpy()
            small = cv2.resize(pixels, (at.into_width, at.into_height), interpolation=kernels[at.kernel])
            whole = np.full((form.height, form.width, 3), form.pad, np.uint8)
            bottom, right = at.into_top + at.into_height, at.into_left + at.into_width
            whole[at.into_top : bottom, at.into_left : right] = small[:, :, ::-1] if form.bgr else small
            into[row] = torch.from_numpy(whole.transpose(2, 0, 1) if form.planar else whole)

    def cut(self, cuts: Sequence[Cut], into: torch.Tensor) -> None:
        """Cuts parts of pictures, one for each row."""
        self([cut.part for cut in cuts], range(len(cuts)), into)


# ---- a batch of files into the input

_MOST_FAILURES = 3
_WORTH_A_STREAM = 8  # pictures: fewer are decoded before another stream would have been waited for
_FIRST = -5  # a stream's priority: the highest that chips have; where there are fewer, it means the highest

_log = logging.getLogger(__name__)


class Resize(Protocol):
    def __call__(self, sources: Sequence[torch.Tensor], rows: Sequence[int], into: torch.Tensor) -> None: ...

    def cut(self, cuts: Sequence[Cut], into: torch.Tensor) -> None: ...


DecodeAll = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def can_decode(device: torch.device) -> bool:
    """Returns whether the device reads and resizes JPEGs itself, and not merely through the CPU."""
    return device.type == "cuda" and None not in (find_spec("torchvision"), find_spec("triton"))


class DevicePictures:
    """One per instance of a model; `fill` is called from one thread at a time."""

    def __init__(
        self, device: torch.device | str, form: PictureForm, place: Place, decode: Decode, *ways: DecodeAll
    ) -> None:
        """`decode` reads one file on the CPU; each of `ways` a batch on the device, by default as that can:
        what the first does not read, the next is asked for."""
        self._device = torch.device(device)
        self._decode = decode
        self._ways = ways or (_chip_decoders(self._device) if can_decode(self._device) else ())
        self._resize: Resize = CpuResize(form, place)
        if self._device.type == "cuda" and find_spec("triton") is not None:
            from carpool.extensions.torch.triton_resize import FusedResize  # with a compiler's runtime

            self._resize = FusedResize(form, self._device, place)
        self._failures = 0
        # nvJPEG decodes a batch as a chain of small steps, picture after picture. Beside another instance's
        # model each of those steps waits for a free multiprocessor, unless its stream has priority.
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device, _FIRST)  # type: ignore[no-untyped-call]

    def fill(self, pictures: Sequence[Seen], into: torch.Tensor) -> dict[int, CarpoolError]:
        """See `FillPictures`. What the device has no memory for raises, for the caller to halve its batch."""
        errors: dict[int, CarpoolError] = {}
        if isinstance(pictures[0], Cut):
            self._resize.cut(cast(Sequence[Cut], pictures), into)
            return errors
        given = cast("Sequence[Array | FileToKeep]", pictures)
        if self._stream is None or len(given) < _WORTH_A_STREAM:
            self._fill(given, into, errors)
            return errors
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # what is under way there may still read `into`
        with torch.cuda.stream(self._stream):
            self._fill(given, into, errors)
        current.wait_stream(self._stream)
        return errors

    def _fill(
        self, given: Sequence[Array | FileToKeep], into: torch.Tensor, errors: dict[int, CarpoolError]
    ) -> None:
        files = [one.file if isinstance(one, FileToKeep) else one for one in given]
        sources = self._decoded(files, 0, errors, self._ways)
        if not sources:
            return
        rows = [row for row in range(len(given)) if row not in errors]
        self._resize(sources, rows, into)
        for row, source in zip(rows, sources, strict=True):
            one = given[row]
            if isinstance(one, FileToKeep):
                one.keep(source)

    def _decoded(
        self,
        pictures: Sequence[Array],
        first: int,
        errors: dict[int, CarpoolError],
        ways: Sequence[DecodeAll],
    ) -> list[torch.Tensor]:
        """Decodes each as [3, h, w]; without those that are in `errors` now. `first` is the number of the
        first.

        One bad file fails them all, so they are halved until it is alone: its neighbours stay on the device,
        and a client who sends bad ones costs the others little.
        """
        if not ways:
            decoded = []
            for number, picture in enumerate(pictures, first):
                try:
                    pixels = torch.from_numpy(self._decode(picture))
                except CarpoolError as error:
                    errors[number] = error
                else:
                    decoded.append(pixels.to(self._device).permute(2, 0, 1))
            return decoded
        try:
            return ways[0]([torch.from_numpy(picture) for picture in pictures])
        except torch.cuda.OutOfMemoryError:
            raise
        except NoDecoder as error:
            self._failed(ways[0], error)
        except RuntimeError:
            if len(pictures) > 1:
                half = len(pictures) // 2
                left = self._decoded(pictures[:half], first, errors, ways)
                return left + self._decoded(pictures[half:], first + half, errors, ways)
        return self._decoded(pictures, first, errors, ways[1:])

    def _failed(self, way: DecodeAll, why: NoDecoder) -> None:
        """It may be the first attempt only; what goes on failing is not asked again."""
        self._failures += 1
        if self._failures == _MOST_FAILURES:
            self._ways = tuple(other for other in self._ways if other is not way)
            _log.warning("JPEGs are decoded without a decoder of the instance's own from now on: %s", why)


def _chip_decoders(device: torch.device) -> tuple[DecodeAll, ...]:
    """An instance's own, where that can be had: torchvision decodes one batch of the process at a time."""
    try:
        return Nvjpeg(loaded_library(), device), _torchvision(device)
    except (NoDecoder, OSError, AttributeError):  # no library, one without these functions, or no engine
        return (_torchvision(device),)


def _torchvision(device: torch.device) -> DecodeAll:
    from torchvision.io import ImageReadMode, decode_jpeg

    def decode_all(files: list[torch.Tensor]) -> list[torch.Tensor]:
        decoded: list[torch.Tensor] = decode_jpeg(files, mode=ImageReadMode.RGB, device=device)
        return decoded

    return decode_all


# ---- raw detector outputs → the boxes that stay, on the device, for a whole batch
# No step depends on the values, so that all can be captured in a graph. Greedy suppression goes box by box;
# here all boxes are settled in rounds instead. A round removes what a box that is still there would remove.
# Odd rounds remove too much, even ones too little, and both come to rest at the greedy answer. After an even
# number of them every box of that answer is there: to suppress what is left once more gives exactly it.

_MOST_CANDIDATES = 1024  # the best ones of each picture: every pair of them is compared
_TOGETHER = 8  # pictures: bounds the memory for the pairs
_ROUNDS = 16  # even; boxes in longer chains are left to the reader of the answer
_FAR = 1e6  # pixels: beyond, areas would overflow
NOBODY = -1.0
"""The class of a row that holds no box."""


@dataclass(frozen=True, slots=True)
class BoxForm:
    """How the outputs hold boxes, and which to keep; see `DetectSettings`."""

    format: str
    sources: tuple[str, ...]  # the outputs: for boxes_scores the boxes, then the scores
    output: str  # what the boxes that stay are called
    score: float
    iou: float
    per_class: bool
    most: int
    scale: tuple[float, float] = (1.0, 1.0)  # width and height of the input, for boxes from 0 to 1


class KeptBoxes:
    """Adds an output [n, most, 6]: x1, y1, x2, y2 in pixels of the input, score and class, the best first."""

    def __init__(self, form: BoxForm) -> None:
        self._form = form
        self.adds: Sequence[str] = (form.output,)

    def __call__(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.inference_mode():
            sources = [outputs[name].float() for name in self._form.sources]
            parts = [torch.split(part, _TOGETHER) for part in candidates(sources, self._form)]
            kept = torch.cat([self._settle(*some) for some in zip(*parts, strict=True)])
            return {**outputs, self._form.output: kept}

    def _settle(self, boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """Boxes [n, anchors, 4], scores and classes [n, anchors]; a score of −1 does not count."""
        form = self._form
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, order = scores[:, :_MOST_CANDIDATES], order[:, :_MOST_CANDIDATES]
        boxes = boxes.gather(1, order.unsqueeze(2).expand(-1, -1, 4))
        classes = classes.gather(1, order)
        counts = scores >= 0
        covers = _covers(boxes, form.iou)
        if form.per_class:
            covers &= classes.unsqueeze(2) == classes.unsqueeze(1)
        covers = covers.triu_(1)  # only a better one suppresses
        stays = counts
        for _ in range(_ROUNDS):
            stays = counts & ~(covers & stays.unsqueeze(2)).any(dim=1)
        return _listed(boxes, scores, classes, stays, form.most)


def candidates(
    sources: Sequence[torch.Tensor], form: BoxForm
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns boxes by corners [n, anchors, 4], scores and classes [n, anchors]; −1 for what does not
    count."""
    if form.format == "boxes_scores":
        boxes, (scores, classes) = sources[0], sources[1].max(dim=2)
    elif form.format == "yolov8":
        fields = sources[0]
        boxes = _corners(fields[:, :4].transpose(1, 2))
        scores, classes = fields[:, 4:].max(dim=1)
    else:
        fields = sources[0]
        boxes = _corners(fields[:, :, :4])
        best, classes = fields[:, :, 5:].max(dim=2)
        scores = torch.where(fields[:, :, 4] >= form.score, best * fields[:, :, 4], NOBODY)
    if form.scale != (1.0, 1.0):
        boxes = torch.stack([boxes[:, :, side] * form.scale[side % 2] for side in range(4)], dim=2)
    sound = (scores >= form.score) & scores.isfinite() & boxes.isfinite().all(dim=2)
    sound &= (boxes[:, :, 2] > boxes[:, :, 0]) & (boxes[:, :, 3] > boxes[:, :, 1])
    boxes = boxes.nan_to_num(0.0).clamp(-_FAR, _FAR)
    return boxes, torch.where(sound, scores, NOBODY), classes


def _corners(boxes: torch.Tensor) -> torch.Tensor:
    """Returns corners from centre x, centre y, width, height."""
    half = boxes[:, :, 2:] / 2
    return torch.cat((boxes[:, :, :2] - half, boxes[:, :, :2] + half), dim=2)


def _covers(boxes: torch.Tensor, limit: float) -> torch.Tensor:
    """Returns [n, k, k]: which pairs overlap by more than the limit."""
    first, second = boxes.unsqueeze(2), boxes.unsqueeze(1)
    sides = torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])
    shared = sides.clamp_(min=0).prod(dim=3)
    areas = (boxes[:, :, 2:] - boxes[:, :, :2]).clamp(min=0).prod(dim=2)
    either = areas.unsqueeze(2) + areas.unsqueeze(1) - shared
    return shared > either * limit


def _listed(
    boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor, stays: torch.Tensor, most: int
) -> torch.Tensor:
    """Returns the boxes that stay, in front; the rows behind them hold no box."""
    rows = torch.cat((boxes, scores.unsqueeze(2), classes.unsqueeze(2).to(boxes.dtype)), dim=2)
    place = torch.where(stays, stays.cumsum(dim=1) - 1, most).clamp(max=most)  # the last row is cut off
    found = torch.zeros(len(boxes), most + 1, 6, dtype=boxes.dtype, device=boxes.device)
    found[:, :, 5].fill_(NOBODY)
    found.scatter_(1, place.unsqueeze(2).expand(-1, -1, 6), rows)
    return found[:, :most]
