"""Decides, from probability maps of a model's input, which pixel of the picture belongs to which class."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from carpool.errors import InvalidInput
from carpool.types import Array
from carpool.vision.geometry import Geometry

# ---- masks as bytes for a wire: run lengths as COCO has them, and PNG

# Masks are long runs: unfiltered rows and a search for runs alone are the fastest and the smallest.
_RUNS = (cv2.IMWRITE_PNG_COMPRESSION, 1, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_RLE)
_UNFILTERED = (  # OpenCV 4 has no word for it
    (cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_NONE) if hasattr(cv2, "IMWRITE_PNG_FILTER") else ()
)


def run_lengths(mask: Array) -> list[int]:
    """Returns, of [h, w], lengths of runs down the columns, from left to right: pixels outside first, then
    inside, …

    This is COCO's uncompressed form, without its "size". The lengths add up to h × w; the first is 0 when the
    first pixel is inside.
    """
    if not mask.size:
        return []
    down = cv2.transpose((mask != 0).view(np.uint8)).ravel()
    edges = np.flatnonzero(down[1:] != down[:-1]) + 1
    inside = [0] if down[0] else []
    bounds = np.concatenate((inside, [0], edges, [down.size])).astype(np.int64)
    lengths: list[int] = np.diff(bounds).tolist()
    return lengths


def from_run_lengths(counts: Sequence[int], height: int, width: int) -> Array:
    """Returns the mask [h, w] of these runs, as bytes of 0 and 1."""
    lengths = np.asarray(counts, np.int64).reshape(-1)
    if (lengths < 0).any() or lengths.sum() != height * width:
        raise InvalidInput(f"run lengths must add up to {height} × {width} pixels", field="counts")
    values = np.arange(len(lengths), dtype=np.uint8) & 1
    return np.repeat(values, lengths).reshape(width, height).T


def png(mask: Array) -> bytes:
    """Returns an 8-bit greyscale PNG: 255 inside, 0 outside."""
    done, data = cv2.imencode(".png", np.where(mask, np.uint8(255), np.uint8(0)), _RUNS + _UNFILTERED)
    if not done:
        raise InvalidInput("this mask cannot be written as a PNG", field="format")
    return data.tobytes()


def png_text(mask: Array) -> str:
    """Returns the PNG as base64, for JSON."""
    return base64.b64encode(png(mask)).decode("ascii")


# ---- maps of probabilities as regions

NOTHING = -1
_MOST_PIXELS = 1 << 22  # larger pictures are decided on a coarser grid: time and memory stay bounded
_MOST_NUMBERED = 1000  # classes in one picture, of a map of their numbers
_ROUNDING = 1e-9  # of whole places that were divided and multiplied
_LONGEST = 16384  # sides of that grid; OpenCV's transforms end at 32767


@dataclass(frozen=True, slots=True)
class MaskRegion:
    """Describes the pixels of one class."""

    class_id: int
    score: float  # their mean probability
    box: tuple[int, int, int, int]  # x1, y1, x2, y2 around them, in the picture


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Every pixel belongs to one class or to none."""

    index: Array  # the class of each pixel, or NOTHING, on the grid
    width: int  # of the picture
    height: int
    found: tuple[MaskRegion, ...]  # the best first

    def mask(self, region: MaskRegion) -> Array:
        """Returns [height, width] of the picture, as bytes: 1 inside, 0 outside."""
        return _mask(self.index, region.class_id, self.width, self.height)


def find(maps: Array, geometry: Geometry, threshold: float, skipped: int | None = None) -> Regions:
    """Returns the most probable class of each pixel, from maps [classes, h, w] of probabilities over the
    input.

    Pixels below the threshold belong to none, nor do those of the class `skipped`, nor those that were
    cropped away and never reached the model. Maps are enlarged before they are compared, one class at a time,
    so that edges are smooth and memory does not grow with the classes.
    """
    grid = _grid(geometry.width, geometry.height)
    present = np.unique(maps.argmax(axis=0)).tolist()  # those that win nowhere need not be enlarged
    best, index = _most_probable(maps, present, geometry, grid)
    index[best < threshold] = NOTHING
    top, bottom, left, right = _seen(geometry, grid)
    index[:top], index[bottom:], index[:, :left], index[:, right:] = (NOTHING,) * 4
    if skipped is not None:
        index[index == skipped] = NOTHING
    regions = [_region(index, best, class_id, geometry) for class_id in present]
    found = sorted((region for region in regions if region), key=lambda region: -region.score)
    return Regions(index, geometry.width, geometry.height, tuple(found))


def find_numbered(numbers: Array, geometry: Geometry, skipped: int | None = None) -> Regions:
    """Returns the class of each pixel, from a map [h, w] of their numbers over the input: that of the map's
    pixel in which the upper left corner of the picture's lies. A number below 0 is no class."""
    grid = _grid(geometry.width, geometry.height)
    shares = (numbers.shape[1] / geometry.input_width, numbers.shape[0] / geometry.input_height)
    across = (np.arange(grid[0]) * (geometry.width / grid[0]) * geometry.scale_x + geometry.left) * shares[0]
    down = (np.arange(grid[1]) * (geometry.height / grid[1]) * geometry.scale_y + geometry.top) * shares[1]
    columns, rows = (
        np.clip(np.floor(at + _ROUNDING).astype(np.intp), 0, side - 1)
        for at, side in zip((across, down), numbers.shape[::-1], strict=True)
    )
    whole = np.clip(numbers.astype(np.float32), NOTHING, np.iinfo(np.int16).max).astype(np.int16)
    index = np.ascontiguousarray(whole[rows][:, columns])
    top, bottom, left, right = _seen(geometry, grid)
    index[:top], index[bottom:], index[:, :left], index[:, right:] = (NOTHING,) * 4
    if skipped is not None:
        index[index == skipped] = NOTHING
    present = [number for number in np.unique(index).tolist() if number != NOTHING]
    sure = np.ones(index.shape, np.float32)
    regions = [_region(index, sure, class_id, geometry) for class_id in present[:_MOST_NUMBERED]]
    found = sorted((region for region in regions if region), key=lambda region: region.class_id)
    return Regions(index, geometry.width, geometry.height, tuple(found))


def _grid(width: int, height: int) -> tuple[int, int]:
    """Returns the picture's size, or a smaller one in its proportions."""
    shrink = min(1.0, math.sqrt(_MOST_PIXELS / (width * height)), _LONGEST / max(width, height))
    return max(1, int(width * shrink)), max(1, int(height * shrink))


def _most_probable(
    maps: Array, classes: Iterable[int], geometry: Geometry, grid: tuple[int, int]
) -> tuple[Array, Array]:
    best = np.full((grid[1], grid[0]), -1.0, np.float32)
    index = np.full((grid[1], grid[0]), NOTHING, np.int16)
    for class_id in classes:
        here = _enlarged(maps[class_id], geometry, grid)
        better = here > best
        np.copyto(best, here, where=better)
        np.copyto(index, np.int16(class_id), where=better)
    return best, index


def _enlarged(probabilities: Array, geometry: Geometry, grid: tuple[int, int]) -> Array:
    """One map laid over the grid: the letterbox falls away, and what was cropped takes the edge's value."""
    return _laid(probabilities, geometry, (0, 0, geometry.width, geometry.height), grid)


def _laid(values: Array, geometry: Geometry, box: tuple[int, int, int, int], grid: tuple[int, int]) -> Array:
    """Returns a map over the input, where the box of the picture lies in it, enlarged to the grid."""
    # Pixels of the map for one of the input, and for one of the grid; and where the grid begins in the map
    across = values.shape[1] / geometry.input_width
    down = values.shape[0] / geometry.input_height
    scale_x = (box[2] - box[0]) * geometry.scale_x * across / grid[0]
    scale_y = (box[3] - box[1]) * geometry.scale_y * down / grid[1]
    left = (geometry.left + box[0] * geometry.scale_x) * across
    top = (geometry.top + box[1] * geometry.scale_y) * down
    # OpenCV counts from the centres of pixels, geometry from their edges: hence the halves
    matrix = np.array(
        [[scale_x, 0.0, left + scale_x / 2 - 0.5], [0.0, scale_y, top + scale_y / 2 - 0.5]], np.float64
    )
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    source = np.ascontiguousarray(values, np.float32)
    return cv2.warpAffine(source, matrix, grid, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def whole_picture(values: Array, geometry: Geometry, unseen: float, *, corners: bool = False) -> Array:
    """[height, width]: a map over the input laid over the picture; what the model did not see is `unseen`.
    With `corners`, the middles of the outermost pixels of both lie on each other, where the picture fills the
    input."""
    grid = _grid(geometry.width, geometry.height)
    fills = geometry.area == (0.0, 0.0, geometry.input_width, geometry.input_height)
    laid = _by_corners(values, grid) if corners and fills else _enlarged(values, geometry, grid)
    top, bottom, left, right = _seen(geometry, grid)
    laid[:top], laid[bottom:], laid[:, :left], laid[:, right:] = (unseen,) * 4
    if grid == (geometry.width, geometry.height):
        return laid
    return cv2.resize(laid, (geometry.width, geometry.height), interpolation=cv2.INTER_LINEAR)


def _by_corners(values: Array, grid: tuple[int, int]) -> Array:
    rows, columns = values.shape
    across, down = ((a - 1) / max(b - 1, 1) for a, b in zip((columns, rows), grid, strict=True))
    matrix = np.array([[across, 0.0, 0.0], [0.0, down, 0.0]], np.float64)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    source = np.ascontiguousarray(values, np.float32)
    return cv2.warpAffine(source, matrix, grid, flags=flags, borderMode=cv2.BORDER_REPLICATE)


def inside_box(values: Array, geometry: Geometry, box: Sequence[float], least: float) -> Array:
    """Returns [height, width] of the picture, as bytes: 1 where a map over the input has so much, within this
    box."""
    x1, y1 = (max(0, math.floor(side)) for side in box[:2])
    x2, y2 = min(geometry.width, math.ceil(box[2])), min(geometry.height, math.ceil(box[3]))
    mask = np.zeros((geometry.height, geometry.width), np.uint8)
    if x2 > x1 and y2 > y1:
        here = _laid(values, geometry, (x1, y1, x2, y2), _grid(x2 - x1, y2 - y1)) >= least
        mask[y1:y2, x1:x2] = cv2.resize(
            here.view(np.uint8), (x2 - x1, y2 - y1), interpolation=cv2.INTER_NEAREST
        )
    return mask


def _seen(geometry: Geometry, grid: tuple[int, int]) -> tuple[int, int, int, int]:
    """Returns top, bottom, left, right of what the model saw of the picture, on the grid."""
    x1, y1, x2, y2 = geometry.to_picture(
        np.array([[0, 0, geometry.input_width, geometry.input_height]], np.float32)
    )[0].tolist()
    across, down = grid[0] / geometry.width, grid[1] / geometry.height
    return round(y1 * down), round(y2 * down), round(x1 * across), round(x2 * across)


def _region(index: Array, best: Array, class_id: int, geometry: Geometry) -> MaskRegion | None:
    x, y, width, height = cv2.boundingRect(_mask(index, class_id, geometry.width, geometry.height))
    if not width:
        return None
    score = float(cv2.mean(best, (index == class_id).view(np.uint8))[0])
    return MaskRegion(class_id, min(1.0, score), (x, y, x + width, y + height))


def _mask(index: Array, class_id: int, width: int, height: int) -> Array:
    mask: Array = (index == class_id).view(np.uint8)
    if mask.shape == (height, width):
        return mask
    return cv2.resize(mask, (width, height), interpolation=cv2.INTER_NEAREST)
