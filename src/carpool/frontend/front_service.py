"""What requests need of their front end, over every protocol; and what is wrapped around the
engine, in which order."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from itertools import islice
from typing import TYPE_CHECKING

from carpool.errors import CarpoolError, NotFound, Unavailable
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import FrontPart, StartedWith
from carpool.frontend.calls.lane import Choice, LooksEarly
from carpool.frontend.calls.request import Infer, ModelLane, places_at
from carpool.frontend.demands import Demands, NotLoaded
from carpool.frontend.documents import served_versions
from carpool.frontend.front_parts import FrontParts
from carpool.link.catalog import UNLOADED, Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.observe.counters import Block

if TYPE_CHECKING:
    from carpool.frontend.pictures.sent_pictures import PictureModel

_LONGEST_SHOWN = 80
_MOST_COMPARED = 5
_MOST_LOOKED_AT = 200


def is_model_ready(engine: EngineClient, entry: ModelEntry) -> bool:
    return engine.serving and entry.key not in engine.catalog.down


def not_serving() -> Unavailable:
    return Unavailable(
        "the server is starting, draining or restarting its engine, or the engine does not respond",
        reason="not-serving",
    )


def _absent(catalog: Catalog, name: str, version: str) -> CarpoolError:
    """Returns the error in Triton's words, which clients match on, and then what we know beyond them."""
    shown = name if len(name) <= _LONGEST_SHOWN else name[:_LONGEST_SHOWN] + "…"
    asked = f"Request for unknown model: '{shown}'"
    if version:
        asked += f" version {version[:_LONGEST_SHOWN]}"
    not_ready = f"{asked} is not at ready state" if version else f"{asked} has no available versions"
    lines = [line for line in catalog.index if line.name == name and version in ("", line.version)]
    for line in lines:
        if line.state in ("LOADING", "UNAVAILABLE") and line.reason != UNLOADED:
            why = f": {line.reason}" if line.reason else ""
            sentence = f"{not_ready}; it is {line.state.lower()}{why}"
            if name in catalog.server.on_demand:
                return NotLoaded(sentence, name)
            return Unavailable(sentence, reason="model-not-ready")
    was_loaded = any(line.state for line in lines)
    if name in catalog.newest:
        served = ", ".join(served_versions(catalog, name))
        sentence = not_ready if was_loaded else f"{asked} is not found"
        return NotFound(f"{sentence}; it serves {served}", reason="unknown-version")
    if was_loaded:
        return NotFound(f"{not_ready}; it is not loaded", reason="model-not-loaded")
    if lines:
        return NotFound(
            f"{asked} is not found; it is in the repository, but not loaded", reason="model-not-loaded"
        )
    near = _nearest(shown, catalog)
    hint = f"; did you mean '{near}'?" if near else ""
    return NotFound(f"{asked} is not found{hint}", reason="unknown-model")


def _nearest(name: str, catalog: Catalog) -> str | None:
    """Returns what may have been meant. Comparing two names takes as long as refusing a request, so only a
    few of many are compared: those with the most letters in common."""
    known: Iterable[str] = catalog.newest
    if len(catalog.newest) > _MOST_COMPARED:
        letters = set(name)
        first = islice(catalog.newest, _MOST_LOOKED_AT)
        known = nlargest(_MOST_COMPARED, first, key=lambda one: len(letters.intersection(one)))
    near = difflib.get_close_matches(name, known, n=1)
    return near[0] if near else None


class FrontService(CallService):
    """Serves one front end, and is used in its loop's thread only."""

    def __init__(
        self,
        name: str,
        engine: EngineClient,
        block: Block,
        max_body_bytes: int,
        picture_threads: int,
        forward: ForwardedHeaders | None = None,
        parts: Sequence[FrontPart] = (),
        started: StartedWith | None = None,
    ) -> None:
        started = started or StartedWith()
        self.settings = started.settings
        self.parts = FrontParts(self, block.server, started)
        engine = self.parts.start(engine)
        super().__init__(name, engine, block, max_body_bytes, picture_threads, forward)
        self.demands = Demands(engine)
        self._outermost = parts  # what is added sees every request once, and answers as they are written
        self._lanes = ModelLanes(self)
        self.lane, self.choose = self._lanes.lane, self._choose
        engine.watch(self._follow)

    def _follow(self, catalog: Catalog) -> None:
        """Follows the catalogue after the others that watch, whose word this takes."""
        self.parts.load(catalog)
        parts = self.parts.in_order()
        if hasattr(self, "pictures") or any(entry.vision for entry in catalog.entries.values()):
            self.with_pictures().renew(
                catalog, [part.picture_model for part in parts if part.picture_model is not None]
            )
        self.parts.follow(catalog)
        self.observers, self.see_pictures = self.parts.observers, self.parts.see_pictures
        self._renew_lanes()

    def _renew_lanes(self) -> None:
        self._lanes.renew((*self._outermost, *self.parts.in_order()))

    def _choose(self, entry: ModelEntry, fields: Mapping[bytes, bytes], tensors: bool) -> Choice | None:
        if self.parts.loads_for(fields, self.engine.catalog):
            self._renew_lanes()
        return self._lanes.choose(entry, fields, tensors)

    def picture_model(self, entry: ModelEntry, options: Mapping[str, str]) -> PictureModel:
        """Returns what takes the pictures of requests with these options on picture routes."""
        if self.parts.loads_for_options(options, self.engine.catalog):
            self._renew_lanes()
        for part in self.parts.in_order():
            found = None if part.picture_model_for is None else part.picture_model_for(entry, options)
            if found is not None:
                return found
        return self.with_pictures().model(entry)

    def look_up(self, name: str, version: str = "") -> ModelEntry:
        """The version asked for or the newest; raises `NotFound`, `Unavailable` when it may come, or
        `NotLoaded` when that is only to be asked for."""
        catalog = self.engine.catalog
        entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
        if entry is None:
            if not self.engine.serving:
                raise not_serving()
            error = _absent(catalog, name, version)
            # While a start goes on, as after the end of an engine, what is not there yet may come.
            raise not_serving() if isinstance(error, NotFound) and not catalog.ready else error
        return entry

    def close(self) -> None:
        self.demands.close()
        self.parts.close()
        for part in self._outermost:
            if part.close is not None:
                part.close()
        super().close()


class ModelLanes:
    """Makes what the requests for each version pass, once for each catalogue. The parts stand in the order of
    wrapping, from the client to the engine; what a part returns as it is, is not there at all. Innermost is
    `Request.place`: its content goes into a slot there. Observers (traces, drift) see how requests end and
    change nothing: they wrap nothing.
    """

    def __init__(self, service: CallService) -> None:
        self._service = service
        self._parts: Sequence[FrontPart] = ()
        self._placing = places_at(service.engine)
        self._made: dict[int, ModelLane] = {}  # by the entry's key

    def renew(self, parts: Sequence[FrontPart]) -> None:
        """Makes all lanes anew, of these parts."""
        self._parts = parts
        self._made.clear()

    def lane(self, entry: ModelEntry) -> ModelLane:
        lane = self._made.get(entry.key)
        if lane is None or lane.entry is not entry:  # another engine numbers anew
            lane = self._made[entry.key] = self._make(entry)
        return lane

    def choose(self, entry: ModelEntry, fields: Mapping[bytes, bytes], tensors: bool) -> Choice | None:
        for part in self._parts:
            choice = None if part.choose is None else part.choose(entry, fields, tensors)
            if choice is not None:
                return choice
        return None

    def _make(self, entry: ModelEntry) -> ModelLane:
        infer: Infer = self._placing
        holds_back: Callable[[], bool] | None = None
        early: LooksEarly | None = None
        for part in reversed(self._parts):
            if part.around is not None:
                outer = part.around(infer, entry)
                if outer is not infer:
                    early = None if part.early is None else part.early(entry)
                infer = outer
            if part.holds_back is not None:
                holds_back = part.holds_back(entry) or holds_back
        wrapped = None if infer is self._placing else infer
        divided = self.choose(entry, {}, False) is not None
        return ModelLane(entry, self._service.row(entry), wrapped, holds_back, divided, early)
