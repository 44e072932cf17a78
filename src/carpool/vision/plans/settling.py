"""Settles how a model that takes pictures answers them: from its settings, its claims and a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace

from carpool.config.model import DYNAMIC, ImageSettings, ModelConfig, Task, values_on_device
from carpool.errors import ConfigError
from carpool.types import Signature, TensorSpec
from carpool.vision import tasks
from carpool.vision.coco_numbers import COCO_NUMBERS, names_all, of_coco_numbers
from carpool.vision.geometry import lookup_tables, read_form
from carpool.vision.head_rules import readings
from carpool.vision.output_facts import Claims, Facts, OutputFact
from carpool.vision.picture_input import Picture, in_words, outputs_of
from carpool.vision.plans.pixels import refuse_assumed, see_pixels
from carpool.vision.recognition import Reading, Verdict, recognise
from carpool.vision.tasks.task import LoadedModel
from carpool.vision.vision_settings import (
    Described,
    ModelFacts,
    TaskTable,
    VisionSettings,
    because,
    declared_task,
    guesses,
)


def settle_pictures(
    config: ModelConfig,
    signature: Signature,
    picture: Picture,
    declared: str | None,
    labels: Mapping[str, Sequence[str]],
    seen: ModelFacts,
) -> Described:
    """`picture` is the model's input for one. Settings that the model cannot fulfil are a ConfigError."""
    image, _ = see_pixels(config, picture, seen.claims, declared)
    if image.size is None and DYNAMIC in (picture.height, picture.width):
        return _without_a_size(config, picture, declared)
    names = next((tuple(lines) for lines in labels.values() if lines), ()) or seen.claims.labels
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


def _settled(
    model: LoadedModel, task: str, verdict: Verdict
) -> tuple[TaskTable | None, tuple[TensorSpec, ...]]:
    reading = verdict.reading
    if reading is None and verdict.ask:
        raise ConfigError(f"{model.config.name}: {because(model.config, task)} does not fit: {verdict.ask}")
    if reading is None:
        return tasks.kinds()[task].settle(model)
    if verdict.ask and not _answered(model.config, task):
        raise ConfigError(f"{model.config.name}: {verdict.ask}")
    if model.labels and reading.classes is not None and not names_all(model.labels, reading.classes):
        given = len(model.labels)
        model.notes.append(f"{given} labels for {reading.classes} classes: the others are named by number")
    return _combined(getattr(model.config, task, None), reading), reading.outputs


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
