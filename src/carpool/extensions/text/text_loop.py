"""Runs one instance of a model that writes: a thread that encodes and steps as text_scheduler.py says, or,
where its encoders and decoders are apart, one thread for each of them.

The scheduler is shared between these threads and the callers that submit and cancel, under one lock, which is
never held while a device works: a request is accepted or rejected at once, whatever the devices do. The
thread with the lock asks the scheduler for all threads, and stores each thread's work where it finds it. What
a thread does with its device it does alone. Pictures are copied on arrival (`Encoder.read`), so that no
request's memory is read later. A cancelled request is gone at once; its slot is freed at the next boundary.

Where a device can get its next work before the result of the last is known, it does: behind a step that runs,
the next one is launched, and encodings between the two (`TextScheduler.follow`). The time that Python needs
for one step is so hidden behind the next.

What an encoder apart makes of a picture is stored with its request before the scheduler is notified that it
is encoded; only then is it in a step of its decoder, whose thread takes it from there. The lock is between
the two, so that neither ever sees half of it.
"""

from __future__ import annotations

import codecs
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from carpool.core.job import DONE, INFINITY, RUNNING, GivenUp, Job
from carpool.core.refusal_words import dropped, turned_away
from carpool.errors import CarpoolError, ModelError, Unavailable
from carpool.extensions.text.stepper import AHEAD, Decoder, TextInstance
from carpool.extensions.text.text_job import DecodeStep, Encode, TextGivenUp, TextJob
from carpool.extensions.text.text_records import LENGTH, STOP, Event, Failed, Piece, Worked
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.observe.logs import logger

_log = logger("engine")
_MOST_FAILURES = 3  # steps in a row: then the instance is of no use
Tell = Callable[[Sequence[Event]], None]
"""Called from the loop's threads; what is said of one answer comes in order."""


class _TextAnswer:
    """Represents one answer under way."""

    __slots__ = ("begun", "decoder", "encoded", "number", "picture", "rows")

    def __init__(self, number: int, picture: Any) -> None:
        self.number = number
        self.picture = picture
        self.rows: Any = None  # what an encoder apart made of it, until its decoder has it
        self.begun = 0.0  # when its encoding began
        self.encoded = 0.0
        self.decoder: codecs.IncrementalDecoder | None = None  # while a character has come only in part


class _Flight:
    """Describes a step that was launched."""

    __slots__ = ("began", "encoded", "work")

    def __init__(self, work: DecodeStep, began: float, encoded: Sequence[tuple[Encode, float, bool]]) -> None:
        self.work = work
        self.began = min([began, *(when for _, when, _ in encoded)])
        self.encoded = encoded  # right before it


class TextLoop:
    def __init__(
        self,
        model: str,
        instance: TextInstance,
        scheduler: TextScheduler,
        tell: Tell,
        ended: Callable[[], None] = lambda: None,
        now: Callable[[], float] = monotonic,
    ) -> None:
        """`ended` is called in the last thread when it is over: asked to, or because nothing works any
        more."""
        self._model = model
        self._instance = instance
        self._apart = scheduler.settings.apart
        self._scheduler = scheduler
        self._tell = tell
        self._ended = ended
        self._now = now
        self._changed = (
            threading.Condition()
        )  # with a lock that may be taken again; guards the scheduler and all that follows
        self._open: dict[int, TextJob] = {}
        self._told = self._full
        self._closed = False
        self._dead: CarpoolError | None = None
        # One thread for each, encoders first; where they are not apart, one that does both.
        self.threads = len(instance.parts)
        self._todo: list[Encode | DecodeStep | None] = [None] * self.threads
        # Each is its thread's: steps that were launched, the first first; when a device last had a result.
        self._flights: list[deque[_Flight]] = [deque() for _ in range(self.threads)]
        self._heard = [0.0] * self.threads
        # What was encoded by the device that steps, since its last step was launched, and when that began.
        self._encodings: list[tuple[Encode, float, bool]] = []  # and whether all of it was encoded
        self._left = self.threads  # threads that have not ended
        self._failures = [0] * len(instance.decoders)  # each is its thread's
        self._texts: dict[int, str | None] = {}  # of tokens that were seen; None: a part of a character

    @property
    def alive(self) -> bool:
        return not self._closed and self._dead is None

    def start(self) -> None:
        for thread in range(self.threads):
            name = f"{self._model}-writer-{thread}" if self._apart else f"{self._model}-writer"
            threading.Thread(target=self._work, args=(thread,), name=name, daemon=True).start()

    # ---- from any thread --------------------------------------------------------------------------------

    def submit(
        self, number: int, picture: Any, arrived: float, deadline: float = INFINITY, limit: int = 0
    ) -> CarpoolError | None:
        """None: it is in the queue. `picture` is what `Encoder.read` returned."""
        job = TextJob(arrived, limit, deadline, _TextAnswer(number, picture))
        with self._changed:
            if not self.alive:
                return self._dead or Unavailable(f"{self._model} is being unloaded", reason="unloading")
            refusal = self._scheduler.offer(job, self._now())
            if refusal is None:
                self._open[number] = job
                self._changed.notify()  # any thread that wakes asks the scheduler for all
                return None
        return turned_away(self._model, Job(job.arrived, job.first_due), refusal, fixed=False)

    def cancel(self, number: int) -> None:
        """Cancels an answer: no more events of it are reported."""
        with self._changed:
            job = self._open.pop(number, None)
            if job is not None:
                self._scheduler.cancel(job, self._now())
                self._changed.notify()

    def close(self) -> None:
        """Ends the threads after their current work. Requests that are left fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ---- its threads ------------------------------------------------------------------------------------

    def _work(self, thread: int = 0) -> None:
        try:
            while self.turn(thread, wait=True):
                """Until it is closed or broken."""
        except Exception as error:
            _log.exception("writer-failed", model=self._model)
            self._die(ModelError(f"{self._model}: {type(error).__name__}: {error}"))
        if self._flights[thread]:
            with suppress(Exception):  # it is over: an error has no consequence
                self._instance.decoders[self._flights[thread][0].work.decoder].forget()
        with self._changed:
            self._left -= 1
            if self._left:
                return
            left = self._dead or Unavailable(
                f"{self._model} was unloaded before it answered", reason="unloading"
            )
            self._closed = True
            failed = [Failed(number, left) for number in self._open]
            self._open.clear()
        if failed:
            self._tell(failed)
        self._instance.close()
        self._ended()

    def turn(self, thread: int = 0, *, wait: bool = False) -> bool:
        """Decide, and do what is this thread's; False when it is over. With `wait`, wait for something to
        do."""
        with self._changed:
            if not self.alive:
                return False
            now = self._now()
            events, again = self._share_out(thread, now)
            work, self._todo[thread] = self._todo[thread], None
            if work is None and not self._flights[thread] and wait and not events:
                if self._told == self._full:
                    self._changed.wait(None if again is None else max(0.0, again - now))
                    return True
                events.append(self._worked(0, 0, 0.0))  # a request left, and no work follows that reports it
        if events:
            self._tell(events)
        if isinstance(work, Encode):
            self._encode(work)
        elif work is not None:
            self._launch(work, thread)
        if self._flights[thread]:
            self._look_ahead(thread)
            self._land(thread)
        return True

    def _share_out(self, thread: int, now: float) -> tuple[list[Event], float | None]:
        """Gives what the scheduler wants done to whom it is for, while it holds the lock."""
        events: list[Event] = []
        while True:
            decision = self._scheduler.decide(now)
            events += [self._dropped(gone, now) for gone in decision.given_up]
            work = decision.work
            if work is None:
                return events, decision.look_again
            if not self._apart:
                self._todo[0] = work
                return events, None
            place = work.encoder if isinstance(work, Encode) else len(self._instance.encoders) + work.decoder
            self._todo[place] = work
            if place != thread:
                self._changed.notify_all()

    def _encode(self, work: Encode) -> None:
        """Where a device is asked ahead, it is on its way then: what it takes shows with the next step."""
        ahead = not self._apart and self._instance.decoders[0].overlaps
        began = self._now()
        riding = [job for job in work.jobs if job.state is RUNNING]
        wrong = self._admitted(riding, work.encoder) if riding else {}
        ended = self._now()
        events: list[Event] = []
        with self._changed:
            for job in work.jobs:
                job.payload.begun, job.payload.encoded, job.payload.picture = began, ended - began, None
                if job in wrong and self._open.pop(job.payload.number, None) is not None:
                    self._scheduler.cancel(job, ended)
                    events.append(Failed(job.payload.number, wrong[job]))
            whole = not wrong and len(riding) == len(work.jobs)
            if ahead:
                self._encodings.append((work, began, whole))
            self._scheduler.encoded(work, ended, ended - began if whole and not ahead else None)
            events.append(self._worked(len(riding), 0, ended - began))
        self._tell(events)

    def _admitted(self, jobs: Sequence[TextJob], encoder: int) -> dict[TextJob, CarpoolError]:
        """Admits all at once; where that fails one by one, so that only those who are to blame go without."""
        try:
            self._admit(jobs, encoder)
            return {}
        except Exception as error:
            if self._instance.encoders[encoder].broken:
                self._die(self._trouble(error))
                return {}
            if len(jobs) == 1:
                return {jobs[0]: self._trouble(error)}
        wrong: dict[TextJob, CarpoolError] = {}
        for job in jobs:
            wrong |= self._admitted([job], encoder)
        return wrong

    def _admit(self, jobs: Sequence[TextJob], encoder: int) -> None:
        encoded = self._instance.encoders[encoder].encode([job.payload.picture for job in jobs])
        if self._apart:
            for job, rows in zip(jobs, encoded, strict=True):
                job.payload.rows = rows
        else:
            self._instance.decoders[0].admit([job.slot for job in jobs], encoded)

    def _launch(self, work: DecodeStep, thread: int) -> None:
        decoder = self._instance.decoders[work.decoder]
        new = [job for job in work.jobs if job.payload.rows is not None]
        flight = _Flight(work, self._now(), self._encodings)
        self._encodings = []
        try:
            if new:
                decoder.admit([job.slot for job in new], [job.payload.rows for job in new])
            decoder.launch(work.width)
        except Exception as error:
            self._failed(self._trouble(error), work.decoder, thread)
            return
        for job in new:
            job.payload.rows = None
        self._flights[thread].append(flight)

    def _look_ahead(self, thread: int) -> None:
        """Launches what may come behind the step that runs."""
        flights = self._flights[thread]
        if not self._instance.decoders[flights[0].work.decoder].overlaps:
            return
        while 0 < len(flights) < AHEAD:
            with self._changed:
                if not self.alive:
                    return
                now = self._now()
                decision = self._scheduler.follow(flights[0].work, now)
                events = [self._dropped(gone, now) for gone in decision.given_up]
            if events:
                self._tell(events)
            if isinstance(decision.work, Encode):
                self._encode(decision.work)
            elif decision.work is not None:
                self._launch(decision.work, thread)
            else:
                return

    def _land(self, thread: int) -> None:
        """Waits for the first step that was launched, and reports its tokens."""
        if not self._flights[thread]:
            return  # it failed
        flight = self._flights[thread].popleft()
        work = flight.work
        decoder = self._instance.decoders[work.decoder]
        try:
            tokens: list[int] = decoder.tokens().tolist()
        except Exception as error:
            self._failed(self._trouble(error), work.decoder, thread)
            return
        self._failures[work.decoder] = 0
        now = self._now()
        took = now - max(flight.began, self._heard[thread])
        self._heard[thread] = now
        events: list[Event] = []
        with self._changed:
            ended = {job for job in work.jobs if tokens[job.slot] == decoder.end}
            riding = [job for job in work.jobs if job.state is RUNNING]
            boundary = self._scheduler.stepped(work, now, ended, None if flight.encoded else took)
            self._learn(flight, took - self._scheduler.step_takes(work.width), now)
            done = set(boundary.done)
            for job in riding:
                self._say(job, self._text(job, tokens[job.slot], decoder, job in done), job in ended, events)
            events += [self._dropped(gone, now) for gone in boundary.given_up]
            events.append(self._worked(0, work.width, took))
        self._tell(events)

    def _learn(self, flight: _Flight, beyond: float, now: float) -> None:
        """What came before the step took what it took beyond a step."""
        for encoded, _, whole in flight.encoded:
            for job in encoded.jobs:
                job.payload.encoded = max(job.payload.encoded, beyond)
            if whole and len(flight.encoded) == 1 and beyond > 0.0:
                self._scheduler.took(encoded, beyond, now)

    def _text(self, job: TextJob, token: int, decoder: Decoder, done: bool) -> str:
        """Returns what it adds to the answer. A character may come in several tokens: what is not whole yet
        is held back."""
        rider: _TextAnswer = job.payload
        if token not in self._texts:
            piece = b"" if token == decoder.end else decoder.piece(token)
            try:
                self._texts[token] = piece.decode()
            except UnicodeDecodeError:
                self._texts[token] = None
        text = self._texts[token]
        if text is not None and rider.decoder is None:
            return text
        if rider.decoder is None:
            rider.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = rider.decoder.decode(b"" if token == decoder.end else decoder.piece(token), done)
        if not rider.decoder.getstate()[0]:
            rider.decoder = None
        return text

    def _say(self, job: TextJob, text: str, ended: bool, events: list[Event]) -> None:
        rider: _TextAnswer = job.payload
        number = rider.number
        if number not in self._open:
            return
        finish = ""
        if job.state is DONE:
            finish = STOP if ended else LENGTH
            del self._open[number]
        if job.tokens == 1:
            waited = max(0.0, rider.begun - job.arrived)
            events.append(Piece(number, text, 1, finish, waited, rider.encoded))
        elif text or finish:
            events.append(Piece(number, text, job.tokens, finish))

    def _dropped(self, gone: TextGivenUp, now: float) -> Failed:
        job = gone.job
        number = job.payload.number
        self._open.pop(number, None)
        due = job.first_due if job.first_at is None else job.deadline
        lost = GivenUp(Job(job.arrived, due), gone.reason, batch=gone.takes)
        return Failed(number, dropped(self._model, lost, now, 0.0))

    @property
    def _full(self) -> tuple[int, int]:
        """Returns the slots used, and how many wait."""
        return self._scheduler.used, self._scheduler.waiting

    def _worked(self, encoded: int, stepped: int, seconds: float) -> Worked:
        """Reports work, while it holds the lock."""
        self._told = self._full
        return Worked(encoded, stepped, seconds, *self._told)

    # ---- when the device fails --------------------------------------------------------------------------

    def _trouble(self, error: Exception) -> CarpoolError:
        if isinstance(error, CarpoolError):
            return error
        return ModelError(f"{self._model}: {type(error).__name__}: {' '.join(str(error).split())[:500]}")

    def _failed(self, error: CarpoolError, decoder: int, thread: int) -> None:
        """Fails all answers in slots of this decoder, since a failed step leaves its caches undefined.
        Waiting requests go on waiting, unless it happens again and again."""
        self._flights[thread].clear()
        self._encodings = []
        with suppress(Exception):  # what it says of itself next is heard at the next step
            self._instance.decoders[decoder].forget()
        self._failures[decoder] += 1
        failures = self._failures[decoder]
        _log.error("step-failed", model=self._model, error=error.message, decoder=decoder, in_a_row=failures)
        with self._changed:
            if self._instance.broken or failures >= _MOST_FAILURES:
                self._die(error)
                return
            events = [
                Failed(job.payload.number, error)
                for job in self._scheduler.lost(decoder)
                if self._open.pop(job.payload.number, None) is not None
            ]
        self._tell(events)

    def _die(self, error: CarpoolError) -> None:
        with self._changed:
            self._dead = error
            self._changed.notify_all()
