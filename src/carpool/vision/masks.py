"""Masks as bytes for a wire: run lengths as COCO has them, and PNG."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import cv2
import numpy as np

from carpool.errors import InvalidInput
from carpool.types import Array

# Masks are long runs: unfiltered rows and a search for runs alone are the fastest and the smallest.
_RUNS = (cv2.IMWRITE_PNG_COMPRESSION, 1, cv2.IMWRITE_PNG_STRATEGY, cv2.IMWRITE_PNG_STRATEGY_RLE)
_UNFILTERED = (  # OpenCV 4 has no word for it
    (cv2.IMWRITE_PNG_FILTER, cv2.IMWRITE_PNG_FILTER_NONE) if hasattr(cv2, "IMWRITE_PNG_FILTER") else ()
)


def run_lengths(mask: Array) -> list[int]:
    """[h, w] → lengths of runs down the columns, from left to right: pixels outside first, then inside, …

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
    """The mask [h, w] of these runs, as bytes of 0 and 1."""
    lengths = np.asarray(counts, np.int64).reshape(-1)
    if (lengths < 0).any() or lengths.sum() != height * width:
        raise InvalidInput(f"run lengths must add up to {height} × {width} pixels", field="counts")
    values = np.arange(len(lengths), dtype=np.uint8) & 1
    return np.repeat(values, lengths).reshape(width, height).T


def png(mask: Array) -> bytes:
    """An 8-bit greyscale PNG: 255 inside, 0 outside."""
    done, data = cv2.imencode(".png", np.where(mask, np.uint8(255), np.uint8(0)), _RUNS + _UNFILTERED)
    if not done:
        raise InvalidInput("this mask cannot be written as a PNG", field="format")
    return data.tobytes()


def png_text(mask: Array) -> str:
    """The PNG as base64, for JSON."""
    return base64.b64encode(png(mask)).decode("ascii")
