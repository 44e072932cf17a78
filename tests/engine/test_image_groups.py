"""One admission for the parts of an image: what the gate is asked, what it promises, and lies."""

from __future__ import annotations

import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import JobOrigin
from carpool.core.objectives import FixedBatching, Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.engine_link import LinkGroups
from carpool.engine.routes.image_groups import MOST_IMAGES, ImageGroups
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import Refused
from carpool.link.records import ANSWERED, BOOKING_NEWS, GIVEN_UP, REACHES, STEP_PART, ProtocolError

KEY = 7
BATCH_S = 0.02  # of any size


class Bench:
    """A version that promises 100 ms and answers four images in each batch of 20 ms."""

    def __init__(self, settings: Promise | FixedBatching | None = None) -> None:
        curve = BatchCurve([(size, BATCH_S) for size in (1, 2, 3, 4)])
        self.scheduler = Scheduler(curve, settings or Promise(0.1, 4))
        self.scheduler.set_available(self.scheduler.instances.next_free, True)
        self.groups = ImageGroups("finder", self.scheduler)
        self.link = LinkGroups(lambda key: self.groups if key == KEY else None, 16)

    def asks(
        self,
        number: int,
        images: int,
        part: int = 1,
        at: float = 0.0,
        source: str = "one",
        deadline: float = 1e9,
    ) -> Work:
        work = Work({}, self._done, 0.0, deadline, part)
        work.origin = JobOrigin(source)
        assert self.link.join(work, STEP_PART.pack(number, KEY, images), at) == b""
        return work

    def over(self, number: int, how: int = ANSWERED, at: float = 0.0) -> None:
        self.link.hear(number, BOOKING_NEWS.pack(how, 0, 0), at)

    def _done(self, work: Work, outcome: Outcome) -> None:
        raise AssertionError(f"{work} was answered: {outcome}")


def test_the_promise_of_the_whole_is_that_of_each_of_its_images() -> None:
    bench = Bench()
    first = bench.asks(1, 12)
    assert bench.scheduler.offer(first, 0.0) is None
    assert first.deadline == pytest.approx(1.2)
    later = bench.asks(1, 12, part=4, at=0.5)
    assert bench.scheduler.offer(later, 0.5) is None
    assert later.deadline == pytest.approx(1.2)
    assert later.course.entered == 0.5  # it waits since then, whenever the image came


def test_the_gate_asks_for_all_of_them() -> None:
    bench = Bench()
    bench.asks(1, 12, deadline=0.15)  # three batches
    with pytest.raises(Refused) as refused:
        bench.asks(2, 60, deadline=0.15)
    assert refused.value.reason == "cannot-finish"
    assert bench.scheduler.ledger.offered == 1  # as a request that was rejected
    assert not bench.scheduler.lanes.waiting


def test_what_was_let_in_counts_before_it_is_here() -> None:
    bench = Bench()
    bench.asks(1, 24)
    with pytest.raises(Refused):
        bench.asks(2, 24, deadline=0.19)
    bench.asks(3, 24, source="two", deadline=0.19)  # another's are not before its own
    bench.over(1, GIVEN_UP)
    bench.asks(4, 24, deadline=0.19)


def test_who_was_let_in_is_not_asked_again() -> None:
    bench = Bench()
    bench.asks(1, 8, deadline=0.3)
    for _ in range(50):  # more than the gate lets wait
        bench.scheduler.offer(Work({}, bench._done, 0.0, 1e9, 4), 0.0)
    later = bench.asks(1, 8, part=4, at=0.25, deadline=0.3)
    assert bench.scheduler.offer(later, 0.25) is None


def test_nothing_is_left_of_groups_that_are_over() -> None:
    bench = Bench()
    bench.asks(1, 12)
    bench.asks(1, 12, part=3)
    bench.asks(2, 5, source="two")
    assert bench.groups.coming == {"one": 8, "two": 4}
    bench.over(1)
    bench.link.end()
    assert not bench.groups.coming


def test_without_a_promise_all_are_let_in() -> None:
    bench = Bench(FixedBatching(4))
    work = bench.asks(1, 3000)
    assert not work.course.promise
    assert work.deadline == 1e9


def test_lies_cost_the_link() -> None:
    bench = Bench()
    with pytest.raises(ProtocolError):
        bench.asks(1, MOST_IMAGES + 1)
    with pytest.raises(ProtocolError):
        bench.asks(1, 2, part=3)
    bench.asks(1, 4)
    with pytest.raises(ProtocolError):
        bench.asks(1, 5)  # it had four
    with pytest.raises(ProtocolError):
        bench.asks(1, 4, part=4)  # three are left
    with pytest.raises(ProtocolError):
        bench.over(1, REACHES)
