"""Says what a form of a model loses: by labels, or by the sure answers that become others.

An answer is sure, or a box is, where the model itself would not call it a close call: a class that leads by a
tenth, a box well above the score that counts. What changes among close calls is counted apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, NamedTuple

from carpool.lab.evaluate.evaluation import gap_between
from carpool.lab.evaluate.scores import Measure
from carpool.vision.certainty import certainty
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.plans.compare import compare_answers
from carpool.vision.python_pictures import typed

Answer = Mapping[str, Any]

_MARGIN = 0.1  # of the best class over the next
_LIMITS, _SURELY = CompareSettings(), CompareSettings(score=0.6)
_THINGS = ("detections", "masks", "regions")
_Z = 1.959964  # 95 %
LEAST_SURE = 30
_HARDLY = 0.1  # of all answers are sure: the pictures are not of the kind that the model knows
_UNLIKE = 0.5  # of the share of sure answers


class Interval(NamedTuple):
    low: float
    high: float


def wilson(hits: int, trials: int) -> Interval:
    """Returns where the true share lies with 95 % confidence, for one look at a fixed number of trials."""
    if not trials:
        return Interval(0.0, 1.0)
    share, square = hits / trials, _Z * _Z
    middle = (share + square / (2 * trials)) / (1 + square / trials)
    half = _Z / (1 + square / trials) * sqrt(share * (1 - share) / trials + square / (4 * trials * trials))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True, slots=True)
class Loss:
    """Holds what a form loses on the held pictures, in percentage points. The field names are keys of
    optimize.json."""

    points: float
    low: float
    high: float
    by: str  # what was counted
    sure: int  # answers or boxes that are no close call,
    sure_changed: int  # of which so many changed
    close: int
    close_changed: int
    means: Mapping[str, float] = field(default_factory=dict)  # of what answers of this task differ in

    def within(self, limit: float) -> bool:
        return self.points <= limit


@dataclass(slots=True)
class _Counts:
    sure: int = 0
    sure_changed: int = 0
    close: int = 0
    close_changed: int = 0

    def add(self, task: str, right: Answer, found: Answer) -> Mapping[str, Any]:
        """Counts one picture; returns in what the two answers differ."""
        difference = compare_answers(task, right, found, _LIMITS)
        listed = next((name for name in _THINGS if name in right), "")
        if listed and "missing" in difference.details:
            things = [*right[listed], *found[listed]]
            scores = [float(thing["score"]) for thing in things]
            surely = sum(score >= _SURELY.score for score in scores)
            there = sum(score >= _LIMITS.score for score in scores)
            lone = _lone(difference.details)
            changed = min(lone, _lone(compare_answers(task, right, found, _SURELY).details))
            self.sure += surely
            self.sure_changed += changed
            self.close += there - surely
            self.close_changed += lone - changed
        elif is_sure(right):
            self.sure += 1
            self.sure_changed += difference.differs
        else:
            self.close += 1
            self.close_changed += difference.differs
        return difference.details


def _lone(details: Mapping[str, Any]) -> int:
    return int(details["missing"]) + int(details["extra"])


def is_sure(answer: Answer) -> bool:
    """Returns whether the answer to a picture as a whole is no close call."""
    if "classes" in answer:
        return (certainty(answer, "margin") or 0.0) >= _MARGIN
    listed = next((name for name in _THINGS if name in answer), "")
    return not listed or any(float(thing["score"]) >= _SURELY.score for thing in answer[listed])


class Judge:
    """Compares forms of one model with the form that it has, on the same pictures. `labels` may say what is
    right; `places` are those of the pictures in the labels."""

    def __init__(
        self,
        task: str,
        right: Sequence[Answer],
        labels: Measure | None = None,
        places: Sequence[int] = (),
    ) -> None:
        self._task, self._right, self._labels, self._places = task, right, labels, places
        self._scored = None if labels is None else self._scores(right)

    def loss(self, found: Sequence[Answer], limit: float) -> Loss:
        counts, sums = _Counts(), defaultdict[str, float](float)
        for one, other in zip(self._right, found, strict=True):
            for name, value in counts.add(self._task, one, other).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    sums[name] += float(value)
        means = {name: round(total / len(self._right), 6) for name, total in sums.items()}
        if self._scored is not None:
            gap = gap_between(self._scores(found), self._scored, len(self._right), limit / 100)
            points, by = -100 * gap.difference, f"labels: {gap.figure}"
            low, high = -100 * gap.high, -100 * gap.low
        else:
            share = counts.sure_changed / counts.sure if counts.sure else 1.0
            points, (low, high) = 100 * share, wilson(counts.sure_changed, counts.sure)
            low, high, by = 100 * low, 100 * high, f"sure {self.unit} that changed"
        return Loss(
            round(points, 4),
            round(low, 4),
            round(high, 4),
            by,
            counts.sure,
            counts.sure_changed,
            counts.close,
            counts.close_changed,
            means,
        )

    @property
    def unit(self) -> str:
        boxes = any(name in answer for answer in self._right[:1] for name in ("detections", "regions"))
        return "boxes" if boxes else "answers"

    def _scores(self, answers: Sequence[Answer]) -> Any:
        assert self._labels is not None
        read = [
            self._labels.read(place, typed(dict(answer)))
            for place, answer in zip(self._places, answers, strict=True)
        ]
        return self._labels.scored(read, self._places)

    def doubts(self) -> str:
        """Returns why no loss can be found by these pictures, or nothing."""
        if self._labels is not None:
            return ""
        own = _Counts()
        for answer in self._right:
            own.add(self._task, answer, answer)
        sure = sum(map(is_sure, self._right))
        if own.sure < LEAST_SURE or sure < _HARDLY * len(self._right):
            return (
                f"the model is sure of {own.sure} {self.unit} in {len(self._right)} images: they are too "
                "few, or not of the kind that it knows"
            )
        return ""


def unlike(calibrating: Sequence[Answer], held: Sequence[Answer]) -> str:
    """Returns a sentence, where the model sees the pictures to calibrate with as something else than the
    others."""
    shares = [sum(map(is_sure, answers)) / max(1, len(answers)) for answers in (calibrating, held)]
    if shares[0] >= _UNLIKE * shares[1]:
        return ""
    return (
        f"the images to calibrate with are unlike the held ones: the model is sure of {shares[0]:.0%} of "
        f"them, and of {shares[1]:.0%} of the held ones"
    )
