"""What answers are worth: each measure reads one answer at a time and keeps little of it; a figure can then
be taken over all pictures, or over a weighted choice of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from carpool.errors import InvalidInput
from carpool.lab.evaluate.labelled_data import MaskedPictures, NamedPictures, plain
from carpool.types import Array
from carpool.vision.python_pictures import Answer, Classes, Masks

TOP = 5
_IGNORED = 255
_UNCOVERED = (0, "")
_MOST_TOLD = 8


@dataclass(frozen=True, slots=True)
class Scored:
    """Holds the scores of all pictures of one version."""

    figures: Mapping[str, float]  # by name; the first is the one that versions are compared by
    per_class: Mapping[str, float]
    notes: Sequence[str]
    figure: Callable[[Array], float] = field(repr=False)
    """The first figure over the pictures, each counted so many times: whole numbers."""


class Measure(Protocol):
    @property
    def task(self) -> str: ...

    @property
    def options(self) -> Mapping[str, Any]:
        """Returns the options that every picture is asked with."""

    @property
    def files(self) -> Sequence[Path]: ...

    def read(self, place: int, answer: Answer) -> Any:
        """Returns what is kept of the answer to the picture at this place."""

    def scored(self, kept: Sequence[Any], places: Sequence[int]) -> Scored:
        """Returns the scores of these pictures."""


class Naming:
    """Maps a model's labels to the data's classes. What could not be mapped is reported."""

    def __init__(self, classes: Sequence[str], names: Mapping[str, str]) -> None:
        """Takes `names`: by what the data calls a class, plainly, what the model calls it."""
        self._places: dict[str, int] = {}
        for place, name in enumerate(classes):
            self._places.setdefault(plain(names.get(plain(name), name)), place)
        self._classes = classes
        self._known: dict[str, int | None] = {}

    def place(self, label: str) -> int | None:
        """Returns the class of a label like `tench` or `tench, Tinca tinca`."""
        if label not in self._known:
            words = [label, *label.split(",")]
            found = (self._places[plain(word)] for word in words if plain(word) in self._places)
            self._known[label] = next(found, None)
        return self._known[label]

    def notes(self, wanted: Sequence[int]) -> list[str]:
        """Returns what was not mapped; `wanted` are the classes that the data has examples of."""
        named = {place for place in self._known.values() if place is not None}
        strangers = sorted(label for label, place in self._known.items() if place is None)
        if not named and self._known:
            raise InvalidInput(
                f"no label of the model is a class of the data: the model says {_told(strangers)}, the data"
                f" {_told(sorted(self._classes))}; give --names, or the model its labels",
                field="names",
            )
        unheard = sorted(self._classes[place] for place in wanted if place not in named)
        notes = [f"Not in the data, and not counted: {_told(strangers)}."] if strangers else []
        if unheard:
            notes.append(f"In the data but never named by the model, so they count as 0: {_told(unheard)}.")
        return notes


def _told(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_TOLD} more" if len(names) > _MOST_TOLD else ""
    return ", ".join(names[:_MOST_TOLD]) + more


# ---- one class for each picture


class Accuracy:
    task = "classify"
    options: Mapping[str, Any] = {"top_k": TOP}

    def __init__(self, data: NamedPictures, names: Mapping[str, str]) -> None:
        self.files = data.files
        self._classes = sorted(set(data.names))
        place = {name: number for number, name in enumerate(self._classes)}
        self._truth = [place[name] for name in data.names]
        self._names = names
        self._naming = Naming(self._classes, names)

    def read(self, place: int, answer: Answer) -> int:
        """Returns at which of the answered classes the right one stands; TOP if at none."""
        if not isinstance(answer, Classes):
            raise InvalidInput(f"the model answers {', '.join(answer)}, not classes", field="data")
        found = [self._naming.place(label) for label in answer.labels[:TOP]]
        truth = self._truth[place]
        return found.index(truth) if truth in found else TOP

    def scored(self, kept: Sequence[int], places: Sequence[int]) -> Scored:
        ranks, truth = np.array(kept, np.int64), np.array([self._truth[place] for place in places])
        right = (ranks == 0).astype(np.float64)
        figures = {"top1": float(right.mean()), f"top{TOP}": float((ranks < TOP).mean())}
        there = np.unique(truth).tolist()
        each = {self._classes[one]: float(right[truth == one].mean()) for one in there}
        return Scored(
            figures,
            each,
            self._naming.notes(there),
            lambda weights: float(weights @ right / max(weights.sum(), 1e-12)),
        )


# ---- a class for each pixel


def _overlaps(common: Array, joint: Array) -> Array:
    """Returns the overlap of each class; nan where it is nowhere."""
    found: Array = np.divide(common, joint, out=np.full(len(joint), np.nan), where=joint > 0)
    return found


_Pixels: TypeAlias = Counter[tuple[int, int, str]]
"""Of a picture, how many: by what they are (a number), and what the model says (a number and a label)."""


class MaskOverlap:
    task = "segment"
    options: Mapping[str, Any] = {"format": "rle"}

    def __init__(self, data: MaskedPictures, names: Mapping[str, str]) -> None:
        self.files = data.files
        self._data = data
        self._names = names

    def read(self, place: int, answer: Answer) -> _Pixels:
        if not isinstance(answer, Masks):
            raise InvalidInput(f"the model answers {', '.join(answer)}, not masks", field="data")
        truth = _read_mask(self._data.masks[place])
        if truth.shape != (answer.height, answer.width):
            raise InvalidInput(
                f"{self._data.masks[place].name} has {truth.shape[1]}×{truth.shape[0]} pixels, its image "
                f"{answer.width}×{answer.height}",
                field="data",
            )
        said = [_UNCOVERED, *{(int(one["class_id"]) + 1, str(one["label"])) for one in answer.things}]
        painted = np.zeros(truth.shape, np.int64)
        for number in np.argsort(answer.scores, kind="stable").tolist():  # the surest lies on top
            thing = answer.things[number]
            painted[answer.mask(number)] = said.index((int(thing["class_id"]) + 1, str(thing["label"])))
        pairs, pixels = np.unique(truth.astype(np.int64) * len(said) + painted, return_counts=True)
        return Counter(
            {
                (pair // len(said), *said[pair % len(said)]): count
                for pair, count in zip(pairs.tolist(), pixels.tolist(), strict=True)
            }
        )

    def scored(self, kept: Sequence[_Pixels], places: Sequence[int]) -> Scored:  # noqa: ARG002
        values = sorted({truth for one in kept for truth, _, _ in one})
        classes, naming, notes = self._classes(values)
        common = np.zeros((len(kept), len(classes)))
        joint = np.zeros((len(kept), len(classes)))
        two_valued = naming is None and len(classes) == 2
        for row, counts in enumerate(kept):
            for (truth, said, label), pixels in counts.items():
                is_class = int(truth != 0) if two_valued else truth
                if not two_valued and truth == _IGNORED:
                    continue
                says = self._place(said, label, naming, two_valued)
                for one in {is_class, says}:
                    if one is not None and one < len(classes):
                        joint[row, one] += pixels
                        common[row, one] += pixels * (is_class == says)
        if naming is not None:
            notes += naming.notes([value for value in values if 0 < value < len(classes)])
        overlaps = _overlaps(common.sum(0), joint.sum(0))
        per_class = {
            name: float(overlap)
            for name, overlap in zip(classes, overlaps, strict=True)
            if overlap == overlap
        }
        return Scored(
            {"miou": float(np.nanmean(overlaps))},
            per_class,
            notes,
            lambda weights: float(np.nanmean(_overlaps(weights @ common, weights @ joint))),
        )

    def _classes(self, values: Sequence[int]) -> tuple[Sequence[str], Naming | None, list[str]]:
        """Returns, by number, their names; how labels are mapped, unless they are by number."""
        if self._data.classes:
            beyond = [value for value in values if value >= len(self._data.classes) and value != _IGNORED]
            if beyond:
                raise InvalidInput(
                    f"--data: a mask has the value {beyond[0]}, and classes.txt only"
                    f" {len(self._data.classes)} names",
                    field="data",
                )
            return self._data.classes, Naming(self._data.classes, self._names), []
        if len({value for value in values if value}) <= 1:
            return ("background", "foreground"), None, []
        highest = max((value for value in values if value != _IGNORED), default=0)
        note = "The masks' values were taken for the model's class numbers: no classes.txt names them."
        return [str(value) for value in range(highest + 1)], None, [note]

    @staticmethod
    def _place(said: int, label: str, naming: Naming | None, two_valued: bool) -> int | None:
        """What the model says, as a number of the masks; what no mask covers is 0."""
        if not said:
            return 0
        if two_valued:
            return 1
        return said - 1 if naming is None else naming.place(label)


def _read_mask(path: Path) -> Array:
    from PIL import Image

    try:
        with Image.open(path, formats=("PNG",)) as image:
            if image.mode not in ("P", "L", "1", "I", "I;16"):
                raise InvalidInput(
                    f"{path.name} is {image.mode}, not one number for each pixel", field="data"
                )
            pixels: Array = np.asarray(image)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{path.name} cannot be read: {error}", field="data") from None
    return pixels.astype(np.int64)
