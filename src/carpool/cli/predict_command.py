"""Implements `carpool predict`: pictures to a running server, answers in a table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import make_folder, write_file
from carpool.errors import CarpoolError, InvalidInput, Unreachable

if TYPE_CHECKING:
    from carpool.client.client import Client

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_STDIN = "-"
_MOST_FROM_STDIN = 1 << 28  # bytes; a server takes fewer
_MOST_SHOWN = 4
_PATIENCE_S = 60.0  # for an image: the deadline of its request, and of the retries if it is rejected
Task = StrEnum(
    "Task",
    "detect classify segment pose obb depth embed text_regions read caption anomaly restore",
)
Format = StrEnum("Format", ["table", "jsonl", "csv", "coco"])


@dataclass(frozen=True, kw_only=True)
class Predict(o.AsksServer):
    """Send images to a running server.

    What the images show, by the server's first model:

        carpool predict holiday/*.jpg

    Objects with a score of at least 0.6, drawn into copies of the images:

        carpool predict street.jpg --task detect --score 0.6 --save drawn

    The text of a line, as the model writes it:

        carpool predict line.png --task read --stream
    """

    images: list[str] = o.argument(
        "Image files, patterns like 'in/**/*.jpg', folders of images; - reads one from stdin.",
        metavar="IMAGE…",
    )
    url: o.ServerUrl = o.DEFAULT_URL
    task: Task | None = o.option(None, "The task. Default: that of the server's first model.")
    model: str | None = o.option(None, "Model that answers. Default: the first for the task.")
    score: float | None = o.option(None, "Lowest score of a result.", min=0.0, max=1.0)
    iou: float | None = o.option(
        None, "Overlap (IoU) above which the box with the lower score is dropped.", min=0.0, max=1.0
    )
    top_k: int | None = o.option(None, "Number of classes in a response.", min=1, max=1000)
    save: Path | None = o.option(None, "Folder for the images with the results drawn in.", metavar="DIR")
    form: Format = o.option(
        Format.table,
        "Output: table, jsonl (a line per image), csv (a line per result) or coco.",
        name="--format",
    )
    out: Path | None = o.option(None, "Write the results to this file instead of stdout.", metavar="FILE")
    resume: bool = o.option(False, "Continue an earlier run: send only images without a result in --out.")
    stream: bool = o.option(False, "Print text as the model writes it, with --task read or caption.")
    at_once: int = o.option(4, "Number of concurrent requests.", min=1, max=64)

    def run(self) -> int:
        """Exits with 1 unless every picture was answered."""

        if self.form is Format.table and (self.out or self.resume):
            raise InvalidInput("--out and --resume go with --format jsonl, csv or coco")
        if self.stream and (self.as_json or self.save or self.form is not Format.table):
            raise InvalidInput("--stream prints text as it comes: leave out --json, --save and --format")
        if self.stream and self.task not in (None, Task.read, Task.caption):
            raise InvalidInput(f"--stream is for --task read or caption, not {self.task}")
        if self.resume and self.out is None:
            raise InvalidInput("--resume needs --out, the file to continue")
        if self.as_json and self.form is not Format.table:
            raise InvalidInput("--json and --format exclude each other")
        files = pictures(self.images)
        with self.client("--url", self.url, _PATIENCE_S, self.at_once) as client:
            if self.stream:
                bad = self._streamed(client, files)
            else:
                bad = (
                    self._shown(client, files) if self.form is Format.table else self._written(client, files)
                )
        for prediction in bad:
            message = str(prediction.answer.get("error", "no answer"))
            reason = f" ({prediction.answer['reason']})" if prediction.answer.get("reason") else ""
            said = message if message.isprintable() else repr(message)
            print(f"carpool: {prediction.file}: {said}{reason}", file=sys.stderr)
        return 1 if bad else 0

    def _shown(self, client: Client, files: Sequence[Path]) -> list[Prediction]:
        """What failed; the rest is in the table, or all of it in one JSON document."""
        predictions = list(self._answers(client, files, set()))
        if self.as_json:
            documents = [prediction.as_json() for prediction in predictions]
            print(json.dumps(documents, indent=2, ensure_ascii=False))
        else:
            _show([prediction for prediction in predictions if prediction.good])
        return [prediction for prediction in predictions if not prediction.good]

    def _streamed(self, client: Client, files: Sequence[Path]) -> list[Prediction]:
        """What failed; the rest is printed as it comes, one picture after the other."""
        bad = []
        for file in files:
            if len(files) > 1:
                print(f"{file}: ", end="", flush=True)
            try:
                asked = self.task or Task.read
                with client.stream_text(_read(file), task=asked, model=self.model or "") as pieces:
                    for piece in pieces:
                        print(piece, end="", flush=True)
            except CarpoolError as error:
                if isinstance(error, Unreachable) and error.reason == Unreachable.reason:
                    raise
                bad.append(Prediction(file, {"error": error.message, "reason": error.reason}, good=False))
            print(flush=True)
        return bad

    def _written(self, client: Client, files: Sequence[Path]) -> list[Prediction]:
        """What failed; the rest is written as it comes."""
        from carpool.cli.predict_output import Coco, Csv, JsonLines

        kind = {Format.jsonl: JsonLines, Format.csv: Csv, Format.coco: Coco}[self.form]
        output = kind(self.out, resume=self.resume)
        known, answered, bad = len(output.done), 0, []
        try:
            for prediction in self._answers(client, files, output.done):
                if prediction.good:
                    output.add(prediction.as_json())
                    answered += 1
                else:
                    bad.append(prediction)
        except KeyboardInterrupt:
            raise Stopped(f"stopped after {answered} images; --resume continues from there") from None
        finally:
            output.close()
        if self.out is not None:
            before = f", {known} were there before" if known else ""
            print(f"{answered} answered, {len(bad)} failed{before}: {self.out}", file=sys.stderr)
        return bad

    def _answers(self, client: Client, files: Sequence[Path], done: Collection[str]) -> Iterator[Prediction]:
        """Yields answers in order, of those that are not done."""
        from carpool.client.client import in_order

        named = zip(files, _names_to_save(self, files), strict=True)
        left = [(file, name) for file, name in named if str(file) not in done]

        def ask(one: tuple[Path, Path | None]) -> Prediction:
            return self._ask(client, *one)

        with show.steps("Asking", len(left)) as step:
            for prediction in in_order(ask, left, self.at_once):
                step()
                yield prediction

    def _ask(self, client: Client, file: Path, save: Path | None) -> Prediction:
        """What concerns this picture alone is in the answer; that the server is gone is raised."""
        chosen: dict[str, object] = {"score": self.score, "iou": self.iou, "top_k": self.top_k}
        options: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
        task, model = self.task or "", self.model or ""
        started, drawn = monotonic(), b""
        try:
            data = _read(file)
            answer = client.predict(data, task=task, model=model, deadline_ms=_PATIENCE_S * 1e3, **options)
            prediction = Prediction(file, answer, True, monotonic() - started, save)
            if save is not None:
                drawn = client.draw(data, task=task, model=model, deadline_ms=_PATIENCE_S * 1e3, **options)
        except CarpoolError as error:
            if isinstance(error, Unreachable) and error.reason == Unreachable.reason:
                raise
            message = error.message.removeprefix(f"{file}: ")
            return Prediction(file, {"error": message, "reason": error.reason}, good=False)
        if save is not None:
            write_file(save, drawn)
        return prediction


class Stopped(CarpoolError):
    """Means that Ctrl-C stopped it, with something done already."""

    exit_code = 130


@dataclass(slots=True)
class Prediction:
    """Describes one picture and what came of it."""

    file: Path
    answer: dict[str, Any]  # the error, where there is one
    good: bool
    seconds: float = 0.0
    saved: Path | None = None

    def as_json(self) -> dict[str, Any]:
        saved = {} if self.saved is None else {"saved": str(self.saved)}
        return {"file": str(self.file), **self.answer, **saved}


def pictures(words: Sequence[str]) -> list[Path]:
    """Returns the files that are meant, each once, in the order given."""
    files: dict[Path, None] = {}
    for word in words:
        path = Path(word)
        if word == _STDIN:
            inside = [path]
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if _is_picture(file, path))
            if not inside:
                raise InvalidInput(f"{word}: no images in this folder")
        elif path.is_file():
            inside = [path]
        else:
            anchor = Path(path.anchor)
            pattern = str(path.relative_to(anchor)) if path.anchor else word
            patterned = any(sign in word for sign in "*?[")
            inside = sorted(file for file in anchor.glob(pattern) if file.is_file()) if patterned else []
            if not inside:
                raise InvalidInput(f"{word}: there is no such image")
        files |= dict.fromkeys(inside)
    return list(files)


@cache
def _standard_input() -> bytes:
    return sys.stdin.buffer.read(_MOST_FROM_STDIN)


def _read(file: Path) -> bytes | bytearray | memoryview:
    from carpool.vision.python_pictures import picture_file

    return _standard_input() if str(file) == _STDIN else picture_file(file)


def _is_picture(file: Path, folder: Path) -> bool:
    """Decides by its name; what is hidden is none."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in _SUFFIXES and not hidden and file.is_file()


def _names_to_save(options: Predict, files: Sequence[Path]) -> list[Path | None]:
    """Returns where each drawn picture goes; those of the same name in different folders are numbered."""
    if options.save is None:
        return [None] * len(files)
    make_folder(options.save)
    seen: Counter[str] = Counter()
    names: list[Path | None] = []
    for file in files:
        seen[file.stem] += 1
        number = f"-{seen[file.stem]}" if seen[file.stem] > 1 else ""
        names.append(options.save / f"{file.stem}{number}.jpg")
    return names


def in_words(answer: dict[str, Any]) -> str:
    """Returns the gist of an answer in a line."""
    for key in ("detections", "classes", "masks"):
        if key in answer:
            things = [f"{one['label']} {one['score']:.2f}" for one in answer[key]]
            more = f" and {len(things) - _MOST_SHOWN} more" if len(things) > _MOST_SHOWN else ""
            return (", ".join(things[:_MOST_SHOWN]) or "nothing") + more
    if "text" in answer:
        return " / ".join(answer["text"].split("\n")) or "nothing"
    if "regions" in answer:
        return f"{len(answer['regions'])} regions of text"
    if "depth" in answer:
        return f"from {answer['depth']['low']:g} to {answer['depth']['high']:g}"
    if "anomaly" in answer:
        return (
            f"{'anomalous' if answer['anomaly']['anomalous'] else 'normal'} {answer['anomaly']['score']:.2f}"
        )
    if "restored" in answer:
        return f"an image of {answer['restored']['width']}×{answer['restored']['height']} pixels"
    if "embedding" in answer:
        return f"a vector of {len(answer['embedding'])} numbers"
    shapes = [f"{one['name']} {one['shape']}" for one in answer.get("outputs", ())]
    return ", ".join(shapes) or "an answer of another kind"


def _show(good: Sequence[Prediction]) -> None:
    if not good:
        return
    alike = len({one.file.name for one in good}) < len(good)
    rows = []
    for one in good:
        image = one.answer.get("image", {})
        size = f"{image.get('width', '?')}×{image.get('height', '?')}"
        name = str(one.file) if alike else one.file.name
        model = str(one.answer.get("model", ""))
        rows.append((name, size, in_words(one.answer), model, f"{one.seconds * 1e3:.0f}"))
    show.table(
        ("picture", "size", "answer", "model", "ms"), rows, left=("picture", "size", "answer", "model")
    )
    saved = [one.saved for one in good if one.saved is not None]
    if saved:
        print(f"Saved {len(saved)} drawn image{'' if len(saved) == 1 else 's'} in {saved[0].parent}")
