"""Makes instances that are warm and measured, e(B) and s(n) apart, from the files of a model that writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from statistics import median
from time import monotonic
from typing import cast

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.backend_kinds import kind_of, module_of
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.config.usable_cores import usable_cores
from carpool.core.curve import BatchCurve, sizes
from carpool.core.job import INFINITY
from carpool.core.objectives import Promise
from carpool.engine.loading.loading import Ready, ReportStep, settle
from carpool.engine.profile.instance_layout import instance_count, places
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.model_profile import Profile
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import CarpoolError, ModelError, Unsupported
from carpool.extensions.text.settings import EncoderSettings, PoolSettings, text_settings
from carpool.extensions.text.stepper import ModelPart, Stepper, TextHome, TextInstance
from carpool.extensions.text.text_job import TextPromise
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.plans.settings import VisionSettings

_log = logger("engine")
_ENCODED_AT_ONCE = 32
_LEAST_RUNS, _RUN_S = 5, 0.05  # of one size
_LONG_S = 0.1  # one run that takes longer is enough: what it leaves out is learned in service


class TextLoading:
    """Does the same as `Loading`, for a model that writes. Not for the loop."""

    def __init__(self, config: ModelConfig, version: ModelVersion) -> None:
        self.config = config
        self._version = version
        self._signature = Signature(config.name, (), ())
        self._vision: VisionSettings | None = None
        self._gpus: Sequence[int] = ()
        self.threads: int | None = None
        self.kept_as = ""

    def check(self) -> None:
        self._settle()

    def resume(self, config: ModelConfig, threads: int | None) -> None:
        """Be ready for more instances of what was prepared in another process, which is gone."""
        self._settle()
        self.config, self.threads = config, threads

    def _settle(self) -> None:
        kind = kind_of(self.config.backend)
        if missing := kind.missing():
            raise Unsupported(f"{self.config.name}: {missing}")
        config = cast(TextHome, module_of(kind, "text")).describe_text(self.config, self._version)
        self.config, self._signature, self._vision, _ = settle(config, signature_of(config), {})
        devices = backends.devices(self.config)
        self._gpus = places(self.config, devices) if devices else ()

    def backend(self, index: int, count: int, tell: ReportStep = lambda _: None) -> TextInstance:
        if not text_settings(self.config).apart:
            gpu = self._gpus[index % len(self._gpus)] if self._gpus else None
            return TextInstance.whole(self._load(self.config, index, gpu, count, tell))
        loaded: dict[ModelPart, list[Stepper]] = {ModelPart.ENCODER: [], ModelPart.DECODER: []}
        try:
            for (part, those), pool in zip(loaded.items(), pools_of(self.config), strict=True):
                for number in range(pool.instances):
                    tell(f"loading {part.value} {number + 1} of {pool.instances}")
                    those.append(self._part(part, pool, number, tell))
        except BaseException:
            for one in (*loaded[ModelPart.ENCODER], *loaded[ModelPart.DECODER]):
                one.close()
            raise
        return TextInstance(loaded[ModelPart.ENCODER], loaded[ModelPart.DECODER], apart=True)

    def _part(self, part: ModelPart, pool: PoolSettings, number: int, tell: ReportStep) -> Stepper:
        config = self.config
        if pool.device != "auto":
            config = replace(config, pytorch=replace(config.pytorch, device=pool.device))
        gpus = backends.devices(config)
        gpu = gpus[number % len(gpus)] if gpus else None
        return self._load(config, number, gpu, self._both, tell, part)

    @property
    def _both(self) -> int:
        return sum(pool.instances for pool in pools_of(self.config))

    def _load(
        self,
        config: ModelConfig,
        index: int,
        gpu: int | None,
        count: int,
        tell: ReportStep,
        part: ModelPart = ModelPart.WHOLE,
    ) -> Stepper:
        home = cast(TextHome, module_of(kind_of(config.backend), "text"))
        threads = self.threads or backends.default_threads(count, usable_cores())
        placement = Placement(index, threads, gpu, tell=tell)
        return home.load_text(config, self._version, placement, part)

    def abort(self) -> None:
        """Its runs are short."""

    def prepare(self, tell: ReportStep) -> Ready:
        if not self._signature.inputs:
            self._settle()
        apart = text_settings(self.config).apart
        count = 1 if apart else len(self._gpus) or instance_count(self.config)
        sharing = self._both if apart else count
        self.threads = backends.default_threads(sharing, usable_cores())
        opened: list[TextInstance] = []
        try:
            for index in range(count):
                tell(f"loading instance {index + 1} of {count}")
                opened.append(self.backend(index, count, tell))
            encoder, step = self.measured(opened[0], tell)
        except BaseException as error:
            for instance in opened:
                instance.close()
            if isinstance(error, CarpoolError):
                raise
            raise ModelError(f"{self.config.name}: {type(error).__name__}: {error}") from error
        at = datetime.now(UTC).isoformat(timespec="seconds")
        slots = opened[0].slots
        profile = Profile(Layout(count, self.threads), "as the settings say", encoder, at)
        curve = encoder.curve(_most_encoded(opened[0]))
        steps = BatchCurve.measured([(p.size, p.seconds) for p in step.points], slots, opened[0].widths)
        said = (*opened[0].notes, *_in_words(self.config, curve, steps))
        for sentence in said:
            _log.debug("choice", model=self.config.name, why=sentence)
        config, signature = self.config, self._signature
        return Ready(config, signature, curve, opened, {}, self._vision, profile, 1, said, steps)

    def measured(self, instance: TextInstance, tell: ReportStep) -> tuple[Measured, Measured]:
        """Measures its encoder, and its steps."""
        encoder, decoder = instance.encoders[0], instance.decoders[0]
        if self.config.fake is not None:
            curves = [
                BatchCurve.parse(text, decoder.slots)
                for text in (self.config.fake.curve, self.config.fake.step_curve)
            ]
            told = [Measured(tuple(Point(*point) for point in curve.points)) for curve in curves]
            return told[0], told[1]
        picture = encoder.sample()
        apart = instance.apart

        def encode(size: int) -> None:
            rows = encoder.encode([picture] * size)
            if not apart:  # else it waits for its device itself, and its decoders take the rows
                decoder.admit(range(size), rows)
                decoder.step(1)

        tell("measuring its encoder")
        encoded = [measure(partial(encode, size), size) for size in sizes(_most_encoded(instance))]
        tell("measuring its steps")
        stepped = [measure(partial(decoder.step, width), width) for width in decoder.widths]
        one = 0.0 if apart else stepped[0].seconds
        alone = [Point(p.size, max(1e-6, p.seconds - one), p.spread, p.runs) for p in encoded]
        return Measured(tuple(alone)), Measured(tuple(stepped))


def measure(run: Callable[[], object], size: int, now: Callable[[], float] = monotonic) -> Point:
    """Returns the median of some runs, after one that is not counted."""
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


def _most_encoded(instance: TextInstance) -> int:
    return min(instance.slots * len(instance.decoders), _ENCODED_AT_ONCE)


def pools_of(config: ModelConfig) -> tuple[EncoderSettings, PoolSettings]:
    """Returns the settings of encoders and of decoders."""
    settings = text_settings(config)
    return settings.encoder or EncoderSettings(), settings.decoder or PoolSettings()


def promise_of(config: ModelConfig, slots: int) -> TextPromise:
    settings = text_settings(config)
    encoder, decoder = pools_of(config)
    slo = config.policy.slo if isinstance(config.policy, Promise) else INFINITY
    return TextPromise(
        slots=slots,
        max_tokens=settings.generate.max_tokens,
        ttft=INFINITY if settings.ttft is None else settings.ttft,
        per_token=INFINITY if settings.per_token is None else settings.per_token,
        slo=slo,
        encoders=encoder.instances if settings.apart else 0,
        decoders=decoder.instances,
    )


def _in_words(config: ModelConfig, encoder: BatchCurve, step: BatchCurve) -> Sequence[str]:
    slots, settings = step.max_batch, text_settings(config)
    said = [
        f"Encoding one image takes {encoder.times[1] * 1e3:.3g} ms, {encoder.max_batch} take "
        f"{encoder.times[encoder.max_batch] * 1e3:.3g} ms; a step of one response takes "
        f"{step.times[1] * 1e3:.3g} ms, of {slots} {step.times[slots] * 1e3:.3g} ms."
    ]
    if settings.per_token is not None:
        fits = max(1, step.fits(settings.per_token))
        if step.times[1] > settings.per_token:
            said.append(
                f"per_token_ms is {settings.per_token * 1e3:g}, but a single response takes "
                f"{step.times[1] * 1e3:.3g} ms for a token: the SLO cannot be met here."
            )
        elif fits < slots:
            said.append(f"per_token_ms allows {fits} concurrent responses.")
    first = encoder.times[1] + step.times[1]
    if settings.ttft is not None and first > settings.ttft:
        said.append(
            f"ttft_ms is {settings.ttft * 1e3:g}, and the first token takes {first * 1e3:.3g} ms on an idle "
            "server: all requests will be rejected."
        )
    return said
