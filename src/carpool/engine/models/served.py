"""Represents one version of one model, from loading to unloading: what it is, what answers its requests, what
is counted."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from hashlib import blake2b
from time import monotonic
from typing import Any, Protocol

import orjson

from carpool.config.asked_extensions import asked_extensions
from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import settings_of_answers
from carpool.config.model import InstanceKind, ModelConfig
from carpool.core.job import INFINITY, Job, Reason
from carpool.core.objectives import Promise
from carpool.core.scaling import capacity
from carpool.core.scheduler import Scheduler
from carpool.engine.loading.loadable import Upload
from carpool.engine.profile.model_profile import Profile
from carpool.engine.routes.direct_route import Background
from carpool.engine.run.batch import Route, Work
from carpool.errors import CarpoolError, NotFound, Unavailable
from carpool.observe import columns
from carpool.observe.logs import logger
from carpool.observe.statistics import VersionCounters
from carpool.types import Signature
from carpool.vision.plans.settings import VisionSettings

log = logger("engine")

Gate = Callable[[Scheduler, float], bool]
"""Receives the scheduler's advice on new requests; returns whether it advises to refuse any now."""


class VersionState(enum.StrEnum):
    LOADING = "LOADING"
    READY = "READY"
    UNLOADING = "UNLOADING"
    UNAVAILABLE = "UNAVAILABLE"


class Served:
    """Its settings and tensors are what its files say, once its `runtime` has loaded them."""

    def __init__(
        self,
        config: ModelConfig,
        version: str,
        counters: VersionCounters,
        runtime: Callable[[Served], Runtime],
        *,
        identity: object = None,
        upload: Upload | None = None,
    ) -> None:
        self.name = config.name
        self.version = version
        self.identity = identity  # equal for what is made of the same files and settings
        self.config = config
        self.state = VersionState.LOADING
        self.signature = Signature(config.name, (), ())
        self.labels: Mapping[str, Sequence[str]] = {}  # by output
        self.vision: VisionSettings | None = None  # how it answers pictures, if it does
        self.pictures: Mapping[str, Any] | None = None  # the same for front ends; None: it takes only tensors
        self.profile: Profile | None = None  # as it was loaded; what is believed now is the scheduler's
        self.load_s = 0.0
        self.choices: Sequence[str] = ()  # what was chosen for it and why, in words
        self.counters = counters
        self._upload = upload
        self.runtime = runtime(self)

    @property
    def runs_nothing(self) -> bool:
        """Returns whether its requests are answered by other models, its steps, alone."""
        return bool(self.config.needs)

    @property
    def writes(self) -> bool:
        """Returns whether it has no batches: each of its answers comes part by part."""
        return any(one.no_batches for one in asked_extensions(self.config))

    @property
    def promises(self) -> bool:
        return isinstance(self.config.policy, Promise) and not self.writes

    @property
    def slo(self) -> float:
        policy = self.config.policy
        return policy.slo if isinstance(policy, Promise) else INFINITY

    @property
    def hosted(self) -> bool:
        """It runs in another process."""
        return self.runtime.hosted

    @property
    def able(self) -> bool:
        """Returns whether it could run a request now."""
        return not self.runtime.why_not

    @property
    def why_not(self) -> str:
        return self.runtime.why_not

    @property
    def scheduler(self) -> Scheduler | None:
        return self.runtime.scheduler

    def answers_digest(self) -> str:
        """Returns a digest of all that its answers follow from: two models that have the same one answer the
        same."""
        settings = settings_of_answers(self.config)
        parts = [self.runtime.made_of(), settings, self.pictures, self.labels]
        text = orjson.dumps(parts, default=list, option=orjson.OPT_NON_STR_KEYS)
        return blake2b(text, digest_size=16).hexdigest()

    # ---- coming and going -------------------------------------------------------------------------------

    async def load(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Load, warm up and measure, off the loop; it serves once it is offered. Raises what went wrong."""
        began = monotonic()
        try:
            await self.runtime.load(progress)
        except CarpoolError:
            self.state = VersionState.UNAVAILABLE
            raise
        seconds = self.load_s = monotonic() - began
        self.counters.row.set(columns.LOAD_SECONDS, seconds)
        self.counters.row.set(columns.UNBATCHED, float(bool(self.signature.unbatched)))
        if self.profile is not None:
            self.counters.row.set(columns.RUN_MEMORY, self.profile.memory.service)
        facts = {} if self.runs_nothing else self._facts()
        log.info("model-ready", model=self.name, version=self.version, **facts, seconds=round(seconds, 3))

    def _facts(self) -> dict[str, object]:
        """Returns what an operator wants to know of one that serves; why it is so is in its profile."""
        config, profile = self.config, self.profile
        facts: dict[str, object] = {"engine": config.backend, "device": _device(config)}
        if profile is not None:
            facts["instances"] = f"{profile.layout.instances}x{profile.layout.threads}"
            if profile.provisional:
                facts["provisional"] = profile.provisional
        facts["max_batch"] = self.signature.max_batch
        if self.signature.unbatched:
            facts["unbatched"] = self.signature.unbatched
        if isinstance(config.policy, Promise):
            facts["slo_ms"] = round(config.policy.slo * 1e3, 3)
        if self.scheduler is not None and (able := capacity(self.scheduler)):
            facts["capacity_rps"] = round(able, 1)
        return facts

    def offer(self, gate: Gate) -> None:
        self.state = VersionState.READY
        self.counters.row.set(columns.SLO_SECONDS, self.slo if self.slo < INFINITY else 0.0)
        if self.promises:
            self.counters.row.set(columns.SPEED_RATIO, 1.0)
        self.runtime.offered(gate)

    def withdraw(self) -> None:
        """Stops offering the version; requests that come all the same are still served."""
        self.state = VersionState.UNLOADING

    async def retire(self) -> None:
        """Frees the model after its last request, however long that takes."""
        await self.runtime.finish(None)
        await self._close()

    async def unload(self, timeout: float) -> None:
        """Finish what was accepted, within this time, and free the model."""
        self.withdraw()
        waiting = await self.runtime.finish(timeout)
        if waiting is not None:
            log.warning("drain-timeout", model=self.name, waiting=waiting)
        await self._close()

    async def _close(self) -> None:
        self.state = VersionState.UNAVAILABLE
        await self.runtime.close()
        if self._upload is not None:
            await asyncio.to_thread(self._upload.leave)
            self._upload = None


class Runtime:
    """Answers the requests of one version. It is used in the loop's thread. This base class gives no advice
    and has no instances that could be lost."""

    hosted = False  # it runs in another process
    loop: asyncio.AbstractEventLoop | None = None  # None before it is loaded
    scheduler: Scheduler | None = None  # also None for what forms no batches
    rows: Sequence[str] = ()  # the names of its parts that are counted in rows of their own

    def __init__(self, served: Served) -> None:
        self.served = served

    @property
    def why_not(self) -> str:
        """Why it could not run any request now; empty: it could, which is what readiness means."""
        raise NotImplementedError

    @property
    def idle(self) -> bool:
        """Returns whether no request waits or runs, and nothing would be lost if it were unloaded."""
        return True

    def route(self) -> Route:
        """Returns how requests are answered."""
        raise NotImplementedError

    def groups(self) -> OpensGroups | None:
        """Returns what lets in together the requests that front ends make of one; None: they make none."""
        return None

    def background_route(self) -> Background:
        """Returns the route for background work."""
        why = f"{self.served.name} forms no batches, and background work runs only beside batches"
        raise Unavailable(why, reason="background")

    def riding(self, _number: int) -> Sequence[Job]:
        """Requests that the instance of this number is busy with."""
        return ()

    def asked_for(self, _work: Work) -> Iterable[tuple[Work, Served]] | None:
        """Returns the requests to other models that are under way for this request, and those models. None:
        the request runs on an instance of its own model."""
        return None

    def document(self, _now: float) -> Mapping[str, Any]:
        """Returns what is known of its times."""
        raise NotFound(f"{self.served.name} is an ensemble: each of its steps has its own profile")

    def made_of(self) -> Sequence[str]:
        """Returns digests of its files."""
        raise NotImplementedError

    async def check(self) -> None:
        """Raises what can be seen to be wrong without loading."""

    async def load(self, progress: Callable[[str], None]) -> None:
        """Loads until it can run. What its version learns of itself by that is written there."""
        raise NotImplementedError

    def offered(self, gate: Gate) -> None:
        """Requests come from now on; `gate` has advice for those who send them."""

    def work_beside(self) -> Coroutine[Any, Any, None] | None:
        """Returns work that goes on while the version serves, until it is withdrawn."""
        return None

    def rebind(self) -> None:
        """Other versions are offered than before."""

    def holds(self, _served: Served) -> bool:
        """Returns whether one of its requests is on its way to this version."""
        return False

    def look_at_instances(self) -> None:
        """One of them was lost or placed, or the process that runs them has stalled or moves again."""

    def refused_elsewhere(self, requests: int, reason: Reason, source: str) -> None:
        """Counts requests that front ends rejected on its advice."""

    async def finish(self, timeout: float | None) -> int | None:
        """Waits for what was accepted. With a time limit nothing new is accepted, and the number of those who
        wait when it is over is returned; None if nothing is left."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Group(Protocol):
    """Defines one admission for many requests. Used in the loop's thread; errors that are no `CarpoolError`
    and no `ProtocolError` are faults of the server."""

    failed: CarpoolError | None  # what every later request of it is answered with

    def asks(self, step: int, work: Work, now: float) -> None:
        """Takes one of its requests, and may change its deadline. Raises what keeps it from being run."""

    def reaches(self, step: int, images: int) -> None:
        """Notes that so many images come to this step."""

    def over(self, now: float, *, answered: bool) -> None:
        """Ends it: the front end has answered, or no client waits for it any more."""


class OpensGroups(Protocol):
    """Defines what lets in groups of requests: to the steps of a model that is made of others, or to one that
    gets an image in parts. Of those, a step is the number of images of the whole."""

    name: str

    def opened(self, step: int, work: Work, now: float) -> Group | None:
        """Returns a group for the first of its requests; None: no group begins with this step. Raises what
        the gate says."""


def _device(config: ModelConfig) -> str:
    kinds = {group.kind for group in config.instances}
    if InstanceKind.GPU in kinds:
        gpus = sorted({gpu for group in config.instances for gpu in group.gpus})
        return ",".join(f"cuda:{gpu}" for gpu in gpus) or "cuda"
    chooses = kind_of(config.backend).pictures_on_device  # a GPU where there is one: only the runner knows
    return "auto" if chooses and kinds != {InstanceKind.CPU} else "cpu"
