"""Implements rollouts in a front end: a request that the candidate rejects or fails is run again on stable.
Some requests are run on the other version, too, as background work, and both answers are compared off the
loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import cast

from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput
from carpool.extensions.rollout.blame import may_run_again
from carpool.extensions.rollout.comparison import Comparison
from carpool.extensions.rollout.mirror import Mirror
from carpool.extensions.rollout.routing import Routing, Split
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.request import Infer, Listener, Request
from carpool.frontend.calls.request_facts import OVER
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import Sender
from carpool.observe.logs import logger

_ROLLOUT = "X-Carpool-Rollout"
"""Asks for one side of a rollout."""
_FIELD = _ROLLOUT.lower().encode()
_SIDES = ("stable", "candidate")
_RESERVE = (0.2, 0.5)  # of the promise, at least and at most: for stable, where the candidate is slow

_log = logger("rollout")


def front(server: FrontServer) -> FrontPart:
    """Returns what rollouts do in a front end."""
    return Mirroring(server).part


class Mirroring:
    """Implements the feature, for versions of which one takes over from the other."""

    def __init__(self, server: FrontServer) -> None:
        self._routing = Routing()
        self._mirror = Mirror(server)
        self._states: Mapping[str, str] = {}  # of rollouts, by model
        self.part = FrontPart(
            around=self._around,
            choose=self._choose,
            follow=self._follow,
            close=self._mirror.close,
            shows=lambda entry: self._states.get(entry.name),
        )

    def _follow(self, catalog: Catalog) -> None:
        self._routing.follow(catalog)
        self._states = catalog.extra.get("rollout", {}).get("states", {})

    def _around(self, inner: Infer, entry: ModelEntry) -> Infer:
        split = self._routing.splits.get(entry.name)
        if split is None or not (entry is split.stable or entry is split.candidate):
            return inner
        return MirrorWrapper(inner, self._mirror)

    def _choose(self, entry: ModelEntry, fields: Mapping[bytes, bytes], tensors: bool) -> Sides | None:
        wish = read_side(fields.get(_FIELD))
        split = self._routing.split(entry.name, wish, tensors=tensors)
        return None if split is None else Sides(self._mirror, split, fields, wish)


def read_side(field: bytes | None) -> str:
    """Returns which side of a rollout is asked for; empty: either."""
    if field is None:
        return ""
    side = field.decode("ascii", "replace")
    if side not in _SIDES:
        raise InvalidInput(f"{_ROLLOUT} must be {' or '.join(_SIDES)}", field=_ROLLOUT)
    return side


class Sides:
    """Implements `Choice` between the two versions of a rollout."""

    __slots__ = ("_fields", "_mirror", "_wish", "entries", "split")

    def __init__(self, mirror: Mirror, split: Split, fields: Mapping[bytes, bytes], wish: str) -> None:
        self._mirror = mirror
        self._fields = fields
        self._wish = wish
        self.split = split
        self.entries: Sequence[ModelEntry] = (split.stable, split.candidate)

    def choose(self, sender: Sender, at: float) -> ModelEntry:
        return self.split.choose(sender, at, self._fields, self._wish)

    def instead(self, entry: ModelEntry) -> ModelEntry | None:
        return self.split.stable if self.split.spares(entry) else None

    def rejected(self, entry: ModelEntry, error: CarpoolError) -> None:
        self._mirror.count_failure(self.split, entry, error)


class MirrorWrapper:
    """Wraps the requests for one of the two versions."""

    def __init__(self, inner: Infer, mirror: Mirror) -> None:
        self.inner = inner
        self.mirror = mirror

    def __call__(self, request: Request) -> None:
        sides = cast("Sides | None", request.choice)
        if sides is None:  # it names its version
            self.inner(request)
            return
        beside = Beside(self, sides.split, request)
        request.listen(beside)
        beside.begin()


class Beside(Listener):
    """Leads one request whose model has two versions. Keeps its content for as long as that may be needed
    again."""

    __slots__ = (
        "_begun",
        "_compares",
        "_content",
        "_engine",
        "_id",
        "_lane",
        "_pictures",
        "_request",
        "_split",
        "_timer",
    )

    def __init__(self, engine: MirrorWrapper, split: Split, request: Request) -> None:
        content = request.content
        assert content is not None
        self._engine = engine
        self._split = split
        self._request = request
        self._lane = request.service.lane(request.entry)  # that was chosen: errors count there
        self._content = content
        self._pictures: SentPictures | None = None  # that were answered
        self._id = ""  # as its client calls it
        self._compares = False
        self._begun = False  # it was passed on
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begins on the version that was chosen, or on stable, if that rejects it."""
        request, split, content, now = self._request, self._split, self._content, monotonic()
        entry = request.entry
        in_parts = entry.traits.in_parts(request.refuses_many)
        spares = split.spares(entry) and not in_parts
        self._compares = not in_parts and self._engine.mirror.wants(split, entry, request.sender.named, now)
        content.copied = True
        content.kept = self._compares or spares
        self._engine.inner(request)
        self._begun = True
        if spares and entry.batching.slo is not None and request.state != OVER:
            slo = entry.batching.slo
            reserve = min(_RESERVE[1] * slo, max(_RESERVE[0] * slo, 3.0 * split.stable_s))
            late = entry.due(request.arrived, request.deadline) - reserve
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(0.0, late - now), self._too_slow)

    # ── on stable instead ──

    def _moves_to_stable(self, error: CarpoolError) -> bool:
        """The candidate does not take it: from here on it is stable's, if it may be."""
        if not self._split.spares(self._request.entry) or not may_run_again(error):
            return False
        self._engine.mirror.fell_back(self._split, error)
        return True

    def _begins_again(self, error: CarpoolError) -> bool:
        """The candidate has rejected it before the engine knew of it: stable is asked what was asked."""
        if error.reason == "no-slots" or not self._moves_to_stable(error):
            return False
        request, content, stable = self._request, self._content, self._split.stable
        if isinstance(content, SentPictures):
            content = content.for_model(request.service.pictures.model(stable))
        self._content = request.content = content
        request.enter(request.service.lane(stable))
        request.listen(self)
        request.go(lambda _: self.begin())
        return True

    def _too_slow(self) -> None:
        """If the candidate has not answered by now, stable just could."""
        self._timer = None
        if self._content.sent and not self._content.gone:
            self._runs_again(DeadlineExceeded("the candidate takes too long", reason="deadline"))

    def _runs_again(self, error: CarpoolError) -> bool:
        """The candidate had it and failed, or is about to be late: run it on stable, if that can be in time.
        Its inputs are still in their slot; pictures that stable wants in another size are decoded again."""
        request, content, stable = self._request, self._content, self._split.stable
        if monotonic() >= request.entry.due(request.arrived, request.deadline):
            return False
        if isinstance(content, SentPictures):
            model = request.service.pictures.model(stable)
            if not content.can_be_again(model) or not self._moves_to_stable(error):
                return False
            content = content.again(model)
        elif content.held is None or not self._moves_to_stable(error):
            return False
        self._stop()
        request.recall(self)
        self._compares = content.kept = False
        self._content = request.content = content
        request.enter(request.service.lane(stable))
        request.listen(self)
        request.go(self._engine.inner)
        return True

    # ── as a `Listener` ──

    def answered(self, request: Request, answer: Answer) -> Answer | None:
        error, split, mirror = answer.error, self._split, self._engine.mirror
        if error is not None and (self._runs_again(error) if self._begun else self._begins_again(error)):
            return None
        self._stop()
        if error is not None:
            mirror.count_failure(split, request.entry, error)
            request.enter(self._lane)
            return answer
        self._pictures, self._id = request.pictures, request.request_id
        request.content = None  # it is dropped when it was compared
        request.after(self._sent)
        return answer

    def _sent(self, answer: Answer) -> None:
        request, split, mirror, content = self._request, self._split, self._engine.mirror, self._content
        try:
            entry = request.entry
            mirror.count_answer(split, entry, monotonic() - request.arrived, self._id)
            if self._compares and content.offered_as is not None:
                given = request.service, mirror.pictures
                job = Comparison(*given, mirror, split, entry, request.sender.named, self._pictures)
                job.keep_answer(answer.outputs)
                job.begin(content.offered_as, content.take_held(), content.tail)
        finally:
            content.drop()

    def left(self, request: Request) -> bool:
        self._stop()
        return False

    def _stop(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
