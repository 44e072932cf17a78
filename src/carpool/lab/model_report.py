"""What a model file is recognised as, why, and the model.toml that would say so."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path

from carpool import backends
from carpool.backends.backend import Backend, Placement
from carpool.config.model import ImageSettings, ModelConfig, PictureChoice
from carpool.config.repository import ModelSource, find_models
from carpool.engine.hardware import gpu_count
from carpool.engine.models.trial import Examined, examine, try_out
from carpool.errors import ConfigError
from carpool.types import TensorSpec
from carpool.vision.settings import Described, VisionSettings, describe

_LABELS = "labels.txt"
_HINTS = (  # what may be said where nothing was told
    "size = 640",
    'resize = "letterbox"',
    "mean = [0.485, 0.456, 0.406]",
    "std = [0.229, 0.224, 0.225]",
    "scale = 0.00392156862745098",
)
_HEADING = "# What is known of this model. Every line may be changed: docs/configuration.md has them all."


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
    evidence: tuple[str, ...]
    ask: str  # what to set, where nothing is sure
    toml: str  # the model.toml that would pin it

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def inspect_model(path: Path, choice: PictureChoice | None = None) -> ModelReport:
    """Opens the model and tries it once; nothing is served."""
    sources, _ = find_models([path], gpus=gpu_count())
    if len(sources) != 1:
        raise ConfigError(f"{path} holds {len(sources)} models: name one of them")
    return _report(sources[0], *_tried(sources[0], choice))


def how_it_sees(source: ModelSource) -> VisionSettings | None:
    """How a model answers pictures; None: it takes tensors. It is opened and tried once."""
    return _tried(source)[1].vision


def _tried(source: ModelSource, choice: PictureChoice | None = None) -> tuple[Examined, Described]:
    version = source.versions[-1]

    def load(config: ModelConfig) -> Backend:
        devices = backends.devices(config)
        placement = Placement(threads=1, gpu=devices[0] if devices else None, hurry=True)
        return backends.load(config, version, placement)

    found = try_out(examine((choice or PictureChoice()).applied(source.config), version), load)
    return found, describe(found.config, found.signature, found.labels, found.seen)


def _report(source: ModelSource, found: Examined, said: Described) -> ModelReport:
    vision, signature = said.vision, found.signature

    def told(spec: TensorSpec) -> Tensor:
        sample = found.seen.samples.get(spec.name)
        shape = list(spec.full_shape(signature.max_batch))
        return Tensor(spec.name, spec.datatype.value, shape, None if sample is None else list(sample.shape))

    file = source.versions[-1].file
    return ModelReport(
        model=source.config.name,
        file="" if file is None else str(file),
        backend=source.config.backend or "",
        inputs=tuple(map(told, signature.inputs)),
        outputs=tuple(map(told, signature.outputs)),
        task=None if vision is None else str(vision.task),
        format=None if vision is None else getattr(vision.table, "format", None),
        labels=found.seen.claims.labels if vision is None else vision.labels,
        evidence=tuple(said.evidence),
        ask=said.ask,
        toml=settings_text(found.config, said),
    )


def settings_text(config: ModelConfig, said: Described) -> str:
    """A model.toml with what was found, and as comments what it was found by and what else may be said."""
    vision = said.vision
    asked = [f"to be said before it takes pictures: {said.ask}"] if said.ask else []
    lines = [_HEADING, *(f"# - {' '.join(line.split())}" for line in (*said.evidence, *asked)), ""]
    if config.file and not config.file.startswith("model."):
        lines.append(f"file = {_value(config.file)}")
    lines.append('# task = "detect"' if vision is None else f"task = {_value(str(vision.task))}")
    inside = config.labels and not Path(config.labels).is_absolute()
    names = f"labels = {_value(config.labels if inside else _LABELS)}"
    lines.append(names if vision is not None and vision.labels else f"# {names}  # a class a line")
    lines += ["# slo_ms = 50  # promise to answer within so many ms, or say no early", ""]
    lines += _image(vision)
    if vision is not None and vision.table is not None:
        lines += ["", f"[{vision.task}]", *_fields(vision.table)]
    return "\n".join(lines) + "\n"


def _image(vision: VisionSettings | None) -> list[str]:
    """What differs from what is so anyway, and as comments what models are often trained with."""
    lines = ["[image]"]
    plain = ImageSettings()
    if vision is not None:
        lines += [line for line in _fields(vision.image, plain) if not line.startswith("layout")]
    said = {line.partition(" ")[0] for line in lines}
    return lines + [f"# {hint}" for hint in _HINTS if hint.partition(" ")[0] not in said]


def _fields(table: object, plain: object | None = None) -> list[str]:
    found = []
    for field in fields(table):  # type: ignore[arg-type]
        value = getattr(table, field.name)
        if value is not None and (plain is None or value != getattr(plain, field.name)):
            found.append(f"{field.name} = {_value(value)}")
    return found


def _value(value: object) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return repr(value)
