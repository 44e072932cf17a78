"""The feature of models that are rolled out: a request that the candidate refuses or fails is run again on
stable; some are run on the other version, too, out of what the device has to spare, and both answers are
compared, off the loop."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import cast

from carpool.errors import CarpoolError, DeadlineExceeded
from carpool.frontend.calls.asking import Asker, Infers, Made, not_made
from carpool.frontend.calls.routing import Routing, Split
from carpool.frontend.pictures.picture_service import promised
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.frontend.rollout.comparison import Comparison, may_run_again
from carpool.frontend.rollout.mirror import Mirror
from carpool.link.contents import Content
from carpool.link.door import Answer, Ask, Call, Hears, ModelEntry
from carpool.memory.arena import Slot
from carpool.observe.logs import logger

_RESERVE = (0.2, 0.5)  # of the promise, at least and at most: for stable, where the candidate is slow

_log = logger("rollout")


class Mirroring:
    """Implements the feature, for versions of which one takes over from the other."""

    def __init__(self, routing: Routing, mirror: Mirror) -> None:
        self._routing = routing
        self._mirror = mirror

    def around(self, inner: Infers, entry: ModelEntry) -> Infers:
        split = self._routing.splits.get(entry.name)
        if split is None or not (entry is split.stable or entry is split.candidate):
            return inner
        return MirroringDoor(inner, self._mirror)


class MirroringDoor:
    """Implements `Infers` around another."""

    def __init__(self, inner: Infers, mirror: Mirror) -> None:
        self.inner = inner
        self.mirror = mirror

    def infer(self, ask: Ask, hears: Hears) -> Call:
        split = cast("Split | None", ask.asker.rollout)
        if split is None:  # it names its version
            return self.inner.infer(ask, hears)
        beside = Beside(self, split, ask, hears)
        beside.begin()
        return beside


class Beside:
    """Represents one request whose model has two versions. Keeps its content for as long as that may be
    needed again. Implements `Call` for who asks and `Hears` for what runs."""

    __slots__ = ("_ask", "_asker", "_compares", "_content", "_door", "_hears", "_inner", "_split", "_timer")

    def __init__(self, door: MirroringDoor, split: Split, ask: Ask, hears: Hears) -> None:
        self._door = door
        self._split = split
        self._ask = ask
        self._asker: Asker = ask.asker
        self._hears: Hears | None = hears  # None: it has the answer, or does not want it
        self._content: Content = ask.content
        self._compares = False
        self._inner: Call | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begins on the version that was chosen, or on stable, if that refuses."""
        try:
            self._offer()
        except CarpoolError as error:
            if error.reason == "no-slots" or not self._moves_to_stable(error):
                self._door.mirror.count_failure(self._split, self._ask.entry, error)
                raise
            self._again()
            try:
                self._offer()
            except CarpoolError as another:
                self._door.mirror.count_failure(self._split, self._ask.entry, another)
                self._content.drop()
                raise

    def _offer(self) -> None:
        ask, split, content, now = self._ask, self._split, self._content, monotonic()
        in_parts = ask.entry.in_parts(self._asker.refuses_many)
        spares = split.spares(ask.entry) and not in_parts
        self._compares = not in_parts and self._door.mirror.wants(split, ask.entry, ask.sender.named, now)
        content.copied = True
        content.kept = self._compares or spares
        self._inner = self._door.inner.infer(ask, self)
        if spares and ask.entry.slo is not None:
            slo = ask.entry.slo
            reserve = min(_RESERVE[1] * slo, max(_RESERVE[0] * slo, 3.0 * split.stable_s))
            late = promised(ask.entry, ask.arrived, ask.deadline) - reserve
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, late - now), self._too_slow)

    # ── on stable instead ──

    def _moves_to_stable(self, error: CarpoolError) -> bool:
        """The candidate does not take it: from here on it is stable's, if it may be."""
        if not self._split.spares(self._ask.entry) or not may_run_again(error):
            return False
        self._door.mirror.fell_back(self._split, error)
        return True

    def _again(self) -> None:
        """Asks stable what was asked."""
        stable, content = self._split.stable, self._content
        if isinstance(content, SentPictures):
            content = content.for_model(self._door.mirror.pictures.model(stable))
        self._content = content
        self._ask = self._ask._replace(entry=stable, content=content)

    def _too_slow(self) -> None:
        """If the candidate has not answered by now, stable just could."""
        self._timer = None
        if self._content.sent and not self._content.gone:
            self._runs_again(DeadlineExceeded("the candidate takes too long", reason="deadline"))

    def _runs_again(self, error: CarpoolError) -> bool:
        """The candidate had it and failed, or is about to be late: run it on stable, if that can be in time.
        Its inputs are still in their slot; pictures that stable wants in another size are decoded again."""
        ask, content = self._ask, self._content
        if self._hears is None or monotonic() >= promised(ask.entry, ask.arrived, ask.deadline):
            return False
        stable = self._split.stable
        if isinstance(content, SentPictures):
            model = self._door.mirror.pictures.model(stable)
            if not content.can_be_again(model) or not self._moves_to_stable(error):
                return False
            content = content.again(model)
        elif content.held is None or not self._moves_to_stable(error):
            return False
        self._stop()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.cancel()
        self._compares = content.kept = False
        self._content = content
        self._ask = ask._replace(entry=stable, content=content)
        try:
            self._inner = self._door.inner.infer(self._ask, self)
        except CarpoolError as another:
            self._end(not_made(another, heard=True))
        except Exception as unknown:
            _log.exception("request-failed", model=stable.name)
            failed = CarpoolError(f"the server failed on this request: {type(unknown).__name__}")
            self._end(not_made(failed, heard=True))
        return True

    # ── as `Hears` ──

    def admitted(self) -> None:
        if self._hears is not None:
            self._hears.admitted()

    def part(self, answer: Answer) -> None:
        if self._hears is not None:
            self._hears.part(answer)

    def done(self, answer: Answer) -> None:
        if answer.error is None or not self._runs_again(answer.error):
            self._end(cast(Made, answer))

    def _end(self, made: Made) -> None:
        hears, self._hears = self._hears, None
        self._inner = None
        self._stop()
        if hears is None:
            return
        ask, split, mirror, content = self._ask, self._split, self._door.mirror, self._content
        try:
            if made.error is not None:
                mirror.count_failure(split, ask.entry, made.error)
            hears.done(made)
            if made.error is None:
                took = monotonic() - ask.arrived
                mirror.count_answer(split, ask.entry, took, self._asker.request_id)
                if self._compares and content.offered_as is not None:
                    job = Comparison(mirror, split, ask.entry, ask.sender.named, made.pictures)
                    job.keep_answer(made.outputs)
                    job.begin(content.offered_as, content.take_held(), content.tail)
        finally:
            content.drop()

    # ── as `Call` ──

    def ready(self, slot: Slot) -> None:
        """What runs makes itself ready."""
        raise NotImplementedError

    def cancel(self) -> None:
        self._hears = None
        self._stop()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.cancel()
        self._content.drop()

    def release(self) -> None:
        """Nothing is held for an answer that was sent."""

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
