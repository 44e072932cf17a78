"""Describes the steps of a pipeline over pictures: what each waits for, which parts of the picture it is
asked about, and what becomes of the answers. Arithmetic and plain documents: no pixels, and nothing is run.

A step answers for each of its *items*. One that sees the whole picture has one; one with `each` has an item
for every part that its source found, over all items of that. Places are in pixels of the whole picture, also
in what is answered about a crop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, floor, hypot
from typing import Any, NamedTuple

from carpool.config import rules
from carpool.config.model import Task
from carpool.errors import ConfigError
from carpool.extensions.pipelines.settings import (
    BOXES,
    MOST_CROPS,
    REFUSE,
    REGIONS,
    CropSettings,
    PipelineSettings,
    PipelineStep,
)

Document = dict[str, Any]
Point = tuple[float, float]

LISTS: Mapping[str, str] = {BOXES: "detections", REGIONS: "regions"}
"""Under which name of an answer its parts are."""
_TASKS: Mapping[str, tuple[str, ...]] = {BOXES: ("detect", "pose", "obb"), REGIONS: ("text_regions",)}
"""Which tasks answer them."""
_CERTAIN: Mapping[str, tuple[str, ...]] = {
    "classify": ("margin", "confidence", "entropy"),
    "read": ("confidence",),
    "detect": ("confidence",),
}
"""The measures of how certain an answer is, by task."""
_USUAL_FAN_OUT, _USUAL_ESCALATED = 4.0, 0.3  # before any was seen
_TURNED = 1.5  # times as high as wide: text that runs downwards


class Place(NamedTuple):
    """Describes a part of the picture: a rectangle of whole pixels, or the corners of one that is turned."""

    left: int
    top: int
    right: int
    bottom: int
    corners: tuple[Point, ...] = ()

    @property
    def size(self) -> tuple[int, int]:
        """Returns width and height, of a turned one along its sides."""
        if not self.corners:
            return self.right - self.left, self.bottom - self.top
        one, two, three, four = self.corners
        wide = max(hypot(two[0] - one[0], two[1] - one[1]), hypot(three[0] - four[0], three[1] - four[1]))
        high = max(hypot(four[0] - one[0], four[1] - one[1]), hypot(three[0] - two[0], three[1] - two[1]))
        return max(1, round(wide)), max(1, round(high))


class Item(NamedTuple):
    """Describes one question to a step: about this place (None: the whole picture), which is this part of
    that item of its source."""

    place: Place | None = None
    owner: int = 0
    part: int = 0
    width: int = 0  # of the kind of work, where widths differ


class StepFacts(NamedTuple):
    """Describes what has to be known of a step's model."""

    task: str | None  # None: it takes no pictures
    size: tuple[int, int] = (-1, -1)  # height and width that its input has; -1: any
    runs_nothing: bool = False  # an ensemble or a pipeline
    labels: Sequence[str] = ()  # none: its classes have no names


class PictureGraph:
    """Builds the graph of settings that are right by themselves."""

    def __init__(self, settings: PipelineSettings) -> None:
        self.settings = settings
        self.steps: Sequence[PipelineStep] = settings.steps
        sources = [
            step.escalate.source if step.escalate else step.each[0] if step.each else None
            for step in self.steps
        ]
        self.after = [None if source is None else settings.numbered(source) for source in sources]
        self.base = settings.numbered(settings.answer[-1])  # of a cascade, the cheap model
        self.beside = [n for n, after in enumerate(self.after) if after is None and n != self.base]
        self.order = self._ordered()  # each after the one that it waits for; the answer's own first

    def _ordered(self) -> list[int]:
        listed, waiting = [self.base], [n for n in range(len(self.steps)) if n != self.base]
        while waiting:
            ready = next(n for n in waiting if self.after[n] is None or self.after[n] in listed)
            listed.append(ready)
            waiting.remove(ready)
        return listed

    def usual_images(self, number: int) -> float:
        """How many images of a request this step gets, as long as nothing is known of the traffic."""
        after = self.after[number]
        if after is None:
            return 1.0
        if self.steps[number].escalate is not None:
            return _USUAL_ESCALATED
        return min(_USUAL_FAN_OUT, self.steps[after].keep.most)

    def optional(self, number: int) -> bool:
        """Returns whether the request is answered without this step when there is no time for it."""
        return self.steps[number].escalate is not None and self.settings.under_load != REFUSE

    def reader(self, tasks: Sequence[str | None]) -> str | None:
        """Returns the step that reads every region of text in the answer, of steps with these tasks. With
        one, all of it is for reading, and answers text and lines."""
        base = (self.steps[self.base].name, REGIONS)
        listed = zip(self.steps, tasks, strict=True)
        return next((step.name for step, task in listed if task == Task.READ and step.each == base), None)

    def following(self, number: int) -> list[int]:
        return [other for other, after in enumerate(self.after) if after == number]

    # ---- beside its models --------------------------------------------------------------------------------

    def check(self, facts: Sequence[StepFacts]) -> None:
        """Raises what does not fit, with the line."""
        for number, (step, known) in enumerate(zip(self.steps, facts, strict=True)):
            at = self.settings.at(number)
            if known.runs_nothing:
                raise ConfigError(
                    f"{at}: {step.model} has steps itself; a step is a model", field=field_of(step)
                )
            if known.task is None:
                raise ConfigError(f"{at}: {step.model} takes tensors, not images", field=field_of(step))
            for label in step.keep.labels if known.labels else ():
                if label not in known.labels:
                    near = rules.nearest(label, known.labels)
                    said = f"{at}: {step.model} has no label {rules.shown(label)}; {near}"
                    raise ConfigError(said, field=field_of(step))
        for number, (step, known) in enumerate(zip(self.steps, facts, strict=True)):
            if step.each is not None:
                at = self.settings.at(number)
                self._check_parts(at, step, facts[self.settings.numbered(step.each[0])])
                _check_size(at, step, known)
            if step.escalate is not None:
                self._check_cascade(at, step, known, facts[self.base])

    def _check_cascade(self, at: str, step: PipelineStep, big: StepFacts, cheap: StepFacts) -> None:
        assert step.escalate is not None
        if big.task != cheap.task:
            said = f"{step.model} is for {big.task}, and {step.escalate.source} for {cheap.task}"
            raise ConfigError(f"{at}: {said}: a cascade has one task", field=at)
        known = _CERTAIN.get(big.task or "", ())
        if not known:
            raise ConfigError(f"{at}: {big.task} does not say how certain it is", field=at)
        if step.escalate.by not in known:
            raise ConfigError(f"{at}: escalate.by must be {' or '.join(known)} for {big.task}", field=at)

    def _check_parts(self, at: str, step: PipelineStep, source: StepFacts) -> None:
        assert step.each is not None
        tasks = _TASKS[step.each[1]]
        if source.task not in tasks:
            raise ConfigError(
                f'{at}: each = "{".".join(step.each)}" needs a step whose task is {" or ".join(tasks)}, and '
                f"{step.each[0]} is for {source.task}",
                field=field_of(step),
            )

    # ---- what goes from step to step ----------------------------------------------------------------------

    def kept(self, number: int, answer: Document) -> Document:
        """Returns the answer of a step, with those things only that its settings keep."""
        keep = self.steps[number].keep
        for name in LISTS.values():
            if name in answer:
                stay = (
                    one
                    for one in answer[name]
                    if one["score"] >= keep.score and (not keep.labels or one.get("label") in keep.labels)
                )
                answer[name] = [one for one, _ in zip(stay, range(keep.most), strict=False)]
        return answer

    def items(self, number: int, answers: Sequence[Document], size: tuple[int, int]) -> list[Item]:
        """What a step with `each` is asked, after its source gave these answers about a picture of this width
        and height."""
        step = self.steps[number]
        assert step.each is not None
        name, found = LISTS[step.each[1]], []
        for owner, answer in enumerate(answers):
            for part, one in enumerate(answer[name]):
                place = placed(one, step.crop, size)
                found.append(Item(place, owner, part, width_for(place, step.crop)))
        return found[:MOST_CROPS]

    def answer(
        self, items: Mapping[int, Sequence[Item]], answers: Mapping[int, Sequence[Document]]
    ) -> Document:
        """Returns all of it in one document. Steps that gave no answers are left out. Of a cascade it is the
        big model's answer, if that gave one."""
        for number, step in enumerate(self.steps):
            if step.escalate is not None:
                return answers[number][0] if answers.get(number) else answers[self.base][0]
        for number in reversed(self.order):
            if number == self.base or number not in answers:
                continue
            source = self.after[number]
            if source is None:
                answers[self.base][0][self.steps[number].name] = _without_size(answers[number][0])
                continue
            step = self.steps[number]
            assert step.each is not None
            for item, one in zip(items[number], answers[number], strict=True):
                answers[source][item.owner][LISTS[step.each[1]]][item.part][step.name] = _without_size(one)
        return answers[self.base][0]


def field_of(step: PipelineStep) -> str:
    return f"step.{step.name}.model"


def _check_size(at: str, step: PipelineStep, known: StepFacts) -> None:
    crop = step.crop
    if not crop.rectify:
        return
    height, width = known.size
    if height not in (-1, crop.height):
        raise ConfigError(
            f"{at}: {step.model} takes {height} rows, and crop.height is {crop.height}", field=field_of(step)
        )
    if width != -1 and crop.widths != (width,):
        raise ConfigError(
            f"{at}: {step.model} takes {width} columns, and crop.widths is {list(crop.widths)}",
            field=field_of(step),
        )


def placed(part: Document, crop: CropSettings, size: tuple[int, int]) -> Place:
    """Returns which part of a picture of this width and height is cut out for a thing that was found there:
    all pixels that its box touches, and what is asked for around them, cut at the picture's edges."""
    if crop.rectify:
        corners = tuple((float(x), float(y)) for x, y in part["polygon"])
        return Place(0, 0, 0, 0, corners)
    left, top, right, bottom = part["box"]
    across, down = max(right - left, 0.0), max(bottom - top, 0.0)
    side = max(across, down)
    wide = max((side if crop.square else across) + 2 * crop.pad * across, crop.least)
    high = max((side if crop.square else down) + 2 * crop.pad * down, crop.least)
    if crop.square:
        wide = high = max(wide, high)
    x, y = (left + right) / 2, (top + bottom) / 2
    columns, rows = _cut(x - wide / 2, x + wide / 2, size[0]), _cut(y - high / 2, y + high / 2, size[1])
    return Place(columns[0], rows[0], columns[1], rows[1])


def _cut(low: float, high: float, length: int) -> tuple[int, int]:
    """Returns whole pixels, at least one, of those that there are."""
    first = min(max(floor(low + 1e-6), 0), length - 1)
    return first, max(min(ceil(high - 1e-6), length), first + 1)


def width_for(place: Place, crop: CropSettings) -> int:
    """Returns the kind of work that a rectified part is: the narrowest that holds all of it in its
    proportions."""
    if not crop.rectify:
        return 0
    natural = natural_width(place, crop)
    return next((width for width in crop.widths if width >= natural), crop.widths[-1])


def natural_width(place: Place, crop: CropSettings) -> int:
    wide, high = place.size
    if high >= _TURNED * wide:  # it runs downwards, and is turned
        wide, high = high, wide
    return max(1, ceil(crop.height * crop.stretch * wide / high))


def moved(answer: Document, place: Place, scale: tuple[float, float]) -> Document:
    """Returns an answer about a crop, with its places in pixels of the whole picture. `scale` is how many of
    those a pixel of the crop is, across and down."""
    if place.corners:
        return answer  # nothing is looked for in a line that was made straight
    for one in answer.get(LISTS[BOXES], ()):
        left, top, right, bottom = one["box"]
        one["box"] = [*_point((left, top), place, scale), *_point((right, bottom), place, scale)]
        for name in ("corners", "keypoints"):
            if name in one:
                one[name] = [[*_point(point[:2], place, scale), *point[2:]] for point in one[name]]
    for one in answer.get(LISTS[REGIONS], ()):
        one["polygon"] = [_point(point, place, scale) for point in one["polygon"]]
        box = one["box"]
        one["box"] = [*_point(box[:2], place, scale), *_point(box[2:], place, scale)]
    return answer


def _point(point: Sequence[float], place: Place, scale: tuple[float, float]) -> list[float]:
    return [round(place.left + point[0] * scale[0], 2), round(place.top + point[1] * scale[1], 2)]


def _without_size(answer: Document) -> Document:
    """Returns what a step says about a part of the picture, without how large that is, which its box says
    already."""
    return {name: value for name, value in answer.items() if name != "image"}


def chunks(items: Sequence[Item], most: int) -> Iterator[list[int]]:
    """Which of them make one request each: equal kinds together, as many as a batch holds."""
    by_width: dict[int, list[int]] = {}
    for number, item in enumerate(items):
        by_width.setdefault(item.width, []).append(number)
    for same in by_width.values():
        for start in range(0, len(same), most):
            yield same[start : start + most]
