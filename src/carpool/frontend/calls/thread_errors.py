"""Turns what a thread raised into what a client may know of it."""

from __future__ import annotations

import asyncio

from carpool.errors import CarpoolError, Unavailable, without_stack
from carpool.observe.logs import logger

_log = logger("pictures")


def stopping() -> Unavailable:
    return Unavailable("the server is stopping", reason="stopping")


def explained(error: BaseException | None, model: str) -> CarpoolError:
    """Returns what a client may know of a thread's failure. Unexpected ones are bugs, and are logged."""
    if isinstance(error, CarpoolError):
        return without_stack(error)
    if isinstance(error, asyncio.CancelledError):
        return stopping()
    if isinstance(error, MemoryError):
        return Unavailable("there is not enough memory for this image now", reason="no-memory")
    try:
        raise error or RuntimeError("there was no result")
    except BaseException as unexpected:
        _log.exception("picture-failed", model=model)
        without_stack(unexpected)
        return CarpoolError(f"the server failed on this image: {type(unexpected).__name__}")
