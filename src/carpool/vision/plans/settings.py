"""Decides how one model answers pictures: settled once when it is loaded, then sent to every front end as
JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig, Task, values_on_device
from carpool.errors import ConfigError
from carpool.types import DATATYPES, Array, Signature, TensorSpec
from carpool.vision import tasks
from carpool.vision.claims import NO_CLAIMS, Claims
from carpool.vision.coco_numbers import COCO_NUMBERS, names_all, of_coco_numbers
from carpool.vision.geometry import lookup_tables, read_form
from carpool.vision.head_rules import readings
from carpool.vision.output_facts import Facts, OutputFact
from carpool.vision.plans.pixels import guesses, refuse_assumed, see_pixels
from carpool.vision.recognition import Reading, TaskTable, Verdict, recognise
from carpool.vision.tasks.task import (
    AS_TENSORS,
    LoadedModel,
    Picture,
    VisionSettings,
    find_picture,
    in_words,
    no_picture,
    outputs_of,
)

__all__ = ["VisionSettings", "describe", "read", "write"]


def write(settings: VisionSettings) -> dict[str, Any]:
    """Returns the settings as JSON."""
    written = asdict(settings)
    for spec in (written["input"], *written["outputs"]):
        spec["datatype"] = spec["datatype"].value
    return {**written, "task": str(settings.task)}


def read(document: Mapping[str, Any]) -> VisionSettings:
    """Reads what `write` wrote, through JSON."""
    kind, table = tasks.kinds()[document["task"]], document["table"]
    made = {
        "task": kind.name,
        "image": ImageSettings(**_tuples(document["image"])),
        "input": _read_spec(document["input"]),
        "outputs": tuple(map(_read_spec, document["outputs"])),
        "table": None if table is None or kind.table is None else kind.table(**_tuples(table)),
    }
    return VisionSettings(**{**_tuples(document), **made})


def _read_spec(spec: Mapping[str, Any]) -> TensorSpec:
    return TensorSpec(**{**_tuples(spec), "datatype": DATATYPES[spec["datatype"]]})


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


# ---- from a loaded model --------------------------------------------------------------------------------


class Described(NamedTuple):
    """Describes how a model answers pictures; None where it does not, and then `ask` says what to set, if
    that could help. `evidence` is what was found, in words."""

    vision: VisionSettings | None
    evidence: list[str]
    ask: str = ""
    tasks: tuple[str, ...] = ()  # that it could be for, where nothing is sure


class ModelFacts(NamedTuple):
    """Describes what is known of a model beside its settings and its signature."""

    claims: Claims = NO_CLAIMS
    samples: Mapping[str, Array] = MappingProxyType({})  # what a dry run answered, by output, for one picture
    loud: Mapping[str, Array] = MappingProxyType({})  # the same for noise 255 times as large
    whole: bool = False  # outputs do not begin with a batch, although the input does
    trouble: str = ""  # why there is no dry run, in words
    ask: str = ""  # what to set, where that alone says it


NOTHING_SEEN = ModelFacts()


def describe(
    config: ModelConfig,
    signature: Signature,
    labels: Mapping[str, Sequence[str]] | None = None,
    seen: ModelFacts = NOTHING_SEEN,
) -> Described:
    """`labels` are class names by output. Settings that the model cannot fulfil are a ConfigError."""
    declared = declared_task(config)
    picture = find_picture(config, signature)
    if picture is None:
        return _without_a_picture(config, signature, declared)
    image, _ = see_pixels(config, picture, seen.claims, declared)
    if image.size is None and DYNAMIC in (picture.height, picture.width):
        return _without_a_size(config, picture, declared)
    names = next((tuple(lines) for lines in (labels or {}).values() if lines), ()) or seen.claims.labels
    outputs = signature.outputs if seen.whole else outputs_of(signature, picture)
    fixed = signature.why_unbatched() if picture.leading == 1 else ""
    model = LoadedModel(config, picture, outputs, names, [note for note in (seen.trouble, fixed) if note])
    if seen.ask and declared is None:
        return Described(None, model.notes, seen.ask)
    verdict = _judge(model, image, seen, declared)
    task = declared or (verdict.reading.task if verdict.reading is not None else None)
    if task is None:
        return Described(None, [*verdict.evidence, *model.notes], verdict.ask, verdict.tasks)
    return _answering(model, task, verdict, seen.claims)


def _answering(model: LoadedModel, task: str, verdict: Verdict, claims: Claims) -> Described:
    """Returns how a model of this task answers pictures. Without settings that ask for it, one whose input
    cannot hold them is left to tensors."""
    config, declared = model.config, declared_task(model.config)
    table, outputs = _settled(model, task, verdict)
    image, assumed = see_pixels(config, model.picture, claims, task)
    if values_on_device(config):  # who makes the pictures' tensors leaves their pixels as they are
        image = replace(image, mean=(0.0,), std=(1.0,), scale=None)
    try:
        form = read_form(image, model.picture.spec, config.name)
        lookup_tables(image, form, model.picture.spec.datatype, config.name)
    except ConfigError as error:
        if config.task is not None or config.image is not None:
            raise
        return Described(None, [f"it has no image route: {error.message}"])
    assumed = (*assumed, *_left_open(config, task, verdict.reading))
    if config.strict_pixels:
        refuse_assumed(config, assumed)
    told = [] if declared else [f"task {task}"]
    if not (declared and _answered(config, task)):
        told += verdict.evidence
    classes = None if verdict.reading is None else verdict.reading.classes
    labels = of_coco_numbers(model.labels) if classes == COCO_NUMBERS else model.labels
    vision = VisionSettings(task, image, model.picture.spec, outputs, table, labels, assumed=assumed)
    tasks.build(vision)  # what is wrong with it is said now, not where it is used
    return Described(vision, [*told, *model.notes])


def _left_open(config: ModelConfig, task: str, reading: Reading | None) -> tuple[str, ...]:
    """Returns what the reading guesses and the task's table does not say. Who writes a Python model knows its
    outputs."""
    if reading is None or not guesses(config):
        return ()
    table = getattr(config, task, None)
    told = {"labels": "format"}  # what a format in the settings confirms, too
    return tuple(name for name in reading.assumed if getattr(table, told.get(name, name), None) is None)


def _without_a_picture(config: ModelConfig, signature: Signature, declared: str | None) -> Described:
    why, likely = no_picture(config, signature)
    if config.image is not None or declared not in (None, Task.RAW):
        raise ConfigError(
            f"{config.name}: {_because(config, declared)} needs one input that can hold an image: three "
            f"dimensions without the batch, with 1 or 3 channels where the layout has them; {why}"
        )
    if declared == Task.RAW or not guesses(config):
        return Described(None, [])
    return Described(None, [why], f"{why}. {AS_TENSORS}" if likely else "")


def _settled(
    model: LoadedModel, task: str, verdict: Verdict
) -> tuple[TaskTable | None, tuple[TensorSpec, ...]]:
    reading = verdict.reading
    if reading is None and verdict.ask:
        raise ConfigError(f"{model.config.name}: {_because(model.config, task)} does not fit: {verdict.ask}")
    if reading is None:
        return tasks.kinds()[task].settle(model)
    if verdict.ask and not _answered(model.config, task):
        raise ConfigError(f"{model.config.name}: {verdict.ask}")
    if model.labels and reading.classes is not None and not names_all(model.labels, reading.classes):
        given = len(model.labels)
        model.notes.append(f"{given} labels for {reading.classes} classes: the others are named by number")
    return _combined(getattr(model.config, task, None), reading), reading.outputs


def declared_task(config: ModelConfig) -> str | None:
    """The task, or the one whose table is there; two that contradict each other are an error."""
    tables = [name for name, kind in tasks.kinds().items() if kind.table and getattr(config, name, None)]
    for task in tables:
        other = config.task or tables[0]
        if task != other:
            raise ConfigError(
                f"{config.name}: [{task}] is for models of that task, but this model is for {other}; "
                "remove one"
            )
    return config.task or next(iter(tables), None)


def _because(config: ModelConfig, declared: str | None) -> str:
    if declared is None:
        return "[image]"
    return f'task = "{declared}"' if config.task else f"[{declared}]"


def _without_a_size(config: ModelConfig, picture: Picture, declared: str | None) -> Described:
    found = f"the model's input {in_words([picture.spec])} takes images of any size"
    if declared is not None or config.image is not None:
        raise ConfigError(f"{config.name}: {found}; set size in [image]")
    ask = f"{found}: set size in [image] of model.toml, or give --size to carpool serve"
    return Described(None, [found], ask)


def _judge(model: LoadedModel, image: ImageSettings, seen: ModelFacts, declared: str | None) -> Verdict:
    """Raw outputs need no reading, and a task of another package may have none."""
    if declared == Task.RAW:
        return Verdict(None, ())
    height, width = image.size or (model.picture.height, model.picture.width)
    pose = model.config.pose
    claims = seen.claims if pose is None else replace(seen.claims, keypoints=pose.keypoints)
    facts = Facts(
        height,
        width,
        image.layout == "nchw",
        tuple(OutputFact(s, seen.samples.get(s.name), seen.loud.get(s.name)) for s in model.outputs),
        model.labels,
        claims,
        declared,
        getattr(getattr(model.config, declared or "", None), "format", None),
    )
    others = (kind.recognise(facts) for kind in tasks.kinds().values())
    untried = not seen.samples and declared is not None and _answered(model.config, declared)
    found = readings(facts) if declared is None or untried else _offered(facts)
    return recognise(facts, [*(one for one in others if one is not None), *found])


def _offered(facts: Facts) -> Iterator[Reading]:
    """Yields those that fit the declared task: one that would not be offered without that fits by its shape
    alone."""
    unasked = replace(facts, task=None, form=None, claims=replace(facts.claims, task=facts.task))
    offered = {(one.task, one.outputs, getattr(one.table, "format", None)) for one in readings(unasked)}
    for one in readings(facts):
        known = (one.task, one.outputs, getattr(one.table, "format", None)) in offered
        yield replace(one, by_shape=one.by_shape or not known)


def _answered(config: ModelConfig, task: str) -> bool:
    """Returns whether the task's table says anything that a reading left open."""
    table = getattr(config, task, None)
    return table is not None and any(
        getattr(table, name, None) is not None
        for name in ("format", "activation", "background", "boxes", "normalized")
    )


def _combined(declared: TaskTable | None, reading: Reading) -> TaskTable | None:
    """Returns what the settings say; what they leave open as the reading has it."""
    if declared is None or reading.table is None:
        return reading.table
    told = {field.name: getattr(reading.table, field.name) for field in fields(reading.table)}
    left = {name: value for name, value in told.items() if getattr(declared, name) is None}
    return replace(declared, **left)
