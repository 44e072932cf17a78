"""The whole server without sockets: load models, infer, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic as now
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from carpool.backends.device_memory import limit_device_memory
from carpool.config.model import ModelConfig
from carpool.config.presets import PictureChoice
from carpool.config.repository import find_models, with_promise
from carpool.core.job import INFINITY, NEW, JobOptions, JobOrigin
from carpool.engine.fleet.control import Checks, LoadListener, ModelControl
from carpool.engine.fleet.fleet import Fleet, Publisher
from carpool.engine.loading.loadable import Override
from carpool.engine.models.served import Served, VersionState
from carpool.engine.profile.hardware import gpu_count
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.routes.direct_route import NO_ROUTE
from carpool.engine.run.batch import Outcome, Route, Work
from carpool.engine.run.model_inputs import check_inputs, only_input, shape_key
from carpool.errors import CarpoolError, ConfigError, InvalidInput, NotFound, Unavailable, Unsupported
from carpool.link.catalog import ASK, UNLOADED, IndexEntry, LoadingStep
from carpool.link.templates import RequestForm
from carpool.observe.counters import Block, Table, table_bytes
from carpool.observe.logs import logger
from carpool.types import Array

if TYPE_CHECKING:
    from carpool.engine.fleet.model_calls import InstanceCalls, ModelCalls
    from carpool.engine.fleet.on_demand import OnDemand
    from carpool.engine.models.runtime import ModelProcess
    from carpool.vision.geometry import Geometry
    from carpool.vision.python_pictures import Answer, Picture

log = logger("engine")

StartProgress = Callable[[LoadingStep], None]
"""Receives the progress of a start, from any thread."""


class Engine:
    """Serves models to the process it lives in.

        async with Engine("models/", slo_ms=50) as engine:
            answer = await engine.infer("resnet", {"images": batch})

    Everything is called from one asyncio loop. `paths` are model files, model folders or repositories.
    What is measured is kept in `cache_dir`, or in `profiles`, and checked instead of measured the next time.
    """

    def __init__(
        self,
        *paths: str | Path,
        slo_ms: float | None = None,
        pictures: PictureChoice | None = None,
        table: Table | None = None,
        block: Block | None = None,
        cache_dir: str | Path | None = None,
        profiles: ProfileStore | None = None,
        device_memory_gb: float | None = None,
        on_demand: bool = False,
        memory_gb: float | None = None,
        host: ModelProcess | None = None,
        publisher: Publisher | None = None,
        loads: Callable[[], LoadListener] = LoadListener,
    ) -> None:
        """With `on_demand`, models are loaded on their first request, and freed for others. Models that
        `host` takes run in its process, and answer only requests in memory that it maps. `publisher`
        announces to others what is offered; `loads` returns the listener of the next load."""
        self.paths = [Path(path) for path in paths]
        self._slo_ms = slo_ms
        self._calls: ModelCalls | None = None  # of models that ask others, once there is one
        self._pictures = pictures or PictureChoice()
        self.table = table or Table(bytearray(table_bytes(1)))
        limit_device_memory(device_memory_gb)
        profiles = profiles or ProfileStore.of(None if cache_dir is None else Path(cache_dir))
        self.block = block or self.table.block(0)  # that this process counts in
        self.fleet = Fleet(self.table, self.block, publisher or Publisher(), profiles, host, self._calls_of)
        self.control = ModelControl(self.paths, self.fleet, self._with_promise, loads, on_demand=on_demand)
        self.on_demand: OnDemand | None = None
        if on_demand:
            from carpool.engine.fleet.on_demand import OnDemand

            self.on_demand = OnDemand(self.control, self.fleet, memory_gb)

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- models -----------------------------------------------------------------------------------------

    @property
    def served(self) -> Mapping[int, Served]:
        """Returns what is offered now, by the number that `submit` takes."""
        return self.fleet.offered

    async def start(
        self,
        progress: StartProgress = lambda _step: None,
        *,
        only: Collection[str] | None = None,
        some: bool = True,
        patient: bool = False,
    ) -> Mapping[str, CarpoolError]:
        """Load every model, or only these, side by side; each serves as soon as it is warm.

        On demand, nothing is loaded yet, but every model's settings are read. Mistakes that can be found
        without loading are reported before anything is loaded. Without `some`, there may be no model. With
        `patient`, models that do not load are left for later, and their errors are returned by name: the
        index has them, too.
        """
        try:
            mistakes: dict[str, ConfigError] | None = {} if patient else None
            found, _ = find_models(self.paths, gpus=gpu_count(), only=only, some=some, mistakes=mistakes)
            self.control.steps.expect(source.config for source in found)
            there = await self.control.find()
            if self.on_demand is not None:
                self.on_demand.expect(there, {source.config.name: source for source in found})
                return self.control.note_mistakes(mistakes or {})
            names = list(there if only is None else dict.fromkeys(only))
            return await self._load_together(names, progress, patient=patient)
        except BaseException:
            if not self.control.closed:  # else the caller of `stop` handles what was accepted
                await self.stop(0.0)
            raise

    async def _load_together(
        self, names: Sequence[str], progress: StartProgress, *, patient: bool
    ) -> Mapping[str, CarpoolError]:
        checks = Checks(names)
        under_way = dict.fromkeys(names, "waiting")
        failed: dict[str, CarpoolError] = {}

        def tell(name: str, step: str) -> None:  # also from threads that load, each for a model of its own
            under_way[name] = step
            progress(LoadingStep(name, step, len(names) - len(under_way) + 1, len(names)))

        async def load(name: str) -> None:
            try:
                await self.control.load(name, progress=tell, checks=checks)
            except CarpoolError as error:
                if not patient:
                    raise
                failed[name] = error
            del under_way[name]
            for other, step in list(under_way.items())[:1]:
                tell(other, step)

        await asyncio.gather(*map(load, names))
        return failed

    async def load(
        self, model: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Load a model, or load it again from its changed folder, while everything else goes on.

        Requests are answered by what was there until all that replaces it is warm. `config` stands in for the
        model's settings, in Triton's JSON form; `files`, named like 1/model.onnx, for its whole folder. Both
        last until the next load. Raises what is wrong, and then nothing has changed.
        """
        override = Override(config, files) if config is not None or files else None
        await self.control.load(model, override)

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        """Take no new requests for a model, and free it when those it has are answered. Ensembles that need
        it go with it; with `dependents`, the steps of an ensemble too."""
        await self.control.unload(model, dependents=dependents)

    def _with_promise(self, config: ModelConfig) -> ModelConfig:
        """And with what is said about its pictures."""
        config = self._pictures.applied(config)
        slo_ms, may_grow = self._slo_ms, False
        if slo_ms is None:
            promised = self.control.steps.promised(config)
            if promised is None:
                return config
            slo_ms, may_grow = promised.slo * 1e3, promised.may_grow
        config, warnings = with_promise(config, slo_ms)
        config = replace(config, slo_may_grow=may_grow)
        for warning in warnings:
            log.warning("config", message=warning)
        return config

    async def stop(self, timeout: float = 10.0) -> None:
        """Finish what was accepted, within this time, and free everything."""
        await self.control.close()
        await self.fleet.stop(timeout)

    @property
    def folders(self) -> tuple[str, ...]:
        """Where the models were looked for, as sentences may name it."""
        return tuple(str(form) for path in self.paths for form in (path.absolute(), path.resolve()))

    def look_at_instances(self) -> None:
        """The process that runs some of the models has stalled, or moves again."""
        for served in (*self.fleet.offered.values(), *self.fleet.leaving.values()):
            if served.hosted:
                served.runtime.look_at_instances()

    def index(self) -> list[IndexEntry]:
        """Returns every model that was found, and how each of its versions is."""
        return self.control.index()

    def find(self, name: str, version: str = "") -> Served:
        """Returns the version that serves this request; without one, the newest that is ready."""
        return self._choose(name, version)[1]

    def _choose(self, name: str, version: str) -> tuple[int, Served, Route]:
        found = self.fleet.find(name, version or -1)
        if found is None:
            raise self._absent(name, version)
        return found

    def _absent(self, name: str, version: str) -> CarpoolError:
        if self.control.closed and self.fleet.leaving:
            return Unavailable("the engine is stopping", reason="stopping")
        for line in self.index():
            may_come = (
                line.state in (VersionState.LOADING, VersionState.UNAVAILABLE) and line.reason != UNLOADED
            )
            if line.name == name and version in ("", line.version) and may_come:
                why = f": {line.reason}" if line.reason else ""
                return Unavailable(f"{name} is {line.state.lower()}{why}", reason="not-ready")
        wanted = f"{name} version {version}" if version else name
        names = ", ".join(sorted(self.fleet.newest))
        return NotFound(f"there is no model {wanted}; there are {names or 'none'}")

    def _calls_of(self, served: Served) -> Callable[[int], InstanceCalls]:
        """Returns what makes the calls of its instances, by their numbers: in the threads that load them."""
        if self._calls is None:
            from carpool.engine.fleet.model_calls import ModelCalls

            self._calls = ModelCalls(self)
        return partial(self._calls.caller, served)

    def bring_for(self, name: str, caller: Served) -> Coroutine[Any, Any, None] | None:
        """Returns the load of a model that another one calls, or None if it needs none. While the caller is
        itself being loaded, it gets none: both would be measured, and each would wait for the other."""
        if self.on_demand is None or name in self.fleet.newest or caller.state is VersionState.LOADING:
            return None
        return self.on_demand.bring(name)

    # ---- inference --------------------------------------------------------------------------------------

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, Array] | Array,
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        deadline_ms: float | None = None,
        priority: int = 0,
        source: str = "",
        latest: bool = False,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> dict[str, Array]:
        """Answer one request. Arrays may come with or without the batch dimension; the answer matches.

        With `latest`, a newer frame of the same `source` takes its place while it waits (`errors.Replaced`).
        Models with sequences need a `sequence_id`.
        """
        if latest and not source:
            raise InvalidInput(
                "latest needs a source: newer frames of the same source replace it", field="latest"
            )
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(_work: Work, outcome: Outcome) -> None:
            if not answer.done():
                answer.set_result(outcome)

        if self.on_demand is not None:
            await self.on_demand.bring(model)
        key, work, single = self.prepare(model, inputs, version, outputs, done)
        if deadline_ms is not None:
            work.deadline = work.due = work.arrived + deadline_ms / 1e3
        work.origin, work.options = JobOrigin(source), JobOptions(priority, latest=latest)
        if sequence_id:
            is_text, is_flag = isinstance(sequence_id, str), sequence_id is True
            if not is_text and (is_flag or not isinstance(sequence_id, int) or not 0 < sequence_id < 2**64):
                raise InvalidInput("sequence_id must be 0 to 2^64 - 1, or text", field="sequence_id")
            work.own_extras().parameters = {
                "sequence_id": sequence_id,
                "sequence_start": sequence_start is True,
                "sequence_end": sequence_end is True,
            }
        self.submit_own(key, work)
        try:
            outcome = await answer
        except asyncio.CancelledError:
            self.cancel(work)
            raise
        if outcome.outputs is None:
            raise outcome.error or CarpoolError(f"{model} gave no response")
        return {name: array[0] if single else array for name, array in outcome.outputs.items()}

    def prepare(
        self,
        model: str,
        inputs: Mapping[str, Array] | Array,
        version: str,
        outputs: Sequence[str],
        done: Callable[[Work, Outcome], None],
    ) -> tuple[int, Work, bool]:
        """A request that fits its model, to be submitted under this number; and whether its arrays came
        without the batch dimension, which the answer then should not have either."""
        key, served, _ = self._choose(model, version)
        if served.hosted and self.fleet.memory is None:
            raise Unsupported(f"{model} runs in another process: only front ends reach it")
        if served.config.decoupled:
            raise Unsupported(f"{model} gives any number of responses to a request: only clients can call it")
        signature = served.signature
        given = inputs if isinstance(inputs, Mapping) else {only_input(signature).name: inputs}
        arrays, single = check_inputs(signature, given)
        for name in outputs:
            if name not in signature.output_named:
                raise InvalidInput(f"{model} has no output {name!r}", field=name)
        images = len(next(iter(arrays.values()))) if signature.max_batch else 1
        shape = shape_key(signature, arrays)
        return key, Work(arrays, done, now(), INFINITY, images, shape, RequestForm(tuple(outputs))), single

    async def predict(
        self,
        first: Picture,
        second: Picture | None = None,
        /,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        **options: object,
    ) -> Answer:
        """The answer to a picture as image routes give it: `predict(picture)` or `predict(model, picture)`.

        Without a model, the first that takes pictures answers. Options are those of the model's task, such as
        top_k.
        """
        # OpenCV comes along, which no server's engine needs.
        from carpool.vision.plans.picture_plan import PicturePlan
        from carpool.vision.python_pictures import picture_file, typed

        picture = first if second is None else second
        if second is not None:
            if model or not isinstance(first, str):
                raise InvalidInput("predict takes an image, or a model's name and an image", field="model")
            model = first
        if model and self.on_demand is not None:
            await self.on_demand.bring(model)
        served = self.find(model or self._first_for_pictures(), version)
        model = served.name
        if served.vision is None:
            ask = served.config.parameters.get(ASK)
            why = f"; for images: {ask}" if ask else ""
            raise InvalidInput(
                f"{model} takes tensors, not images: use infer{why}", reason="no-task", field="model"
            )
        plan = PicturePlan(served.vision, model)
        asked = plan.read_options(options)
        name = plan.settings.input.name

        def prepare() -> tuple[Array, Geometry]:
            data = picture_file(picture)
            memory = bytearray(plan.bytes)
            geometry = plan.prepare(data, memory)
            pixels = np.ndarray(plan.transform.shape, plan.transform.dtype, memory)
            whole = len(served.signature.input_named[name].shape) > pixels.ndim  # with a batch of its own
            return pixels[None] if whole else pixels, geometry

        pixels, geometry = await asyncio.to_thread(prepare)
        wanted = [spec.name for spec in plan.settings.outputs]
        outputs = await self.infer(
            model, {name: pixels}, version=version, outputs=wanted, deadline_ms=deadline_ms
        )
        answer = await asyncio.to_thread(plan.answer, outputs, geometry, asked)
        return typed({"model": served.name, "version": served.version, **plan.assumed, **answer})

    def _first_for_pictures(self) -> str:
        ready = {served.name for served in self.fleet.offered.values() if served.vision is not None}
        for line in self.index():
            if line.name in ready:
                return line.name
        raise NotFound("no model here takes images", reason="no-task")

    def submit(self, key: int, works: Sequence[Work]) -> None:
        """The servers' way in, for what came at once: `work.done` is called exactly once for each, whatever
        happens."""
        self.fleet.routes.get(key, NO_ROUTE).submit(works)

    def submit_own(self, key: int, work: Work) -> None:
        """Submits a request that was prepared here. A model in another process gets its tensors in memory
        that both map."""
        memory = self.fleet.memory
        if memory is not None and self.served[key].hosted:
            memory.place(key, work)
        self.submit(key, [work])

    def submit_background(self, key: int, work: Work) -> None:
        """Submits background work, as `submit` submits requests."""
        try:
            self.fleet.background_route(key).submit([work])
        except CarpoolError as error:
            work.done(work, Outcome(error=error))
        except Exception as error:  # no client's request is to fail with it
            log.exception("background-failed", key=key)
            if work.state is NEW:
                work.done(work, Outcome(error=CarpoolError(f"the engine failed: {error}")))

    def cancel(self, work: Work) -> None:
        if work.route is not None:
            work.route.cancel(work)
