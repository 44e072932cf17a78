"""Recognises what a model is for from facts: the shapes and values of a dry run, names, labels and metadata.

Every rule (head_rules) gives readings: a task, and the settings with which the outputs make sense. No shape
that fits decides alone: a reading is certain only where something speaks for it that other models lack, such
as metadata, as many labels as classes, or values that only this head answers. Where two readings are
left, or none is certain, the model is served as tensors, and a client that sends a picture is answered with
what to set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from carpool.config.model import (
    Task,
)
from carpool.types import TensorSpec
from carpool.vision.coco_numbers import names_all
from carpool.vision.known_families import known_family
from carpool.vision.output_facts import Facts
from carpool.vision.vision_settings import TaskTable

WRITTEN, WRITTEN_END = "text_output", "finish_reason"
"""What the outputs of a model that writes are called: the text, and why it ends."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Describes one way to understand the outputs."""

    task: str
    table: TaskTable | None  # the task's settings; what is None in it is still to be set
    outputs: tuple[TensorSpec, ...]  # those that are read, in order
    why: str
    classes: int | None = None  # how many there would be
    certain: bool = False
    ask: str = ""  # what else must be set before it can be used
    assumed: tuple[str, ...] = ()  # settings of the task that are guessed
    by_shape: bool = False  # nothing but shapes fits, as those of many other models do


@dataclass(frozen=True, slots=True)
class Verdict:
    reading: Reading | None  # None: nothing is sure
    evidence: tuple[str, ...]
    ask: str = ""  # what to set, where nothing is sure
    tasks: tuple[str, ...] = ()  # all that are possible then


def recognise(facts: Facts, found: Iterable[Reading]) -> Verdict:
    """Returns which of the readings it is, if that can be said."""
    found = list(found)
    evidence = list(facts.claims.lines)
    if facts.labels:
        evidence.append(f"{len(facts.labels)} labels")
    if facts.task is not None:
        return _as_declared(facts, [one for one in found if one.task == facts.task], evidence)
    claimed = facts.claims.task
    if facts.claims.unread:
        say = f"its metadata says {facts.claims.unread}, and no task here is that"
        return Verdict(None, (*evidence, say), f"{say}; its outputs are {facts.in_words()}")
    if claimed is not None:
        found = [one for one in found if one.task == claimed]
        if not found:
            say = f"its metadata says {claimed}, but its outputs {facts.in_words()} do not match"
            return Verdict(None, (*evidence, say), f"{say}: {how_to_set()}")
    sure = _sure(facts, found, claimed is not None)
    if len(sure) == 1 and not sure[0].ask:
        return Verdict(sure[0], (*evidence, sure[0].why))
    left = sure or found
    evidence += [f"could be {one.task}: {one.why}" for one in left]
    tasks = tuple(dict.fromkeys(one.task for one in left))
    return Verdict(None, tuple(evidence), _question(facts, left, tasks), tasks)


def _sure(facts: Facts, found: Sequence[Reading], claimed: bool) -> list[Reading]:
    """Returns the sure readings: as many labels as classes decide, for heads that are not rare; else a claim
    that one reading alone fits; else what is certain by itself, unless there are labels and their number is
    another."""
    if facts.labels:
        exact = [one for one in found if names_all(facts.labels, one.classes)]
        exact = [one for one in exact if claimed or one.certain or one.task not in (Task.POSE, Task.OBB)]
        if exact:
            return [one for one in exact if one.certain] or exact
        found = [one for one in found if one.classes is None]
    if claimed and len(found) == 1:
        return list(found)
    return [one for one in found if one.certain]


def _as_declared(facts: Facts, found: list[Reading], evidence: list[str]) -> Verdict:
    if facts.form is not None:
        found = [one for one in found if getattr(one.table, "format", None) == facts.form]
    family = known_family(facts)
    if not found:
        ask = f"its outputs are {facts.in_words()}: {family.words}" if family and not facts.form else ""
        return Verdict(None, tuple(evidence), ask)
    shown = [one for one in found if not one.by_shape] or found
    best = next(iter(_sure(facts, shown, claimed=True)), shown[0])
    if family is not None:
        evidence.append(family.words)
        if best.by_shape and family.certain and facts.form is None:
            say = f"{family.words}. Remove the task"
            return Verdict(None, tuple(evidence), f"its outputs are {facts.in_words()}: {say}")
    if (best.by_shape or facts.claims.unread) and facts.form is None:
        best = replace(best, assumed=("outputs", *best.assumed))
    return Verdict(best, (*evidence, best.why), best.ask)


def _question(facts: Facts, found: Sequence[Reading], tasks: Sequence[str]) -> str:
    asked = next((one.ask for one in found if one.ask), "")
    outputs = f"its outputs are {facts.in_words()}"
    family = known_family(facts)
    if family is not None and family.certain:
        return f"{outputs}: {family.words}"
    if not found:
        return f"{outputs}, which could be anything: {how_to_set()}"
    if len(tasks) == 1 and asked:
        return f"{outputs}, which look like {tasks[0]}: {asked}"
    could = " or ".join(f"{one.task} ({one.why})" for one in found)
    counted = f", and there are {len(facts.labels)} labels" if facts.labels else ""
    if family is not None:
        return (
            f"{outputs}, which could be {could}{counted}; but {family.words}. Otherwise {how_to_set(*tasks)}"
        )
    return f"{outputs}, which could be {could}{counted}: {how_to_set(*tasks)}"


def how_to_set(*tasks: str) -> str:
    """Returns how to say which of them it is, which only its owner knows."""
    words = " or ".join(f'"{task}"' for task in tasks or ("…",))
    option = f"--task {tasks[0]}" if len(tasks) == 1 else "--task"
    return f"set task = {words} in model.toml, or give {option} to carpool serve"
