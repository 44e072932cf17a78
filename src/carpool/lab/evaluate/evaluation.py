"""Asks for every labelled picture, scores the answers, and compares two versions on the same pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from carpool.client.client import in_order
from carpool.errors import CarpoolError, InvalidInput, Unreachable
from carpool.lab.evaluate.box_measure import BoxMeasure
from carpool.lab.evaluate.labelled_data import LabelledData, MaskedPictures, NamedPictures
from carpool.lab.evaluate.scores import Accuracy, MaskOverlap, Measure, Scored
from carpool.lab.evaluate.subjects import Ask

ROUNDS = 500  # of the bootstrap
_SEED = 1
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class VersionScore:
    """Represents one version. The field names are keys of `--json`."""

    model: str
    version: str
    figures: dict[str, float]
    per_class: dict[str, float]
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class VersionGap:
    """Describes how much better the version is than the other, in the first figure, and between what that
    would lie with other pictures of the kind, with 95 % confidence. `sure`: all of that is on one side of the
    limit."""

    figure: str
    difference: float
    low: float
    high: float
    tolerate: float
    worse: bool
    sure: bool


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The field names are the keys of `--json`."""

    pictures: int  # that count
    scored: VersionScore
    against: VersionScore | None
    gap: VersionGap | None
    failed: dict[str, str]  # by picture: why it does not count
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Answered:
    kept: dict[int, Any] = field(default_factory=dict)  # by the picture's place
    seconds: list[float] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)
    model: str = ""
    version: str = ""


def measure_of(data: LabelledData, names: Mapping[str, str], score: float, iou: float | None) -> Measure:
    """Returns the measure for the data; `names` has, by what the data calls a class, plainly, what the model
    calls it."""
    if isinstance(data, NamedPictures):
        return Accuracy(data, names)
    if isinstance(data, MaskedPictures):
        return MaskOverlap(data, names)
    return BoxMeasure(data, names, score, iou)


def evaluate(
    measure: Measure,
    subjects: Sequence[AbstractContextManager[Ask]],
    *,
    at_once: int,
    tolerate: float,
    step: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Evaluates `subjects`: the version, and perhaps the one that it is compared with. Pictures that either
    does not answer do not count."""
    answered = [_ask_all(measure, subject, at_once, step) for subject in subjects]
    failed = {place: why for one in reversed(answered) for place, why in one.failed.items()}
    places = [place for place in range(len(measure.files)) if place not in failed]
    if not places:
        raise InvalidInput(f"no image was answered: {measure.files[0]}: {failed[0]}", field="pictures")
    scored = [measure.scored([one.kept[place] for place in places], places) for one in answered]
    versions = [_version_score(one, score) for one, score in zip(answered, scored, strict=True)]
    if len({(one.model, one.version) for one in versions}) < len(versions):
        raise InvalidInput(f"version {versions[0].version} would be compared with itself", field="against")
    return Evaluation(
        len(places),
        versions[0],
        versions[1] if len(versions) > 1 else None,
        gap_between(scored[0], scored[1], len(places), tolerate) if len(scored) > 1 else None,
        {str(measure.files[place]): why for place, why in sorted(failed.items())},
        tuple(dict.fromkeys(note for score in scored for note in score.notes)),
    )


def _ask_all(
    measure: Measure, subject: AbstractContextManager[Ask], at_once: int, step: Callable[[], None]
) -> _Answered:
    found = _Answered()
    with subject as ask:

        def one(place: int) -> tuple[int, Any, float, str, str]:
            file: Path = measure.files[place]
            began = monotonic()
            try:
                answer = ask(file, measure.options)
                seconds = monotonic() - began
                return place, measure.read(place, answer), seconds, answer.model, answer.version
            except CarpoolError as error:
                if isinstance(error, Unreachable) and error.reason == Unreachable.reason:
                    raise
                if error.field in ("data", "score", "top_k", "format", "max_detections", "iou") or (
                    error.reason in ("no-task", "not-found", "unknown-model", "unknown-version")
                ):
                    raise  # the next picture will not fare better
                found.failed[place] = error.message.removeprefix(f"{file}: ")
                return place, None, -1.0, "", ""

        for place, kept, seconds, model, version in in_order(one, range(len(measure.files)), at_once):
            step()
            if seconds >= 0:
                found.kept[place] = kept
                found.seconds.append(seconds)
                found.model, found.version = model, version
    return found


def _version_score(answered: _Answered, scored: Scored) -> VersionScore:
    p50, p99 = np.percentile(answered.seconds, [50, 99]).tolist()
    return VersionScore(
        answered.model,
        answered.version,
        {name: round(value, 6) for name, value in scored.figures.items()},
        {name: round(value, 6) for name, value in sorted(scored.per_class.items())},
        round(p50 * 1e3, 3),
        round(p99 * 1e3, 3),
    )


def gap_between(mine: Scored, others: Scored, pictures: int, tolerate: float) -> VersionGap:
    """The bootstrap draws pictures with replacement, the same ones for both: what is hard is hard for both,
    so the difference is known far better than either figure."""
    draw = np.random.default_rng(_SEED)
    everything = np.ones(pictures)
    difference = mine.figure(everything) - others.figure(everything)
    drawn = []
    for _ in range(ROUNDS):
        weights = np.bincount(draw.integers(0, pictures, pictures), minlength=pictures).astype(np.float64)
        drawn.append(mine.figure(weights) - others.figure(weights))
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.nanquantile(drawn, [tail, 1 - tail]).tolist()
    worse = difference < -tolerate
    sure = high < -tolerate if worse else low >= -tolerate
    figure = next(iter(mine.figures))
    return VersionGap(figure, round(difference, 6), round(low, 6), round(high, 6), tolerate, worse, sure)
