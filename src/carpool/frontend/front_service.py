"""What requests need of their front end, over every protocol; and which features are wrapped around the
engine, in which order."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import islice

from carpool.errors import CarpoolError, NotFound, Unavailable
from carpool.frontend.caches.caching_door import Caching
from carpool.frontend.caches.front_caches import CacheParts, Caches
from carpool.frontend.calls.asking import Feature, Infers
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.placed_call import Placing
from carpool.frontend.calls.routing import Routing
from carpool.frontend.demands import Demands, NotLoaded
from carpool.frontend.documents import served_versions
from carpool.frontend.pictures.picture_service import is_pipeline
from carpool.frontend.pictures.pipeline_run import PipelineDoor
from carpool.frontend.pictures.sampling import Sampler
from carpool.frontend.rollout.mirror import Mirror
from carpool.frontend.rollout.mirroring_door import Mirroring
from carpool.frontend.traces.tracing import Tracer
from carpool.link.door import UNLOADED, Catalog, Door, ModelEntry
from carpool.observe.counters import Block

_LONGEST_SHOWN = 80
_MOST_COMPARED = 5
_MOST_LOOKED_AT = 200


def is_model_ready(door: Door, entry: ModelEntry) -> bool:
    return door.serving and entry.key not in door.catalog.down


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
            if name in catalog.on_demand:
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
        door: Door,
        block: Block,
        max_body_bytes: int,
        picture_threads: int,
        cache: CacheParts | None = None,
        forward: ForwardedHeaders | None = None,
        features: Sequence[Feature] = (),
    ) -> None:
        super().__init__(name, door, block, max_body_bytes, picture_threads, forward)
        self.routing = Routing(door)
        self.demands = Demands(door)
        self.caches = Caches(door, block, cache or CacheParts())
        self.mirror = Mirror(door, self.pictures, self.threads, self.row)
        self._sampling = Sampler(door, self.pictures.workers)
        self.tracer = Tracer(door, self._observe)
        self._features = Features(self, features)
        door.watch(self._follow)

    def _follow(self, catalog: Catalog) -> None:
        """Follows the catalogue after the others that watch, whose word this takes."""
        self.sampler = self._sampling if self._sampling.follow(catalog) else None
        self.features = self._features.of_each(catalog)
        self._observe()

    def _observe(self) -> None:
        seers = (self.sampler, self.tracer if self.tracer.on else None)
        self.observers = tuple(one for one in seers if one is not None)

    def look_up(self, name: str, version: str = "") -> ModelEntry:
        """The version asked for or the newest; raises `NotFound`, `Unavailable` when it may come, or
        `NotLoaded` when that is only to be asked for."""
        catalog = self.door.catalog
        entry = catalog.entries.get((name, version)) if version else catalog.newest.get(name)
        if entry is None:
            if not self.door.serving:
                raise not_serving()
            error = _absent(catalog, name, version)
            # While a start goes on, as after the end of an engine, what is not there yet may come.
            raise not_serving() if isinstance(error, NotFound) and not catalog.ready else error
        return entry

    def close(self) -> None:
        self.tracer.close()
        self.demands.close()
        self._sampling.close()
        self.mirror.close()
        super().close()
        self.caches.close()


class Features:
    """What requests get besides being run, for each version that has any of it.

    The order, from the engine to the client; each is a wrapper with the `infer` of a door:

    1. The door, with `--record` in a `RecordingDoor` (process/front_ends.py): what comes to the engine is
       noted where it arrives.
    2. `PipelineDoor`: one request is many for the doors below, and one for what is above.
    3. `Placing`: contents go into slots here, and outputs become answers. Below are tensors in memory, above
       are contents that can be looked at, and offered more than once.
    4. `MirroringDoor`: a request that runs again on stable is placed again.
    5. `CachingDoor`: what is known is not even placed; and what stable answered in a candidate's place is not
       kept as the candidate's.
    6. Those that somebody adds: they see every request for a model once, and answers as they are written.

    What is switched off for a version is not wrapped. Versions without any of it have no entry here, and
    their requests go straight to the door. Observers (traces, drift) see how requests end and change nothing:
    they wrap nothing.
    """

    def __init__(self, service: FrontService, more: Sequence[Feature]) -> None:
        self._placing = Placing(service, service.door)
        self._pipelines = Placing(service, PipelineDoor())
        caching, mirroring = Caching(service, service.caches), Mirroring(service.routing, service.mirror)
        self._order: Sequence[Feature] = (mirroring, caching, *more)

    def of_each(self, catalog: Catalog) -> dict[int, Infers]:
        """Returns what serves each version, by the entry's key."""
        found: dict[int, Infers] = {}
        for entry in (*catalog.leaving, *catalog.entries.values()):
            infers: Infers = self._pipelines if is_pipeline(entry) else self._placing
            for feature in self._order:
                infers = feature.around(infers, entry)
            if infers is not self._placing:
                found[entry.key] = infers
        return found
