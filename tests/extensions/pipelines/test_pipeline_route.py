"""What the engine makes of a front end's bookings: gate, deadline of the whole, live sources, lies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import GONE, READY, RUNNING, JobOptions, JobOrigin
from carpool.core.objectives import Promise
from carpool.core.remaining import Booking, Step
from carpool.core.scheduler import Scheduler
from carpool.engine.engine_link import LinkGroups
from carpool.engine.routes.stepped_route import Binding
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import Cancelled, CarpoolError, Refused, Replaced, Unavailable
from carpool.extensions.pipelines.picture_graph import PictureGraph
from carpool.extensions.pipelines.pipeline_route import PipelineRoute
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import pipeline_settings
from carpool.link.records import ANSWERED, BOOKING_NEWS, GIVEN_UP, REACHES, STEP_PART, ProtocolError
from carpool.observe import columns
from carpool.observe.counters import CounterRow, Row, Table, table_bytes
from carpool.types import Timing

KEY, FIND, KIND = 7, 0, 1
TEXT = """
slo_ms = 100
[[step]]
name = "find"
model = "finder"
[[step]]
name = "kind"
model = "namer"
each = "find.boxes"
"""


class Route:
    """Holds what is cancelled, as a driver would tell it."""

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route, work.state = self, READY

    def ready(self, work: Work) -> None: ...

    def cancel(self, work: Work) -> None:
        work.state = GONE
        work.done(work, Outcome(error=Cancelled("the client left")))


class Bench:
    def __init__(self, text: str = TEXT) -> None:
        config = pipeline_config(text, Path("street/pipeline.toml"), "street")
        settings = pipeline_settings(config)
        assert settings is not None
        table = Table(bytearray(table_bytes(1)))
        rows = [table.block(0).row(CounterRow(number, 1)) for number in (2, 3)]
        self.schedulers = [Scheduler(BatchCurve([(1, 0.010), (8, 0.020)]), Promise(0.1, 8)) for _ in range(2)]
        leaves = (Step(self.schedulers[0]), Step(self.schedulers[1], (0,), 4.0))
        models: Any = tuple(
            SimpleNamespace(slo=0.1, promises=True, counters=SimpleNamespace(asked=lambda *_: None))
            for _ in range(2)
        )
        self.answered: list[Timing] = []
        self.pipeline = PipelineRoute(
            "street",
            PictureGraph(settings),
            lambda: Binding(leaves, models),
            lambda _images, timing: self.answered.append(timing),
            rows,
            slo=0.1,
        )
        self.bookings = LinkGroups(lambda key: self.pipeline if key == KEY else None, 4)
        self.route = Route()
        self.told: list[tuple[Work, CarpoolError | None]] = []

    def work(self, images: int = 1, *, at: float = 0.0, source: str = "", latest: bool = False) -> Work:
        work = Work({}, lambda work, outcome: self.told.append((work, outcome.error)), at, images=images)
        work.origin, work.options = JobOrigin(source), JobOptions(latest=latest)
        return work

    def ask(self, booking: int, step: int, work: Work, now: float) -> Work:
        assert self.bookings.join(work, STEP_PART.pack(booking, KEY, step) + b"{}", now) == b"{}"
        self.route.submit([work])
        return work

    def say(self, booking: int, what: int, step: int = 0, images: int = 0, now: float = 0.0) -> None:
        self.bookings.hear(booking, BOOKING_NEWS.pack(what, step, images), now)

    def coming(self) -> list[int]:
        return list(self.pipeline.remaining._coming)


def good(work: Work) -> None:
    work.done(work, Outcome({}, timing=Timing(0.001, 0.0, 0.01, 0.0, 2)))


def test_one_promise_for_both_steps() -> None:
    bench = Bench()
    first = bench.ask(1, FIND, bench.work(), 0.0)
    assert first.deadline == 0.1
    assert first.course.later == pytest.approx(0.010 + 0.010 * 3 / 7)  # four images alone
    good(first)
    bench.say(1, REACHES, KIND, 3, 0.02)
    second = bench.ask(1, KIND, bench.work(3, at=0.0), 0.03)
    course = second.course
    assert (second.arrived, second.deadline, course.later, course.entered) == (0.0, 0.1, 0.0, 0.03)
    good(second)
    assert [error for _, error in bench.told] == [None, None]
    bench.say(1, ANSWERED, now=0.05)
    assert bench.coming() == [0, 0]
    assert not bench.pipeline.under_way


def test_the_gate_refuses_the_whole_before_its_first_step() -> None:
    bench = Bench()
    late = bench.work()
    late.deadline = 0.022  # the first step alone would make it
    with pytest.raises(Refused):
        bench.ask(1, FIND, late, 0.0)
    assert not bench.pipeline.under_way
    bench.say(1, GIVEN_UP)  # nobody listens
    without = Bench(TEXT + '[answer]\nif_late = "without"\n')
    first = without.work()
    first.deadline = 0.022
    without.ask(1, FIND, first, 0.0)


def test_what_was_done_in_vain_is_counted() -> None:
    bench = Bench()
    good(bench.ask(1, FIND, bench.work(), 0.0))
    bench.say(1, GIVEN_UP)
    assert bench.pipeline.rows[FIND]._cells[columns.STEP_WASTED] == 1
    assert bench.coming() == [0, 0]


def test_nothing_found_ends_well() -> None:
    bench = Bench()
    good(bench.ask(1, FIND, bench.work(), 0.0))
    bench.say(1, REACHES, KIND, 0)
    bench.say(1, ANSWERED, now=0.02)
    assert bench.coming() == [0, 0]
    row = bench.pipeline.rows[KIND]._cells
    assert sum(row[columns.FAN_OUT.first : columns.FAN_OUT.sum]) == 1


def test_a_link_that_ends_takes_its_bookings_along() -> None:
    bench = Bench()
    bench.ask(1, FIND, bench.work(), 0.0)
    good(bench.ask(2, FIND, bench.work(), 0.0))
    bench.say(2, REACHES, KIND, 2)
    assert bench.coming() == [0, 1]
    bench.bookings.end()
    assert bench.coming() == [0, 0]
    assert not bench.pipeline.under_way


def camera(bench: Bench, booking: int, at: float) -> Work:
    """A frame of a live source whose crops wait for the second step."""
    good(bench.ask(booking, FIND, bench.work(at=at, source="door", latest=True), at))
    bench.say(booking, REACHES, KIND, 2)
    return bench.ask(booking, KIND, bench.work(2, at=at, source="door", latest=True), at + 0.01)


def test_a_newer_frame_takes_the_place_of_one_that_waits_for_a_later_step() -> None:
    bench = Bench()
    old = camera(bench, 1, 0.0)
    new = camera(bench, 2, 0.02)
    assert isinstance(dict(bench.told)[old], Replaced)
    assert new not in dict(bench.told)
    assert not new.options.latest  # crops of one frame must not replace each other
    bench.say(1, GIVEN_UP)
    newest = camera(bench, 3, 0.04)
    assert isinstance(dict(bench.told)[new], Replaced)
    newest.state = RUNNING
    camera(bench, 4, 0.06)
    assert newest not in dict(bench.told)  # what runs is answered


def test_a_pipeline_that_is_gone() -> None:
    bench = Bench()
    bench.pipeline.closed = "street is being unloaded"
    with pytest.raises(Unavailable, match="being unloaded"):
        bench.ask(1, FIND, bench.work(), 0.0)
    with pytest.raises(Unavailable):
        bench.bookings.join(bench.work(), STEP_PART.pack(1, 99, FIND), 0.0)


def test_lies() -> None:
    bench = Bench()
    with pytest.raises(ProtocolError):
        bench.bookings.join(bench.work(), b"short", 0.0)
    bench.ask(1, FIND, bench.work(), 0.0)
    for images, step in ((101, KIND), (1, 5), (1, FIND)):
        with pytest.raises(ProtocolError):
            bench.say(1, REACHES, step, images)
    with pytest.raises(ProtocolError):
        bench.say(1, 9)
    with pytest.raises(ProtocolError):
        bench.bookings.hear(1, b"?", 0.0)
    bench.say(1, REACHES, KIND, 2)
    with pytest.raises(ProtocolError):
        bench.ask(1, KIND, bench.work(3), 0.0)
    for booking in range(2, 5):
        bench.ask(booking, FIND, bench.work(), 0.0)
    with pytest.raises(ProtocolError):
        bench.ask(9, FIND, bench.work(), 0.0)


class Unwalked(dict[Any, Any]):
    """Says how often it was walked through: a frame's end must not cost more where there are more sources."""

    walks = 0

    def items(self) -> Any:
        self.walks += 1
        return super().items()

    def __iter__(self) -> Any:
        self.walks += 1
        return super().__iter__()


def test_the_end_of_a_frame_costs_the_same_however_many_sources_there_are() -> None:
    bench = Bench()
    camera(bench, 1, 0.0)
    bench.pipeline.waiting = waiting = Unwalked(bench.pipeline.waiting)
    assert list(waiting.keys()) == [(KIND, "door")]
    bench.say(1, GIVEN_UP)
    assert not len(waiting)
    assert waiting.walks == 0


def test_a_fault_of_ours_costs_one_request_and_not_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def bug(*_: object, **_named: object) -> None:
        raise KeyError("a bug")

    first = bench.ask(1, FIND, bench.work(), 0.0)
    with monkeypatch.context() as patch:
        patch.setattr(Booking, "reaches", bug)
        bench.say(1, REACHES, KIND, 2)
        with pytest.raises(CarpoolError, match="KeyError"):
            bench.ask(2, FIND, bench.work(), 0.0)
        patch.setattr(Row, "observe", bug)
        good(first)
    assert bench.told == [(first, None)]
    with pytest.raises(CarpoolError, match="the engine failed on this request of street"):
        bench.ask(1, KIND, bench.work(2), 0.0)
    bench.say(1, ANSWERED)
    assert bench.coming() == [0, 0]
    assert not bench.pipeline.under_way
