"""Computes how sure an answer is, from 0 to 1: a decision whether to call a larger model rests on it.

Classes are judged in three ways: by the margin between the best two, by the confidence in the best, and by
the entropy of all. A line of text is judged by its confidence, and a detector's boxes by how far the best
score lies from the score that counts: just above it, what was found may be nothing; just below it, something
may have been missed; and where no score comes near it, there is surely nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isfinite, log
from typing import Any

MEASURES = ("margin", "confidence", "entropy")
"""The simplest first: a margin means the same whatever the number of classes, and needs no calibration."""

_ALL_CLASSES = 1000
CLASSES_NEEDED: Mapping[str, int] = {"margin": 2, "confidence": 1, "entropy": _ALL_CLASSES}
"""How many classes of an answer each looks at, the best first."""

LOWEST_SCORE = 0.01  # of a box that is looked at: below, it is noise


def of_classes(scores: Sequence[float], by: str) -> float:
    """Takes probabilities, the highest first. What is no number, as models may say anything, is not sure at
    all."""
    if not scores or not all(isfinite(score) for score in scores):
        return 0.0
    if by == "confidence":
        return _clipped(scores[0])
    if by == "margin":
        return _clipped(scores[0] - (scores[1] if len(scores) > 1 else 0.0))
    return _evenness(scores)


def _evenness(scores: Sequence[float]) -> float:
    """Returns 1 where all is in one class, 0 where all are alike."""
    total = sum(score for score in scores if score > 0.0)
    if not 0.0 < total < inf:
        return 0.0
    if len(scores) == 1:
        return 1.0
    shares = [score / total for score in scores]
    entropy = -sum(share * log(share) for share in shares if share > 0.0)  # the smallest scores have none
    return _clipped(1.0 - entropy / log(len(scores)))


def of_boxes(scores: Sequence[float], counts: float) -> float:
    """Takes scores from LOWEST_SCORE on, and the one that counts."""
    best = max((score for score in scores if isfinite(score)), default=0.0)
    if best >= counts:
        return _clipped((best - counts) / (1.0 - counts)) if counts < 1.0 else 1.0
    return _clipped((counts - best) / counts)


def certainty(answer: Mapping[str, Any], by: str, counts: float = 0.5) -> float | None:
    """Returns that of a route's answer that has as many classes as are needed, or boxes from LOWEST_SCORE on,
    of which those from `counts` on are reported. None, where an answer of this kind says nothing of it."""
    if "classes" in answer:
        return of_classes([one["score"] for one in answer["classes"]], by)
    if by != "confidence":
        return None
    if "detections" in answer:
        return of_boxes([one["score"] for one in answer["detections"]], counts)
    score = answer.get("score")
    return _clipped(float(score)) if isinstance(score, int | float) and isfinite(score) else None


def _clipped(value: float) -> float:
    return min(1.0, max(0.0, value))
