"""Waiting for what has no event of its own, with a bound that only a failure reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.02
_OF_WHAT_WAS_WAITED = 0.05  # who looks takes the cores that what is waited for needs

What: TypeAlias = "str | Callable[[], object]"
"""What did not come true; a function tells it when that is known."""


def until(
    condition: Callable[[], T],
    what: What = "it did not come true",
    seconds: float = PATIENCE_S,
    work: Callable[[], object] | None = None,
) -> T:
    """Look again and again, with `work` in between where it takes some; returns what was found at last."""
    begin = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - begin
        assert waited < seconds, _late(what, seconds)
        if work is None:
            time.sleep(_pause(waited))
        else:
            work()
    return found


async def until_in_loop(condition: Callable[[], object], what: What = "it did not come true") -> None:
    """The same for what the running loop does meanwhile."""
    begin = time.monotonic()
    while not condition():
        waited = time.monotonic() - begin
        assert waited < PATIENCE_S, _late(what, PATIENCE_S)
        await asyncio.sleep(_pause(waited))


def _pause(waited: float) -> float:
    return min(max(_FIRST_PAUSE_S, waited * _OF_WHAT_WAS_WAITED), _LONGEST_PAUSE_S)


def _late(what: What, seconds: float) -> str:
    return f"not within {seconds:g} s: {what() if callable(what) else what}"
