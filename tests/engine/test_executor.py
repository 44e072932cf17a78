"""Which batches the loop runs itself, and that nothing it runs there harms anybody: times are the test's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from carpool.config.model import ModelSignature
from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch, Instance
from carpool.core.objectives import FixedBatching
from carpool.core.scheduler import Scheduler
from carpool.engine.run import batch as batch_module
from carpool.engine.run import driver as driver_module
from carpool.engine.run import executor as executor_module
from carpool.engine.run.batch import BatchResult, Outcome, Watcher, Work
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import BRIEF_S, Brief, Executor, LoopTime
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, ModelError
from carpool.types import Array, Datatype, Signature, TensorSpec
from engine.scripted import run
from waiting import until_in_loop as until

LOOP = "the loop"
T_S = 1e-4  # of one image


class Model:
    """Doubles numbers, in as much time as it is told to take."""

    signature = ModelSignature()

    def __init__(self) -> None:
        self.in_any_thread = True
        self.alive = True
        self.closed = False
        self.ran_in: list[str] = []
        self.takes = T_S
        self.computes = T_S
        self.fails: list[CarpoolError] = []
        self.hangs = False
        self.now, self.computed = 100.0, 0.0  # as its clocks say
        self._aborted = threading.Event()
        self.rigs: list[Rig] = []

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        is_loop = threading.current_thread() is threading.main_thread()
        self.ran_in.append(LOOP if is_loop else threading.current_thread().name)
        self.now += self.takes
        self.computed += self.computes
        if self.hangs:
            assert self._aborted.wait(30)
            raise ModelError("stopped", reason="aborted")
        if self.fails:
            raise self.fails.pop()
        return {"y": 2 * inputs["x"]}

    def abort(self) -> None:
        self.alive = False
        self._aborted.set()

    def close(self) -> None:
        self.alive, self.closed = False, True


class Rig(Watcher):
    """One model behind its driver."""

    def __init__(
        self, model: Model, spec: TensorSpec, policy: FixedBatching, brief: Brief | None = None
    ) -> None:
        self.model = model
        self.lost: list[str] = []
        self.batches: list[BatchResult] = []
        self.answers: dict[float, Outcome] = {}
        loop = asyncio.get_running_loop()
        signature = Signature("m", (spec,), (TensorSpec("y", spec.datatype, spec.shape),), 8)
        scheduler = Scheduler(BatchCurve.linear(T_S / 2, T_S / 2, 8), policy)
        self.driver = Driver("m", scheduler, True, self, loop)
        self.executor = Executor(model, signature, 8, 8, self.driver.report, brief or Brief(LoopTime()))
        self.driver.place(scheduler.instances[0], self.executor)
        model.rigs.append(self)

    def batch_ended(self, result: BatchResult, batch: Batch) -> None:
        self.batches.append(result)

    def instance_lost(self, instance: Instance, why: str) -> None:
        self.lost.append(why)

    def submit(self, *values: float) -> list[Work]:
        """At once."""

        def done(work: Work, outcome: Outcome) -> None:
            value = float(work.inputs["x"].flat[0])
            assert value not in self.answers, "answered twice"
            self.answers[value] = outcome

        arrays = [np.full((1, 1), value, np.float32) for value in values]
        works = [Work({"x": array}, done, self.model.now) for array in arrays]
        self.driver.submit(works)
        return works

    async def ask(self, *values: float) -> None:
        """When the loop has nothing to do, and until they are answered."""
        self.model.now += 1.0
        self.submit(*values)
        await until(lambda: all(value in self.answers for value in values))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    made = Model()
    for module in (batch_module, driver_module, executor_module):
        monkeypatch.setattr(module, "monotonic", lambda: made.now)
    monkeypatch.setattr(executor_module, "thread_time", lambda: made.computed)
    yield made
    for one in made.rigs:
        one.executor.close()
        one.executor.join(30)


def rig(
    model: Model,
    *,
    shape: Sequence[int] = (1,),
    fixed: FixedBatching | None = None,
    brief: Brief | None = None,
) -> Rig:
    spec = TensorSpec("x", Datatype.FP32, tuple(shape))
    return Rig(model, spec, fixed or FixedBatching(8), brief)


def test_a_lone_request_is_run_by_the_loop(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        await one.ask(1.0)
        assert model.ran_in == [LOOP]
        outputs = one.answers[1.0].outputs
        assert outputs is not None
        assert outputs["y"].tolist() == [[2.0]]

    run(main())


def test_what_it_took_is_learned_counted_and_told(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        model.takes = 2 * T_S
        await one.ask(1.0)
        assert one.driver.scheduler.instances[0].speed.mean > 1.0
        assert one.driver.scheduler.ledger.answered == 1
        assert [result.timing.batch for result in one.batches] == [1]
        assert one.answers[1.0].timing.infer == pytest.approx(2 * T_S)

    run(main())


def test_several_that_come_at_once_are_run_by_the_instances_thread(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        await one.ask(1.0, 2.0)
        assert model.ran_in == ["m-instance"]

    run(main())


@pytest.mark.parametrize("what", ["varies", "not anywhere", "slow"])
def test_what_may_take_long_is_run_by_the_instances_thread(model: Model, what: str) -> None:
    async def main() -> None:
        model.in_any_thread = what != "not anywhere"
        one = rig(model, shape=(-1,) if what == "varies" else (1,))
        if what == "slow":
            belief = one.driver.scheduler.belief
            belief.adopt(BatchCurve.linear(BRIEF_S, T_S, 8), BRIEF_S / T_S)
        await one.ask(1.0)
        assert model.ran_in == ["m-instance"]

    run(main())


def test_one_that_computes_for_too_long_leaves_the_loop_for_a_rest(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        model.computes = 10 * BRIEF_S
        for number in range(4):
            await one.ask(float(number))
        model.computes = T_S
        await one.ask(4.0)
        model.now += 5.0
        await one.ask(5.0)
        assert model.ran_in == [LOOP] * 3 + ["m-instance"] * 2 + [LOOP]

    run(main())


def test_one_that_stays_slow_rests_longer_each_time() -> None:
    """A machine that is itself held up now and then makes a fast model look slow for some runs."""
    brief, now = Brief(LoopTime()), 100.0
    for _ in range(3):
        assert brief.may_run(now)
        now += 0.2
        brief.ran(10 * BRIEF_S, now)
    for rest in (5.0, 10.0, 20.0):
        assert not brief.may_run(now + 0.99 * rest)
        now += 1.01 * rest
        assert brief.may_run(now)
        brief.ran(10 * BRIEF_S, now)  # the one chance that it has then
    assert not brief.may_run(now + 39.0)
    now += 41.0
    for _ in range(2001):
        brief.ran(T_S, now)
    for _ in range(3):
        assert brief.may_run(now), "it has earned them back"
        now += 0.2
        brief.ran(10 * BRIEF_S, now)
    assert not brief.may_run(now + 4.9)
    assert brief.may_run(now + 5.1), "and its first rest is short again"


def test_one_that_was_held_up_now_and_then_stays() -> None:
    brief, now = Brief(LoopTime()), 0.0
    for _ in range(20):
        now += 1.0
        for close in range(10):
            brief.ran(10 * BRIEF_S, now + 0.009 * close)  # of one cause
        for _ in range(1000):
            brief.ran(T_S, now)
    assert brief.may_run(now)


def test_one_that_takes_far_too_long_goes_at_once() -> None:
    brief = Brief(LoopTime())
    brief.ran(0.05, 0.0)
    for _ in range(10_000):
        brief.ran(T_S, 0.0)
    assert not brief.may_run(0.0)


def test_of_its_time_the_loop_keeps_a_third_for_others() -> None:
    loop_time = LoopTime()
    busy, other = Brief(loop_time), Brief(loop_time)
    loop_time.spent(1.0, 1.2)
    assert not busy.may_run(1.2)
    assert not other.may_run(1.29)
    assert other.may_run(1.31)


def test_a_neighbour_is_run_by_its_thread_meanwhile(model: Model) -> None:
    async def main() -> None:
        loop_time = LoopTime()
        loop_time.spent(model.now, model.now + 10.0)  # on another's batch
        one = rig(model, brief=Brief(loop_time))
        await one.ask(1.0)
        assert model.ran_in == ["m-instance"]

    run(main())


def test_a_model_that_fails_there_costs_one_answer(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        model.fails = [ModelError("no such number")]
        await one.ask(1.0)
        await one.ask(2.0)
        assert isinstance(one.answers[1.0].error, ModelError)
        assert one.answers[2.0].error is None
        assert model.ran_in == [LOOP, LOOP]
        assert not one.lost

    run(main())


def test_one_that_dies_there_is_replaced(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        model.fails = [ModelError("the end")]
        model.alive = False
        await one.ask(1.0)
        assert one.lost == ["its backend died"]
        await until(lambda: model.closed)

    run(main())


def test_one_that_hangs_there_is_stopped_and_never_run_there_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "_LOOK_S", 0.01)

    async def main() -> None:
        brief = Brief(LoopTime())
        one = rig(model, brief=brief)
        model.hangs = True
        await one.ask(1.0)
        error = one.answers[1.0].error
        assert isinstance(error, DeadlineExceeded)
        assert error.reason == "execution-timeout"
        assert one.lost == ["its backend died"]
        assert not brief.may_run(1e9)

    run(main())


def test_its_thread_goes_to_sleep_and_is_woken_to_look_again(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "_LOOK_S", 0.001)

    async def main() -> None:
        one = rig(model)
        for number in range(3):
            await one.ask(float(number))
            await until(lambda: not one.executor._watching and one.executor._queue.empty())
        model.hangs = True
        await one.ask(3.0)
        assert isinstance(one.answers[3.0].error, DeadlineExceeded)

    run(main())


def test_one_that_was_cancelled_before_is_not_run(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        (work,) = one.submit(1.0)
        one.driver.cancel(work)
        assert isinstance(one.answers[1.0].error, Cancelled)
        await one.ask(2.0)
        assert model.ran_in == [LOOP]

    run(main())


def test_it_can_be_unloaded_by_who_hears_the_answer(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        heard: list[Outcome] = []

        def done(_work: Work, outcome: Outcome) -> None:
            heard.append(outcome)
            one.driver.close()
            one.executor.join(30)  # it is freed while its last batch is being counted

        one.driver.submit([Work({"x": np.ones((1, 1), np.float32)}, done, model.now)])
        await until(lambda: model.closed)
        assert [outcome.error for outcome in heard] == [None]
        assert not one.lost
        assert one.driver.idle

    run(main())


def test_who_waits_for_the_last_answer_hears_of_it(model: Model) -> None:
    async def main() -> None:
        one = rig(model)
        one.submit(1.0)
        assert await one.driver.drained(30.0)
        assert model.ran_in == [LOOP]
        assert 1.0 in one.answers
        one.driver.close()
        await until(lambda: model.closed)

    run(main())


def test_answers_that_keep_their_order_come_from_the_instances_thread(model: Model) -> None:
    async def main() -> None:
        one = rig(model, fixed=FixedBatching(8, preserve_ordering=True))
        for number in range(3):
            await one.ask(float(number))
        assert list(one.answers) == [0.0, 1.0, 2.0]
        assert model.ran_in == ["m-instance"] * 3

    run(main())
