"""The route of a model with sequences: a request goes to the driver when it is its turn, and to the instance
where its sequence is. Other models have no part in this."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import Final, NamedTuple, cast

import orjson

from carpool.core.job import DONE, INFINITY, RUNNING, Job
from carpool.engine.run.batch import Done, Outcome, Work
from carpool.engine.run.driver import Driver, Reminder
from carpool.errors import (
    Cancelled,
    CarpoolError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    Unavailable,
    Unsupported,
)
from carpool.extensions.sequences.law import Bounds, SequenceId, Sequences, SequenceStep, Why
from carpool.extensions.sequences.settings import CORRID, SequenceSettings
from carpool.observe.columns import by_word
from carpool.observe.counters import Row
from carpool.observe.logs import logger

log = logger("engine")

_STATES = by_word("sequences", "states")
_SHOWN = 128
_IDS: Final = 2**64
_CATCH_UP_S: Final = 0.02  # the gauges show within so much how many sequences there are

_TOO_MUCH = {
    Why.FULL: ": {law.waiting} requests for {model} wait already",
    Why.CROWDED: ": {law.backlog} sequences wait already for one of {model}'s {places} slots",
    Why.HEAVY: ": what waits for {model} already uses {law.size} bytes",
}
_LOST = "sequence-lost"
"""The reason of requests whose sequence has ended with its instance."""


def _size(job: Job) -> int:
    return sum(array.nbytes for array in cast(Work, job).inputs.values())


class _Named(NamedTuple):
    """Describes which sequence a request belongs to; with 0 or "" to none."""

    name: SequenceId
    start: bool
    end: bool


def _named(work: Work) -> _Named:
    """Returns what its caller says. What is of another type than it should be counts as not given."""
    extras = work.extras
    given: Mapping[str, object]
    if extras.parameters is not None:
        given = extras.parameters
    else:
        details = extras.details
        given = orjson.loads(details).get("parameters", {}) if details else {}
    name = given.get("sequence_id", 0)
    if type(name) is not int and type(name) is not str:
        name = 0
    return _Named(name, given.get("sequence_start") is True, given.get("sequence_end") is True)


class SequenceRoute:
    """Routes requests of sequences; everything is called on the loop's thread. `done` of every work is called
    once: each that was accepted and not answered yet has it as `then`, and `_untold` counts them."""

    def __init__(
        self,
        model: str,
        driver: Driver,
        settings: SequenceSettings,
        loop: asyncio.AbstractEventLoop,
        row: Row,
        slo: float = INFINITY,
    ) -> None:
        self._model = model
        self._row = row
        self.why_no_background = (
            "no background work runs on it, since that would change the states of its sequences"
        )
        self._driver = driver
        self._settings = settings
        self._idle = settings.idle
        self._any_number = not any(control.kind == CORRID for control in settings.controls)
        self._slo = slo
        policy = driver.scheduler.policy
        places = settings.places(policy.max_images)
        instances = len(driver.scheduler.instances)
        self._places = instances * places
        bounds = Bounds(policy.max_queue, settings.max_backlog, settings.max_backlog_bytes, settings.max_wait)
        self.law = Sequences(instances, places, settings.idle, bounds, _size)
        self._reminder = Reminder(loop, self._go)
        self._untold = 0
        self._hears: Done = self._done  # made once, not for each request
        self._rode: set[Work] = set()  # their clients left while they ran
        self._lost: set[Work] = set()  # their instance is gone
        self._stopped: CarpoolError | None = None
        self._going = self._again = self._planned = False
        self._shown = -1, -1  # live sequences and backlog in the gauges; negative before the first turn
        self._loop = loop
        self._emptied: asyncio.Event | None = None  # made by the first call of `drained` that has to wait

    @property
    def idle(self) -> bool:
        """No sequence lives, whose state would be lost."""
        return not self.law.live

    def turned(self) -> int:
        """Shows how many sequences there are; returns the requests that wait for their turn."""
        law = self.law
        counts = law.live, law.backlog
        if counts != self._shown:
            self._shown = counts
            self._row.set(_STATES["live"], counts[0])
            self._row.set(_STATES["backlog"], counts[1])
        return law.waiting

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
        passed = self.law.passed_at_once()
        if passed is None:
            self._go()
        elif passed:  # as most are; their own deadlines are the driver's affair
            self._driver.submit(passed)  # type: ignore[arg-type]  # nothing but works is ever offered

    def ready(self, work: Work) -> None:
        """Its inputs were there when it came."""

    def cancel(self, work: Work) -> None:
        if work.extras.then is None:
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
        if work.options.latest:
            why = "a frame of a sequence is not replaced by a newer one: leave latest out"
            return InvalidInput(f"{self._model}: {why}", field="parameters.latest")
        if work.course.ready_at != -INFINITY or work.form.encoded:
            return Unsupported(f"{self._model}: requests of a sequence bring tensors, not images")
        said = _named(work)
        name = said.name
        fits = self._any_number and type(name) is int and 0 <= name < _IDS
        wrong = "" if fits else self._settings.refuses(name)
        if wrong:
            return InvalidInput(f"{self._model}: {wrong}", field="parameters.sequence_id")
        within = min(work.options.timeout, self._slo) if work.options.timeout else self._slo
        if work.arrived + within < work.deadline:
            work.deadline = work.arrived + within
        work.due = work.deadline
        why_not = self.law.offer(work, name, now, start=said.start, end=said.end)
        if why_not is not None:
            return self._refusal(why_not, work.origin.holder or work.origin.payer, name, now)
        work.own_extras().then, work.done = work.done, self._hears
        self._untold += 1
        return None

    def _refusal(self, why: Why, client: str, name: SequenceId, now: float) -> CarpoolError:
        """Returns the error in Triton's words where it has any: clients look for them."""
        if why in _TOO_MUCH:
            about = _TOO_MUCH[why].format(model=self._model, places=self._places, law=self.law)
            full = Unavailable(f"Exceeds maximum queue size{about}", reason="queue-full")
            full.retry_after_s = self.law.until_free(now)
            return full
        to_model = f"inference request to model '{self._model}' must specify"
        if why is Why.NOT_ONE:
            return InvalidInput(f"{to_model} batch-size 1 due to requirements of sequence batcher")
        if why is Why.NO_ID:
            field = "parameters.sequence_id"
            return InvalidInput(f"{to_model} a non-zero or non-empty correlation ID", field=field)
        ended = self.law.why_ended(name, client)
        hint = {
            Why.IDLE: f"; it was ended after {self._settings.idle:g} s without a request",
            Why.LOST: "; it was ended when its instance died, which had its state",
            Why.NEVER_BEGAN: "; the request that started it was not run",
            Why.YIELDED: f"; it was ended, because its client had more than its share of {self._places} "
            "slots",
        }.get(ended or why, "")
        return InvalidInput(
            f"inference request for sequence {str(name)[:_SHOWN]} to model '{self._model}' must specify the "
            f"START flag on the first request of the sequence{hint}",
            field="parameters.sequence_start",
        )

    # ---- one turn -----------------------------------------------------------------------------------------

    def _go(self) -> None:
        """Do what follows. Whatever that leads to in turn, such as refusals, is done here too, not deeper."""
        self._planned = False
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
                    # Who is refused there comes back here, through `_done`.
                    self._driver.submit(cast(Sequence[Work], turn.passed))
            self._reminder.set(turn.look_again, now)
            if (self.law.live, self.law.backlog) != self._shown:  # the gauges follow the driver's turns
                self._driver.plan_turn()
        finally:
            self._going = False

    def _dropped(self, job: Job, why: Why, now: float) -> CarpoolError:
        step: SequenceStep = job.payload
        if why is Why.TOLD and self._stopped is not None:
            return self._stopped
        if why is Why.LOST:
            return self._lost_error(step)
        if why is Why.YIELDED:
            what = f"{self._model}: sequence {str(step.sequence.key[1])[:_SHOWN]} was ended"
            share = f"its client had more than its share of {self._places} slots; restart it"
            return Unavailable(f"{what}: {share}", reason="sequence-yielded")
        if why is Why.DEADLINE and not step.start and job.deadline <= now:
            return DeadlineExceeded(f"{self._model}: the deadline passed before it was this request's turn")
        if why is Why.NO_PLACE:
            late = Unavailable(
                f"timeout of the corresponding sequence has been expired: none of {self._model}'s "
                f"{self._places} slots was free within {self._settings.max_wait:g} s",
                reason="timeout",
            )
            late.retry_after_s = self.law.until_free(now)
            return late
        if why is Why.DEADLINE:
            return Unavailable("timeout of the corresponding sequence has been expired", reason="timeout")
        return Unavailable(f"{self._model}: the request that starts this sequence was not run", reason=_LOST)

    def _lost_error(self, step: SequenceStep, cause: CarpoolError | None = None) -> ModelError:
        how, name = "" if cause is None else f" ({cause.message})", str(step.sequence.key[1])[:_SHOWN]
        return ModelError(
            f"{self._model}: sequence {name} has ended with the instance that had its state{how}; restart it",
            reason=_LOST,
        )

    # ---- the ends -----------------------------------------------------------------------------------------

    def _done(self, work: Work, outcome: Outcome) -> None:
        """The driver is done with it. One that the loop itself has run is still counted as running."""
        now, news = monotonic(), True
        try:
            ran = work.state is DONE or work.state is RUNNING or work in self._rode
            if self._rode:
                self._rode.discard(work)
            news = self.law.finished(work, now, ran=ran)
        except Exception:  # the client must be answered all the same
            log.exception("sequence-failed", model=self._model)
        if self._lost and work in self._lost:
            self._lost.discard(work)
            if outcome.error is not None:
                outcome = Outcome(error=self._lost_error(work.payload, outcome.error), timing=outcome.timing)
        self._tell(work, outcome)
        if news:
            self._plan()
        else:  # its sequence may be quiet from now on
            shown = self.law.live == self._shown[0]
            at = now + (self._idle if shown else _CATCH_UP_S)
            if at < self._reminder.at:
                self._reminder.set(at, now)

    def _plan(self) -> None:
        """Once for all that a batch has answered, and all that it lets go on."""
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._go)

    def _tell(self, work: Work, outcome: Outcome) -> None:
        done = work.extras.then
        if done is not None:
            work.done, work.extras.then = done, None
            work.payload = None  # which leads back to it: such a ring, inputs and all, is freed late
            self._untold -= 1
            if self._emptied is not None and not self._untold:
                self._emptied.set()
            try:
                done(work, outcome)
            except Exception:
                log.exception("answer-failed", model=self._model)

    def lost(self, instance: int) -> None:
        """Cancels the requests that wait for the instance; those of a running batch get its outcome."""
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
        """Rejects all requests that wait here."""
        self._stopped = error
        self.law.drop_waiting()
        self._go()
        if until_placed:
            self._stopped = None  # until then, the driver rejects requests

    async def drained(self, timeout: float | None) -> bool:
        """Waits until no request waits or runs; False when that took too long."""
        if self._untold:
            self._emptied = self._emptied or asyncio.Event()
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout)
            except TimeoutError:
                return not self._untold
        return True

    def close(self) -> None:
        self._reminder.stop()
