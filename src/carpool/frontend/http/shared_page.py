"""A page that takes long to write: in slices, and at intervals, for all who asked since the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from time import monotonic
from typing import TypeAlias

from carpool.observe.logs import logger

log = logger("http")

Tell: TypeAlias = Callable[[bytes | None], None]

_SLICE_S = 0.0005
_EVERY_S = 0.1
_BURST_S = 0.5  # of intervals that nobody used: a person who asks a few times is not kept waiting
_MOST_OF_THE_LOOP = 0.05


class SharedPage:
    """What it says is never older than the question. Used in the loop's thread only.

    Whoever asks too often waits for the next page instead of getting an old one: programs that count before
    and after something they do would otherwise count wrongly.
    """

    def __init__(self, write: Callable[[], Iterator[bytes]]) -> None:
        self._write = write
        self._asking: list[Tell] = []
        self._under_way = False
        self._due = 0.0  # when the next page would be due at the steady pace

    def ask(self, tell: Tell) -> None:
        """`tell` is called in the loop: with the page, or with nothing if it could not be written."""
        self._asking.append(tell)
        if not self._under_way:
            self._begin_in_time()

    def _begin_in_time(self) -> None:
        self._under_way = True
        wait = self._due - _BURST_S - monotonic()
        if wait > 0.0:
            asyncio.get_running_loop().call_later(wait, self._begin)
        else:
            self._begin()

    def _begin(self) -> None:
        asking, self._asking = self._asking, []
        self._go_on(self._write(), [], asking, 0.0)

    def _go_on(self, rest: Iterator[bytes], written: list[bytes], asking: list[Tell], spent: float) -> None:
        began = now = monotonic()
        page: bytes | None = None
        try:
            for piece in rest:
                written.append(piece)
                now = monotonic()
                if now - began >= _SLICE_S:
                    loop = asyncio.get_running_loop()
                    loop.call_soon(self._go_on, rest, written, asking, spent + now - began)
                    return
            page = b"".join(written)
        except Exception:
            log.exception("page-failed")
        spent += now - began
        self._due = max(self._due, now) + max(_EVERY_S, spent / _MOST_OF_THE_LOOP)
        self._under_way = False
        for tell in asking:
            tell(page)
        if self._asking and not self._under_way:
            self._begin_in_time()
