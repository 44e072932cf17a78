"""When the driver takes a turn: on a loop that is turned by hand, at times that the test sets."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch, Instance
from carpool.core.job import Job, Refusal
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.run import driver as driver_module
from carpool.engine.run.batch import BatchResult, Outcome, Watcher, Work
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import Executor
from carpool.errors import Refused, Unavailable
from carpool.types import Timing

SLO = 0.2


class Handle:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Hand(Watcher):
    """The loop, the clock, the only executor and the watcher of one driver."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns = 0
        self.given: list[Sequence[Work]] = []
        self.answers: dict[str, Outcome] = {}
        self._soon: list[Callable[[], None]] = []
        self._timers: list[tuple[float, Callable[[], None], Handle]] = []
        scheduler = Scheduler(BatchCurve.linear(0.016, 0.004, 8), Promise(SLO, 8))
        self.driver = Driver("m", scheduler, False, self, cast(Any, self))
        self.driver.place(scheduler.instances[0], cast(Executor, self))
        self.turn()

    # As the loop.

    def call_soon(self, call: Callable[[], None]) -> None:
        self._soon.append(call)

    def call_later(self, delay: float, call: Callable[[], None]) -> Handle:
        handle = Handle()
        self._timers.append((self.now + delay, call, handle))
        return handle

    def turn(self) -> None:
        soon, self._soon = self._soon, []
        for call in soon:
            call()

    def wait(self, seconds: float) -> None:
        """Let timers ring that are due by then."""
        end = self.now + seconds
        while due := [timer for timer in self._timers if timer[0] <= end and not timer[2].cancelled]:
            timer = min(due, key=lambda one: one[0])
            self._timers.remove(timer)
            self.now = max(self.now, timer[0])
            timer[1]()
        self.now = end

    # As the executor and the watcher.

    def run(self, works: Sequence[Work]) -> None:
        self.given.append(works)

    def batch_ended(self, result: BatchResult, batch: Batch) -> None: ...

    def instance_lost(self, instance: Instance, why: str) -> None: ...

    def turned(self, scheduler: Scheduler, now: float) -> None:
        self.turns += 1

    # What a test does.

    def submit(self, source: str, budget: float = SLO, images: int = 1) -> Work:
        def done(_work: Work, outcome: Outcome) -> None:
            self.answers[source] = outcome

        work = Work(
            {"x": np.zeros(images)}, done, images=images, arrived=self.now, deadline=self.now + budget
        )
        self.driver.submit([work])
        self.turn()
        return work

    def end_batch(self) -> None:
        works = self.given[-1]
        result = BatchResult([Outcome(outputs={}) for _ in works], 0.02, Timing(batch=len(works)))
        self.backend = self
        self.alive = True
        self.driver.ended(cast(Executor, self), result)


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    found: list[Hand] = []
    monkeypatch.setattr(driver_module, "monotonic", lambda: found[0].now if found else 100.0)
    found.append(Hand())
    return found[0]


def test_newcomers_cost_no_turn_while_the_instance_is_busy(hand: Hand) -> None:
    hand.submit("first")
    hand.submit("second")  # sets the timer for its deadline
    before = hand.turns
    for number in range(5):
        hand.submit(f"later {number}")
    assert hand.turns == before
    hand.end_batch()
    assert [len(works) for works in hand.given] == [1, 6]


def test_requests_leave_no_cycles_for_the_collector(hand: Hand) -> None:
    """The server has it look rarely: what only the collector can free would stay for long."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(200):  # the queue keeps the places of some that have left
            hand.submit("answered or refused")
            hand.wait(0.001)
        while hand.driver._running:
            hand.end_batch()
        hand.given.clear()
        gc.collect()
        assert not [kept for kept in gc.garbage if isinstance(kept, Work)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_the_gate_is_shown_what_gathers_meanwhile(hand: Hand) -> None:
    """Front ends refuse by it: a long batch must not leave it as it was when the batch began."""
    hand.submit("first")
    before = hand.turns
    for _ in range(5):
        hand.wait(0.002)
        hand.submit("later")
    assert hand.turns == before + 5


def test_a_deadline_that_passes_before_the_others_is_told_in_time(hand: Hand) -> None:
    hand.submit("first")
    hand.submit("patient")
    hand.submit("hasty", budget=0.045)
    hand.wait(0.046)
    assert hand.answers["hasty"].error is not None
    assert "patient" not in hand.answers
    hand.wait(SLO)
    assert hand.answers["patient"].error is not None


def test_a_timer_that_nobody_needs_any_more_does_no_harm(hand: Hand) -> None:
    hand.submit("first")
    hand.submit("second")
    hand.end_batch()
    hand.end_batch()
    assert [hand.answers[name].error for name in ("first", "second")] == [None, None]
    hand.wait(10 * SLO)
    hand.submit("third")
    hand.end_batch()
    assert hand.answers["third"].error is None


def test_many_who_are_given_up_at_once_ask_the_gate_only_once(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks alike is told the same; who asks for more is asked about on its own."""
    scheduler = hand.driver.scheduler
    asked: list[Job] = []
    refuses = scheduler.refuses

    def counted(job: Job, now: float) -> Refusal | None:
        asked.append(job)
        return refuses(job, now)

    monkeypatch.setattr(scheduler, "refuses", counted)
    hand.submit("first")
    for number in range(6):
        hand.submit(f"alike {number}")
    hand.submit("larger", images=2)
    hand.wait(SLO - 0.010)  # a batch of one takes longer than what is left now
    hand.end_batch()
    errors = [answer.error for name, answer in hand.answers.items() if name != "first"]
    assert all(isinstance(error, Refused) for error in errors)
    assert len(errors) == 7
    waits = {error.retry_after_s for error in errors if isinstance(error, Refused)}
    assert min(wait or 0.0 for wait in waits) > 0
    assert sorted(job.images for job in asked) == [1, 2]


# ---- whatever raises, everybody is told once


class Oops(Exception):
    """What nobody foresaw."""


def raises(*_: object, **__: object) -> Any:
    raise Oops("by the test")


def counted(hand: Hand, name: str, told: list[str], *, fails: bool = False, budget: float = SLO) -> Work:
    def done(_work: Work, _outcome: Outcome) -> None:
        told.append(name)
        if fails:
            raise Oops(name)

    work = Work({"x": np.zeros(1)}, done, arrived=hand.now, deadline=hand.now + budget)
    hand.driver.submit([work])
    return work


@pytest.mark.parametrize(
    ("where", "what"),
    [("driver", "batch_ended"), ("driver", "turned"), ("scheduler", "finished"), ("scheduler", "decide")],
)
def test_who_rides_is_answered_whatever_raises_behind_it(
    hand: Hand, monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    told: list[str] = []
    for name in ("a", "b"):
        counted(hand, name, told)
    hand.turn()
    with monkeypatch.context() as broken:
        broken.setattr(hand if where == "driver" else hand.driver.scheduler, what, raises)
        hand.end_batch()
    assert sorted(told) == ["a", "b"]


def test_a_callback_that_raises_costs_only_its_own_answer(hand: Hand) -> None:
    told: list[str] = []
    for name in ("a", "bad", "b"):
        counted(hand, name, told, fails=name == "bad")
    hand.turn()
    hand.end_batch()
    assert sorted(told) == ["a", "b", "bad"]


def test_a_scheduler_that_raises_costs_those_who_wait_and_nobody_later(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    rider = counted(hand, "rides", told)
    hand.turn()
    assert rider in hand.given[-1]
    counted(hand, "waits", told)
    with monkeypatch.context() as broken:
        broken.setattr(hand.driver.scheduler, "decide", raises)
        hand.wait(0.05)
        hand.turn()
    assert told == ["waits"]
    hand.end_batch()
    assert told == ["waits", "rides"]
    counted(hand, "later", told)
    hand.turn()
    hand.end_batch()
    assert told == ["waits", "rides", "later"]


def test_an_offer_that_raises_is_answered_and_the_next_one_is_taken(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    with monkeypatch.context() as broken:
        broken.setattr(hand.driver.scheduler, "offer", raises)
        counted(hand, "first", told)
    assert told == ["first"]
    counted(hand, "second", told)
    hand.turn()
    hand.end_batch()
    assert told == ["first", "second"]


def test_a_gate_that_raises_does_not_keep_who_was_given_up(
    hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    counted(hand, "rides", told)
    hand.turn()
    counted(hand, "waits", told)
    monkeypatch.setattr(hand.driver.scheduler, "refuses", raises)
    hand.turn()
    hand.wait(SLO - 0.010)
    hand.end_batch()
    assert sorted(told) == ["rides", "waits"]


def test_a_batch_that_cannot_be_started_is_answered(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    hand.alive = True
    with monkeypatch.context() as broken:
        broken.setattr(hand, "run", raises)
        counted(hand, "first", told)
        hand.turn()
        hand.turn()
    assert told == ["first"]
    counted(hand, "second", told)
    hand.turn()
    hand.end_batch()
    assert told == ["first", "second"]


def test_who_rides_when_the_model_is_closed_is_told(hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that hangs is not waited for longer than the time to drain."""
    told: list[str] = []
    monkeypatch.setattr(hand, "close", lambda: None, raising=False)
    counted(hand, "rides", told)
    hand.turn()
    hand.driver.close()
    hand.end_batch()
    assert told == ["rides"]


def coming(hand: Hand, name: str, seconds: float) -> Work:
    """Submit one whose inputs are expected in so many seconds."""
    work = Work({}, lambda _work, outcome: hand.answers.__setitem__(name, outcome), arrived=hand.now)
    work.own_course().ready_at = hand.now + seconds
    hand.driver.submit([work])
    hand.turn()
    return work


def test_one_whose_inputs_are_coming_runs_when_they_are_there(hand: Hand) -> None:
    work = coming(hand, "first", 0.010)
    hand.wait(0.012)
    assert not hand.given
    hand.driver.ready(work)
    hand.turn()
    assert [list(works) for works in hand.given] == [[work]]


def test_a_deadline_that_passes_while_inputs_are_coming_is_told_then(hand: Hand) -> None:
    coming(hand, "late", 0.010)
    hand.wait(SLO - 0.021)
    assert not hand.answers
    hand.wait(0.002)  # from here on it could not run in time
    assert hand.answers["late"].error is not None
    assert hand.answers["late"].error.reason == "deadline"


def test_when_no_instance_is_left_those_who_are_coming_are_told_too(hand: Hand) -> None:
    work = coming(hand, "unlucky", 0.010)
    hand.driver.refuse_until_placed(Unavailable("it is being restarted", reason="restarting"))
    assert hand.answers["unlucky"].error is not None
    hand.driver.ready(work)  # its inputs are made meanwhile: nothing comes of them
    hand.turn()
    assert not hand.given
    assert hand.driver.idle
