"""Writes answers of `carpool predict` to a file or to stdout: JSON Lines, CSV, or one document as COCO has
it.

What is written is whole pictures, so that a run that was interrupted goes on where it ended.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from carpool.cli.written_files import write_file
from carpool.errors import InvalidInput
from carpool.vision.python_pictures import Masks

_COLUMNS = ("file", "width", "height", "model", "label", "class_id", "score", "x1", "y1", "x2", "y2")
_LISTS = ("detections", "classes", "masks")


class Output:
    """Lines that are appended as answers come. `done` are the files that a run before has answered."""

    header = ""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        self.path = path
        self.done: set[str] = set()
        self._file: TextIO = sys.stdout
        try:
            if path is not None:
                if resume and path.exists():
                    self._take_up(path)
                self._file = path.open("a" if resume else "w", encoding="utf-8", newline="")
        except UnicodeDecodeError:
            raise InvalidInput(f"--resume: {path} is no output of this verb") from None
        except OSError as error:
            raise InvalidInput(f"--out: {path} cannot be written: {error.strerror or error}") from None
        if self.header and not self.done:
            self._file.write(self.header)

    def add(self, document: Mapping[str, Any]) -> None:
        self._file.write(self.lines(document))
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()

    def lines(self, document: Mapping[str, Any]) -> str:
        """All that is said of one picture, each line with its end."""
        raise NotImplementedError

    def whole(self, text: str) -> tuple[str, list[str]]:
        """Returns what of a file can stay, and the pictures that it is about: a last one may be torn."""
        raise NotImplementedError

    def _take_up(self, path: Path) -> None:
        text = path.read_bytes().decode()
        try:
            kept, names = self.whole(text)
        except (ValueError, KeyError, TypeError, csv.Error):
            raise InvalidInput(f"--resume: {path} is no output of this verb") from None
        if kept != text:
            write_file(path, kept)
        self.done = set(names)


class JsonLines(Output):
    def lines(self, document: Mapping[str, Any]) -> str:
        return json.dumps(document, ensure_ascii=False, separators=(",", ":")) + "\n"

    def whole(self, text: str) -> tuple[str, list[str]]:
        text = text[: text.rfind("\n") + 1]
        return text, [str(json.loads(line)["file"]) for line in text.split("\n") if line]


class Csv(Output):
    """A line for each thing found; a picture with none has one line without a label."""

    header = ",".join(_COLUMNS) + "\n"

    def lines(self, document: Mapping[str, Any]) -> str:
        found = _things(document)
        image = document.get("image", {})
        start = (document["file"], image.get("width"), image.get("height"), document.get("model"))
        rows = [
            (*start, thing.get("label"), thing.get("class_id"), thing.get("score"), *thing.get("box", ()))
            for thing in found or [{}]
        ]
        return _csv((*row, *[None] * (len(_COLUMNS) - len(row))) for row in rows)

    def whole(self, text: str) -> tuple[str, list[str]]:
        """Of a torn file, all lines of its last picture go: there may have been more of them."""
        if not text.startswith(self.header):
            raise ValueError
        rows = list(csv.reader(io.StringIO(text[len(self.header) :])))
        if not text.endswith("\n"):
            rows = [row for row in rows if row[0] != rows[-1][0]]
            text = self.header + _csv(rows)
        return text, [row[0] for row in rows]


def _csv(rows: Iterable[Iterable[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


class Coco(JsonLines):
    """Writes one document at the end, made from JSON Lines that are kept beside it."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        if path is None:
            raise InvalidInput("--format coco needs --out FILE", field="out")
        self._document = path
        super().__init__(path.with_name(path.name + ".jsonl"), resume=resume)

    def lines(self, document: Mapping[str, Any]) -> str:
        if "masks" not in document:
            return super().lines(document)
        from carpool.vision.mask_regions import run_lengths

        found = Masks(document)
        size = [found.height, found.width]
        masks = [
            {key: value for key, value in thing.items() if key != "png"}
            | {"rle": {"size": size, "counts": run_lengths(found.mask(number))}}
            for number, thing in enumerate(found.things)
        ]
        return super().lines({**document, "masks": masks})

    def close(self) -> None:
        super().close()
        assert self.path is not None
        with self.path.open(encoding="utf-8") as lines:
            document = coco(map(json.loads, lines))
        write_file(self._document, json.dumps(document, ensure_ascii=False))


def coco(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Boxes as x, y, width, height; classes keep the model's own numbers; ids count from 1."""
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    categories: dict[int, str] = {}
    for number, answer in enumerate(answers, 1):
        size = answer.get("image", {})
        images.append(
            {
                "id": number,
                "file_name": answer["file"],
                "width": size.get("width"),
                "height": size.get("height"),
            }
        )
        for thing in _things(answer):
            categories[thing["class_id"]] = thing["label"]
            one = {"id": len(annotations) + 1, "image_id": number, "category_id": thing["class_id"]}
            one |= {"score": thing["score"], "iscrowd": 0}
            if "box" in thing:
                x1, y1, x2, y2 = thing["box"]
                one |= {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1)}
            if "rle" in thing:
                one |= {"segmentation": thing["rle"], "area": sum(thing["rle"]["counts"][1::2])}
            annotations.append(one)
    named = [{"id": class_id, "name": name} for class_id, name in sorted(categories.items())]
    return {"images": images, "annotations": annotations, "categories": named}


def _things(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    return next((answer[key] for key in _LISTS if key in answer), [])
