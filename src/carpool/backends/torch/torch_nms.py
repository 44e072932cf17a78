"""Raw detector outputs → the boxes that stay, on the device, for a whole batch: a few numbers to copy back.

No step depends on the values, so that all can be captured in a graph. Greedy suppression goes box by box;
here all boxes are settled in rounds instead. A round removes what a box that is still there would remove.
Odd rounds remove too much, even ones too little, and both come to rest at the greedy answer. After an even
number of them every box of that answer is there: to suppress what is left once more gives exactly it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

_MOST_CANDIDATES = 1024  # the best ones of each picture: every pair of them is compared
_TOGETHER = 8  # pictures: bounds the memory for the pairs
_ROUNDS = 16  # even; boxes in chains that are longer are left for whoever reads the answer
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
            return {**outputs, self._form.output: self._kept(sources)}

    def _kept(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        parts = [torch.split(part, _TOGETHER) for part in candidates(sources, self._form)]
        return torch.cat([self._settle(*some) for some in zip(*parts, strict=True)])

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
    """Boxes by corners [n, anchors, 4], scores and classes [n, anchors]; −1 for what does not count."""
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
    """From centre x, centre y, width, height."""
    half = boxes[:, :, 2:] / 2
    return torch.cat((boxes[:, :, :2] - half, boxes[:, :, :2] + half), dim=2)


def _covers(boxes: torch.Tensor, limit: float) -> torch.Tensor:
    """[n, k, k]: which pairs overlap by more than the limit."""
    first, second = boxes.unsqueeze(2), boxes.unsqueeze(1)
    sides = torch.minimum(first[..., 2:], second[..., 2:]) - torch.maximum(first[..., :2], second[..., :2])
    shared = sides.clamp_(min=0).prod(dim=3)
    areas = (boxes[:, :, 2:] - boxes[:, :, :2]).clamp(min=0).prod(dim=2)
    either = areas.unsqueeze(2) + areas.unsqueeze(1) - shared
    return shared > either * limit


def _listed(
    boxes: torch.Tensor, scores: torch.Tensor, classes: torch.Tensor, stays: torch.Tensor, most: int
) -> torch.Tensor:
    """Those that stay, in front; rows of NOBODY behind them."""
    rows = torch.cat((boxes, scores.unsqueeze(2), classes.unsqueeze(2).to(boxes.dtype)), dim=2)
    place = torch.where(stays, stays.cumsum(dim=1) - 1, most).clamp(max=most)  # the last row is cut off
    found = torch.zeros(len(boxes), most + 1, 6, dtype=boxes.dtype, device=boxes.device)
    found[:, :, 5].fill_(NOBODY)
    found.scatter_(1, place.unsqueeze(2).expand(-1, -1, 6), rows)
    return found[:, :most]
