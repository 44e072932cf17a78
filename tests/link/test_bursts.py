"""What a front end says in one burst is heard in turns, in order, and all of it."""

from __future__ import annotations

import asyncio
import socket
from mmap import mmap
from typing import Any, cast

import pytest

from carpool.engine.engine_link import MOST_UNREAD, EngineLink, EngineSide
from carpool.engine.run.parts import MOST_UNSENT
from carpool.link import records

pytestmark = pytest.mark.interpreted


class Side:
    """Who counts what is heard."""

    max_answer_bytes = 1 << 20

    def __init__(self) -> None:
        self.engine = self
        self.heard = self.by_then = 0
        self.lost = False
        self.groups: dict[int, object] = {}

    def opened(self, _link: EngineLink) -> None: ...

    def closed(self, _link: EngineLink) -> None: ...

    def dropped(self, _frontend: int) -> None:
        self.lost = True

    def acknowledged(self) -> None:
        self.heard += 1


class Pipe:
    """A transport that notes when it is told to read and when not."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self.told: list[str] = []
        self.unsent = 0

    def get_extra_info(self, _name: str) -> socket.socket:
        return self._ours

    def set_write_buffer_limits(self, **_limits: int) -> None: ...

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        self.told.append("pause")

    def resume_reading(self) -> None:
        self.told.append("resume")

    def abort(self) -> None:
        self.told.append("abort")

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def seen(first: int, count: int) -> bytes:
    return b"".join(records.to_engine(records.SEEN, number) for number in range(first, first + count))


def hear(*bursts: bytes, turns: int = 100, unsent: int = 0) -> tuple[Side, EngineLink, list[str]]:
    """Bursts that come one after the other, before the loop's next turn."""

    async def run() -> tuple[Side, EngineLink, list[str]]:
        side, pipe = Side(), Pipe()
        memory = mmap(-1, 1 << 16)
        loop = asyncio.get_running_loop()
        link = EngineLink(cast(EngineSide, side), 1, memory, 1, loop)
        link.connection_made(cast(Any, pipe))
        if unsent:
            pipe.unsent = unsent
            link.pause_writing()
        for burst in bursts:
            link.data_received(burst)
        for _ in range(turns):
            await asyncio.sleep(0)
        if unsent:
            pipe.unsent = 0
            link.resume_writing()
        pipe.close()
        side.by_then = side.heard  # before the loop ends, which takes a turn
        return side, link, pipe.told

    return asyncio.run(run())


def test_a_burst_of_some_turns_is_heard_without_a_word_to_the_kernel() -> None:
    side, link, told = hear(seen(0, 64))
    assert (side.heard, link.seen) == (64, 63)
    assert told == []


def test_it_takes_turns() -> None:
    assert hear(seen(0, 64), turns=0)[0].by_then == 16
    assert hear(seen(0, 64), turns=1)[0].by_then == 32


def test_what_comes_while_others_wait_is_heard_behind_them() -> None:
    side, link, told = hear(seen(0, 20), seen(20, 20), seen(40, 5))
    assert (side.heard, link.seen) == (45, 44)
    assert told == []
    assert hear(seen(0, 20), seen(20, 20), turns=0)[0].by_then == 16, "its turn is over"


def test_far_more_than_that_is_not_read_until_most_of_it_was_heard() -> None:
    side, _, told = hear(seen(0, 1000))
    assert side.heard == 1000
    assert told == ["pause", "resume"]
    side, _, told = hear(seen(0, 100), seen(100, 100))
    assert side.heard == 200
    assert told == ["pause", "resume"]


def test_one_that_does_not_take_its_answers_is_not_read_in_between() -> None:
    side, _, told = hear(seen(0, 8), unsent=MOST_UNREAD + 1)
    assert side.heard == 8, "what was read is heard"
    assert told == ["pause", "resume"]


def test_parts_that_wait_to_be_written_never_stop_the_reading_of_requests() -> None:
    """As many as there can be: what holds them back, and one that is as large as may be."""
    most = MOST_UNSENT + records.TO_FRONTEND.size + records.MAX_PART_BYTES
    side, _, told = hear(seen(0, 8), unsent=most)
    assert (side.heard, told) == (8, [])


def test_nonsense_behind_a_burst_ends_the_link() -> None:
    side, _, told = hear(seen(0, 64), records.TO_ENGINE.pack(255, 1 << 30, *[0] * 14))
    assert side.lost
    assert "abort" in told
