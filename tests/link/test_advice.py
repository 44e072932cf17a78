"""The gate's advice with sources: who floods is turned away at the door, the others are not."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import Job, Reason, Refusal, Terms
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.errors import CarpoolError, Refused
from carpool.link import advice as advice_module
from carpool.link.advice import GATE_BYTES, Advice, GateTable, publish
from carpool.link.catalog import Batching, ModelEntry
from carpool.link.senders import NOBODY, Sender
from carpool.types import Signature
from waiting import until_in_loop as until

ENTRY = ModelEntry(3, "m", "1", Signature("m", (), ()), Batching("promise", 0.05))
FLOOD, MODEST = Sender("flood"), Sender("modest")


class Gate:
    def __init__(self) -> None:
        self.core = Scheduler(BatchCurve.parse("4+1"), Promise(0.05, 64))
        self.table = GateTable(bytearray(GATE_BYTES))
        self.reports: list[Mapping[str, Any]] = []
        self.now = 0.0
        self.advice = Advice(self.table.read, self._ask)

    async def _ask(self, _what: str, counts: Mapping[str, Any]) -> None:
        self.reports.append(counts)

    async def reported(self) -> None:
        """When its time has come: asked for earlier, a second one without counts would follow."""
        await until(lambda: self.reports)

    def flood(self, source: str, count: int = 300, priority: int = 0) -> None:
        for _ in range(count):
            self.now += 1e-4
            self.core.offer(Job(self.now, source=source, priority=priority), self.now)
            self.core.decide(self.now)
        publish(self.table.write, ENTRY.key, self.core, self.now)

    def ask(self, sender: Sender, *, certain: bool = True, later: float = 0.0) -> CarpoolError | None:
        return self.advice(ENTRY, float("inf"), self.now + later, sender, certain=certain)


def with_gate(story: Any) -> None:
    async def main() -> None:
        await story(Gate())

    asyncio.run(main())


def test_without_sources_one_verdict_is_for_everybody_who_names_none() -> None:
    async def story(gate: Gate) -> None:
        gate.flood("")
        error = gate.ask(NOBODY, certain=False)
        assert isinstance(error, Refused)
        assert error.retry_after_s is not None
        assert error.numbers["waiting"] > 0
        assert gate.ask(NOBODY, certain=False) is not error  # raised twice, one would keep both stacks
        assert gate.ask(NOBODY, later=0.06) is None  # old advice says nothing
        assert gate.ask(MODEST) is None
        await gate.reported()
        assert gate.reports == [{"refused": [[3, "", error.reason, 2]]}]

    with_gate(story)


def test_there_is_room_for_a_few_of_those_of_whom_the_engine_has_not_heard() -> None:
    """All that come before the engine looks again would pass, for the one place that is free."""

    async def story(gate: Gate) -> None:
        gate.core.offer(Job(0.0), 0.0)
        gate.core.decide(0.0)
        waiting = [Job(0.0)]
        while gate.core.offer(waiting[-1], 0.0) is None:
            waiting.append(Job(0.0))
        for job in waiting[-6:-1]:
            gate.core.cancel(job, 0.0)
        publish(gate.table.write, ENTRY.key, gate.core, gate.now)

        def ask(ahead: int) -> CarpoolError | None:
            return gate.advice(ENTRY, float("inf"), gate.now, NOBODY, ahead=lambda _at: ahead)

        assert ask(0) is None
        refused_after = next(ahead for ahead in range(200) if ask(ahead) is not None)
        assert 0 < refused_after <= 64
        before = gate.core.lanes.waiting
        let_in = 0
        while gate.core.offer(Job(gate.now), gate.now) is None:
            let_in += 1
        assert let_in <= refused_after <= 2 * let_in + 1
        assert gate.core.lanes.waiting == before + let_in

    with_gate(story)


def test_the_advice_counts_what_is_outside_as_the_engine_does() -> None:
    async def story(gate: Gate) -> None:
        answers = []
        for outside in (0.0, 0.010):
            gate.core = Scheduler(BatchCurve.parse("4+1"), Promise(0.05, 64))
            gate.now += 1.0
            for _ in range(60):  # every newcomer moves what is thought of those who come
                gate.core.offer(Job(gate.now, outside=outside), gate.now)
            running = gate.core.decide(gate.now).batch
            assert running is not None
            for job in [job for lane in gate.core.lanes for line in lane.lines.values() for job in line]:
                gate.core.cancel(job, gate.now)
            gate.now += running.instance.free_at - gate.now - 0.037
            publish(gate.table.write, ENTRY.key, gate.core, gate.now)
            advised = gate.ask(NOBODY)
            decided = gate.core.offer(Job(gate.now, outside=outside), gate.now)
            assert (advised is None) == (decided is None)
            answers.append(advised)
        assert answers[0] is None
        assert isinstance(answers[1], Refused)
        assert answers[1].predicted_ms > answers[1].numbers["deadline_ms"] == 50.0

    with_gate(story)


def test_with_sources_only_the_one_that_floods_is_turned_away() -> None:
    async def story(gate: Gate) -> None:
        gate.flood("modest", 2)
        gate.flood("flood")
        assert isinstance(gate.ask(FLOOD), Refused)
        assert gate.ask(MODEST) is None
        assert gate.ask(NOBODY) is None

    with_gate(story)


def test_a_flood_without_a_name_beside_sources_is_turned_away_where_no_body_can_name_one() -> None:
    async def story(gate: Gate) -> None:
        gate.flood("modest", 2)
        gate.flood("")
        assert isinstance(gate.ask(NOBODY), Refused)
        assert gate.ask(NOBODY, certain=False) is None

    with_gate(story)


def test_frames_that_may_replace_one_another_are_for_the_engine_to_judge() -> None:
    async def story(gate: Gate) -> None:
        gate.flood("flood")
        assert gate.ask(FLOOD._replace(latest=True)) is None

    with_gate(story)


def test_while_urgent_requests_come_the_engine_decides_alone() -> None:
    async def story(gate: Gate) -> None:
        gate.flood("", 1, priority=1)
        gate.flood("")
        assert gate.ask(NOBODY) is None

    with_gate(story)


def test_what_was_refused_here_counts_for_its_source() -> None:
    core = Scheduler(BatchCurve.parse("4+1"), Promise(0.05, 64))
    core.refused_elsewhere(5, 5, Reason.OVERLOAD, 1.0, "flood")
    lane = next(iter(core.lanes))
    assert (lane.source, core.ledger.refused[Reason.OVERLOAD]) == ("flood", 5)
    assert lane.rate.at(1.0) > 0


def test_what_a_front_end_says_that_is_behind_is_counted_and_said_once() -> None:
    fixed = ENTRY.__class__(5, "knobs", "1", Signature("knobs", (), ()), Batching("knobs"))

    async def story(gate: Gate) -> None:
        error = gate.advice.behind(ENTRY, 1.0, "modest", 0.03)
        assert error.reason == "overload"
        assert error.retry_after_s == 0.03
        assert error.numbers == {"unread_ms": 30.0, "deadline_ms": 50.0}
        assert "30 ms" in error.message
        again = gate.advice.behind(ENTRY, 1.001, "other", 0.04)
        assert again is not error
        assert again.message == error.message
        unpromised = gate.advice.behind(fixed, 1.0, "", 0.03)
        assert unpromised.numbers == {"unread_ms": 30.0}
        assert "promised" not in unpromised.message
        await gate.reported()
        assert gate.reports == [
            {"refused": [[3, "modest", "overload", 1], [3, "other", "overload", 1], [5, "", "overload", 1]]}
        ]

    with_gate(story)


def test_a_sentence_about_a_model_of_an_earlier_engine_is_not_said_of_another() -> None:
    """Each engine numbers its models anew."""
    now_there = ENTRY.__class__(ENTRY.key, "n", "1", Signature("n", (), ()), Batching("promise", 0.2))

    async def story(gate: Gate) -> None:
        assert gate.advice.behind(ENTRY, 1.0, "", 0.03).message.startswith("m: ")
        error = gate.advice.behind(now_there, 9.0, "", 0.03)
        assert error.message.startswith("n: ")
        assert error.numbers == {"unread_ms": 30.0, "deadline_ms": 200.0}

    with_gate(story)


def test_one_sentence_does_for_all_who_are_refused_in_the_same_moment() -> None:
    async def turn() -> None:
        gate = Gate()
        code = float(list(Reason).index(Reason.OVERLOAD))

        def told(waiting: int) -> Refused:
            gate.now += 0.001
            refusal = Refusal(
                Reason.OVERLOAD, 0.5, waiting, asked=900.0, room=2, sustained=400.0, terms=Terms(1.0)
            )
            gate.table.write(ENTRY.key, gate.now, 1.0, 0.0, 0.0, code, *refusal.flat())
            error = gate.advice(ENTRY, gate.now + 1.0, gate.now, NOBODY)
            assert isinstance(error, Refused)
            return error

        first, second = told(5), told(6)
        assert second is not first  # one that is raised twice would keep both stacks
        assert (second.message, second.numbers) == (first.message, first.numbers)
        assert second.rendered is first.rendered is not None  # and what clients are sent is made once
        gate.now += 0.01
        later = told(7)
        assert "7 images are queued." in later.message
        gate.now += 0.01
        assert told(7).rendered is later.rendered  # equal numbers make an equal sentence at any time

    asyncio.run(turn())


@pytest.mark.interpreted
def test_a_row_that_is_as_it_was_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a flood, many look at the same row."""
    checked = []

    def crc32(data: bytes) -> int:
        checked.append(data)
        return zlib.crc32(data)

    monkeypatch.setattr(advice_module, "zlib", SimpleNamespace(crc32=crc32))
    table = GateTable(bytearray(GATE_BYTES))
    other = ENTRY.key + 1024  # shares its row
    for values in ((1.0, 2.0), (1.0, 3.0)):
        table.write(ENTRY.key, *values)
        checked.clear()
        assert [table.read(ENTRY.key) for _ in range(3)] == [values] * 3
        assert len(checked) == 1
        assert table.read(other) is None
    table.clear()
    assert table.read(ENTRY.key, 1) is None
