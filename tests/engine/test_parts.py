"""Parts on their way from the loop to a front end: in turns, bounded, and the end behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from carpool.engine.run.parts import MOST_UNSENT, LinkParts, OutgoingParts

pytestmark = pytest.mark.interpreted  # the stand-ins are of classes that compiled code takes itself only


class Box:
    """An outbox whose front end takes nothing until it is told to."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.unsent = 0
        self.why = ""

    def put(self, piece: bytes) -> None:
        self.sent.append(piece)
        self.unsent += len(piece)

    def failed(self, why: str) -> None:
        self.why = why


def outgoing(story: Callable[[OutgoingParts, Box], Awaitable[None]]) -> None:
    async def main() -> None:
        box = Box()
        await story(OutgoingParts(cast(Any, box), asyncio.get_running_loop()), box)

    asyncio.run(asyncio.wait_for(main(), 60))


def test_parts_beyond_the_mark_wait_and_models_take_turns() -> None:
    piece = bytes(MOST_UNSENT // 4)

    async def story(parts: OutgoingParts, box: Box) -> None:
        for _ in range(20):
            parts.put(1, piece + b"1")
        before = len(box.sent)
        assert box.unsent <= MOST_UNSENT + len(piece) + 1
        parts.put(2, b"2")
        assert len(box.sent) == before
        assert LinkParts(parts, 1, 7).full
        assert not LinkParts(parts, 2, 8).full, "the other model goes on"
        parts.pause()
        box.unsent = 0
        parts.resume()
        assert [sent[-1:] for sent in box.sent[before : before + 2]] == [b"1", b"2"]
        while parts.size(1):
            box.unsent = 0  # its socket takes all, of which nobody says anything
            await asyncio.sleep(0)
        assert len(box.sent) == 21

    outgoing(story)


def test_the_end_of_a_call_comes_behind_its_parts() -> None:
    async def story(parts: OutgoingParts, box: Box) -> None:
        parts.pause()
        sink = LinkParts(parts, 1, 7)
        sink.send(b"one")
        sink.put(b"the end")
        assert box.sent == []
        parts.resume()
        assert box.sent[0].endswith(b"one")
        assert box.sent[1] == b"the end"

    outgoing(story)


def test_a_front_end_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.engine.run.parts.MAX_UNSENT", 100)

    async def story(parts: OutgoingParts, box: Box) -> None:
        parts.pause()
        for _ in range(12):
            parts.put(1, bytes(10))
        assert box.why
        parts.clear()
        assert parts.size(1) == 0

    outgoing(story)
