"""Connects time and scheduling: one loop thread reports events to the scheduler and runs its decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import ceil
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from carpool.core.instance import Batch, Instance
from carpool.core.job import DIRECT, DONE, GONE, INFINITY, GivenUp, Job
from carpool.core.scheduler import Scheduler
from carpool.engine.run.batch import BatchResult, Outcome, Watcher, Work
from carpool.engine.run.executor import BRIEF_S, Brief, Executes, Executor
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, Unavailable
from carpool.observe.logs import logger
from carpool.types import Timing

if TYPE_CHECKING:
    from carpool.core.background import BackgroundTurn


class Reminder:
    """Calls at the earliest time that it was set to, once."""

    def __init__(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._loop = loop
        self._call = call
        self._timer: asyncio.TimerHandle | None = None
        self.at = INFINITY

    def set(self, at: float | None, now: float) -> None:
        """One that rings before that is left alone: who it calls finds nothing to do and sets the next."""
        if at is not None and at < self.at:
            self.stop()
            self.at = at
            # Timers tick in milliseconds: round up, or the call would come early and spin.
            delay = ceil(max(0.0, at - now) * 1e3) / 1e3
            self._timer = self._loop.call_later(delay, self._ring)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self.at = INFINITY

    def _ring(self) -> None:
        self.stop()
        self._call()


log = logger("engine")

_CATCH_UP_S: Final = 0.02
_LOOK_S = 0.001  # while every instance is busy, looking more often than this finds nothing to do


class Driver:
    """Drives one model version. Everything but the executors' threads runs on the loop's thread.

    `done` is called exactly once for every work, whatever raises: `_open` holds those that were accepted and
    not answered yet, and `_tell` is the only way out of it. An error that a callback, the watcher or the
    scheduler raises is logged; at most the requests that wait at that moment fail by it, never those in a
    running batch and never later ones.
    """

    def __init__(
        self,
        model: str,
        scheduler: Scheduler,
        fixed: bool,
        watcher: Watcher,
        loop: asyncio.AbstractEventLoop,
        execution_timeout: float | None = None,
    ) -> None:
        self._model = model
        self.scheduler = scheduler
        self._fixed = fixed
        self._watcher = watcher
        self._loop = loop
        self._execution_timeout = execution_timeout
        self._executors: dict[int, Executes] = {}
        self._open: set[Work] = set()
        self._running: dict[Executes, Batch] = {}
        self._alarms: dict[Executes, asyncio.TimerHandle] = {}
        self._turn_planned = False
        self._reminder = Reminder(loop, self._turn)
        self._looked_at = -INFINITY
        self._batches = int(monotonic() * 1e3) << 24  # their numbers, apart from those of other drivers
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._closed: CarpoolError | None = None
        self._down: CarpoolError | None = None

    # ---- what happens -----------------------------------------------------------------------------------

    def place(self, instance: Instance, executor: Executes) -> None:
        """This executor works for that instance from now on; it is not ours to close if this raises."""
        self._executors[instance.index] = executor
        try:
            self.scheduler.set_available(instance, True)
        except BaseException:
            del self._executors[instance.index]
            raise
        self._down = None
        self.plan_turn()

    def submit(self, works: Sequence[Work]) -> None:
        """Submits what came at once: the same moment counts for all of them."""
        closed = self._closed or self._down
        if closed is not None:
            for work in works:
                self._turn_away(work, closed)
            return
        scheduler, now = self.scheduler, monotonic()
        age, lag = scheduler.age, scheduler.lag
        for work in works:
            if work.route is None:  # else another stands before this, and is asked about it
                work.route = self
            if work.sent is not None:  # else it comes from no front end
                age.seen(work.sent - work.arrived, now)
                lag.seen(now - work.sent, now)
            try:
                refusal = scheduler.offer(work, now, ready=work.course.ready_at == -INFINITY)
            except Exception as error:
                log.exception("offer-failed", model=self._model)
                self._withdraw(work)  # it may be in the queue by now, and its memory is about to be another's
                self._turn_away(work, _failed(error))
                continue
            if refusal is None:
                self._open.add(work)
            else:
                from carpool.core.refusal_words import turned_away

                self._turn_away(work, turned_away(self._model, work, refusal, fixed=self._fixed))
        # After a refusal as well: the front ends' advice has to be fresh to be of use.
        if not self._turn_planned:
            if self._is_worth_a_turn(now):
                self.plan_turn()
            else:  # the gauges must not wait for as long as a batch may take
                self._reminder.set(now + _CATCH_UP_S, now)

    def _is_worth_a_turn(self, now: float) -> bool:
        """Returns whether to plan a turn now. A new request that finds every instance busy waits for the end
        of a batch, with nothing to decide before."""
        scheduler = self.scheduler
        return (
            bool(scheduler.instances.idle)
            or now - self._looked_at > _LOOK_S
            or scheduler.next_expiry < self._reminder.at
        )

    def ready(self, work: Work) -> None:
        """Its inputs are there. Nothing, if it was given up meanwhile."""
        now = monotonic()
        try:
            self.scheduler.ready(work, now)
        except Exception as error:
            log.exception("scheduler-failed", model=self._model)
            self._withdraw(work)
            self._tell(work, Outcome(error=_failed(error)))
        if self._is_worth_a_turn(now):
            self.plan_turn()

    def cancel(self, work: Work) -> None:
        """The client has gone. `done` is still called, when nothing reads the inputs any more."""
        if work.state < DONE and self._withdraw(work):
            self._tell(work, Outcome(error=Cancelled("the client left")))
            self.plan_turn()

    def submit_background(self, work: Work) -> None:
        """Submits background work: it runs while the model has slack, or is skipped."""
        closed, background = self._closed or self._down, self.scheduler.background
        if closed is not None:
            self._turn_away(work, closed)
        elif background is None or not background.offer(work, monotonic()):
            from carpool.core.refusal_words import skipped

            self._turn_away(work, skipped(self._model))
        else:
            self._open.add(work)
            if self.scheduler.instances.idle:
                self.plan_turn()

    def _withdraw(self, work: Work) -> bool:
        """Take it out of the queue. False while a batch has it, which answers it."""
        try:
            return self.scheduler.cancel(work, monotonic())
        except Exception:
            log.exception("cancel-failed", model=self._model)
            return not any(work in batch.jobs for batch in self._running.values())

    def refuse_from_now_on(self, error: CarpoolError) -> None:
        """Nothing new is taken; what was accepted goes on."""
        self._closed = error

    def refuse_until_placed(self, error: CarpoolError) -> None:
        """Fails waiting requests, and new ones until an instance is placed, since none is left."""
        self._down = error
        self.fail_waiting(error)
        self.plan_turn()

    def accept_again(self) -> None:
        """An instance that did not respond does so again."""
        self._down = None

    @property
    def able(self) -> bool:
        """Some instance can run a batch."""
        return any(executor.alive and executor.responsive for executor in self._executors.values())

    def fail_waiting(self, error: CarpoolError) -> None:
        """Answers all waiting requests with this error, since no instance is left to run them."""
        waiting = self.scheduler.lanes.everybody()
        if self.scheduler.background is not None:
            waiting += self.scheduler.background.everybody()
        for work in _works(waiting):
            self._withdraw(work)
            self._tell(work, Outcome(error=error))

    async def drained(self, timeout: float | None) -> bool:
        """Waits until no request waits or runs; returns False when that took too long."""
        if not self.idle:
            waiter = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=timeout)
        return self.idle

    # ---- one turn ---------------------------------------------------------------------------------------

    def plan_turn(self) -> None:
        """Plans one decision per turn of the loop: requests that arrived in the same turn share a batch."""
        if not self._turn_planned:
            self._turn_planned = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        self._looked_at = now = monotonic()
        look_again: float | None
        try:
            # Start what can start, answer requests that were given up, and note when to look again.
            welcome: dict[object, float] = {}
            while True:
                decision = self.scheduler.decide(now)
                for gone in decision.given_up:
                    self._drop(gone, now, welcome)
                if decision.batch is None:
                    look_again = decision.look_again
                    break
                self._start(decision.batch)
                now = monotonic()  # it may have been run by now
        except Exception as error:
            log.exception("scheduler-failed", model=self._model)
            self._give_up_waiting(_failed(error))
            self._free_lost_batches()
            look_again = now + _CATCH_UP_S
        if look_again is not None:
            self._reminder.set(look_again, now)
        if self.scheduler.background is not None:
            self._tell_skipped(self.scheduler.background)
        try:
            self._watcher.turned(self.scheduler, now)
        except Exception:
            log.exception("gauges-failed", model=self._model)
        if self._idle_waiters and self.idle:
            for waiter in [waiter for waiter in self._idle_waiters if not waiter.done()]:
                waiter.set_result(None)
            self._idle_waiters.clear()

    def _tell_skipped(self, background: BackgroundTurn) -> None:
        for work in _works(background.told()):
            from carpool.core.refusal_words import skipped

            self._tell(work, Outcome(error=skipped(self._model)))

    def _drop(self, gone: GivenUp, now: float, welcome: dict[object, float]) -> None:
        from carpool.core.refusal_words import dropped, until_welcome

        work = cast(Work, gone.job)
        try:
            wait = until_welcome(self.scheduler, gone, now, welcome)
        except Exception:  # what it should do next is a courtesy; that it will not run is not
            log.exception("gate-failed", model=self._model)
            wait = 0.0
        error = dropped(self._model, gone, now, wait)
        self._tell(work, Outcome(error=error, timing=Timing(queue=max(0.0, now - work.arrived))))

    def _give_up_waiting(self, error: CarpoolError) -> None:
        """Answers waiting requests with this error: a scheduler that fails may not recover soon."""
        riding = {job for batch in self._running.values() for job in batch.jobs}
        for work in [work for work in self._open if work not in riding]:
            self._withdraw(work)
            self._tell(work, Outcome(error=error))

    def _free_lost_batches(self) -> None:
        """Frees instances that a scheduler still counts as busy after it raised: their batches do not run."""
        running = self._running.values()
        lost = [instance.batch for instance in self.scheduler.instances if instance.batch not in running]
        for batch in filter(None, lost):
            self._release(self._finish(batch, monotonic())[1])
        self.plan_turn()

    def _may_run_here(self, batch: Batch, brief: Brief | None) -> bool:
        """Returns whether the loop's thread may run this batch: a lone request for a model that answers at
        once would wait longer for two threads to wake up. No other request of this model may wait: they would
        be a batch, which is to run while the loop receives requests."""
        return (
            brief is not None
            and len(batch.jobs) == 1
            and batch.belief.runs.times[batch.images] <= BRIEF_S
            and not (self._running or self.scheduler.lanes.requests)
            and not (batch.turn or self.scheduler.policy.preserve_ordering)  # neither has a say in it
            and brief.may_run(batch.started)
        )

    def _start(self, batch: Batch) -> None:
        executor = self._executors[batch.instance.index]
        if isinstance(executor, Executor) and self._may_run_here(batch, executor.brief):
            result, now = executor.run_here(_works(batch.jobs)), monotonic()
            self._answer(batch, result, False, ())  # before the scheduler learns from it: a client waits
            self._finish(batch, now, result, executor)
            return
        self._running[executor] = batch
        if self._execution_timeout is not None:
            alarm = self._loop.call_later(self._execution_timeout, self._overran, executor)
            self._alarms[executor] = alarm
        try:
            executor.run(batch.jobs)  # type: ignore[arg-type]  # nothing but works is ever offered
        except Exception as error:  # it has not begun: its requests fail, and a dead instance is replaced
            log.exception("batch-not-started", model=self._model)
            failed = BatchResult([Outcome(error=_failed(error)) for _ in batch.jobs], 0.0, clean=False)
            self._loop.call_soon(lambda: self.ended(executor, failed))

    # ---- answers and reports ----------------------------------------------------------------------------

    def _tell(self, work: Work, outcome: Outcome) -> None:
        """Gives the one answer of an accepted work. Never raises: others wait behind it."""
        if work in self._open:
            self._open.discard(work)
            try:
                work.done(work, outcome)
            except Exception:
                log.exception("answer-failed", model=self._model)

    def _turn_away(self, work: Work, error: CarpoolError) -> None:
        """Gives the one answer of a work that was not accepted."""
        try:
            work.done(work, Outcome(error=error))
        except Exception:
            log.exception("answer-failed", model=self._model)

    # ---- a batch ends -----------------------------------------------------------------------------------

    def report(self, executor: Executes, result: BatchResult) -> None:
        """Reports a result from an executor's thread."""
        self._loop.call_soon_threadsafe(self.ended, executor, result)

    def ended(self, executor: Executes, result: BatchResult) -> None:
        batch = self._running.pop(executor, None)
        if batch is None:
            return  # it overran its time, and its requests were answered
        alarm = self._alarms.pop(executor, None)
        if alarm is not None:
            alarm.cancel()
        in_order, released = self._finish(batch, monotonic(), result, executor)
        # The next batch is on its way before the answers of this one are written.
        self._turn()
        self._answer(batch, result, in_order, released)

    def _finish(
        self, batch: Batch, now: float, result: BatchResult | None = None, executor: Executes | None = None
    ) -> tuple[bool, Sequence[Job]]:
        """Returns whether answers wait for their turn, and the requests whose turn it is now. If the
        scheduler fails, no answer waits. An executor that has died of the batch is replaced."""
        seconds = result.seconds if result is not None and result.clean else None
        beside = batch.turn is not None and batch.turn.is_background()
        in_order = self.scheduler.policy.preserve_ordering and not beside
        try:
            released = self.scheduler.finished(batch, now, seconds)
        except Exception:
            log.exception("scheduler-failed", model=self._model)
            self._loop.call_later(_CATCH_UP_S, self._free_lost_batches)
            in_order, released = False, []
        if executor is not None and not executor.alive and executor in self._executors.values():
            self._lose(batch.instance, "its backend died")
        return in_order, released if in_order else ()

    def _answer(self, batch: Batch, result: BatchResult, in_order: bool, released: Sequence[Job]) -> None:
        """Answers the batch's requests, or holds answers until it is their turn, and sends those released."""
        started, timing = batch.started, result.timing
        gathered, ran, split, images = timing.input, timing.infer, timing.output, timing.batch
        self._batches = number = self._batches + 1
        kept = DONE if in_order else None
        work: Work
        for work, outcome in zip(batch.jobs, result.outcomes, strict=True):  # type: ignore[assignment]
            entered = work.arrived if work.course is DIRECT else max(work.arrived, work.course.entered)
            waited = started - entered if started > entered else 0.0
            outcome.timing = Timing(waited, gathered, ran, split, images, number=number)
            if work.state is kept:
                work.own_extras().held = outcome
            else:
                self._tell(work, outcome)  # who was cancelled while it ran gives back what it held
        if released:
            self._release(released)
        try:
            self._watcher.batch_ended(result, batch)
        except Exception:
            log.exception("counters-failed", model=self._model)

    def _release(self, jobs: Sequence[Job]) -> None:
        """It is their turn to be answered."""
        for work in _works(jobs):
            held = work.extras.held
            if held is not None:  # else it was answered when its scheduler failed
                self._tell(work, held)

    def _overran(self, executor: Executes) -> None:
        """Fails the requests of a batch that hangs; the instance is given up and replaced."""
        batch = self._running.pop(executor, None)
        if batch is None:
            return
        self._alarms.pop(executor, None)
        seconds = self._execution_timeout or 0.0
        error = DeadlineExceeded(
            f"{self._model} did not finish a batch of {batch.images} within {seconds * 1e3:.0f} ms",
            reason="execution-timeout",
        )
        in_order, released = self._finish(batch, monotonic())
        try:
            executor.abort()
        except Exception:
            log.exception("abort-failed", model=self._model)
        self._lose(batch.instance, "it did not finish within its time limit")
        for work in _works(batch.jobs):
            held = work.own_extras().held = Outcome(error=error)
            if not in_order or work.state is GONE:
                self._tell(work, held)
        self._release(released)
        self._turn()

    def lost(self, executor: Executes) -> None:
        """It died while it had nothing to do; one that dies at work reports a batch that failed."""
        for index, placed in self._executors.items():
            if placed is executor:
                self._lose(self.scheduler.instances[index], "its process died")
                self._turn()
                return

    def look_at_idle(self) -> None:
        """Replace who has died; one at work is seen when its batch ends."""
        for executor in [e for e in self._executors.values() if e not in self._running and not e.alive]:
            self.lost(executor)

    def _lose(self, instance: Instance, why: str) -> None:
        executor = self._executors.pop(instance.index)
        try:
            executor.close()
        except Exception:
            log.exception("close-failed", model=self._model)
        try:
            self.scheduler.set_available(instance, False)
        except Exception:
            log.exception("scheduler-failed", model=self._model)
        self._report_lost(instance, why)

    def _report_lost(self, instance: Instance, why: str) -> None:
        """Reports the loss until the watcher accepts it: else the instance would not be replaced."""
        try:
            self._watcher.instance_lost(instance, why)
        except Exception:
            log.exception("instance-not-reported", model=self._model)
            self._loop.call_later(_CATCH_UP_S, self._report_lost, instance, why)

    @property
    def idle(self) -> bool:
        """Returns whether no request waits or runs."""
        return not self._running and not self.scheduler.lanes.requests

    @property
    def riders(self) -> int:
        """Returns how many wait."""
        return self.scheduler.lanes.requests

    def close(self) -> list[Executes]:
        """Stops for good: open requests are failed. Returns the executors, which end by themselves."""
        self.refuse_from_now_on(Unavailable(f"{self._model} is being unloaded", reason="unloading"))
        self.fail_waiting(Unavailable(f"{self._model} was unloaded", reason="unloading"))
        self._reminder.stop()
        for alarm in self._alarms.values():
            alarm.cancel()
        error = Unavailable(f"{self._model} was unloaded before it answered", reason="unloading")
        for batch in self._running.values():
            for work in _works(batch.jobs):
                self._tell(work, Outcome(error=error))
        self._running.clear()
        executors = list(self._executors.values())
        for executor in executors:
            executor.close()
        self._executors.clear()
        return executors


def _works(jobs: Sequence[Job]) -> Sequence[Work]:
    """Returns all that is ever offered to a driver's scheduler."""
    return cast(Sequence[Work], jobs)


def _failed(error: Exception) -> CarpoolError:
    """Returns what is said of a fault of ours."""
    return CarpoolError(f"the engine failed: {type(error).__name__}: {error}")
