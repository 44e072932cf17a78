"""One version of a model that writes: its instances and its figures, from loading to unloading."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from time import monotonic, time
from typing import TYPE_CHECKING, Any

from carpool.core.curve import BatchCurve
from carpool.core.instance import Instance
from carpool.core.job import INFINITY, Reason
from carpool.core.learning import Speed
from carpool.core.text_scheduler import TextScheduler
from carpool.engine.generation.hosted_text import HostedText
from carpool.engine.generation.text_driver import LocalText, TextDriver, Writes
from carpool.engine.generation.text_loading import pools_of, promise_of
from carpool.engine.loading.hosted_model import HostedInstance
from carpool.engine.loading.loading import Ready, join_all
from carpool.engine.models.served import Served, VersionState
from carpool.engine.routes.direct_route import Spare
from carpool.engine.run.batch import Route
from carpool.errors import Unavailable
from carpool.link.text_records import Worked
from carpool.observe import columns
from carpool.observe.logs import logger
from carpool.types import StepTiming

if TYPE_CHECKING:
    from carpool.engine.loading.runner_client import Runner
    from carpool.engine.run.driver import Driver

_log = logger("engine")
_HANGS_S, _TIMES_AS_LONG = 10.0, 100.0  # and as many of its longest steps: then an instance is given up


class TextModel(Served):
    """Watches its `TextDriver`: counts what was written, and replaces the instances it lost."""

    writes = True

    def __init__(self, *arguments: Any, host: Runner | None = None, **more: Any) -> None:
        super().__init__(*arguments, host=host, **more)
        self._host = host
        self._text: TextDriver | None = None
        self.curves: tuple[BatchCurve, BatchCurve] | None = None
        self._full: dict[int, Worked] = {}  # how each instance is, by its number
        self.instances = 1

    @property
    def driver(self) -> Driver:
        raise AssertionError(f"{self.name} has no batches")

    @property
    def text(self) -> TextDriver:
        assert self._text is not None
        return self._text

    @property
    def idle(self) -> bool:
        return self._text is None or self._text.idle

    def route(self) -> Route:
        return self.text

    def spare_route(self) -> Spare:
        raise Unavailable(f"{self.name} writes: it has no work that nobody waits for", reason="spare")

    def _begin(self, ready: Ready) -> None:
        assert self._loop is not None
        assert ready.step is not None
        self.config, self.vision = ready.config, ready.vision
        self.signature = replace(ready.signature, told=True)  # max_tokens is a parameter
        self.profile, self.choices = ready.profile, ready.choices
        self.curves = ready.curve, ready.step
        self.instances = len(ready.backends)
        longest = max(ready.curve.times[-1], ready.step.times[-1])
        timeout = ready.config.execution_timeout
        hangs = max(_HANGS_S, _TIMES_AS_LONG * longest) if timeout is None else timeout or None
        most = promise_of(ready.config, ready.step.max_batch).max_tokens
        self._text = TextDriver(self.name, most, self, self._loop, hangs)
        for index, backend in enumerate(ready.backends):
            self._text.place(index, self._writer(backend))

    def _writer(self, backend: Any) -> Writes:
        if isinstance(backend, HostedInstance):
            assert self._host is not None
            return HostedText(self._host, backend, self.name, self.text)
        assert self.curves is not None
        scheduler = TextScheduler(*self.curves, promise_of(self.config, backend.slots))
        return LocalText(self.name, backend, scheduler, self.text)

    # ---- what the driver sees ---------------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        self.row.observe(columns.FIRST_TOKEN_SECONDS, seconds)
        self.row.add(columns.TOKENS)

    def next_token(self, seconds: float) -> None:
        self.row.observe(columns.TOKEN_SECONDS, seconds)
        self.row.add(columns.TOKENS)

    def worked(self, index: int, work: Worked) -> None:
        self.last_used = monotonic()
        row = self.row
        if work.encoded:
            row.observe(columns.ENCODE_SIZE, work.encoded)
            self.recent.add(work.encoded, work.seconds, self.last_used)
        elif work.stepped:
            row.observe(columns.STEP_WIDTH, work.stepped)
        self._full[index] = work
        if self.state is VersionState.READY:
            self._show()

    def _show(self) -> None:
        used = sum(one.used for one in self._full.values())
        each = 1 if self.curves is None else self.curves[1].max_batch
        slots = self.instances * each * pools_of(self.config)[1].instances
        self.row.set(columns.SLOTS["used"], used)
        self.row.set(columns.SLOTS["free"], slots - used)
        self.row.set(columns.PENDING, sum(one.waiting for one in self._full.values()))

    def wrote(self, timing: StepTiming) -> None:
        ended = time() * 1e3
        self.row.add_batch(1, [timing.queue], input_s=0.0, infer_s=timing.infer, output_s=0.0, ended_ms=ended)
        self.batches.add(1, 0, round(timing.infer * 1e9), 0)

    def writer_lost(self, index: int, why: str) -> None:
        self._full.pop(index, None)
        self.instance_lost(Instance(index, Speed()), why)

    async def _load_in_place_of(self, instance: Instance) -> None:
        count = self.instances
        backend: Any = await self._off_the_loop(
            lambda: self.loading.backend(instance.index, count), lambda late: late.close()
        )
        try:
            writer = self._writer(backend)
        except BaseException:
            backend.close()
            raise
        self.text.place(instance.index, writer)

    @property
    def able(self) -> bool:
        return self._text is not None and self._text.able

    def look_at_instances(self) -> None:
        able = self.able
        if able:
            self.text.accept_again()
        else:
            self._refuse_if_down()
        if able != self._was_able:
            self.changed()
            self._was_able = able

    def _refuse_if_down(self) -> None:
        if not self._closed and not self.able and self._text is not None:
            why = f"{self.name} is down and is being restarted"
            self._text.refuse_until_placed(Unavailable(why, reason="restarting"))

    def refused_elsewhere(self, requests: int, reason: Reason, source: str) -> None:
        """It gives no advice that front ends could follow."""

    def offer(self) -> None:
        super().offer()
        self._show()

    # ---- coming and going -------------------------------------------------------------------------------

    async def retire(self) -> None:
        while not (self._text is None or await self._text.drained(None)):
            """Somebody came while it was being said that nobody was there."""
        await self._close()

    async def unload(self, timeout: float) -> None:
        self.withdraw()
        if self._text is not None:
            self._text.refuse_from_now_on(Unavailable(f"{self.name} is being unloaded", reason="unloading"))
            if not await self._text.drained(timeout):
                _log.warning("drain-timeout", model=self.name, waiting=self._text.riders)
        await self._close()

    async def _close(self) -> None:
        self._closed = True
        writers = [] if self._text is None else self._text.close()
        await asyncio.to_thread(join_all, writers)
        await super()._close()


def text_document(served: TextModel) -> dict[str, Any]:
    """What was measured, of encoder and step apart. Times in ms."""
    assert served.curves is not None
    encoder, step = served.curves
    promise = promise_of(served.config, step.max_batch)

    def told(seconds: float) -> float | None:
        return None if seconds == INFINITY else seconds * 1e3

    profile = served.profile
    return {
        "name": served.name,
        "version": served.version,
        "mode": served.config.mode.value,
        "max_batch": 1,
        "measured_at": None if profile is None else profile.measured_at or None,
        "instances": served.instances,
        "encoders": promise.encoders or None,
        "decoders": promise.decoders if promise.apart else None,
        "threads": None if profile is None else profile.layout.threads,
        "encoder": [[size, seconds * 1e3] for size, seconds in encoder.points],
        "step": [[size, seconds * 1e3] for size, seconds in step.points],
        "slots": step.max_batch,
        "max_tokens": promise.max_tokens,
        "ttft_ms": told(promise.ttft),
        "per_token_ms": told(promise.per_token),
        "slots_within_promise": max(1, min(step.max_batch, step.fits(promise.per_token))),
        "choices": list(served.choices),
    }
