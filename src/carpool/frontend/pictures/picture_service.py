"""Holds what pictures need of a front end: the engine, prepared models, threads, and a bound on what they
hold."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import cv2

from carpool.config.control_groups import within_limit
from carpool.errors import CarpoolError, InvalidInput, Unavailable
from carpool.frontend.clients.accounts import Shares
from carpool.frontend.pictures.sent_pictures import PictureModel, SentPictures, weight_of_size
from carpool.frontend.pictures.workers import PictureDecoding, Workers
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.link.senders import Sender
from carpool.observe.counters import Row
from carpool.types import Timing
from carpool.vision.heads import MOST_PIXELS_WAITING

_MOST_HELD_BYTES = 512 << 20
_MOST_KEPT_BYTES = 512 << 20
_LEARNING = 0.2  # how much the newest batch counts in what they take
_SLOW_S = 0.05  # whose body takes longer is not waited for: it is judged again when it is here
_MOST_COUNTED = 256

MakesModel: TypeAlias = Callable[[ModelEntry], PictureModel | None]
"""Returns what pictures see of a version that is made of other models; None for every other."""


class Passed:
    """Counts pictures of one model that were let pass at their head, and of which the engine has not heard
    yet.

    Its gate says for how many there is room. Without this count, all whose heads come before the engine looks
    again would be read, offered and refused for the one place that was free.
    """

    __slots__ = ("_offered", "heads")

    def __init__(self) -> None:
        self.heads: deque[float] = deque(maxlen=_MOST_COUNTED)  # when they were here
        self._offered: deque[float] = deque(maxlen=_MOST_COUNTED)

    def offered(self, now: float) -> None:
        """Notes that one of them was offered; which, does not matter."""
        if self.heads:
            self.heads.popleft()
        self._offered.append(now)

    def ahead(self, at: float) -> int:
        """Counts those that are still read, and those that were offered since that time."""
        heads = self.heads
        while heads and heads[0] < at - _SLOW_S:
            heads.popleft()
        return len(heads) + self.offered_since(at)

    def offered_since(self, at: float) -> int:
        while self._offered and self._offered[0] < at:
            self._offered.popleft()
        return len(self._offered)


class PictureService:
    """Serves the pictures of one front end, in its loop's thread only."""

    def __init__(self, engine: EngineClient, threads: int, row: Callable[[ModelEntry], Row]) -> None:
        """`row` has this process's counters for a model version."""
        cv2.setNumThreads(1)  # pictures are spread over threads already
        self.engine = engine
        self.row = row
        self.workers = Workers(threads)
        self._after: dict[int, float] = {}  # by the model's key: what its batches take, seconds
        self._passed: defaultdict[int, Passed] = defaultdict(Passed)  # by the model's key
        self._models: dict[int, PictureModel] = {}  # by the entry's key
        self._makers: Sequence[MakesModel] = ()
        self._held = Shares(within_limit(_MOST_HELD_BYTES))
        self._pixels = Shares(MOST_PIXELS_WAITING)
        self._kept = 0  # bytes of pixels, for later steps
        self._most_kept = within_limit(_MOST_KEPT_BYTES)

    def renew(self, catalog: Catalog, makers: Sequence[MakesModel] = ()) -> None:
        """Prepares the models of a new catalogue. The makers are asked in this order; an entry for which none
        of them makes a model is a `PictureModel`."""
        self._makers = makers
        entries = (*catalog.entries.values(), *catalog.leaving)
        there = {entry.key: entry for entry in entries if entry.vision is not None}
        self._models = {key: made for key, made in self._models.items() if there.get(key) is made.entry}
        for entry in there.values():
            with suppress(Unavailable):  # it is made of others, of which one is missing
                self.model(entry)
        known = {entry.key for entry in entries}
        self._after = {key: seconds for key, seconds in self._after.items() if key in known}
        for key in self._passed.keys() - known:
            del self._passed[key]

    def model(self, entry: ModelEntry) -> PictureModel:
        """Returns a model, which is made when the entry first appears. Raises `InvalidInput` for a model that
        takes no pictures."""
        made = self._models.get(entry.key)
        if made is not None and made.entry is entry and made.is_current(self.engine.catalog):
            return made
        if entry.vision is None:
            why = f"; for images: {entry.published.ask}" if entry.published.ask else ""
            raise InvalidInput(
                f"model '{entry.name}' takes tensors, not images: use /v2/models/{entry.name}/infer{why}",
                reason="no-task",
                field="model",
            )
        found = (make(entry) for make in self._makers)
        made = next((model for model in found if model is not None), None) or PictureModel(entry)
        self._models[entry.key] = made
        return made

    def refuses(
        self, entry: ModelEntry, deadline: float, now: float, sender: Sender, size: int, client: str = ""
    ) -> CarpoolError | None:
        """Before anything is done for so many bytes of pictures: the gate's word, and that of the threads."""
        passed = self._passed[entry.key]
        refusal = self.engine.refuses(entry, deadline, now, sender, ahead=passed.ahead)
        if refusal is None and self.workers.waiting and not self.model(entry).encoded:  # else for no thread
            until = entry.due(now, deadline)
            refusal = self.cannot_decode(entry, until, now, weight_of_size(size), client)
        if refusal is None:
            passed.heads.append(now)
        return refusal

    def decoding(
        self,
        entry: ModelEntry,
        pictures: SentPictures,
        deadline: float,
        until: float,
        now: float,
        sender: Sender,
        client: str,
    ) -> PictureDecoding:
        """Returns what decodes pictures that are here and will be offered now. Raises the rejection of the
        gate, if they came on a route, or else of the threads: as `refuses`."""
        if pictures.model.patient:
            return PictureDecoding(self.workers, pictures.weight, deadline, now, client)
        passed = self._passed[entry.key] if pictures.on_route else None
        refusal: CarpoolError | None = None
        if passed is not None:  # it was counted at its head, and the gate looks at how many were
            refusal = self.engine.refuses(entry, deadline, now, sender, ahead=passed.offered_since)
        if refusal is None and self.workers.waiting:
            refusal = self.cannot_decode(entry, until, now, pictures.weight, client)
        if refusal is not None:
            raise refusal
        if passed is not None:
            passed.offered(now)
        return PictureDecoding(self.workers, pictures.weight, until, now, client)

    def offers(self, entry: ModelEntry, now: float) -> None:
        """A picture goes to the engine without a second look."""
        self._passed[entry.key].offered(now)

    def cannot_decode(
        self, entry: ModelEntry, until: float, now: float, weight: float, client: str = ""
    ) -> CarpoolError | None:
        """The threads' word on so much to decode, whose answer has to be there by then."""
        return self.workers.refuses(entry.name, until, now, weight, self._after.get(entry.key, 0.0), client)

    def ran(self, entry: ModelEntry, timing: Timing) -> None:
        """A picture was answered: so long a batch of its model takes now."""
        took = timing.input + timing.infer + timing.output
        before = self._after.get(entry.key, took)
        self._after[entry.key] = before + _LEARNING * (took - before)

    def hold(self, client: str, size: int, pixels: int) -> bool:
        """Count the bytes and the pixels of a body whose pictures are under way; False when its client has
        its part of either. No bytes are given for a body that is counted where it was gathered."""
        if size and not self._held.take(client, size):
            return False
        if not self._pixels.take(client, pixels):
            self._held.give(client, size)
            return False
        return True

    def keep(self, size: int) -> bool:
        """Count bytes of pixels that are kept between two steps; False when there are too many already."""
        if self._kept and self._kept + size > self._most_kept:
            return False
        self._kept += size
        return True

    def forget(self, size: int) -> None:
        self._kept -= size

    def let_go(self, client: str, size: int, pixels: int) -> None:
        if size:
            self._held.give(client, size)
        self._pixels.give(client, pixels)

    def close(self) -> None:
        self.workers.close()
