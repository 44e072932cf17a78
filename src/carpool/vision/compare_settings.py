"""Decides how alike two answers to one picture must be to count as the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CompareSettings:
    """Decides when two answers to one picture differ: what counts, and how alike is alike enough."""

    score: float = 0.5
    iou: float = 0.5
    mask_iou: float = 0.8
    cosine: float = 0.98
    top_k: int = 1
