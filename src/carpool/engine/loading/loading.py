"""Makes instances that are warm and measured from a version's file. All of it runs off the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import inf, isinf
from time import monotonic
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from carpool import backends
from carpool.backends.backend import (
    AsksModels,
    Backend,
    Finish,
    KeepsMemory,
    OnDevice,
    Placement,
    SharesWeights,
)
from carpool.config.asked_extensions import asked_extensions
from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import PROVISIONAL, UNBATCHED
from carpool.config.model import BATCH_HELP, DYNAMIC, ModelConfig, Task
from carpool.config.repository import ModelVersion
from carpool.config.rules import singly
from carpool.config.usable_cores import usable_cores
from carpool.core.curve import BatchCurve, promised_batch, sizes
from carpool.core.objectives import Promise
from carpool.engine.loading.batch_proof import (
    RULE,
    SLIGHT,
    BatchTrial,
    asks_for_batches,
    must_be_proven,
    prove,
)
from carpool.engine.loading.trial import Examined, examine, trial_shape, try_out
from carpool.engine.profile.contention import contention
from carpool.engine.profile.hardware import CpuWatch
from carpool.engine.profile.instance_layout import choose_on_cpu, instance_count, is_possible, places
from carpool.engine.profile.layouts import Chosen, Layout, Trying, close_all, closed_if_it_fails
from carpool.engine.profile.measuring import (
    FOR_DEVICES,
    FOR_FIRST_ANSWERS,
    FOR_SERVING,
    Effort,
    Measured,
    Measuring,
    Watches,
)
from carpool.engine.profile.model_profile import (
    STILL_TRUE,
    SURELY_FALSE,
    BatchProof,
    KeptProfile,
    Profile,
    ProfileStore,
    best_piece,
    choices,
    judged,
    keepable,
)
from carpool.engine.profile.run_memory import (
    MUCH_MEMORY,
    RunMemory,
    batch_bytes,
    give_back_all,
    kept_bytes,
)
from carpool.errors import CarpoolError, ModelError
from carpool.link.catalog import ASK, ASSUMED
from carpool.observe.logs import logger
from carpool.types import Signature
from carpool.vision.plans.settings import NOTHING_SEEN, ModelFacts, VisionSettings, describe

log = logger("engine")


Settled = tuple[ModelConfig, Signature, VisionSettings | None, Finish | None]


def settle(
    config: ModelConfig,
    signature: Signature,
    labels: Mapping[str, Sequence[str]],
    seen: ModelFacts = NOTHING_SEEN,
    told: dict[str, str] | None = None,
) -> Settled:
    """Returns the settings with the output that its device adds, if it does. Raises where the settings
    contradict the model. `told` receives what it was recognised as, for clients who read its settings."""
    vision, notes, ask, _ = describe(config, signature, labels, seen)
    if vision is not None:
        from carpool.engine.loading.device_pictures import divided

        vision = divided(config, signature, vision)
    for note in notes:
        log.debug("pictures", model=config.name, note=note)
    if ask:
        log.warning("pictures", model=config.name, note=f"it is served as tensors: {ask}")
    assumed = () if vision is None else vision.assumed
    if vision is not None:
        _warn_of_pixels(config, assumed, seen)
    if told is not None and (notes or assumed):
        told |= {"carpool_task": "" if vision is None else vision.task, "carpool_evidence": "; ".join(notes)}
        told |= {ASK: ask} if ask else {}
        told |= {ASSUMED: ", ".join(assumed)} if assumed else {}
    if vision is None:
        return config, signature, None, None
    from carpool.engine.loading.device_pictures import with_boxes

    return with_boxes(config, signature, vision)


def _warn_of_pixels(config: ModelConfig, assumed: tuple[str, ...], seen: ModelFacts) -> None:
    from carpool.vision.plans.pixels import twice_normalised, what_is_assumed

    twice = twice_normalised(config, seen.claims)
    if twice is not None:
        log.warning("pictures", model=config.name, note=twice)
    if assumed:
        words = what_is_assumed(config.name, assumed, config.preset)
        log.warning("pixels-assumed", model=config.name, assumed=", ".join(assumed), note=words)


def _weights_for(config: ModelConfig) -> tuple[object, ...]:
    """Returns the settings by which instances share weights."""
    return config.inputs, config.outputs, config.image, config.max_batch


class _NoBatches(Exception):
    """Says that instances are opened again, for single requests. No error of a model: those are handled."""


_CHECKED_S = 0.1  # batches that take longer are believed if single images are as they were

ReportStep = Callable[[str], None]
Opened = tuple[list[Backend], Profile, BatchCurve]


@dataclass(slots=True)
class Ready:
    """Describes what loading produced, before it serves."""

    config: ModelConfig
    signature: Signature
    curve: BatchCurve
    backends: Sequence[Any]  # `Backend`s, or `HostedInstance`s in the runner
    labels: Mapping[str, Sequence[str]]  # by output
    vision: VisionSettings | None  # how it answers pictures, if it does
    profile: Profile
    piece: int  # a larger batch is run in pieces of this size
    choices: tuple[str, ...]  # what was chosen and why, in words
    step: BatchCurve | None = None  # of one that writes, whose `curve` is its encoder's

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


class Compiled(Protocol):
    """Represents what was compiled for a model before. An extension finds it, at the place that its manifest
    names as `compiled`."""

    @property
    def profile(self) -> Profile | None:
        """Returns the profile that was measured with it; None: on another machine, or with another SLO."""

    @property
    def sizes(self) -> Sequence[int]:
        """Returns the batch sizes that were compiled."""

    def bring(self) -> None:
        """Loads it into this process, once."""


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Describes a version as far as it is known: what its settings say at first, and then what follows from
    its file, from trying it and from measuring it. Each phase of a load makes the next one of it."""

    config: ModelConfig
    signature: Signature
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by output
    vision: VisionSettings | None = None
    finish: Finish | None = None
    told: Mapping[str, str] = field(default_factory=dict)  # what it was recognised as, by parameter
    insists: bool = False  # its settings ask for batches

    @property
    def largest(self) -> int:
        """Returns its largest batch."""
        return max(1, self.signature.max_batch)

    @property
    def slo(self) -> float:
        """Returns the seconds that it promises; infinity without a promise."""
        policy = self.config.policy
        return policy.slo if isinstance(policy, Promise) else inf

    @property
    def encoded(self) -> bool:
        """Returns whether its device decodes the pictures."""
        return self.vision is not None and self.vision.encoded

    def as_pictures(self) -> Signature:
        """Returns the signature as requests with pictures have it."""
        return as_pictures(self.signature, self.vision)


class Opener:
    """Opens the instances of one version: on which devices, with how many threads, until it is given up."""

    def __init__(self, version: ModelVersion, caller: Callable[[int], AsksModels] | None) -> None:
        self.version = version
        self.threads: int | None = None  # of each instance, once that was found out
        self.gpus: Sequence[int] = ()  # of the instances, in turn; none: the CPU, or the runtime's choice
        self.weights: object = None  # of the instance that was tried, for the first one that serves
        self.backends: WeakSet[Backend] = WeakSet()
        self._caller = caller
        self._aborted = False

    def place(self, config: ModelConfig, threads: int | None = None) -> None:
        """Places instances beyond those that the settings ask for where the first ones went, in turn, each
        with so many threads, where that is known."""
        self.threads = threads or self.threads
        devices = backends.devices(config)
        self.gpus = places(config, devices) if devices else ()

    def open(
        self, model: KnownModel, index: int, count: int, tell: ReportStep, *, hurry: bool, plain: bool
    ) -> Backend:
        """Returns one more instance, of `count`."""
        name = model.config.name
        if self._aborted:
            raise _given_up(name)
        threads = self.threads or backends.default_threads(count, usable_cores())
        gpu = self.gpus[index % len(self.gpus)] if self.gpus else None
        fill = None
        if model.vision is not None:
            from carpool.engine.loading.device_pictures import filling

            fill = filling(model.config, model.vision)
        calls = None if self._caller is None else self._caller(index)
        placement = Placement(index, threads, gpu, fill, model.finish, tell, hurry, plain, calls)
        backend = backends.load(model.config, self.version, placement)
        self.weights = None
        self.backends.add(backend)
        if self._aborted:
            backend.close()
            raise _given_up(name)
        return backend

    def abort(self) -> None:
        """Ends from another thread what runs; no instance is opened any more."""
        self._aborted = True
        for backend in list(self.backends):
            backend.abort()


def _given_up(model: str) -> CarpoolError:
    return ModelError(f"{model}: the load was given up", reason="aborted")


def settled(found: Examined, given: KnownModel, opener: Opener, *, behind: bool) -> KnownModel:
    """Returns the model with nothing left open in its settings, after a trial where its file leaves something
    open. Raises what is wrong, before anything is loaded for good."""

    def load(config: ModelConfig) -> Backend:
        opener.place(config)
        plain = behind and config.pytorch.compiles_behind
        backend = opener.open(replace(given, config=config), 0, 1, lambda _: None, hurry=True, plain=plain)
        opener.weights = backend.weights() if isinstance(backend, SharesWeights) else None
        return backend

    config, signature, labels, seen, _ = try_out(found, load)
    tried = _weights_for(config)
    told: dict[str, str] = {}
    config, signature, vision, finish = settle(config, signature, labels, seen, told)
    if _weights_for(config) != tried:
        opener.weights = None  # it will not share them, and needs the room
    if not labels and vision is not None and vision.task == Task.CLASSIFY:
        labels = {vision.outputs[0].name: vision.labels}
    insists = given.insists or asks_for_batches(given.config, config, opener.version)
    return KnownModel(config, signature, labels, vision, finish, told, insists)


class Bench(NamedTuple):
    """Describes how times are taken: by which clock, while which turn is held, and with what watches the
    other users of the cores."""

    now: Callable[[], float]
    turn: AbstractContextManager[object]
    watch: Callable[[], Watches]


class Loading:
    """Loads one version: all of its instances, and later one that replaces a lost one. Not for the loop."""

    def __init__(
        self,
        config: ModelConfig,
        version: ModelVersion,
        profiles: ProfileStore | None = None,
        now: Callable[[], float] = monotonic,
        signature: Signature | None = None,
        turn: AbstractContextManager[object] | None = None,
        caller: Callable[[int], AsksModels] | None = None,
        watch: Callable[[], Watches] = CpuWatch,
        *,
        behind: bool = False,
    ) -> None:
        """With a `signature`, the settings have nothing left open. `turn` is held while times are taken:
        models load side by side, and are measured one by one. `caller` makes the way to other models of the
        instance with this number; `watch` measures what others take of the cores meanwhile. With
        `behind`, the caller also compiles it while it serves, if its settings say so."""
        self._model = KnownModel(
            config, signature or Signature(config.name, (), ()), insists=(config.max_batch or 0) > 1
        )
        self._opener = Opener(version, caller)
        self._kept = KeptProfile(profiles)
        self._bench = Bench(now, nullcontext() if turn is None else turn, watch)
        self._may_compile_behind = behind
        self._examined: Examined | None = None  # what its file says
        self.settled: KnownModel | None = None  # with nothing left open, before anything was measured
        self._proof = BatchProof()
        self.compiled: Compiled | None = None  # what an earlier compilation left

    @property
    def threads(self) -> int | None:
        """Returns those of each instance, once that was found out."""
        return self._opener.threads

    def check(self) -> None:
        """Raises what can be seen to be wrong before anything is loaded; called once, before the rest."""
        if trial_shape(self._examine()) is None:
            self._settle()

    def _examine(self) -> Examined:
        """Returns what its file says. From then on the version is the one whose file runs."""
        if self._examined is None:
            self._examined = examine(self._model.config, self._opener.version)
            self._opener.version = self._examined.version
        return self._examined

    def prepare(self, tell: ReportStep) -> Ready:
        try:
            return self._prepared(tell)
        finally:
            self._opener.weights = None

    def _prepared(self, tell: ReportStep) -> Ready:
        if self.settled is None:
            self._settle()
        if self._model.config.fake is not None:
            return self._ready(*self._fake(tell))
        kept = self._kept.read(self._model.config, self._opener.version)
        self.compiled = self._find_compiled()
        if kept is None and self.compiled is not None:
            kept = self.compiled.profile
        kept = None if kept is None else self._believed(kept)
        if kept is not None and kept.proof.rule == RULE:
            self._proof = kept.proof
            self._batch_as_proven()
        try:
            opened, profile, curve = self._opened(kept, tell)
        except _NoBatches:
            self._batch_as_proven()
            opened, profile, curve = self._opened(None, tell)
        profile = replace(profile, proof=self._proof)
        if not profile.reused:
            self.keep(profile)
        elif kept is not None and kept.proof != self._proof:
            self.keep(replace(kept, proof=self._proof, elsewhere=False))
        give_back_all(opened)
        return self._ready(opened, profile, curve)

    def _opened(self, kept: Profile | None, tell: ReportStep) -> Opened:
        found = None if kept is None else self._reuse(kept, tell)
        return found or self._measure(tell, None if kept is None else kept.layout)

    def _prove(self, opened: Sequence[Backend]) -> None:
        """Finds out, with the first instance, whether its requests may share a batch. Raises _NoBatches
        where they may not, or where it has to be opened again."""
        if self._unproven(opened):
            with self._bench.turn:
                proof = prove(opened[0], self._model.as_pictures(), on_device=bool(self._opener.gpus))
            self._conclude(opened, proof)

    def _unproven(self, opened: Sequence[Backend]) -> bool:
        return self._proof.rule != RULE and must_be_proven(
            opened[0], self._model.config, declared=self._model.insists
        )

    def _conclude(self, opened: Sequence[Backend], proof: BatchProof) -> None:
        self._proof = proof
        if self._runs_singly or not opened[0].alive:
            raise _NoBatches

    @property
    def _runs_singly(self) -> bool:
        """Where the settings ask for batches, they have them although noise fails, or changes little."""
        proof = self._proof
        if self._model.insists and proof.off <= SLIGHT:
            return False
        return bool(proof.differs or (proof.untried and not self._model.insists))

    def _batch_as_proven(self) -> None:
        proof = self._proof
        if self._runs_singly and self._model.config.max_batch != 1:
            why = proof.differs or f"it does not run on noise ({proof.untried}) and nothing sets max_batch"
            signature = replace(self._model.signature, max_batch=1, unbatched=why)
            self._model = replace(self._model, config=singly(self._model.config, why), signature=signature)

    def _doubt(self) -> str:
        """Returns what is doubtful about batches that the settings ask for."""
        proof = self._proof
        if proof.untried:
            return f"batches were not compared with single requests, since noise fails: {proof.untried}"
        return f"{proof.differs}, by {proof.off:.1%}, and max_batch asks for batches" if proof.differs else ""

    def _believed(self, kept: Profile) -> Profile | None:
        """Returns the profile, unless its layout cannot have been chosen on this machine."""
        self._opener.place(self._model.config)
        if is_possible(kept.layout, self._model.config, usable_cores(), len(self._opener.gpus)):
            return kept
        log.warning("profile-implausible", model=self._model.config.name, layout=str(kept.layout))
        return None

    def keep(self, profile: Profile) -> None:
        """Keeps a profile for the next start."""
        self._kept.write(profile)

    @property
    def kept_as(self) -> str:
        """The key of its profile; empty: it is not kept."""
        return self._kept.name

    def _find_compiled(self) -> Compiled | None:
        """Returns what was compiled before, and loads it unless the model is compiled while it serves."""
        for extension in asked_extensions(self._model.config):
            if extension.compiled:
                find = extension.part(extension.compiled)
                kept = self._kept
                found: Compiled | None = find(self._model.config, self._opener.version, kept.key, kept.store)
                if found is not None and not self.behind:
                    found.bring()
                return found
        return None

    def bring_artifacts(self) -> None:
        """Before anything is compiled here: what was compiled elsewhere."""
        if self.compiled is not None:
            self.compiled.bring()

    def resume(self, config: ModelConfig, threads: int | None) -> None:
        """Be ready for more instances of what was prepared in another process, which is gone."""
        self._settle()
        signature = replace(
            self._model.signature, max_batch=config.max_batch or 0, unbatched=config.unbatched
        )
        self._model = replace(self._model, config=config, signature=signature)
        self._opener.place(config, threads)

    def _settle(self) -> None:
        """Completes the settings, with nothing left open. Mistakes are reported before anything is loaded for
        good."""
        self._model = settled(self._examine(), self._model, self._opener, behind=self._may_compile_behind)
        self.settled = self._model

    @property
    def behind(self) -> bool:
        """Its instances are loaded as plain ones, and are compiled while they serve."""
        return self._may_compile_behind and self._model.config.pytorch.compiles_behind

    # ---- instances --------------------------------------------------------------------------------------

    def backend(
        self,
        index: int,
        count: int,
        tell: ReportStep = lambda _: None,
        *,
        hurry: bool = False,
        plain: bool = False,
    ) -> Backend:
        """Returns one more instance; how many threads it has was found out at the first."""
        return self._opener.open(self._model, index, count, tell, hurry=hurry, plain=plain or self.behind)

    def abort(self) -> None:
        """Ends from another thread what this one runs: it is not wanted any more, and may have no end."""
        self._opener.abort()

    def open(self, layout: Layout, tell: ReportStep = lambda _: None) -> list[Backend]:
        self._opener.place(self._model.config, layout.threads)
        opened: list[Backend] = []
        with closed_if_it_fails(opened):
            for index in range(layout.instances):
                tell(f"loading instance {index + 1} of {layout.instances}")
                opened.append(self.backend(index, layout.instances, tell))
        return opened

    def choose(self, tell: ReportStep, earlier: Layout | None = None) -> Chosen:
        """Instances and threads: as the settings say, else as trying them says. Those of an `earlier` start
        stay where nothing is clearly better."""
        self._opener.place(self._model.config)
        if not self._opener.gpus:
            trying = Trying(
                *(self._model.as_pictures(), self.open, self._bench.now, self._bench.turn),
                watch=self._bench.watch,
                earlier=earlier,
            )
            return choose_on_cpu(self._model.config, usable_cores(), trying, tell)
        self._opener.threads = 1

        def open_one(index: int) -> Backend:
            tell(f"loading instance {index + 1}")
            backend = self.backend(index, 1, tell)
            with closed_if_it_fails([backend]):
                self._prove([backend])
            return backend

        from carpool.engine.profile.gpu_layouts import choose_on_gpus, usual_on_gpus

        if self.behind and not any(group.given for group in self._model.config.instances):
            return usual_on_gpus(self._opener.gpus, open_one, decodes=self._model.encoded)
        return choose_on_gpus(
            self._model.config, self._opener.gpus, self._model.slo, open_one, self._measuring
        )

    def _fake(self, tell: ReportStep) -> Opened:
        """Opens a fake model. Its curve is in the settings, so no measurement is needed."""
        assert self._model.config.fake is not None
        layout = Layout(instance_count(self._model.config), 1)
        curve = BatchCurve.parse(self._model.config.fake.curve, self._model.largest)
        return self.open(layout, tell), Profile(layout, "as the settings say"), curve

    # ---- measuring --------------------------------------------------------------------------------------

    def _reuse(self, kept: Profile, tell: ReportStep) -> Opened | None:
        """Returns the instances that it was measured with, if a few runs still take what it says."""
        model = self._model.config.name
        curve = kept.measured.curve(self._model.largest, self._model.config.pytorch.buckets)
        too_slow = curve.times[1] > self._model.slo
        if too_slow and not self._model.config.slo_may_grow:  # nothing is rejected for what a file says
            return None
        promised = promised_batch(curve, self._model.slo) or 1
        wanted = {1, promised if curve.times[promised] < _CHECKED_S else 1}
        opened = self.open(kept.layout, tell)
        try:
            with closed_if_it_fails(opened):
                self._prove(opened)
                tell("checking the kept profile")
                with self._bench.turn:
                    watched, measuring = self._bench.watch(), self._measuring(opened)
                    if kept.elsewhere:
                        ratios = measuring.quick_ratios(sorted(wanted), curve, STILL_TRUE)
                    else:
                        ratios = measuring.ratios(sorted(wanted), curve, STILL_TRUE)
                    busy = contention(watched.read())
        except ModelError as error:
            log.warning("profile-outdated", model=model, error=error.message)
            return None
        off = max(ratios.values(), key=lambda ratio: max(ratio, 1 / ratio))
        most = STILL_TRUE if too_slow else SURELY_FALSE
        found = judged(kept, off, busy, model=model, whose=self._kept.whose, most=most)
        if found is None:
            close_all(opened)
            return None
        return opened, found, curve

    def _measure(self, tell: ReportStep, earlier: Layout | None = None) -> Opened:
        chosen = self.choose(tell, earlier)
        self._opener.threads = chosen.layout.threads
        opened = list(chosen.backends) or self.open(chosen.layout, tell)
        profile = Profile(chosen.layout, chosen.reason)
        name, promises = self._model.config.name, isinstance(self._model.config.policy, Promise)
        warm = bool(chosen.backends) and not self._opener.gpus
        with closed_if_it_fails(opened):
            if self._opener.gpus or self._model.encoded:
                self._prove(opened)
            try:
                measured = self._look(opened, tell, warm=warm)
                if measured.points[0].seconds > self._model.slo:  # it may only be the machine: once more
                    again = self._look(opened, tell, warm=warm)
                    measured = min(measured, again, key=lambda found: found.points[0].seconds)
            except ModelError as error:
                if promises:
                    why = f"{name}: an SLO needs a measured model, and warming up failed: {error.message}"
                    raise ModelError(why) from error
                if not all(backend.alive for backend in opened):
                    raise
                log.warning("warm-up-failed", model=name, error=error.message)
                return opened, profile, BatchCurve.linear(0.001, 0.001, self._model.largest)
        at = datetime.now(UTC).isoformat(timespec="seconds")
        points = ",".join(f"{point.size}:{point.seconds * 1e3:.4g}" for point in measured.points)
        log.debug("profile-measured", model=name, layout=str(chosen.layout), curve=points)
        curve = measured.curve(self._model.largest, self._model.config.pytorch.buckets)
        memory = self._memory(opened, curve)
        return opened, replace(profile, measured=measured, memory=memory, measured_at=at), curve

    def _memory(self, opened: Sequence[Backend], curve: BatchCurve) -> RunMemory:
        if not any(isinstance(backend, KeepsMemory) for backend in opened):
            return RunMemory()
        with self._bench.turn:
            measuring = kept_bytes(opened)
            if measuring < MUCH_MEMORY:
                return RunMemory(measuring, measuring)
            piece = best_piece(curve, kind_of(self._model.config.backend), measuring)
            images = min(piece, curve.points[-1][0])
            return RunMemory(measuring, batch_bytes(self._measuring(opened), images))

    def _look(self, opened: Sequence[Backend], tell: ReportStep, *, warm: bool) -> Measured:
        effort = FOR_FIRST_ANSWERS if self.behind else FOR_DEVICES if self._opener.gpus else FOR_SERVING
        measuring = self._measuring(opened, effort, warm=warm)
        if self.behind:
            measuring.once(1)  # what is made for the first picture only is not worth measuring
        wanted = self._model.config.pytorch.buckets or sizes(self._model.largest)

        def begins(images: int) -> None:
            tell(f"measuring batches of {images}")

        with self._bench.turn:
            if self._unproven(opened):
                return self._look_and_prove(opened, measuring, wanted, begins)
            return measuring.points(wanted, self._model.slo, begins)

    def _look_and_prove(
        self,
        opened: Sequence[Backend],
        measuring: Measuring,
        wanted: Sequence[int],
        tell: Callable[[int], None],
    ) -> Measured:
        """Measures batches of noise, and compares what they answer with single requests. Raises _NoBatches as
        `_prove` does."""
        trial, size = BatchTrial(opened[0], self._model.as_pictures()), 1
        measured: Measured | None = None

        def begins(images: int) -> None:
            nonlocal size
            size = images
            tell(images)

        if trial.begin():
            try:
                warm = measuring.warm or len(opened) == 1  # it has just answered the trial
                measured = replace(measuring, rows=trial, warm=warm).points(wanted, self._model.slo, begins)
            except ModelError as error:
                trial.failed(size, error)
        self._conclude(opened, trial.end())
        return measured or measuring.points(wanted, self._model.slo, tell)

    def _measuring(
        self, opened: Sequence[Backend], effort: Effort = FOR_SERVING, *, warm: bool = False
    ) -> Measuring:
        """Measures with pictures, where the device decodes them."""
        picture = None
        if self._model.encoded:
            from carpool.engine.loading.device_pictures import sample_picture

            picture = sample_picture()
        return Measuring(
            *(opened, self._model.as_pictures(), effort),
            now=self._bench.now,
            picture=picture,
            warm=warm,
            watch=self._bench.watch,
        )

    def _ready(self, opened: list[Backend], profile: Profile, curve: BatchCurve) -> Ready:
        with closed_if_it_fails(opened):
            config, grown = keepable(self._model.config, curve, provisional=bool(profile.provisional))
        if profile.layout.instances != instance_count(config):
            group = replace(config.instances[0], count=profile.layout.instances)
            config = replace(config, instances=(group,))
        busy = {PROVISIONAL: profile.provisional} if profile.provisional else {}
        busy |= {UNBATCHED: config.unbatched} if config.unbatched else {}
        config = replace(config, parameters={**config.parameters, **self._model.told, **busy})
        self._model = replace(self._model, config=config)
        piece = best_piece(curve, kind_of(config.backend), profile.memory.measuring)
        told = ""
        if self._model.encoded:
            from carpool.engine.loading.device_pictures import SAMPLE_TOLD

            told = SAMPLE_TOLD
        slo = None if isinf(self._model.slo) else self._model.slo
        said = choices(profile, curve, piece, slo, told) + ((grown,) if grown else ())
        if why := self._model.signature.why_unbatched():
            said += (f"{why[0].upper()}{why[1:]}.",)
        if why := config.unbatched:
            log.warning("batches-off", model=config.name, why=why, help=BATCH_HELP)
        elif why := self._doubt():
            log.warning("batches-not-proven", model=config.name, why=why)
            said += (f"{why[0].upper()}{why[1:]}.",)
        if isinstance(opened[0], OnDevice):
            said += tuple(opened[0].notes)
        for sentence in said:
            log.debug("choice", model=config.name, why=sentence)
        signature, labels, vision = self._model.signature, self._model.labels, self._model.vision
        return Ready(config, signature, curve, opened, labels, vision, profile, piece, said)


def as_pictures(signature: Signature, vision: VisionSettings | None) -> Signature:
    """Returns the signature with the size that pictures have, where the input leaves it open: that is what
    will be asked."""
    spec = None if vision is None else signature.input_named.get(vision.input.name)
    if vision is None or spec is None or DYNAMIC not in vision.input.shape:
        return signature
    from carpool.vision.geometry import read_form

    shape = read_form(vision.image, vision.input, signature.model).shape
    whole = (*spec.shape[: len(spec.shape) - len(shape)], *shape)
    sized = replace(spec, shape=whole)
    return replace(signature, inputs=tuple(sized if one is spec else one for one in signature.inputs))
