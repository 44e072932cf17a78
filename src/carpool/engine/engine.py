"""The whole server without sockets: load models, infer, stop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from carpool.clock import now
from carpool.config.model import Mode, ModelConfig
from carpool.config.repository import ModelSource, find_models, with_promise
from carpool.core.job import INFINITY
from carpool.engine.served import Served, State
from carpool.engine.work import Outcome, Work
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable
from carpool.observe.counters import Block, Table, table_bytes
from carpool.observe.logs import logger
from carpool.types import Array, Datatype, Signature, TensorSpec

log = logger("engine")

Progress = Callable[[str, str], None]


class Engine:
    """Serves models to the process it lives in.

        async with Engine("models/", slo_ms=50) as engine:
            answer = await engine.infer("resnet", {"images": batch})

    Everything is called from one asyncio loop. `paths` are model files, model folders or repositories.
    """

    def __init__(
        self,
        *paths: str | Path,
        slo_ms: float | None = None,
        table: Table | None = None,
        block: Block | None = None,
    ) -> None:
        self._paths = [Path(path) for path in paths]
        self._slo_ms = slo_ms
        self.table = table or Table(bytearray(table_bytes(1)))
        self._block = block or self.table.block(0)
        self.served: dict[int, Served] = {}  # by key, a number that is never used again
        self._keys = 0
        self.changed: Callable[[], None] = lambda: None

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # ---- models -----------------------------------------------------------------------------------------

    async def start(self, progress: Progress = lambda _model, _step: None) -> None:
        """Load every model, one after the other, so that each is measured on a quiet machine."""
        sources, warnings = find_models(self._paths)
        for warning in warnings:
            log.warning("config", message=warning)
        try:
            for source in sources:
                await self.add(source, progress)
        except BaseException:
            await self.stop(0.0)
            raise

    async def add(self, source: ModelSource, progress: Progress = lambda _model, _step: None) -> None:
        """Load the versions of one model that its policy asks for."""
        config = self._with_promise(source.config)
        for version in source.versions:
            slot = self.table.directory.assign(config.name, str(version.number))
            served = Served(config, version, slot, self._block.row(slot), self._block.server)
            self._keys += 1
            self.served[self._keys] = served
            self.changed()
            await served.load(lambda step: progress(config.name, step))
            self.changed()

    def _with_promise(self, config: ModelConfig) -> ModelConfig:
        if self._slo_ms is None:
            return config
        config, warnings = with_promise(config, self._slo_ms)
        for warning in warnings:
            log.warning("config", message=warning)
        return config

    async def stop(self, timeout: float = 10.0) -> None:
        """Finish what was accepted, within this time, and free everything."""
        await asyncio.gather(*(served.unload(timeout) for served in self.served.values()))
        for served in self.served.values():
            self.table.directory.retire(served.name, served.version)
        self.served.clear()
        self.changed()

    def find(self, name: str, version: str = "") -> Served:
        """The version that serves this request; without one, the newest that is ready."""
        named = [served for served in self.served.values() if served.name == name]
        if version:
            named = [served for served in named if served.version == version]
        if not named:
            wanted = f"{name} version {version}" if version else name
            raise NotFound(f"there is no model {wanted}; there are {', '.join(self._names()) or 'none'}")
        ready = [served for served in named if served.state is State.READY]
        if not ready:
            raise Unavailable(f"{name} is {named[-1].state.value.lower()}", reason="not-ready")
        return max(ready, key=lambda served: int(served.version))

    def _names(self) -> list[str]:
        return sorted({served.name for served in self.served.values()})

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
    ) -> dict[str, Array]:
        """Answer one request. Arrays may come with or without the batch dimension; the answer matches."""
        served = self.find(model, version)
        signature = served.signature
        given = inputs if isinstance(inputs, Mapping) else {_only_input(signature).name: inputs}
        arrays, single = _check_inputs(signature, given)
        for name in outputs:
            if name not in signature.output_named:
                raise InvalidInput(f"{model} has no output {name!r}", field=name)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        arrived = now()
        work = Work(
            arrays,
            lambda _work, outcome: None if answer.done() else answer.set_result(outcome),
            images=len(next(iter(arrays.values()))) if signature.max_batch else 1,
            wanted=tuple(outputs),
            arrived=arrived,
            deadline=INFINITY if deadline_ms is None else arrived + deadline_ms / 1e3,
            priority=priority,
            source=source,
            shape=shape_key(signature, arrays),
        )
        served.driver.submit(work)
        try:
            outcome = await answer
        except asyncio.CancelledError:
            served.driver.cancel(work)
            raise
        if outcome.outputs is None:
            raise outcome.error or CarpoolError(f"{model} gave no answer")
        return {name: array[0] if single else array for name, array in outcome.outputs.items()}

    def submit(self, key: int, work: Work) -> None:
        """The servers' way in: `work.done` is called exactly once, whatever happens."""
        served = self.served.get(key)
        if served is None or served.state is not State.READY:
            error = Unavailable("the model was unloaded meanwhile", reason="unloading")
            work.done(work, Outcome(error=error))
            return
        if served.config.mode is Mode.EAGER and work.timeout:
            work.deadline = min(work.deadline, work.arrived + work.timeout)
        work.key = key
        served.driver.submit(work)

    def cancel(self, work: Work) -> None:
        served = self.served.get(work.key)
        if served is not None:
            served.driver.cancel(work)


def shape_key(signature: Signature, arrays: Mapping[str, Array]) -> tuple[Any, ...] | None:
    """What must be equal to share a batch: only inputs whose shape may vary can differ."""
    varying = [spec.name for spec in signature.inputs if -1 in spec.shape]
    return tuple(arrays[name].shape[1:] for name in varying) if varying else None


def _only_input(signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        names = ", ".join(spec.name for spec in signature.inputs)
        raise InvalidInput(f"{signature.model} has several inputs ({names}): give them by name")
    return signature.inputs[0]


def _check_inputs(signature: Signature, given: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
    """Arrays with their batch dimension, and whether we added it."""
    for name in given:
        if name not in signature.input_named:
            raise InvalidInput(f"{signature.model} has no input {name!r}", field=name)
    arrays: dict[str, Array] = {}
    added = set()
    for spec in signature.inputs:
        if spec.name not in given:
            raise InvalidInput(f"{signature.model} needs the input {spec.name!r}", field=spec.name)
        array = np.asarray(given[spec.name])
        _check_datatype(spec, array)
        alone = bool(signature.max_batch) and array.ndim == len(spec.shape)
        added.add(alone)
        arrays[spec.name] = array[np.newaxis] if alone else array
        _check_shape(spec, arrays[spec.name], signature)
    if len({len(array) for array in arrays.values()} if signature.max_batch else {1}) > 1 or len(added) > 1:
        raise InvalidInput(f"the inputs of {signature.model} hold different numbers of images")
    return arrays, added == {True}


def _check_datatype(spec: TensorSpec, array: Array) -> None:
    if array.dtype != spec.datatype.dtype:
        hint = " (an array of bytes objects)" if spec.datatype is Datatype.BYTES else ""
        raise InvalidInput(
            f"input {spec.name!r} must be {spec.datatype.value}{hint}, not {array.dtype}", field=spec.name
        )


def _check_shape(spec: TensorSpec, array: Array, signature: Signature) -> None:
    expected = spec.full_shape(signature.max_batch)
    if array.ndim != len(expected) or any(
        want not in (-1, got) for want, got in zip(expected, array.shape, strict=True)
    ):
        raise InvalidInput(
            f"input {spec.name!r} must have the shape {list(expected)}, not {list(array.shape)}",
            field=spec.name,
        )
    if signature.max_batch and not 1 <= len(array) <= signature.max_batch:
        raise InvalidInput(
            f"{signature.model} takes 1 to {signature.max_batch} images at once, not {len(array)}",
            field=spec.name,
        )
