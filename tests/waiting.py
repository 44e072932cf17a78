"""Waiting for what has no event of its own, with a bound that only a failure reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeAlias, TypeVar

T = TypeVar("T")

PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.001

What: TypeAlias = "str | Callable[[], object]"
"""What did not come true; a function tells it when that is known."""


def until(
    condition: Callable[[], T],
    what: What = "it did not come true",
    seconds: float = PATIENCE_S,
    work: Callable[[], object] | None = None,
) -> T:
    """Look again and again, with `work` in between where it takes some; returns what was found at last."""
    give_up = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < give_up, _late(what, seconds)
        if work is None:
            time.sleep(_LOOK_EVERY_S)
        else:
            work()
    return found


async def until_in_loop(condition: Callable[[], object], what: What = "it did not come true") -> None:
    """The same for what the running loop does meanwhile."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, _late(what, PATIENCE_S)
        await asyncio.sleep(_LOOK_EVERY_S)


def _late(what: What, seconds: float) -> str:
    return f"not within {seconds:g} s: {what() if callable(what) else what}"
