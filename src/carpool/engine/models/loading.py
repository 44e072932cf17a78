"""From a version's file to instances that are warm and measured. All of it runs off the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Protocol, runtime_checkable

from carpool import backends
from carpool.backends.backend import Backend, Finish, OnDevice
from carpool.clock import now as monotonic
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve, promised_batch
from carpool.core.policy import Promise
from carpool.engine.batch import BatchResult, Executes
from carpool.engine.models.device_pictures import SAMPLE_TOLD, divided, filling, sample_picture, with_boxes
from carpool.engine.models.placing import choose_on_cpu, choose_on_gpus, instance_count, places
from carpool.engine.profile.instance_layout import Chosen, Layout, Trying
from carpool.engine.profile.measuring import FOR_DEVICES, FOR_SERVING, Effort, Measured, Measuring, sizes
from carpool.engine.profile.model_profile import Profile, best_piece, choices, keepable
from carpool.engine.profile.profile_store import Key, ProfileStore, profile_key
from carpool.engine.work import signature_of
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.geometry import lookup_tables, read_form
from carpool.vision.settings import VisionSettings, describe


class InstanceEvents(Protocol):
    """Who is told what became of batches, on the loop's thread: the driver."""

    def ended(self, executor: Executes, result: BatchResult) -> None: ...

    def lost(self, executor: Executes) -> None: ...


@runtime_checkable
class HostedBackend(Protocol):
    """An instance in another process, before it has a driver and after."""

    def serve(self, piece: int, hearer: InstanceEvents) -> Executes:
        """From here on it takes batches, and runs one that is larger than `piece` in pieces."""

    def close(self) -> None:
        """Free it; from any thread."""


class Loads(Protocol):
    """Loads one version: all of its instances, and later one that replaces a lost one. Not for the loop."""

    def check(self) -> None:
        """Raises what can be seen to be wrong before anything is loaded; called once, before the rest."""

    def prepare(self, tell: ReportStep) -> Ready: ...

    def backend(self, config: ModelConfig, index: int, count: int) -> Backend | HostedBackend: ...


class ModelHost(Protocol):
    """Keeps the process."""

    def loading(self, config: ModelConfig, version: ModelVersion) -> Loads | None:
        """None for a model that runs in the engine's own process."""


log = logger("engine")

_LARGEST_FILE = 4 << 20


def read_labels(config: ModelConfig) -> Mapping[str, Sequence[str]]:
    """Class names by output: the output's own file, else the model's, which is for its first output."""
    labels: dict[str, Sequence[str]] = {}
    for index, output in enumerate(config.outputs):
        name = output.labels or (config.labels if index == 0 else None)
        if name is None:
            continue
        folder = config.path if config.path.is_dir() else config.path.parent
        lines = _lines(folder, name)
        if lines is None:
            log.warning("labels-not-found", model=config.name, file=name)
        else:
            labels[output.name] = lines
    return labels


def _lines(folder: Path, name: str) -> list[str] | None:
    file = (folder / name).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        return None
    with file.open(encoding="utf-8", errors="replace") as text:
        return text.read(_LARGEST_FILE).splitlines()


Settled = tuple[ModelConfig, Signature, VisionSettings | None, Finish | None]


def settle(config: ModelConfig, signature: Signature, labels: Mapping[str, Sequence[str]]) -> Settled:
    """With the output that its device adds, if it does. Raises what its settings say and it cannot be."""
    vision, notes = describe(config, signature, labels)
    try:
        if vision is not None:
            form = read_form(vision.image, vision.input, config.name)
            lookup_tables(vision.image, form, vision.input.datatype, config.name)
            vision = divided(config, signature, vision)
    except ConfigError as error:
        if config.task is not None or config.image is not None:
            raise
        vision, notes = None, [f"it has no image route: {error.message}"]  # nobody asked for one
    for note in notes:
        log.info("pictures", model=config.name, note=note)
    return with_boxes(config, signature, vision)


_CHECKED_S = 0.1  # batches that take longer are believed if single images are as they were
_STILL_TRUE = 1.3  # times in a kept profile may be off by this factor, for machines are never quite quiet

ReportStep = Callable[[str], None]


@dataclass(slots=True)
class Ready:
    """What loading produced, before it serves."""

    config: ModelConfig
    signature: Signature
    curve: BatchCurve
    backends: Sequence[Backend | HostedBackend]
    labels: Mapping[str, Sequence[str]]  # by output
    vision: VisionSettings | None  # how it answers pictures, if it does
    profile: Profile
    piece: int  # a larger batch is run in pieces of this size
    choices: tuple[str, ...]  # what was chosen and why, in words

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


class Loading:
    """Loads one version: all of its instances, and later one that replaces a lost one."""

    def __init__(
        self,
        config: ModelConfig,
        version: ModelVersion,
        profiles: ProfileStore | None = None,
        now: Callable[[], float] = monotonic,
        turn: AbstractContextManager[object] | None = None,
    ) -> None:
        """`turn` is held while times are taken: models load side by side, and are measured one by one."""
        self._config = config
        self._version = version
        self._profiles = profiles
        self._now = now
        self._turn = nullcontext() if turn is None else turn
        self._settled: tuple[ModelConfig, Signature, Mapping[str, Sequence[str]]] | None = None
        self._threads: int | None = None
        self._vision: VisionSettings | None = None
        self._finish: Finish | None = None
        self._gpus: Sequence[int] = ()  # of the instances, in turn; none: the CPU, or the runtime's choice

    def check(self) -> None:
        self._settled = self._settle()

    def prepare(self, tell: ReportStep) -> Ready:
        config, signature, labels = self._settled or self._settle()
        vision = self._vision
        if config.fake is not None:
            return self._ready(config, signature, labels, vision, *self._fake(config, signature, tell))
        key = self._key(config)
        kept = None if key is None or self._profiles is None else self._profiles.read(key)
        found = None if kept is None else self._reuse(config, signature, kept, tell)
        if found is None:
            found = self._measure(config, signature, tell)
            if key is not None and self._profiles is not None and found[1].points:
                self._profiles.write(key, found[1])
        return self._ready(config, signature, labels, vision, *found)

    def resume(self, config: ModelConfig, threads: int | None) -> None:
        """Be ready for more instances of what was prepared in another process, which is gone."""
        self._settle()
        self._threads = threads
        self._place(config)

    @property
    def threads(self) -> int | None:
        """Of each instance, once that was found out."""
        return self._threads

    def _settle(self) -> tuple[ModelConfig, Signature, Mapping[str, Sequence[str]]]:
        """The settings with nothing left open. What is wrong is told before anything is loaded."""
        config = backends.describe(self._config, self._version)
        signature = signature_of(config)
        labels = read_labels(config)
        config, signature, self._vision, self._finish = settle(config, signature, labels)
        return config, signature, labels

    def backend(
        self,
        config: ModelConfig,
        index: int,
        count: int,
        tell: ReportStep = lambda _: None,
        *,
        hurry: bool = False,
        plain: bool = False,
    ) -> Backend:
        """One more instance; how many threads it has was found out at the first."""
        threads = self._threads or backends.default_threads(count, _cores())
        gpu = self._gpus[index % len(self._gpus)] if self._gpus else None
        return backends.load(
            config,
            self._version,
            instance=index,
            threads=threads,
            gpu=gpu,
            fill=filling(config, self._vision),
            finish=self._finish,
            tell=tell,
            hurry=hurry,
            plain=plain,
        )

    # ---- instances --------------------------------------------------------------------------------------

    def open(self, config: ModelConfig, layout: Layout, tell: ReportStep = lambda _: None) -> list[Backend]:
        self._threads = layout.threads
        self._place(config)
        opened: list[Backend] = []
        try:
            for index in range(layout.instances):
                tell(f"loading instance {index + 1} of {layout.instances}")
                opened.append(self.backend(config, index, layout.instances, tell))
        except BaseException:
            _close(opened)
            raise
        return opened

    def _place(self, config: ModelConfig) -> None:
        """Instances beyond those that the settings ask for go where the first ones went, in turn."""
        devices = backends.devices(config)
        self._gpus = places(config, devices) if devices else ()

    def choose(self, config: ModelConfig, signature: Signature, tell: ReportStep) -> Chosen:
        """Instances and threads: as the settings say, else as trying them says."""
        self._place(config)
        if self._gpus:
            self._threads = 1

            def open_one(index: int) -> Backend:
                tell(f"loading instance {index + 1}")
                return self.backend(config, index, 1, tell)

            def measuring(opened: Sequence[Backend], effort: Effort) -> Measuring:
                return self._measuring(opened, signature, effort)

            return choose_on_gpus(config, self._gpus, _slo(config), open_one, measuring)
        trying = Trying(signature, lambda it: self.open(config, it), self._now, self._turn)
        return choose_on_cpu(config, _cores(), trying, tell)

    def _fake(
        self, config: ModelConfig, signature: Signature, tell: ReportStep
    ) -> tuple[list[Backend], Profile, BatchCurve]:
        """Its curve is known: nobody need wait for it."""
        assert config.fake is not None
        layout = Layout(instance_count(config), 1)
        curve = BatchCurve.parse(config.fake.curve, max(1, signature.max_batch))
        return self.open(config, layout, tell), Profile(layout, "as the settings say"), curve

    # ---- measuring --------------------------------------------------------------------------------------

    def _key(self, config: ModelConfig) -> Key | None:
        if self._profiles is None:
            return None
        try:
            return profile_key(config, self._version)
        except (OSError, CarpoolError) as error:
            log.warning("profile-not-kept", model=config.name, error=str(error))
            return None

    def _reuse(
        self, config: ModelConfig, signature: Signature, kept: Profile, tell: ReportStep
    ) -> tuple[list[Backend], Profile, BatchCurve] | None:
        """With the instances it was measured with, if a few runs still take what it says."""
        largest = max(1, signature.max_batch)
        curve = kept.measured.curve(largest, config.pytorch.buckets)
        promised = promised_batch(curve, _slo(config)) or 1
        wanted = {1, promised if curve.times[promised] < _CHECKED_S else 1}
        opened = self.open(config, kept.layout, tell)
        try:
            tell("checking the kept profile")
            with self._turn:
                ratios = self._measuring(opened, signature).ratios(sorted(wanted), curve, _STILL_TRUE)
        except ModelError as error:
            log.warning("profile-outdated", model=config.name, error=error.message)
            _close(opened)
            return None
        except BaseException:
            _close(opened)
            raise
        off = max(ratios.values(), key=lambda ratio: max(ratio, 1 / ratio))
        if max(off, 1 / off) > _STILL_TRUE:
            log.warning("profile-outdated", model=config.name, ratio=round(off, 3), of=kept.measured_at)
            _close(opened)
            return None
        log.info("profile-reused", model=config.name, ratio=round(off, 3), of=kept.measured_at)
        said = f"The profile of {kept.measured_at} was used again: batches take {off:.3g} × what it says."
        return opened, kept.after_check(said), curve

    def _measure(
        self, config: ModelConfig, signature: Signature, tell: ReportStep
    ) -> tuple[list[Backend], Profile, BatchCurve]:
        chosen = self.choose(config, signature, tell)
        self._threads = chosen.layout.threads
        opened = list(chosen.backends) or self.open(config, chosen.layout, tell)
        profile = Profile(chosen.layout, chosen.reason)
        largest = max(1, signature.max_batch)
        try:
            warm = bool(chosen.backends) and not self._gpus
            measured = self._look(config, opened, signature, tell, warm=warm)
            if measured.points[0].seconds > _slo(config):  # before saying no: it may only be the machine
                again = self._look(config, opened, signature, tell, warm=warm)
                measured = min(measured, again, key=lambda found: found.points[0].seconds)
        except ModelError as error:
            if isinstance(config.policy, Promise) or not all(backend.alive for backend in opened):
                _close(opened)
                raise _unmeasured(config, error) from error
            log.warning("warm-up-failed", model=config.name, error=error.message)
            return opened, profile, BatchCurve.linear(0.001, 0.001, largest)
        except BaseException:
            _close(opened)
            raise
        at = datetime.now(UTC).isoformat(timespec="seconds")
        points = ",".join(f"{point.size}:{point.seconds * 1e3:.4g}" for point in measured.points)
        log.info("profile-measured", model=config.name, layout=str(chosen.layout), curve=points)
        return (
            opened,
            replace(profile, measured=measured, measured_at=at),
            measured.curve(largest, config.pytorch.buckets),
        )

    def _look(
        self,
        config: ModelConfig,
        opened: Sequence[Backend],
        signature: Signature,
        tell: ReportStep,
        *,
        warm: bool,
    ) -> Measured:
        effort = FOR_DEVICES if self._gpus else FOR_SERVING
        measuring = self._measuring(opened, signature, effort, warm=warm)
        wanted = config.pytorch.buckets or sizes(max(1, signature.max_batch))
        with self._turn:
            return measuring.points(wanted, _slo(config), lambda size: tell(f"measuring batches of {size}"))

    def _measuring(
        self,
        opened: Sequence[Backend],
        signature: Signature,
        effort: Effort = FOR_SERVING,
        *,
        warm: bool = False,
    ) -> Measuring:
        """With pictures, where the device decodes them."""
        encoded = self._vision is not None and self._vision.encoded
        picture = sample_picture() if encoded else None
        return Measuring(opened, signature, effort, now=self._now, picture=picture, warm=warm)

    def _ready(
        self,
        config: ModelConfig,
        signature: Signature,
        labels: Mapping[str, Sequence[str]],
        vision: VisionSettings | None,
        opened: list[Backend],
        profile: Profile,
        curve: BatchCurve,
    ) -> Ready:
        try:
            config, grown = keepable(config, curve)
        except ConfigError:
            _close(opened)
            raise
        slo = config.policy.slo if isinstance(config.policy, Promise) else None
        if profile.layout.instances != instance_count(config):
            group = replace(config.instances[0], count=profile.layout.instances)
            config = replace(config, instances=(group,))
        piece = curve.max_batch if config.fake is not None else best_piece(curve)
        told = SAMPLE_TOLD if vision is not None and vision.encoded else ""
        said = choices(profile, curve, piece, slo, told) + ((grown,) if grown else ())
        if isinstance(opened[0], OnDevice):
            said += tuple(opened[0].notes)
        for sentence in said:
            log.info("choice", model=config.name, why=sentence)
        return Ready(config, signature, curve, opened, labels, vision, profile, piece, said)


def _unmeasured(config: ModelConfig, error: ModelError) -> ModelError:
    if not isinstance(config.policy, Promise):
        return error
    return ModelError(
        f"{config.name}: a promise needs a measured model, and warming up failed: {error.message}"
    )


def _close(opened: Sequence[Backend]) -> None:
    for backend in opened:
        backend.close()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _slo(config: ModelConfig) -> float:
    return config.policy.slo if isinstance(config.policy, Promise) else inf
