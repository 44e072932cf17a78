"""Routes the requests of a model that writes: each goes to an instance, and is answered exactly once.

The gate is at the instances, whose schedulers know the state of their slots (text_loop.py). Here is the rest:
which instance has which request, how pieces of text reach clients, and what happens when an instance dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from time import monotonic
from typing import Protocol

import numpy as np
import orjson

from carpool.core.job import DONE, GONE, INFINITY, OFFERED, READY, RUNNING
from carpool.core.refusal_words import replaced
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import Cancelled, CarpoolError, DeadlineExceeded, InvalidInput, ModelError, Unavailable
from carpool.extensions.text.stepper import FINISH, TEXT, TextInstance
from carpool.extensions.text.text_loop import TextLoop
from carpool.extensions.text.text_records import Event, Failed, Piece, Worked
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.extensions.text.written_tokens import WRITE
from carpool.observe.logs import logger
from carpool.types import Array, StepTiming, Timing

_log = logger("engine")
_LOOK_S = 1.0  # between two looks for instances that hang
MAX_TOKENS = "max_tokens"
"""The parameter of a request that says how long its answer may be."""


class Writes(Protocol):
    """Defines an instance as the driver sees it, on the loop's thread. It reports the events of its answers
    to the driver (`heard`), and its own end (`lost`)."""

    alive: bool

    @property
    def responsive(self) -> bool: ...

    def submit(self, number: int, work: Work, limit: int) -> None: ...

    def cancel(self, number: int) -> None:
        """Cancels an answer: nothing of it will be heard any more but what is on its way."""

    def abort(self) -> None:
        """Gives up an instance that hangs."""

    def close(self) -> None: ...

    def join(self, timeout: float) -> None: ...


class LocalText:
    """An instance in this process: implements `Writes`."""

    responsive = True

    def __init__(
        self, model: str, instance: TextInstance, scheduler: TextScheduler, driver: TextDriver
    ) -> None:
        self._instance = instance
        self._driver = driver
        self._on_loop = asyncio.get_running_loop().call_soon_threadsafe
        self._text = TextLoop(model, instance, scheduler, self._tell, self._ended)
        self.alive = True
        self._text.start()

    def submit(self, number: int, work: Work, limit: int) -> None:
        error: CarpoolError | None
        try:
            picture = self._instance.read(work.inputs)
            error = self._text.submit(number, picture, work.arrived, work.deadline, limit)
        except CarpoolError as wrong:
            error = wrong
        if error is not None:
            self._driver.heard(self, [Failed(number, error)])

    def cancel(self, number: int) -> None:
        self._text.cancel(number)

    def abort(self) -> None:
        self.alive = False
        self._instance.abort()
        self._text.close()

    def close(self) -> None:
        self._text.close()

    def join(self, timeout: float) -> None:
        """Its thread ends by itself: it holds nothing that others need."""

    def _tell(self, events: Sequence[Event]) -> None:
        self._call(self._driver.heard, events)

    def _ended(self) -> None:
        self.alive = False
        self._call(lambda one, _: self._driver.lost(one), ())

    def _call(self, what: Callable[[Writes, Sequence[Event]], None], events: Sequence[Event]) -> None:
        try:
            self._on_loop(what, self, events)
        except RuntimeError:
            """The loop is closed: no request waits any more."""


class TextObserver(Protocol):
    """Defines who counts, and who replaces instances."""

    def first_token(self, seconds: float) -> None: ...

    def next_token(self, seconds: float) -> None: ...

    def worked(self, index: int, work: Worked) -> None: ...

    def wrote(self, timing: StepTiming) -> None:
        """Counts a whole answer."""

    def writer_lost(self, index: int, why: str) -> None: ...


class _Ride:
    __slots__ = ("encoded", "last", "number", "pieces", "tokens", "waited", "work", "writer")

    def __init__(self, number: int, work: Work, writer: Writes) -> None:
        self.number = number
        self.work = work
        self.writer = writer
        self.pieces: list[str] = []
        self.tokens = 0
        self.last = self.waited = self.encoded = 0.0


class TextDriver:
    """Everything runs on the loop's thread. `done` of every work is called exactly once."""

    def __init__(
        self,
        model: str,
        most_tokens: int,
        watcher: TextObserver,
        loop: asyncio.AbstractEventLoop,
        timeout: float | None = None,
    ) -> None:
        """An instance with requests that reports nothing for `timeout` seconds is taken to hang."""
        self._model = model
        self._most = most_tokens
        self._watcher = watcher
        self._loop = loop
        self._timeout = timeout
        self._writers: dict[int, Writes] = {}
        self._heard_at: dict[Writes, float] = {}
        self._numbers = count(1)
        self._rides: dict[int, _Ride] = {}
        self._of: dict[Work, _Ride] = {}
        self._live: dict[str, list[_Ride]] = {}  # by source: frames that newer ones may take the place of
        self._coming: set[Work] = set()  # offered before their pictures
        self._closed: CarpoolError | None = None
        self._down: CarpoolError | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._looking: asyncio.TimerHandle | None = None

    # ---- instances --------------------------------------------------------------------------------------

    def place(self, index: int, writer: Writes) -> None:
        self._writers[index] = writer
        self._heard_at[writer] = monotonic()
        self._down = None
        if self._timeout is not None and self._looking is None:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    @property
    def able(self) -> bool:
        return any(writer.alive and writer.responsive for writer in self._writers.values())

    @property
    def idle(self) -> bool:
        return not self._rides and not self._coming

    @property
    def riders(self) -> int:
        return len(self._rides) + len(self._coming)

    def accept_again(self) -> None:
        self._down = None

    def refuse_from_now_on(self, error: CarpoolError) -> None:
        self._closed = error

    def refuse_until_placed(self, error: CarpoolError) -> None:
        self._down = error

    async def drained(self, timeout: float | None) -> bool:
        if not self.idle:
            waiter = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=timeout)
        return self.idle

    def lost(self, writer: Writes) -> None:
        """Notes that an instance died or was closed. Each of its requests fails once; later requests go to
        another instance, or are rejected."""
        self._drop(writer, ModelError(f"{self._model}: the instance that wrote it died", reason="model-died"))
        index = next((index for index, placed in self._writers.items() if placed is writer), None)
        if index is not None:
            del self._writers[index]
            self._heard_at.pop(writer, None)
            self._watcher.writer_lost(index, "its process died")

    def _drop(self, writer: Writes, error: CarpoolError) -> None:
        for ride in [ride for ride in self._rides.values() if ride.writer is writer]:
            self._end(ride, Outcome(error=error))

    def _look(self) -> None:
        """Looks for instances that report nothing although they have requests."""
        assert self._timeout is not None
        self._looking = self._loop.call_later(_LOOK_S, self._look)
        now = monotonic()
        busy = {ride.writer for ride in self._rides.values()}
        # Of several decoders one may hang while the others go on: its answers that have begun get no tokens.
        waits = {
            ride.writer for ride in self._rides.values() if ride.tokens and ride.last < now - self._timeout
        }
        for index, writer in list(self._writers.items()):
            if writer not in busy:
                self._heard_at[writer] = now
            elif writer in waits or now - self._heard_at[writer] > self._timeout:
                _log.error("step-hangs", model=self._model, instance=index, seconds=self._timeout)
                why = f"{self._model} has not written a token for {self._timeout:.0f} s"
                self._drop(writer, DeadlineExceeded(why, reason="execution-timeout"))
                del self._writers[index], self._heard_at[writer]
                writer.abort()
                writer.close()
                self._watcher.writer_lost(index, "it did not answer within its time limit")

    # ---- requests ---------------------------------------------------------------------------------------

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
            if work.course.ready_at == -INFINITY:
                self._take(work)
            else:  # its picture is still being decoded: nothing is known of its size before
                work.state = OFFERED
                self._coming.add(work)

    def ready(self, work: Work) -> None:
        """Takes work that is ready, or does nothing if it left meanwhile."""
        if work in self._coming:
            self._coming.discard(work)
            self._take(work)

    def _take(self, work: Work) -> None:
        work.state = READY
        error = self._closed or self._down
        if error is None and not self._writers:
            error = Unavailable(f"{self._model} is down and is being restarted", reason="restarting")
        if error is None:
            try:
                self._begin(work)
                return
            except CarpoolError as wrong:
                error = wrong
            except Exception as bug:
                _log.exception("submit-failed", model=self._model)
                error = CarpoolError(f"the engine failed: {type(bug).__name__}")
        ride = self._of.get(work)
        if ride is None:
            self._turn_away(work, error)
            return
        with suppress(Exception):
            ride.writer.cancel(ride.number)  # it may have got that far
        self._end(ride, Outcome(error=error))

    def _turn_away(self, work: Work, error: CarpoolError) -> None:
        work.state = GONE
        work.done(work, Outcome(error=error))
        self._tell_idle()

    def _begin(self, work: Work) -> None:
        limit = read_limit(work.extras.details, self._most)
        riding = [ride.writer for ride in self._rides.values()]
        writer = min(self._writers.values(), key=riding.count)
        ride = _Ride(next(self._numbers), work, writer)
        if not any(other is writer for other in riding):
            self._heard_at[writer] = monotonic()
        self._rides[ride.number] = self._of[work] = ride
        if work.options.latest and work.origin.source:
            self._replace_waiting(ride)
        writer.submit(ride.number, work, limit)

    def _replace_waiting(self, newest: _Ride) -> None:
        """Of the frames of a live source whose text has not begun, the first stays and the newest: one that
        sends faster than the first token comes would never have an answer otherwise."""
        source = newest.work.origin.source
        waiting = [ride for ride in self._live.get(source, ()) if not ride.tokens]
        for ride in waiting[1:]:
            ride.writer.cancel(ride.number)
            self._end(ride, Outcome(error=replaced(self._model, source)))
        self._live.setdefault(source, []).append(newest)

    def cancel(self, work: Work) -> None:
        ride = self._of.get(work)
        if work in self._coming:
            self._coming.discard(work)
            self._turn_away(work, Cancelled("the client left"))
        elif ride is not None:
            ride.writer.cancel(ride.number)
            self._end(ride, Outcome(error=Cancelled("the client left")))

    def heard(self, writer: Writes, events: Sequence[Event]) -> None:
        now = monotonic()
        if writer in self._heard_at:  # else it was lost or given up meanwhile
            self._heard_at[writer] = now
        for event in events:
            if isinstance(event, Worked):
                index = next((index for index, one in self._writers.items() if one is writer), None)
                if index is not None:
                    self._watcher.worked(index, event)
                continue
            ride = self._rides.get(event.number)
            if ride is None or ride.writer is not writer:
                continue  # it left meanwhile
            if isinstance(event, Failed):
                self._end(ride, Outcome(error=event.error, timing=self._timing(ride)))
            else:
                self._wrote(ride, event, now)

    def _wrote(self, ride: _Ride, piece: Piece, now: float) -> None:
        work = ride.work
        if not ride.tokens:
            ride.waited, ride.encoded = piece.waited, piece.encoded
            work.state = RUNNING
            self._watcher.first_token(now - work.arrived)
        else:
            self._watcher.next_token((now - ride.last) / max(1, piece.tokens - ride.tokens))
        ride.tokens, ride.last = piece.tokens, now
        parts, place = work.extras.parts, work.place
        if parts is None or place is None:
            ride.pieces.append(piece.text)
        elif piece.text or piece.finish:
            try:
                payload = place.part(outputs(piece.text, piece.finish))
            except CarpoolError as error:
                ride.writer.cancel(ride.number)
                self._end(ride, Outcome(error=error))
                return
            parts.send(payload, piece.finish, last=bool(piece.finish))
        if piece.finish:
            timing = self._timing(ride)
            self._watcher.wrote(timing)
            self._end(ride, Outcome(outputs("".join(ride.pieces), piece.finish), timing=timing))

    def _timing(self, ride: _Ride) -> StepTiming:
        """Until it was encoded, and then token by token; `batch` of the latter is how many there were."""
        if not ride.tokens:
            return StepTiming(max(0.0, monotonic() - ride.work.arrived))
        writing = max(0.0, ride.last - ride.work.arrived - ride.waited - ride.encoded)
        encode, write = (
            Timing(ride.waited, infer=ride.encoded, batch=1),
            Timing(infer=writing, batch=ride.tokens),
        )
        steps = (("encode", encode), (WRITE, write))
        return StepTiming(ride.waited, 0.0, ride.encoded + writing, 0.0, 1, steps)

    def _end(self, ride: _Ride, outcome: Outcome) -> None:
        """Gives the one answer of an accepted work. Never raises: others wait behind it."""
        self._rides.pop(ride.number, None)
        self._of.pop(ride.work, None)
        rides = self._live.get(ride.work.origin.source, []) if ride.work.options.latest else []
        if ride in rides:
            rides.remove(ride)
            if not rides:
                del self._live[ride.work.origin.source]
        ride.work.state = GONE if outcome.error else DONE
        try:
            ride.work.done(ride.work, outcome)
        except Exception:
            _log.exception("answer-failed", model=self._model)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self.idle:
            for waiter in [waiter for waiter in self._idle_waiters if not waiter.done()]:
                waiter.set_result(None)
            self._idle_waiters.clear()

    def close(self) -> list[Writes]:
        """Stops for good: requests that still wait fail. Returns the instances, which end by themselves."""
        self.refuse_from_now_on(Unavailable(f"{self._model} is being unloaded", reason="unloading"))
        if self._looking is not None:
            self._looking.cancel()
        error = Unavailable(f"{self._model} was unloaded before it answered", reason="unloading")
        for work in list(self._coming):
            self._coming.discard(work)
            self._turn_away(work, error)
        for ride in list(self._rides.values()):
            ride.writer.cancel(ride.number)
            self._end(ride, Outcome(error=error))
        writers = list(self._writers.values())
        self._writers.clear()
        for writer in writers:
            writer.close()
        return writers


def outputs(text: str, finish: str) -> dict[str, Array]:
    found = {TEXT: np.array([text.encode()], object)}
    if finish:
        found[FINISH] = np.array([finish.encode()], object)
    return found


def read_limit(details: bytes, most: int) -> int:
    """Returns how many tokens a request asks for at most: the model's own limit holds as well."""
    if not details:
        return most
    asked = orjson.loads(details).get("parameters", {}).get(MAX_TOKENS, most)
    if type(asked) is not int or asked < 1:
        raise InvalidInput(f"{MAX_TOKENS} must be a whole number above 0", field=MAX_TOKENS)
    return min(asked, most)
