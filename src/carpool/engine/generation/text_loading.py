"""From the files of a model that writes to instances that are warm and measured: e(B) and s(n) apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from statistics import median
from typing import cast

from carpool import backends
from carpool.backends.backend import Placement
from carpool.backends.stepper import Stepper, TextHome
from carpool.clock import now as monotonic
from carpool.config.backend_kinds import kind_of
from carpool.config.model import GenerateSettings, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.config.usable_cores import usable_cores
from carpool.core.curve import BatchCurve
from carpool.core.job import INFINITY
from carpool.core.policy import Promise
from carpool.core.steps import TextPromise
from carpool.engine.model_inputs import signature_of
from carpool.engine.models.loading import Ready, ReportStep, settle
from carpool.engine.profile.instance_layout import Layout, instance_count, places
from carpool.engine.profile.measuring import Measured, Point, sizes
from carpool.engine.profile.model_profile import Profile
from carpool.errors import CarpoolError, ModelError, Unsupported
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.settings import VisionSettings

_log = logger("engine")
_ENCODED_AT_ONCE = 32
_LEAST_RUNS, _RUN_S = 5, 0.05  # of one size
_LONG_S = 0.1  # one run that takes longer is enough: what it leaves out is learned in service


class TextLoading:
    """As `Loading`, for a model that writes. Not for the loop."""

    def __init__(self, config: ModelConfig, version: ModelVersion) -> None:
        self._config = config
        self._version = version
        self._signature = Signature(config.name, (), ())
        self._vision: VisionSettings | None = None
        self._gpus: Sequence[int] = ()
        self.threads: int | None = None

    def check(self) -> None:
        self._settle()

    def resume(self, config: ModelConfig, threads: int | None) -> None:
        """Be ready for more instances of what was prepared in another process, which is gone."""
        self._settle()
        self._config, self.threads = config, threads

    def _settle(self) -> None:
        kind = kind_of(self._config.backend)
        if missing := kind.missing():
            raise Unsupported(f"{self._config.name}: {missing}")
        config = cast(TextHome, kind.module()).describe_text(self._config, self._version)
        self._config, self._signature, self._vision, _ = settle(config, signature_of(config), {})
        devices = backends.devices(self._config)
        self._gpus = places(self._config, devices) if devices else ()

    def backend(self, index: int, count: int, tell: ReportStep = lambda _: None) -> Stepper:
        threads = self.threads or backends.default_threads(count, usable_cores())
        gpu = self._gpus[index % len(self._gpus)] if self._gpus else None
        home = cast(TextHome, kind_of(self._config.backend).module())
        return home.load_text(self._config, self._version, Placement(index, threads, gpu, tell=tell))

    def prepare(self, tell: ReportStep) -> Ready:
        if not self._signature.inputs:
            self._settle()
        count = len(self._gpus) or instance_count(self._config)
        self.threads = backends.default_threads(count, usable_cores())
        opened: list[Stepper] = []
        try:
            for index in range(count):
                tell(f"loading instance {index + 1} of {count}")
                opened.append(self.backend(index, count, tell))
            encoder, step = self._measured(opened[0], tell)
        except BaseException as error:
            for stepper in opened:
                stepper.close()
            if isinstance(error, CarpoolError):
                raise
            raise ModelError(f"{self._config.name}: {type(error).__name__}: {error}") from error
        at = datetime.now(UTC).isoformat(timespec="seconds")
        slots = opened[0].slots
        profile = Profile(Layout(count, self.threads), "as the settings say", encoder, at)
        curve = encoder.curve(min(slots, _ENCODED_AT_ONCE))
        steps = BatchCurve.measured([(p.size, p.seconds) for p in step.points], slots, opened[0].widths)
        said = (*opened[0].notes, *_in_words(self._config, curve, steps))
        for sentence in said:
            _log.info("choice", model=self._config.name, why=sentence)
        config, signature = self._config, self._signature
        return Ready(config, signature, curve, opened, {}, self._vision, profile, 1, said, steps)

    def _measured(self, stepper: Stepper, tell: ReportStep) -> tuple[Measured, Measured]:
        if self._config.fake is not None:
            curves = [
                BatchCurve.parse(text, stepper.slots)
                for text in (self._config.fake.curve, self._config.fake.step_curve)
            ]
            encoder, step = (Measured(tuple(Point(*point) for point in curve.points)) for curve in curves)
            return encoder, step
        picture = stepper.sample()
        pictures = sizes(min(stepper.slots, _ENCODED_AT_ONCE))

        def encode(size: int) -> None:
            stepper.admit(range(size), stepper.encode([picture] * size))
            stepper.step(1)  # else a device may still be at it

        tell("measuring its encoder")
        encoded = [measure(partial(encode, size), size) for size in pictures]
        tell("measuring its steps")
        stepped = [measure(partial(stepper.step, width), width) for width in stepper.widths]
        one = stepped[0].seconds
        alone = [Point(p.size, max(1e-6, p.seconds - one), p.spread, p.runs) for p in encoded]
        return Measured(tuple(alone)), Measured(tuple(stepped))


def measure(run: Callable[[], object], size: int, now: Callable[[], float] = monotonic) -> Point:
    """The median of some runs, after one that nobody counts."""
    run()
    times: list[float] = []
    began = now()
    while len(times) < (1 if times and times[0] > _LONG_S else _LEAST_RUNS) or now() - began < _RUN_S:
        start = now()
        run()
        times.append(now() - start)
    times.sort()
    middle = median(times)
    spread = (times[-len(times) // 4] - times[len(times) // 4]) / middle
    return Point(size, middle, max(0.0, spread), len(times))


def promise_of(config: ModelConfig, slots: int) -> TextPromise:
    told = config.generate or GenerateSettings()
    slo = config.policy.slo if isinstance(config.policy, Promise) else INFINITY
    return TextPromise(
        slots=slots,
        max_tokens=told.max_tokens,
        ttft=INFINITY if config.ttft is None else config.ttft,
        per_token=INFINITY if config.per_token is None else config.per_token,
        slo=slo,
    )


def _in_words(config: ModelConfig, encoder: BatchCurve, step: BatchCurve) -> Sequence[str]:
    slots = step.max_batch
    said = [
        f"Encoding one picture takes {encoder.times[1] * 1e3:.3g} ms, {encoder.max_batch} take "
        f"{encoder.times[encoder.max_batch] * 1e3:.3g} ms; a step of one answer takes "
        f"{step.times[1] * 1e3:.3g} ms, of {slots} {step.times[slots] * 1e3:.3g} ms."
    ]
    if config.per_token is not None:
        fits = max(1, step.fits(config.per_token))
        if step.times[1] > config.per_token:
            said.append(
                f"per_token_ms is {config.per_token * 1e3:g}, and even one answer alone takes "
                f"{step.times[1] * 1e3:.3g} ms for a token: the promise cannot be kept here."
            )
        elif fits < slots:
            said.append(f"per_token_ms allows {fits} answers at once.")
    first = encoder.times[1] + step.times[1]
    if config.ttft is not None and first > config.ttft:
        said.append(
            f"ttft_ms is {config.ttft * 1e3:g}, and the first token takes {first * 1e3:.3g} ms on an idle "
            "server: all will be refused."
        )
    return said
