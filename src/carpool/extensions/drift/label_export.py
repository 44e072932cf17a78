"""Exports stored pictures, of doubtful answers, disagreeing versions or users' complaints, as one data set
with the answers as first labels. Of pictures that look alike, one is exported."""

from __future__ import annotations

import csv
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from carpool.config.regular_file import read_regular
from carpool.errors import InvalidInput
from carpool.extensions.drift.kept_pictures import INDEX, MOST_PICTURE_BYTES, read_index, write_whole
from carpool.types import Array
from carpool.vision.thumbnail import block_change, thumbnail

Annotations: TypeAlias = Callable[[Iterable[Mapping[str, Any]]], dict[str, Any]]

ANNOTATIONS, LABELS, PICTURES = "annotations.json", "labels.csv", "pictures"
_ALIKE = 6.0  # grey levels: the noise of a sensor stays below 4, a person far away is above 12
_MOST_COMPARED = 200  # of one source, the last ones


@dataclass(frozen=True, slots=True)
class Exported:
    pictures: int
    look_alikes: int
    unreadable: int


@dataclass(frozen=True, slots=True)
class _KeptPicture:
    path: Path
    line: Mapping[str, Any]
    answer: Mapping[str, Any]

    @property
    def rank(self) -> tuple[int, float]:
        """Returns, of two that look alike, who says more: a complaint, then a disagreement, then a doubt."""
        when = self.line.get("time")
        doubtful = "candidate" not in self.line
        first = 0 if "verdict" in self.line else 1 + doubtful
        return first, float(when) if isinstance(when, int | float) else 0.0


def export(folders: Sequence[Path], to: Path, annotations: Annotations | None = None) -> Exported:
    """`annotations` makes a document of the answers, each with the name of its `file`. Raises `InvalidInput`
    for a folder without pictures, and where `to` holds something already."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise InvalidInput(f"{to} exists already and is not an empty folder", field="--to")
    found = sorted((kept for folder in folders for kept in _kept(folder)), key=lambda kept: kept.rank)
    chosen, look_alikes, unreadable = _without_look_alikes(found)
    (to / PICTURES).mkdir(parents=True, exist_ok=True)
    named = [(f"{number:06}{kept.path.suffix}", kept) for number, kept in enumerate(chosen, 1)]
    for name, kept in named:
        shutil.copyfile(kept.path, to / PICTURES / name)
    lines = [orjson.dumps({**kept.line, "picture": f"{PICTURES}/{name}"}) for name, kept in named]
    if annotations is not None:
        answers = [{**_sure(kept.answer), "file": f"{PICTURES}/{name}"} for name, kept in named]
        write_whole(to / ANNOTATIONS, orjson.dumps(annotations(answers), option=orjson.OPT_INDENT_2))
        classified = list(_classified(named))
        if classified:
            write_whole(to / LABELS, _csv(classified))
    write_whole(to / INDEX, b"".join(line + b"\n" for line in lines))  # last: it says that all is there
    return Exported(len(chosen), look_alikes, unreadable)


def _kept(folder: Path) -> Iterator[_KeptPicture]:
    if not (folder / INDEX).is_file():
        raise InvalidInput(f"{folder} has no {INDEX}: no images were stored there", field="folders")
    for line in read_index(folder):
        path = folder / line["picture"]
        if path.stat().st_size <= MOST_PICTURE_BYTES:
            yield _KeptPicture(path, line, answer_of(line))


def answer_of(line: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the answer to begin with: where two versions disagree, that of the one which served."""
    for name in ("answer", "stable", "candidate"):
        found = line.get(name)
        if isinstance(found, dict):
            inside = found.get("answer")
            return inside if isinstance(inside, dict) else found
    answers = line.get("answers")
    return answer_of(answers) if isinstance(answers, dict) else {}


def _sure(answer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns, of the classes that a picture may show, the best: one label is to begin with."""
    return {**answer, "classes": answer["classes"][:1]} if "classes" in answer else answer


def _without_look_alikes(found: Iterable[_KeptPicture]) -> tuple[list[_KeptPicture], int, int]:
    chosen: list[_KeptPicture] = []
    seen: defaultdict[tuple[str, tuple[int, ...]], list[Array]] = defaultdict(list)
    look_alikes = unreadable = 0
    for kept in found:
        small = thumbnail(read_regular(kept.path, MOST_PICTURE_BYTES))
        if small is None:
            unreadable += 1
            continue
        near = seen[str(kept.line.get("source", "")), small.shape]
        if any(block_change(small, other) <= _ALIKE for other in near[-_MOST_COMPARED:]):
            look_alikes += 1
            continue
        near.append(small)
        chosen.append(kept)
    return chosen, look_alikes, unreadable


def _classified(named: Sequence[tuple[str, _KeptPicture]]) -> Iterator[tuple[str, str]]:
    for name, kept in named:
        classes = kept.answer.get("classes")
        if classes:
            yield f"{PICTURES}/{name}", str(classes[0]["label"])


def _csv(rows: Sequence[tuple[str, str]]) -> bytes:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([("picture", "label"), *rows])
    return text.getvalue().encode()
