"""How one model answers pictures: settled once when it is loaded, then sent to every front end as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from carpool.config.model import (
    DYNAMIC,
    ClassifySettings,
    DetectSettings,
    EmbedSettings,
    ImageSettings,
    ModelConfig,
    SegmentSettings,
    Task,
    values_on_device,
)
from carpool.errors import ConfigError
from carpool.types import DATATYPES, Signature, TensorSpec
from carpool.vision import recognise
from carpool.vision.recognise import Picture, in_words

TaskSettings = ClassifySettings | DetectSettings | SegmentSettings | EmbedSettings
_TABLES: Mapping[Task, type[TaskSettings]] = {
    Task.CLASSIFY: ClassifySettings,
    Task.DETECT: DetectSettings,
    Task.SEGMENT: SegmentSettings,
    Task.EMBED: EmbedSettings,
}
_ALREADY = ("prob", "softmax", "sigmoid")  # in the name of an output: it holds probabilities
_BACKGROUNDS = ("background", "__background__", "_background_")


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """Nothing is left open: the format, the activation and the outputs are known. Shapes have no batch."""

    task: Task
    image: ImageSettings
    input: TensorSpec  # three dimensions, in the order of image.layout
    outputs: tuple[TensorSpec, ...]  # those the task reads: for boxes_scores the boxes, then the scores
    table: TaskSettings | None = None  # the task's own; raw has none
    labels: tuple[str, ...] = ()
    encoded: bool = False  # the model's device decodes pictures; `image` says what is left to do elsewhere

    def label(self, class_id: int) -> str:
        name = self.labels[class_id] if class_id < len(self.labels) else ""
        return name or str(class_id)


def write(settings: VisionSettings) -> dict[str, Any]:
    """As JSON."""
    return {
        "task": settings.task.value,
        "image": asdict(settings.image),
        "input": _write_spec(settings.input),
        "outputs": [_write_spec(spec) for spec in settings.outputs],
        "table": None if settings.table is None else asdict(settings.table),
        "labels": list(settings.labels),
        "encoded": settings.encoded,
    }


def read(document: Mapping[str, Any]) -> VisionSettings:
    """What `write` wrote, through JSON."""
    task = Task(document["task"])
    return VisionSettings(
        task=task,
        image=ImageSettings(**_tuples(document["image"])),
        input=_read_spec(document["input"]),
        outputs=tuple(_read_spec(spec) for spec in document["outputs"]),
        table=None if document["table"] is None else _TABLES[task](**document["table"]),
        labels=tuple(document["labels"]),
        encoded=document["encoded"],
    )


def _write_spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.datatype.value, list(spec.shape)]


def _read_spec(spec: Sequence[Any]) -> TensorSpec:
    return TensorSpec(spec[0], DATATYPES[spec[1]], tuple(spec[2]))


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# ---- from a loaded model --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Model:
    config: ModelConfig
    picture: Picture
    outputs: tuple[TensorSpec, ...]
    labels: tuple[str, ...]
    notes: list[str]


def describe(
    config: ModelConfig, signature: Signature, labels: Mapping[str, Sequence[str]] | None = None
) -> tuple[VisionSettings | None, list[str]]:
    """How this model answers pictures, or None where it takes none; and in words what its shapes told.

    `labels` are class names by output. Declared settings that the model cannot fulfil are a ConfigError.
    """
    declared = _declared_task(config)
    picture = recognise.find_picture(config, signature)
    if picture is None:
        if config.image is not None or declared not in (None, Task.RAW):
            raise ConfigError(
                f"{config.name}: {_because(config, declared)} needs one input that can hold a picture: three "
                "dimensions without the batch, with 1 or 3 channels where the layout has them; "
                f"the model's inputs are {in_words(signature.inputs)}"
            )
        return None, []
    names = next((tuple(lines) for lines in (labels or {}).values() if lines), ())
    model = _Model(config, picture, recognise.outputs_of(signature, picture), names, [])
    if DYNAMIC in (picture.height, picture.width) and (config.image is None or config.image.size is None):
        return _without_a_size(model, declared)
    task = declared or _told(model)
    table, outputs = _SETTLE[task](model)
    image = replace(config.image or ImageSettings(), layout=picture.layout)
    if values_on_device(config):  # who makes the pictures' tensors leaves their pixels as they are
        image = replace(image, mean=(0.0,), std=(1.0,), scale=None)
    return VisionSettings(task, image, picture.spec, outputs, table, names), model.notes


def _declared_task(config: ModelConfig) -> Task | None:
    """The task, or the one whose table is there; two that contradict each other are an error."""
    tables = [task for task in _TABLES if getattr(config, task.value) is not None]
    for task in tables:
        other = config.task or tables[0]
        if task is not other:
            raise ConfigError(
                f"{config.name}: [{task}] is for models of that task, and this one is for {other}; remove one"
            )
    return config.task or next(iter(tables), None)


def _because(config: ModelConfig, declared: Task | None) -> str:
    if declared is None:
        return "[image]"
    return f'task = "{declared}"' if config.task else f"[{declared}]"


def _without_a_size(model: _Model, declared: Task | None) -> tuple[None, list[str]]:
    name = model.config.name
    found = f"the model's input {in_words([model.picture.spec])} takes pictures of any size"
    if declared is not None or model.config.image is not None:
        raise ConfigError(f"{name}: {found}; give the one to use as size in [image]")
    return None, [f"{found}: without size in [image] it has no image route"]


def _told(model: _Model) -> Task:
    """The task that the outputs show beyond doubt, or raw."""
    outputs, labels, picture = model.outputs, model.labels, model.picture
    first = outputs[0] if outputs else None
    known = f" and {len(labels)} labels" if labels else ""
    task, why = Task.RAW, f"outputs {in_words(outputs)} could be anything"
    if recognise.boxes_and_scores(outputs):
        task, why = Task.DETECT, f"outputs {in_words(outputs)}"
    elif first and len({spec.shape for spec in outputs}) == 1 and recognise.is_map(first, labels, picture):
        task, why = Task.SEGMENT, f"output {in_words([first])} is a map of the picture{known}"
    elif first and len(outputs) == 1:
        if recognise.length(first) and "embed" in first.name.lower():
            task, why = Task.EMBED, f"output {in_words(outputs)}"
        elif recognise.is_classes(first, labels):
            task, why = Task.CLASSIFY, f"one output {list(first.shape)}{known}"
        elif recognise.yolo_format(first, labels, picture):
            task, why = Task.DETECT, f"one output {list(first.shape)}{known}"
    model.notes.append(f"task {task}: {why}")
    return task


def _cannot(model: _Model, task: Task, expected: str) -> ConfigError:
    who, why = model.config.name, _because(model.config, task)
    found = in_words(model.outputs)
    return ConfigError(f"{who}: {why} needs {expected}; the model's outputs are {found}")


def _note_labels(model: _Model, classes: int) -> None:
    if model.labels and classes not in (DYNAMIC, len(model.labels)):
        model.notes.append(f"{len(model.labels)} labels for {classes} classes: the rest go by number")


def _classify(model: _Model) -> tuple[ClassifySettings, tuple[TensorSpec, ...]]:
    vectors = [spec for spec in model.outputs if recognise.length(spec) is not None]
    vectors.sort(key=lambda spec: recognise.length(spec) != len(model.labels))
    if not vectors:
        raise _cannot(model, Task.CLASSIFY, "an output [classes] of floats")
    chosen = vectors[0]
    _note_labels(model, recognise.length(chosen) or 0)
    table = model.config.classify or ClassifySettings()
    if table.activation is None:
        table = replace(table, activation="none" if _is_done(chosen) else "softmax")
        model.notes.append(f'scores are {_of(table.activation)} output "{chosen.name}", by its name')
    return table, (chosen,)


def _of(activation: str | None) -> str:
    return "the" if activation == "none" else f"the {activation} of"


def _is_done(spec: TensorSpec) -> bool:
    return any(word in spec.name.lower() for word in _ALREADY)


def _detect(model: _Model) -> tuple[DetectSettings, tuple[TensorSpec, ...]]:
    table = model.config.detect or DetectSettings()
    form = table.format or _told_format(model)
    if form == "boxes_scores":
        pair = recognise.boxes_and_scores(model.outputs)
        if pair is None:
            raise _cannot(model, Task.DETECT, "outputs [anchors, 4] and [anchors, classes] of floats")
        _note_labels(model, pair[1].shape[1])
        return replace(table, format=form), pair
    fields = "[4 + classes, anchors]" if form == "yolov8" else "[anchors, 5 + classes]"
    chosen = next((spec for spec in model.outputs if recognise.can_be(form, spec)), None)
    if chosen is None:
        raise _cannot(model, Task.DETECT, f"for {form} an output {fields} of floats")
    first, extra = (chosen.shape[0], 4) if form == "yolov8" else (chosen.shape[1], 5)
    _note_labels(model, first if first == DYNAMIC else first - extra)
    return replace(table, format=form), (chosen,)


def _told_format(model: _Model) -> str:
    form = "boxes_scores" if recognise.boxes_and_scores(model.outputs) else None
    for spec in model.outputs:
        form = form or recognise.yolo_format(spec, model.labels, model.picture)
    for spec in model.outputs:
        form = form or recognise.likely_yolo(spec)
    if form is None:
        expected = "[anchors, 4] and [anchors, classes], [4 + classes, anchors] or [anchors, 5 + classes]"
        raise _cannot(model, Task.DETECT, f"outputs {expected} of floats")
    model.notes.append(f"detect format {form}: outputs {in_words(model.outputs)}")
    return form


def _segment(model: _Model) -> tuple[SegmentSettings, tuple[TensorSpec, ...]]:
    maps = [spec for spec in model.outputs if recognise.map_shape(spec, model.picture)]
    if not maps:
        raise _cannot(model, Task.SEGMENT, "an output [classes, height, width] or [height, width] of floats")
    chosen = maps[0]
    shape = recognise.map_shape(chosen, model.picture)
    classes = shape[0] if shape else 1
    _note_labels(model, classes)
    table = model.config.segment or SegmentSettings()
    if table.activation is None:
        table = replace(table, activation=_map_activation(chosen, classes))
        model.notes.append(f'masks are from {_of(table.activation)} output "{chosen.name}"')
    if table.background is None:
        named = (number for number, name in enumerate(model.labels) if name.lower() in _BACKGROUNDS)
        table = replace(table, background=next(named, None))
    return table, (chosen,)


def _map_activation(spec: TensorSpec, classes: int) -> str:
    """Classes exclude each other; a single map is taken as probabilities unless it is called …logit…."""
    if classes == 1:
        return "sigmoid" if "logit" in spec.name.lower() else "none"
    return "none" if _is_done(spec) else "softmax"


def _embed(model: _Model) -> tuple[EmbedSettings, tuple[TensorSpec, ...]]:
    chosen = next((spec for spec in model.outputs if spec.datatype in recognise.FLOATS), None)
    if chosen is None:
        raise _cannot(model, Task.EMBED, "an output of floats")
    return model.config.embed or EmbedSettings(), (chosen,)


def _raw(model: _Model) -> tuple[None, tuple[TensorSpec, ...]]:
    return None, model.outputs


_SETTLE: Mapping[Task, Callable[[_Model], tuple[TaskSettings | None, tuple[TensorSpec, ...]]]] = {
    Task.CLASSIFY: _classify,
    Task.DETECT: _detect,
    Task.SEGMENT: _segment,
    Task.EMBED: _embed,
    Task.RAW: _raw,
}
