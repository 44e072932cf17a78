"""One instance of a model that writes: a thread that encodes and steps as core/steps.py says.

The scheduler is shared between that thread and whoever submits and cancels, under one lock, which is never
held while the device works: an arrival is let in or refused at once, whatever the device is at. What a thread
does with the device it does alone. Pictures were copied when they came (`Stepper.read`), so that nobody's
memory is read later, and a rider who leaves is gone at once; only his slot is freed at the next boundary.
"""

from __future__ import annotations

import codecs
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from carpool.backends.stepper import Stepper
from carpool.core.job import INFINITY, RUNNING, Job
from carpool.core.refusal_words import dropped, turned_away
from carpool.core.steps import Encode, Step, StepScheduler, TextGivenUp, TextJob
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.link.text_records import LENGTH, STOP, Event, Failed, Piece, Worked
from carpool.observe.logs import logger

_log = logger("engine")
_MOST_FAILURES = 3  # steps in a row: then the instance is of no use
Tell = Callable[[Sequence[Event]], None]
"""Called from the loop's thread, in order."""


class _Rider:
    """One answer under way."""

    __slots__ = ("begun", "decoder", "encoded", "number", "picture")

    def __init__(self, number: int, picture: Any) -> None:
        self.number = number
        self.picture = picture
        self.begun = 0.0  # when its encoding began
        self.encoded = 0.0
        # A character may come in several tokens: what is not whole yet is held back.
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")


class TextLoop:
    def __init__(
        self,
        model: str,
        stepper: Stepper,
        scheduler: StepScheduler,
        tell: Tell,
        ended: Callable[[], None] = lambda: None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`ended` is called in the thread when it is over: asked to, or because nothing works any more."""
        self._model = model
        self._stepper = stepper
        self._scheduler = scheduler
        self._tell = tell
        self._ended = ended
        self._now = now
        self._changed = threading.Condition()  # guards the scheduler and the next three
        self._open: dict[int, TextJob] = {}
        self._closed = False
        self._dead: CarpoolError | None = None
        self._failures = 0

    @property
    def alive(self) -> bool:
        return not self._closed and self._dead is None

    def start(self) -> None:
        threading.Thread(target=self._work, name=f"{self._model}-writer", daemon=True).start()

    # ---- from any thread --------------------------------------------------------------------------------

    def submit(
        self, number: int, picture: Any, arrived: float, deadline: float = INFINITY, limit: int = 0
    ) -> CarpoolError | None:
        """None: it is in the queue. `picture` is what `Stepper.read` returned."""
        job = TextJob(arrived, limit, deadline, _Rider(number, picture))
        with self._changed:
            if not self.alive:
                return self._dead or Unavailable(f"{self._model} is being unloaded", reason="unloading")
            refusal = self._scheduler.offer(job, self._now())
            if refusal is None:
                self._open[number] = job
                self._changed.notify()
                return None
        return turned_away(self._model, Job(job.arrived, job.first_due), refusal, knobs=False)

    def cancel(self, number: int) -> None:
        """Nothing is told of it any more."""
        with self._changed:
            job = self._open.pop(number, None)
            if job is not None:
                self._scheduler.cancel(job, self._now())
                self._changed.notify()

    def close(self) -> None:
        """It ends after what it is at. Who is left is told so."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    # ---- its thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self.turn(wait=True):
                """Until it is closed or broken."""
        except Exception as error:
            _log.exception("writer-failed", model=self._model)
            self._die(ModelError(f"{self._model}: {type(error).__name__}: {error}"))
        with self._changed:
            left = self._dead or Unavailable(
                f"{self._model} was unloaded before it answered", reason="unloading"
            )
            self._closed = True
            failed = [Failed(number, left) for number in self._open]
            self._open.clear()
        if failed:
            self._tell(failed)
        self._stepper.close()
        self._ended()

    def turn(self, *, wait: bool = False) -> bool:
        """Decide once, and do it; False when it is over. With `wait`, wait for something to do."""
        with self._changed:
            if not self.alive:
                return False
            now = self._now()
            decision = self._scheduler.decide(now)
            events: list[Event] = [self._dropped(gone, now) for gone in decision.given_up]
            if decision.work is None and wait and not events:
                again = decision.look_again
                self._changed.wait(None if again is None else max(0.0, again - now))
                return True
        if events:
            self._tell(events)
        if isinstance(decision.work, Encode):
            self._encode(decision.work)
        elif decision.work is not None:
            self._step(decision.work)
        return True

    def _encode(self, work: Encode) -> None:
        began = self._now()
        riding = [job for job in work.jobs if job.state is RUNNING]
        wrong = self._admitted(riding) if riding else {}
        ended = self._now()
        events: list[Event] = []
        with self._changed:
            for job in work.jobs:
                job.payload.begun, job.payload.encoded, job.payload.picture = began, ended - began, None
                if job in wrong and self._open.pop(job.payload.number, None) is not None:
                    self._scheduler.cancel(job, ended)
                    events.append(Failed(job.payload.number, wrong[job]))
            learned = None if wrong or len(riding) < len(work.jobs) else ended - began
            self._scheduler.encoded(work, ended, learned)
            events.append(self._worked(len(riding), 0, ended - began))
        self._tell(events)

    def _admitted(self, jobs: Sequence[TextJob]) -> dict[TextJob, CarpoolError]:
        """All at once; where that fails one by one, so that only those who are to blame go without."""
        try:
            self._admit(jobs)
            return {}
        except Exception as error:
            if self._stepper.broken:
                self._die(self._trouble(error))
                return {}
            if len(jobs) == 1:
                return {jobs[0]: self._trouble(error)}
        wrong: dict[TextJob, CarpoolError] = {}
        for job in jobs:
            wrong |= self._admitted([job])
        return wrong

    def _admit(self, jobs: Sequence[TextJob]) -> None:
        encoded = self._stepper.encode([job.payload.picture for job in jobs])
        self._stepper.admit([job.slot for job in jobs], encoded)

    def _step(self, work: Step) -> None:
        began = self._now()
        try:
            tokens = self._stepper.step(work.width)
        except Exception as error:
            self._failed(self._trouble(error))
            return
        self._failures = 0
        now = self._now()
        said = {job: int(tokens[job.slot]) for job in work.jobs}
        events: list[Event] = []
        with self._changed:
            fresh = {job for job in work.jobs if job.first_at is None}
            ended = {job for job, token in said.items() if token == self._stepper.end}
            riding = [job for job in work.jobs if job.state is RUNNING]
            boundary = self._scheduler.stepped(work, now, ended, now - began)
            done = set(boundary.done)
            for job in riding:
                events += self._pieces(job, said[job], job in ended, job in done, job in fresh)
            for gone in boundary.given_up:
                events.append(self._dropped(gone, now))
            events.append(self._worked(0, work.width, now - began))
        self._tell(events)

    def _pieces(self, job: TextJob, token: int, ended: bool, done: bool, fresh: bool) -> Sequence[Event]:
        rider: _Rider = job.payload
        if rider.number not in self._open:
            return ()
        text = rider.decoder.decode(b"" if ended else self._stepper.piece(token), done)
        finish = "" if not done else STOP if ended else LENGTH
        if done:
            del self._open[rider.number]
        if not fresh:
            return [Piece(rider.number, text, job.tokens, finish)] if text or finish else ()
        waited = max(0.0, rider.begun - job.arrived)
        return [Piece(rider.number, text, job.tokens, finish, waited, rider.encoded)]

    def _dropped(self, gone: TextGivenUp, now: float) -> Failed:
        job, reason = gone
        number = job.payload.number
        self._open.pop(number, None)
        due = job.first_due if job.first_at is None else job.deadline
        return Failed(number, dropped(self._model, Job(job.arrived, due), reason, now, 0.0))

    def _worked(self, encoded: int, stepped: int, seconds: float) -> Worked:
        return Worked(encoded, stepped, seconds, self._scheduler.used, self._scheduler.waiting)

    # ---- when the device fails --------------------------------------------------------------------------

    def _trouble(self, error: Exception) -> CarpoolError:
        if isinstance(error, CarpoolError):
            return error
        return ModelError(f"{self._model}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")

    def _failed(self, error: CarpoolError) -> None:
        """A step belongs to everybody in a slot: nobody can tell what is in the caches now. Who waits goes on
        waiting, unless it happens again and again."""
        self._failures += 1
        _log.error("step-failed", model=self._model, error=error.message, in_a_row=self._failures)
        if self._stepper.broken or self._failures >= _MOST_FAILURES:
            self._die(error)
            return
        with self._changed:
            lost = self._scheduler.lost(self._now())
            events = [
                Failed(job.payload.number, error)
                for job in lost
                if self._open.pop(job.payload.number, None) is not None
            ]
        self._tell(events)

    def _die(self, error: CarpoolError) -> None:
        with self._changed:
            self._dead = error
