"""Reports what a model file is recognised as, why, and the model.toml that would say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from carpool import backends
from carpool.backends.backend import Backend, KeepsMemory, Placement
from carpool.config.model import BATCH_HELP, DYNAMIC, ModelConfig
from carpool.config.presets import PictureChoice
from carpool.config.repository import TOML, ModelSource, find_models
from carpool.engine.loading.batch_proof import asks_for_batches, must_be_proven, prove
from carpool.engine.loading.fixed_batches import rebatched
from carpool.engine.loading.loading import Loading, as_pictures
from carpool.engine.loading.trial import Examined, claims_of, examine, try_out
from carpool.engine.profile.hardware import gpu_count
from carpool.engine.profile.layouts import Layout, close_all
from carpool.engine.profile.measuring import Measuring
from carpool.engine.profile.run_memory import batch_bytes, give_back_all
from carpool.errors import CarpoolError, ConfigError
from carpool.lab.settings_file import named_file, settings_text
from carpool.memory.free_memory import give_back, own_bytes
from carpool.types import Signature, TensorSpec
from carpool.vision.plans.pixels import twice_normalised, what_is_assumed
from carpool.vision.plans.settings import Described, VisionSettings, describe


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    datatype: str
    shape: list[int]  # with the batch, -1 where it varies
    tried: list[int] | None = None  # what a dry run answered for one picture


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The field names are the keys of `--json`."""

    model: str
    file: str
    backend: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    task: str | None  # None: it is served as tensors
    format: str | None
    labels: tuple[str, ...]
    assumed: tuple[str, ...]  # settings of [image] that nothing says
    evidence: tuple[str, ...]
    ask: str  # what to set, where nothing is sure
    weights_mb: float | None  # that one instance takes; None: not known
    image_mb: float | None  # that one image takes besides, while it runs
    unbatched: str  # why its requests never share a batch, where no setting says so
    toml: str  # the model.toml that would pin it, with what stands in the one that is there

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def one_model(path: Path) -> ModelSource:
    sources, _ = find_models([path], gpus=gpu_count())
    if len(sources) != 1:
        raise ConfigError(f"{path} holds {len(sources)} models: name one of them")
    return sources[0]


def inspect_model(path: Path, choice: PictureChoice | None = None) -> ModelReport:
    """Opens the model and tries it once; nothing is served."""
    source = one_model(path)
    return _report(source, *look_at(source, choice))


def read_before(config: ModelConfig) -> str:
    """Returns the model.toml that stands there, if one does."""
    file = config.path / TOML
    return file.read_text("utf-8") if file.is_file() else ""


def _own_settings(config: ModelConfig) -> str:
    """Returns the model.toml that stands there, unless it is for another file."""
    before = read_before(config)
    return before if named_file(before, config) in (None, config.file) else ""


def rebatched_file(path: Path) -> tuple[bytes, str]:
    """Returns a model's file as one for any batch, and words about it."""
    source = one_model(path)
    version, words, refused, _ = rebatched(source.config, source.versions[-1])
    if refused:
        raise ConfigError(f"{path}: {refused}; {BATCH_HELP}")
    if not words or version.file is None:
        raise ConfigError(f"{path}: it fixes no batch, or its settings want single requests")
    return version.file.read_bytes(), words


def how_it_sees(source: ModelSource) -> VisionSettings | None:
    """Returns how a model answers pictures; None: it takes tensors. It is opened and tried once."""
    return look_at(source)[1].vision


def look_at(source: ModelSource, choice: PictureChoice | None = None) -> tuple[Examined, Described]:
    """Returns what its file says and what it answers to noise, and how it is understood."""
    examined = examine((choice or PictureChoice()).applied(source.config), source.versions[-1])

    def load(config: ModelConfig) -> Backend:
        devices = backends.devices(config)
        placement = Placement(threads=1, gpu=devices[0] if devices else None, hurry=True)
        return backends.load(config, examined.version, placement)

    found = try_out(examined, load)
    return found, describe(found.config, found.signature, found.labels, found.seen)


def _report(source: ModelSource, found: Examined, said: Described) -> ModelReport:
    vision, signature = said.vision, found.signature

    def told(spec: TensorSpec) -> Tensor:
        sample = found.seen.samples.get(spec.name)
        shape = list(spec.full_shape(signature.max_batch))
        return Tensor(spec.name, spec.datatype.value, shape, None if sample is None else list(sample.shape))

    file = source.versions[-1].file
    assumed = () if vision is None else vision.assumed
    instance = _instance(source, found, vision)
    twice = None if vision is None else twice_normalised(found.config, found.seen.claims)
    warnings = [
        *([what_is_assumed("it", assumed, found.config.preset)] if assumed else []),
        *([twice] if twice else []),
        *([f"each request runs alone, because {why}; {BATCH_HELP}"] if (why := instance.unbatched) else []),
    ]
    return ModelReport(
        model=source.config.name,
        file="" if file is None else str(file),
        backend=source.config.backend or "",
        inputs=tuple(map(told, signature.inputs)),
        outputs=tuple(map(told, signature.outputs)),
        task=None if vision is None else str(vision.task),
        format=None if vision is None else getattr(vision.table, "format", None),
        labels=claims_of(file, source.config).labels if vision is None else vision.labels,
        assumed=assumed,
        evidence=(*said.evidence, *warnings),
        ask=said.ask,
        weights_mb=instance.weights_mb,
        image_mb=instance.image_mb,
        unbatched=instance.unbatched,
        toml=settings_text(found.config, said, _own_settings(found.config)),
    )


class _Instance(NamedTuple):
    """What one instance with one thread shows; memory in megabytes, None where it is not known."""

    weights_mb: float | None = None
    image_mb: float | None = None
    unbatched: str = ""  # why its requests never share a batch


def _instance(source: ModelSource, found: Examined, vision: VisionSettings | None) -> _Instance:
    signature, opened = found.signature, list[Backend]()
    varies = any(DYNAMIC in spec.shape for spec in signature.inputs)
    if varies and signature.max_batch < 2:
        return _Instance(unbatched=signature.unbatched)
    give_back()
    before = own_bytes()
    try:
        opened += Loading(found.config, found.version, signature=signature).open(Layout(1, 1))
        weights, image = (None, None) if varies else _memory(opened, signature, before)
        return _Instance(weights, image, signature.unbatched or _proven(opened[0], source, found, vision))
    except CarpoolError:
        return _Instance(unbatched=signature.unbatched)
    finally:
        close_all(opened)


def _memory(
    opened: Sequence[Backend], signature: Signature, before: int
) -> tuple[float | None, float | None]:
    """Returns that of the weights, where `before` they were loaded was used so much; and of one image."""
    if not isinstance(opened[0], KeepsMemory):
        return None, None
    give_back_all(opened)
    weights = max(0, own_bytes() - before) / 1e6
    return round(weights, 1), round(batch_bytes(Measuring(opened, signature), 1) / 1e6, 1)


def _proven(backend: Backend, source: ModelSource, found: Examined, vision: VisionSettings | None) -> str:
    """Returns why a batch is not what its requests are alone."""
    asks = asks_for_batches(source.config, found.config, source.versions[-1])
    if not must_be_proven(backend, found.config, declared=asks):
        return ""
    proof = prove(
        backend, as_pictures(found.signature, vision), on_device=bool(backends.devices(found.config))
    )
    return proof.differs or (
        "" if asks or not proof.untried else f"it does not run on noise: {proof.untried}"
    )
