"""The route of a model with sequences: a request goes to the driver when it is its turn, and to the instance
where its sequence is. Other models have no part in this."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic
from typing import cast

import orjson

from carpool.config.sequence_settings import SequenceSettings
from carpool.core.job import DONE, INFINITY, RUNNING, Job
from carpool.core.sequences import SequenceId, Sequences, Step, Why
from carpool.engine.batch import Outcome, Work
from carpool.engine.driver import Driver, Reminder
from carpool.errors import (
    Cancelled,
    CarpoolError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    Unavailable,
    Unsupported,
)
from carpool.observe.logs import logger

log = logger("engine")

Done = Callable[[Work, Outcome], None]
_SHOWN = 128

_LOST = "sequence-lost"
"""The reason of requests whose sequence has ended with its instance."""


class SequenceRoute:
    """Everything is called on the loop's thread. `done` of every work is called once: `_answers` has that of
    each that was accepted and not told yet."""

    def __init__(
        self,
        model: str,
        driver: Driver,
        settings: SequenceSettings,
        loop: asyncio.AbstractEventLoop,
        slo: float = INFINITY,
    ) -> None:
        self._model = model
        self._driver = driver
        self._settings = settings
        self._slo = slo
        policy = driver.scheduler.policy
        places = settings.places(policy.max_images)
        instances = len(driver.scheduler.instances)
        self.law = Sequences(instances, places, settings.idle, policy.max_queue)
        self._reminder = Reminder(loop, self._go)
        self._answers: dict[Work, Done] = {}
        self._rode: set[Work] = set()  # their clients left while they ran
        self._lost: set[Work] = set()  # their instance is gone
        self._stopped: CarpoolError | None = None
        self._going = self._again = False
        self._emptied = asyncio.Event()

    # ---- requests -----------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> None:
        now = monotonic()
        for work in works:
            work.route = self
            try:
                error = self._enter(work, now)
            except Exception as failure:
                log.exception("sequence-failed", model=self._model)
                error = CarpoolError(f"the engine failed: {type(failure).__name__}: {failure}")
            if error is not None:
                work.done(work, Outcome(error=error))
        self._go()

    def ready(self, work: Work) -> None:
        """Its inputs were there when it came."""

    def cancel(self, work: Work) -> None:
        if work not in self._answers:
            return
        if self.law.cancel(work):
            self._tell(work, Outcome(error=Cancelled("the client left")))
            self._go()
            return
        if work.state is RUNNING:
            self._rode.add(work)
        self._driver.cancel(work)

    def _enter(self, work: Work, now: float) -> CarpoolError | None:
        """It waits for its turn from here on; or why it cannot."""
        if self._stopped is not None:
            return self._stopped
        if work.latest:
            why = "a frame of a sequence is not replaced by a newer one: leave latest out"
            return InvalidInput(f"{self._model}: {why}", field="parameters.latest")
        if work.ready_at != -INFINITY or work.encoded:
            return Unsupported(f"{self._model}: requests of a sequence bring tensors, not pictures")
        said = orjson.loads(work.details).get("parameters", {}) if work.details else {}
        name: SequenceId = said.get("sequence_id", 0)
        start, end = said.get("sequence_start") is True, said.get("sequence_end") is True
        if not isinstance(name, int | str) or isinstance(name, bool):
            name = 0
        wrong = self._settings.refuses(name)
        if wrong:
            return InvalidInput(f"{self._model}: {wrong}", field="parameters.sequence_id")
        if work.timeout:
            work.deadline = min(work.deadline, work.arrived + work.timeout)
        work.deadline = work.due = min(work.deadline, work.arrived + self._slo)
        why_not = self.law.offer(work, name, now, start=start, end=end)
        if why_not is not None:
            return self._refusal(why_not, name)
        self._answers[work] = work.done
        work.done = self._done
        return None

    def _refusal(self, why: Why, name: SequenceId) -> CarpoolError:
        """In Triton's words where it has any: clients look for them."""
        if why is Why.FULL:
            return Unavailable("Exceeds maximum queue size", reason="queue-full")
        to_model = f"inference request to model '{self._model}' must specify"
        if why is Why.NOT_ONE:
            return InvalidInput(f"{to_model} batch-size 1 due to requirements of sequence batcher")
        if why is Why.NO_ID:
            field = "parameters.sequence_id"
            return InvalidInput(f"{to_model} a non-zero or non-empty correlation ID", field=field)
        ended = self.law.why_ended(name)
        hint = {
            Why.IDLE: f"; it was ended after {self._settings.idle:g} s without a request",
            Why.LOST: "; it was ended when its instance died, with what that had kept of it",
            Why.NEVER_BEGAN: "; the request that started it was not run",
        }.get(ended or why, "")
        return InvalidInput(
            f"inference request for sequence {str(name)[:_SHOWN]} to model '{self._model}' must specify the "
            f"START flag on the first request of the sequence{hint}",
            field="parameters.sequence_start",
        )

    # ---- one turn -----------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Do what follows. Whatever that leads to in turn, such as refusals, is done here too, not deeper."""
        self._again = True
        if self._going:
            return
        self._going = True
        try:
            while self._again:
                self._again = False
                now = monotonic()
                turn = self.law.turn(now)
                for job, why in turn.dropped:
                    self._tell(cast(Work, job), Outcome(error=self._dropped(job, why, now)))
                if turn.passed:
                    self._pass_on(turn.passed)  # who is refused there comes back here, through `_done`
            self._reminder.set(turn.look_again, now)
        finally:
            self._going = False

    def _pass_on(self, jobs: Sequence[Job]) -> None:
        works = cast(Sequence[Work], jobs)
        for work in works:
            step: Step = work.payload
            work.details = b'{"slot":%d,' % step.slot + work.details[1:]
        self._driver.submit(works)

    def _dropped(self, job: Job, why: Why, now: float) -> CarpoolError:
        step: Step = job.payload
        if why is Why.TOLD and self._stopped is not None:
            return self._stopped
        if why is Why.LOST:
            return self._lost_error(step)
        if why is Why.DEADLINE and not step.start and job.deadline <= now:
            return DeadlineExceeded(f"{self._model}: the deadline passed before it was this request's turn")
        if why is Why.DEADLINE:
            return Unavailable("timeout of the corresponding sequence has been expired", reason="timeout")
        return Unavailable(f"{self._model}: the request that starts this sequence was not run", reason=_LOST)

    def _lost_error(self, step: Step, cause: CarpoolError | None = None) -> ModelError:
        how = "" if cause is None else f" ({cause.message})"
        return ModelError(
            f"{self._model}: sequence {str(step.sequence.id)[:_SHOWN]} has ended with the instance that had "
            f"its state{how}; start it again",
            reason=_LOST,
        )

    # ---- the ends -----------------------------------------------------------------------------------------

    def _done(self, work: Work, outcome: Outcome) -> None:
        """The driver is done with it."""
        ran = work.state is DONE or work in self._rode
        self._rode.discard(work)
        self.law.finished(work, monotonic(), ran=ran)
        if work in self._lost:
            self._lost.discard(work)
            if outcome.error is not None:
                outcome = Outcome(error=self._lost_error(work.payload, outcome.error), timing=outcome.timing)
        self._tell(work, outcome)
        self._go()

    def _tell(self, work: Work, outcome: Outcome) -> None:
        done = self._answers.pop(work, None)
        if done is not None:
            work.done = done
            if not self._answers:
                self._emptied.set()
            try:
                done(work, outcome)
            except Exception:
                log.exception("answer-failed", model=self._model)

    def lost(self, instance: int) -> None:
        """Riders hear what became of their batch; who waits for the instance hears it now."""
        for job in self.law.lost(instance):
            work = cast(Work, job)
            self._lost.add(work)
            if work.state < RUNNING:
                self._driver.cancel(work)
        self._go()

    def placed(self, instance: int) -> None:
        self.law.placed(instance)
        self._go()

    def stop(self, error: CarpoolError, *, until_placed: bool = False) -> None:
        """All who wait here are told."""
        self._stopped = error
        self.law.drop_waiting()
        self._go()
        if until_placed:
            self._stopped = None  # the driver says no until then

    async def drained(self, timeout: float | None) -> bool:
        """Wait until nobody waits or runs; False when that took too long."""
        self._emptied.clear()
        if self._answers:
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout)
            except TimeoutError:
                return not self._answers
        return True

    def close(self) -> None:
        self._reminder.stop()
