"""Resizes pictures of any size into rows of the input, in one kernel for the whole batch. Imported on CUDA
only.

Each program writes a few pixels of one row: it reads from a table where its picture lies and what goes where,
and sums the source pixels that count. The table is filled on the CPU and goes over in one copy.
"""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
import triton
import triton.language as tl

from carpool.backends.backend import Cut, PictureForm, Place, PlacedRectangle

_FIELDS = (
    16  # of the table, int64: where the picture lies (4), its PlacedRectangle (8), area or not, taps (2), row
)
_BLOCK = 128
_WARPS = 4
_MOST_SIZES = 4096  # of pictures whose line of the table is kept
_ROOM = 256  # pictures in a batch, to begin with


@triton.jit
def _cubic(distance):
    """Computes cubic convolution with a = −0.75."""
    near = (1.25 * distance - 2.25) * distance * distance + 1.0
    far = ((-0.75 * distance + 3.75) * distance - 6.0) * distance + 3.0
    return tl.where(distance <= 1.0, near, tl.where(distance < 2.0, far, 0.0))


@triton.jit
def _along(target, source_length, target_length, area, CUBIC: tl.constexpr):
    """Returns, along one side, the first source pixel that counts for a target pixel, the point from which
    weights are computed, and how many source pixels a target pixel is long."""
    step = source_length.to(tl.float32) / target_length.to(tl.float32)
    at = target.to(tl.float32)
    if CUBIC:
        point = (at + 0.5) * step - 0.5
        first = (point + 1.0).to(tl.int32) - 2  # the sum is never negative, so this rounds down
    else:
        last = (source_length - 1).to(tl.float32)
        centre = tl.minimum(tl.maximum((at + 0.5) * step - 0.5, 0.0), last)
        point = tl.where(area, at * step, centre)
        first = point.to(tl.int32)
    return first, point, step


@triton.jit
def _inside(pixel, length):
    """Returns a pixel inside, where edges repeat."""
    return tl.minimum(tl.maximum(pixel, 0), length - 1)


@triton.jit
def _weight(pixel, point, step, area, CUBIC: tl.constexpr):
    if CUBIC:
        weight = _cubic(tl.abs(point - pixel))
    else:
        share = (tl.minimum(point + step, pixel + 1.0) - tl.maximum(point, pixel)) / step
        weight = tl.maximum(tl.where(area, share, 1.0 - tl.abs(point - pixel)), 0.0)
    return weight


@triton.jit
def _four(at):
    """Returns numbers of the table that lie side by side."""
    first, second = tl.load(at).to(tl.int32), tl.load(at + 1).to(tl.int32)
    third, fourth = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)
    return first, second, third, fourth


@triton.jit
def _resize(
    table,
    out,
    height,
    width,
    out_row,
    out_channel,
    out_y,
    out_x,
    pad,
    FIELDS: tl.constexpr,
    BGR: tl.constexpr,
    CUBIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = table + tl.program_id(1) * FIELDS
    source = tl.load(row).to(tl.pointer_type(tl.uint8))
    channel_step = tl.load(row + 1).to(tl.int32)
    y_step = tl.load(row + 2).to(tl.int32)
    x_step = tl.load(row + 3).to(tl.int32)
    left, top, wide, high = _four(row + 4)
    into_left, into_top, into_wide, into_high = _four(row + 8)
    by_area, x_taps, y_taps, number = _four(row + 12)
    area = by_area != 0

    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = at // width
    x = at % width
    exists = at < height * width
    to_x = x - into_left
    to_y = y - into_top
    shown = exists & (to_x >= 0) & (to_x < into_wide) & (to_y >= 0) & (to_y < into_high)

    corner = source + top * y_step + left * x_step
    x_first, x_point, x_scale = _along(to_x, wide, into_wide, area, CUBIC)
    y_first, y_point, y_scale = _along(to_y, high, into_high, area, CUBIC)
    red = tl.zeros([BLOCK], tl.float32)
    green = tl.zeros([BLOCK], tl.float32)
    blue = tl.zeros([BLOCK], tl.float32)
    for y_tap in range(y_taps):
        y_pixel = y_first + y_tap
        y_weight = _weight(y_pixel.to(tl.float32), y_point, y_scale, area, CUBIC)
        line = corner + _inside(y_pixel, high) * y_step
        for x_tap in range(x_taps):
            x_pixel = x_first + x_tap
            weight = y_weight * _weight(x_pixel.to(tl.float32), x_point, x_scale, area, CUBIC)
            pixel = line + _inside(x_pixel, wide) * x_step
            red += weight * tl.load(pixel, mask=shown, other=0).to(tl.float32)
            green += weight * tl.load(pixel + channel_step, mask=shown, other=0).to(tl.float32)
            blue += weight * tl.load(pixel + 2 * channel_step, mask=shown, other=0).to(tl.float32)

    into = out + number.to(tl.int64) * out_row + y * out_y + x * out_x
    last = 2 * out_channel
    tl.store(into + (last if BGR else 0), _rounded(red, shown, pad), mask=exists)
    tl.store(into + out_channel, _rounded(green, shown, pad), mask=exists)
    tl.store(into + (0 if BGR else last), _rounded(blue, shown, pad), mask=exists)


@triton.jit
def _rounded(value, shown, pad):
    byte = (tl.minimum(tl.maximum(value, 0.0), 255.0) + 0.5).to(tl.int32)
    return tl.where(shown, byte, pad).to(tl.uint8)


class FusedResize:
    """Does the same as CpuResize, on CUDA."""

    def __init__(self, form: PictureForm, device: torch.device, place: Place) -> None:
        self._form = form
        self._device = device
        self._place = place
        self._lines: dict[torch.Size, bytes] = {}
        self._cubic = False
        self._host = torch.empty(0, _FIELDS, dtype=torch.int64)
        self._numbers = self._host.numpy()
        self._table = self._host
        self._make_room(_ROOM)

    def __call__(self, sources: Sequence[torch.Tensor], rows: Sequence[int], into: torch.Tensor) -> None:
        count = len(sources)
        self._make_room(count)
        known = self._lines
        lines = [
            (known.get(source.shape) if source.is_contiguous() else None) or self._line(source)
            for source in sources
        ]
        table = self._numbers[:count]
        table[:] = np.frombuffer(b"".join(lines), np.int64).reshape(count, _FIELDS)
        table[:, 0] = [source.data_ptr() for source in sources]
        table[:, 15] = rows
        self._launch(count, into)

    def cut(self, cuts: Sequence[Cut], into: torch.Tensor) -> None:
        """Parts of pictures, one for each row: no two are of one size, so that nothing is kept of them."""
        count = len(cuts)
        self._make_room(count)
        lines, brought = [], []
        for row, cut in enumerate(cuts):
            pixels, left, top = cut.pixels, cut.left, cut.top
            if pixels.device != into.device:  # decoded on another one: what is needed of it comes here
                pixels, left, top = cut.part.to(into.device), 0, 0
                brought.append(pixels)  # not before the launch may anything take its place
            place = self._place(cut.width, cut.height)
            self._cubic = place.kernel == "bicubic"
            first_x, first_y, *others = _numbers_of(place)
            lines.append((pixels.data_ptr(), *pixels.stride(), left + first_x, top + first_y, *others, row))
        self._numbers[:count] = lines
        self._launch(count, into)

    def _launch(self, count: int, into: torch.Tensor) -> None:
        # The host's side may be written again after the caller has waited for the stream, as it must.
        self._table[:count].copy_(self._host[:count], non_blocking=True)
        form = self._form
        out_row, *steps = into.stride()
        out_channel, out_y, out_x = steps if form.planar else (steps[2], steps[0], steps[1])
        grid = (ceil(form.height * form.width / _BLOCK), count)
        with torch.cuda.device(self._device):
            _resize[grid](
                self._table,
                into,
                form.height,
                form.width,
                out_row,
                out_channel,
                out_y,
                out_x,
                form.pad,
                FIELDS=_FIELDS,
                BGR=form.bgr,
                CUBIC=self._cubic,
                BLOCK=_BLOCK,
                num_warps=_WARPS,
            )

    def _make_room(self, count: int) -> None:
        if count > len(self._host):
            self._host = torch.empty(count, _FIELDS, dtype=torch.int64, pin_memory=True)
            self._numbers = self._host.numpy()
            self._table = torch.empty(count, _FIELDS, dtype=torch.int64, device=self._device)

    def _line(self, source: torch.Tensor) -> bytes:
        """Returns all but the first number and the last, which are 0: the same for all pictures of one size,
        but for the few that the CPU decodes, whose pixels lie otherwise."""
        _, height, width = source.shape
        place = self._place(width, height)
        self._cubic = place.kernel == "bicubic"  # a model has it for all of its pictures or for none
        line = np.array((0, *source.stride(), *_numbers_of(place), 0), np.int64).tobytes()
        if source.is_contiguous():
            if len(self._lines) >= _MOST_SIZES:
                self._lines.clear()
            self._lines[source.shape] = line
        return line


def _numbers_of(place: PlacedRectangle) -> tuple[int, ...]:
    *sides, kernel = place
    area = kernel == "area"
    if area:  # a target pixel may begin and end within source pixels
        taps = [ceil(place.width / place.into_width) + 1, ceil(place.height / place.into_height) + 1]
    else:
        taps = [4, 4] if kernel == "bicubic" else [2, 2]
    return (*sides, int(area), *taps)
