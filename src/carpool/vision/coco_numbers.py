"""COCO's 80 classes have numbers from 1 to 90: models with 91 columns answer those, and label files list the
80."""

from __future__ import annotations

from collections.abc import Sequence

COCO_NUMBERS = 91
_UNUSED = (0, 12, 26, 29, 30, 45, 66, 68, 69, 71, 83)


def names_all(labels: Sequence[str], classes: int | None) -> bool:
    """Returns whether there is a label for each class."""
    return classes in (len(labels), len(of_coco_numbers(labels)))


def of_coco_numbers(labels: Sequence[str]) -> tuple[str, ...]:
    """Returns the 80 labels at their numbers, with empty ones between; others as they are."""
    ends = [label.strip().lower() for label in (*labels[:1], *labels[-1:])]
    if len(labels) != COCO_NUMBERS - len(_UNUSED) or ends != ["person", "toothbrush"]:
        return tuple(labels)
    rest = iter(labels)
    return tuple("" if number in _UNUSED else next(rest) for number in range(COCO_NUMBERS))
