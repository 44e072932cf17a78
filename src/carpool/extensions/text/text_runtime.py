"""Writes answers token by token: with the instances of a version, and their slots."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve
from carpool.core.job import INFINITY
from carpool.engine.loading.loading import Ready
from carpool.engine.models.runtime import EngineParts, InstancesRuntime
from carpool.engine.models.served import Gate, Served, VersionState
from carpool.engine.run.batch import Route
from carpool.extensions.text.hosted_text import HostedText
from carpool.extensions.text.text_columns import ENCODE_SIZE, FIRST_TOKEN, SLOTS, STEP_WIDTH, TOKEN, TOKENS
from carpool.extensions.text.text_driver import LocalText, TextDriver, Writes
from carpool.extensions.text.text_loading import TextLoading, pools_of, promise_of
from carpool.extensions.text.text_records import Worked
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.extensions.torch.hosted_model import HostedInstance
from carpool.observe import columns
from carpool.types import StepTiming

_HANGS_S, _TIMES_AS_LONG = 10.0, 100.0  # and as many of its longest steps: then an instance is given up


class TextRuntime(InstancesRuntime[TextDriver]):
    """Watches its `TextDriver`: counts what was written, and replaces the instances it lost."""

    _joins_busy = True

    def __init__(self, served: Served, version: ModelVersion, parts: EngineParts) -> None:
        super().__init__(served, version, parts, partial(TextLoading, served.config, version))
        self.curves: tuple[BatchCurve, BatchCurve] | None = None  # of its encoder and of a step
        self._full: dict[int, Worked] = {}  # how each instance is, by its number
        self._row = served.counters.row

    def route(self) -> Route:
        return self.driver

    def _begin(self, ready: Ready, loop: asyncio.AbstractEventLoop) -> None:
        assert ready.step is not None
        served = self.served
        served.signature = replace(ready.signature, told=True)  # max_tokens is a parameter
        self.curves = ready.curve, ready.step
        longest = max(ready.curve.times[-1], ready.step.times[-1])
        timeout = ready.config.execution_timeout
        hangs = max(_HANGS_S, _TIMES_AS_LONG * longest) if timeout is None else timeout or None
        most = promise_of(ready.config, ready.step.max_batch).max_tokens
        self._driver = TextDriver(served.name, most, self, loop, hangs)
        for number, backend in enumerate(ready.backends):
            self._place(number, backend)

    def _place(self, number: int, backend: Any) -> None:
        try:
            writer = self._writer(backend)
        except BaseException:
            backend.close()
            raise
        self.driver.place(number, writer)

    def _writer(self, backend: Any) -> Writes:
        if isinstance(backend, HostedInstance):
            return HostedText(backend, self.served.name, self.driver)
        assert self.curves is not None
        scheduler = TextScheduler(*self.curves, promise_of(self.served.config, backend.slots))
        return LocalText(self.served.name, backend, scheduler, self.driver)

    # ---- what the driver sees ---------------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        self._row.observe(FIRST_TOKEN, seconds)
        self._row.add(TOKENS)

    def next_token(self, seconds: float) -> None:
        self._row.observe(TOKEN, seconds)
        self._row.add(TOKENS)

    def worked(self, index: int, work: Worked) -> None:
        counters = self.served.counters
        counters.last_used = monotonic()
        if work.encoded:
            self._row.observe(ENCODE_SIZE, work.encoded)
            counters.recent.add(work.encoded, work.seconds, counters.last_used)
        elif work.stepped:
            self._row.observe(STEP_WIDTH, work.stepped)
        self._full[index] = work
        if self.served.state is VersionState.READY:
            self._show()

    def _show(self) -> None:
        used = sum(one.used for one in self._full.values())
        each = 1 if self.curves is None else self.curves[1].max_batch
        slots = self.instances * each * pools_of(self.served.config)[1].instances
        self._row.set(SLOTS["used"], used)
        self._row.set(SLOTS["free"], slots - used)
        self._row.set(columns.PENDING, sum(one.waiting for one in self._full.values()))

    def wrote(self, timing: StepTiming) -> None:
        self.served.counters.ran(1, [timing.queue], 0.0, timing.infer, 0.0)

    def writer_lost(self, index: int, why: str) -> None:
        self._full.pop(index, None)
        self._lost(index, why)

    def offered(self, _gate: Gate) -> None:
        self._show()

    # ---- in a document ----------------------------------------------------------------------------------

    def document(self, _now: float) -> dict[str, Any]:
        """Returns what was measured, of encoder and step apart. Times in ms."""
        assert self.curves is not None
        encoder, step = self.curves
        served, profile = self.served, self.served.profile
        promise = promise_of(served.config, step.max_batch)
        return {
            "name": served.name,
            "version": served.version,
            "mode": served.config.mode.value,
            "max_batch": 1,
            "measured_at": None if profile is None else profile.measured_at or None,
            "instances": self.instances,
            "encoders": promise.encoders or None,
            "decoders": promise.decoders if promise.apart else None,
            "threads": None if profile is None else profile.layout.threads,
            "encoder": _points(encoder),
            "step": _points(step),
            "slots": step.max_batch,
            "max_tokens": promise.max_tokens,
            "ttft_ms": _milliseconds(promise.ttft),
            "per_token_ms": _milliseconds(promise.per_token),
            "slots_within_promise": max(1, min(step.max_batch, step.fits(promise.per_token))),
            "choices": list(served.choices),
        }


def _points(curve: BatchCurve) -> Sequence[Sequence[float]]:
    return [[size, seconds * 1e3] for size, seconds in curve.points]


def _milliseconds(seconds: float) -> float | None:
    return None if seconds == INFINITY else seconds * 1e3
