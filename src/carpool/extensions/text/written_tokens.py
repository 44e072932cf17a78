"""Finds the tokens that a model wrote among the times of a request's steps."""

from __future__ import annotations

from carpool.types import StepTiming, Timing

WRITE = "write"
"""The step of a model that writes text, token by token: its `batch` is how many tokens there were."""


def tokens_in(timing: Timing) -> int | None:
    """Returns how many tokens a model wrote, ends of texts included. None: they were not counted."""
    steps = timing.steps if isinstance(timing, StepTiming) else ()
    return next((each.batch for name, each in steps if name == WRITE), None)
