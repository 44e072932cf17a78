"""An engine that gives back what it gets, at once or when it is told to: the source of a request says which.

hold    waits in the queue until `release`, and can be cancelled there
run     runs until `release`: a cancellation has to wait
refuse, missing, wrong, twice, nothing    go wrong in one way each
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from carpool.config.server import ServerSettings
from carpool.core.job import GONE, OFFERED, READY
from carpool.engine.engine_link import EngineSide
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import Cancelled, ConfigError, NotFound, Refused
from carpool.link.catalog import Batching, Catalog, ModelEntry, PublishedModel, Traits
from carpool.memory.client_files import OpenRegion
from carpool.types import Array, Datatype, Signature, TensorSpec, Timing

TIMING = Timing(queue=0.5, input=0.25, infer=2.0, output=0.125, batch=7)


def entry(key: int, name: str, datatype: Datatype, shape: tuple[int, ...], max_batch: int = 8) -> ModelEntry:
    signature = Signature(
        name, (TensorSpec("x", datatype, shape),), (TensorSpec("y", datatype, shape),), max_batch
    )
    config = {"name": name, "max_batch_size": max_batch}
    published = PublishedModel("echo", config, {"y": ["cat", "dog"]})
    return ModelEntry(key, name, "1", signature, Batching("eager"), published=published, row=(key, 1))


def picture_entry(key: int, name: str) -> ModelEntry:
    """Takes pictures' files, and gives them back."""
    plain = entry(key, name, Datatype.UINT8, (3, 2, 2))
    signature = replace(plain.signature, outputs=(TensorSpec("y", Datatype.UINT8, (-1,)),))
    return replace(
        plain,
        signature=signature,
        vision={"encoded": True, "input": {"name": "x", "datatype": "UINT8", "shape": [3, 2, 2]}},
    )


def told_entry(key: int, name: str) -> ModelEntry:
    """Is told what requests say of themselves."""
    plain = entry(key, name, Datatype.FP32, (4,))
    return replace(plain, signature=replace(plain.signature, told=True))


MODELS = (
    entry(1, "fixed", Datatype.FP32, (4,)),
    entry(2, "loose", Datatype.UINT8, (-1,)),
    entry(3, "words", Datatype.BYTES, (-1,)),
    entry(4, "flags", Datatype.BOOL, (3,)),
    entry(5, "single", Datatype.INT64, (2, 2), max_batch=0),
    picture_entry(6, "pictures"),
    replace(entry(7, "fetching", Datatype.FP32, (4,)), traits=Traits(fetches=True)),
    replace(entry(8, "fetching flags", Datatype.BOOL, (3,)), traits=Traits(fetches=True)),
    told_entry(9, "told"),
    replace(entry(10, "many", Datatype.FP32, (4,)), traits=Traits(decoupled=True)),
)


def catalog_of(number: int, entries: Sequence[ModelEntry]) -> Catalog:
    return Catalog(
        number,
        True,
        {(model.name, model.version): model for model in entries},
        {model.name: model for model in entries},
    )


class EchoRoutes:
    """Stands in for the routes by key, and for each of them."""

    def __init__(self, engine: EchoEngine, key: int = 0) -> None:
        self._engine = engine
        self._key = key
        self.ready, self.cancel = engine.ready, engine.cancel

    def get(self, key: int, _default: object) -> EchoRoutes:
        return EchoRoutes(self._engine, key)

    def submit(self, works: Sequence[Work]) -> None:
        for work in works:
            work.route = self
        self._engine.submit(self._key, works)


class EchoEngine:
    """Stands in for `EngineHost`."""

    def __init__(self) -> None:
        self.waiting: list[Work] = []
        self.running: list[Work] = []
        self.coming: list[Work] = []  # all that were offered before their inputs
        self.submitted = 0
        self.routes = EchoRoutes(self)
        self.groups: dict[int, object] = {}  # it has none
        self.together: list[tuple[int, int]] = []  # by key, how many came at once
        self.catalog = catalog_of(1, MODELS)
        self.regions: dict[int, OpenRegion] = {}
        self.drained = False
        self._listeners: list[Callable[[Catalog], None]] = []

    def submit(self, key: int, works: Sequence[Work]) -> None:
        self.together.append((key, len(works)))
        for work in works:
            self._submit(key, work)

    def _submit(self, key: int, work: Work) -> None:
        self.submitted += 1
        if work.course.ready_at > 0.0 and work.origin.source != "refuse":
            work.state = OFFERED
            self.coming.append(work)
        elif work.origin.source == "hold":
            self.waiting.append(work)
        elif work.origin.source == "run":
            self.running.append(work)
        elif work.origin.source == "explode":
            raise RuntimeError("the engine exploded")
        else:
            self.finish(work)

    def ready(self, work: Work) -> None:
        if work.state is OFFERED:
            work.state = READY
            self.finish(work)

    async def open(self) -> None:
        """There is nothing to load."""

    def set_ready(self, ready: bool) -> None:
        """It always was."""

    def give_up_loads(self) -> None:
        """It loads nothing."""

    def share(self, arena: int, file: int) -> None:
        """No model of it runs elsewhere."""

    def unshare(self, arena: int) -> None:
        """Nothing was shared."""

    def cancel(self, work: Work) -> None:
        if work in self.waiting or work.state is OFFERED:
            if work in self.waiting:
                self.waiting.remove(work)
            work.state = GONE
            work.done(work, Outcome(error=Cancelled("the client left")))

    def release(self) -> None:
        works = self.waiting + self.running
        self.waiting, self.running = [], []
        for work in works:
            self.finish(work)

    def finish(self, work: Work) -> None:
        outcome = Outcome(timing=TIMING)
        if work.origin.source == "refuse":
            outcome.error = Refused("too much", reason="overload", predicted_ms=12.5, retry_after_s=0.5)
        elif work.origin.source != "nothing" and work.extras.parts is None:
            assert work.place is not None
            outcome.outputs = work.place(self._outputs(work))
        work.done(work, outcome)
        if work.origin.source == "twice":
            work.done(work, outcome)

    def _outputs(self, work: Work) -> Mapping[str, Array]:
        if work.origin.source == "missing":
            return {}
        if work.origin.source == "wrong":
            return {"y": np.zeros((1, 4), np.float64)}
        if work.origin.source == "large":
            return {"y": np.resize(work.inputs["x"], (work.images, 1 << 20))}
        if work.extras.reads is not None:
            work.extras.reads.into("x", fetched := np.empty_like(work.inputs["x"]))
            return {"y": fetched}
        return {"y": work.inputs["x"][None] if work.form.encoded else work.inputs["x"]}

    def listen(self, listener: Callable[[Catalog], None], seen: object = None) -> None:
        self._listeners.append(listener)

    def publish(self, *entries: ModelEntry) -> None:
        self.catalog = catalog_of(self.catalog.number + 1, entries)
        for listener in self._listeners:
            listener(self.catalog)

    async def ask(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if what == "counts":
            return {"waiting": len(self.waiting), "running": len(self.running), "pid": os.getpid()}
        if what == "release":
            self.release()
            return {}
        if what == "load":
            newest = self.catalog.number + 100
            self.publish(*MODELS, entry(newest, f"model{newest}", Datatype.FP32, (4,)))
            return newest
        if what == "absent":
            raise NotFound("there is no such thing", field="name")
        if what == "explode":
            raise RuntimeError("the engine exploded")
        if what == "wait":
            await asyncio.Event().wait()
        return [what, dict(arguments)]

    async def drain(self, timeout: float) -> None:
        self.drained = True


async def start(
    settings: ServerSettings, paths: Sequence[str], *, dropped: Callable[[int], None], **_: Any
) -> tuple[EngineSide, Callable[[], Coroutine[Any, Any, None]]]:
    """What the supervisor's engine process runs in these tests; `paths` says how it goes wrong."""
    fault = paths[0] if paths else ""
    if fault == "config":
        raise ConfigError("model.toml: nobody knows the key 'sloms'")
    if fault == "raise":
        raise RuntimeError("no such device")
    if fault == "die":
        os._exit(9)
    if fault == "never":
        await asyncio.Event().wait()
    engine = EchoEngine()
    if fault == "unready":
        engine.catalog = replace(engine.catalog, ready=False)
    most = settings.max_body_bytes
    return EngineSide(cast(Any, engine), max_answer_bytes=most, dropped=dropped), engine.open
