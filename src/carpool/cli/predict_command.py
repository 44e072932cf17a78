"""`carpool predict`: pictures to a running server, answers in a table."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from random import uniform
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlencode

import typer

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.load.facts import RunningServer

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_LARGEST = 1 << 30
_ANSWER_S = 60.0
_MOST_SHOWN = 4
_PATIENCE_S = 60.0  # for a picture that is refused, and told to come back
_COME_BACK = (429, 503)
_LATER = 1.5
_SHORTEST_S, _LONGEST_S = 0.05, 5.0  # between two tries
Task = StrEnum("Task", ["detect", "classify", "segment", "pose", "obb", "depth", "embed"])


@dataclass(frozen=True, kw_only=True)
class Predict(o.AsksServer):
    """Send pictures to a running server.

    What is in them, from whatever model the server has:

        carpool predict holiday/*.jpg

    People and things with at least 0.6, drawn into copies of the pictures:

        carpool predict street.jpg --task detect --score 0.6 --save drawn
    """

    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE…", help="Pictures, patterns like 'in/*.jpg', or folders of pictures."),
    ]
    url: o.ServerUrl = "http://localhost:8000"
    task: Task | None = o.option(None, "What to ask for; without it, what the server's first model does.")
    model: str | None = o.option(None, "Which model is to answer.")
    score: float | None = o.option(None, "Lowest score that counts.", min=0.0, max=1.0)
    iou: float | None = o.option(None, "Overlap above which the weaker box goes.", min=0.0, max=1.0)
    top_k: int | None = o.option(None, "How many classes to answer.", min=1, max=1000)
    save: Path | None = o.option(None, "Write the pictures with the answers drawn in here.", metavar="DIR")
    at_once: int = o.option(4, "How many pictures to have under way.", min=1, max=64)

    def run(self) -> int:
        """Exits with 1 unless every picture was answered."""
        from carpool.lab.load.facts import Failed, RunningServer

        files = pictures(self.images)
        server = RunningServer(self.url, self.trust())
        try:
            predictions = self._ask_all(server, files)
        except OSError as error:
            why = error.strerror or error
            raise Failed(f"{error.filename or self.save}: cannot be written: {why}") from None
        if self.as_json:
            documents = [prediction.as_json() for prediction in predictions]
            print(json.dumps(documents, indent=2, ensure_ascii=False))
        else:
            _show([prediction for prediction in predictions if prediction.good])
        bad = [prediction for prediction in predictions if not prediction.good]
        for prediction in bad:
            message = str(prediction.answer.get("error", "no answer"))
            reason = f" ({prediction.answer['reason']})" if prediction.answer.get("reason") else ""
            said = message if message.isprintable() else repr(message)
            print(f"carpool: {prediction.file}: {said}{reason}", file=sys.stderr)
        return 1 if bad else 0

    def _ask_all(self, server: RunningServer, files: Sequence[Path]) -> list[Prediction]:
        from concurrent.futures import ThreadPoolExecutor

        path = _path(self, server)
        names = _names_to_save(self, files)
        with ThreadPoolExecutor(self.at_once) as pool, show.steps("Asking", len(files)) as step:

            def ask(file: Path, name: Path | None) -> Prediction:
                prediction = _ask(server, path, file, name)
                step()
                return prediction

            return list(pool.map(ask, files, names))


@dataclass(slots=True)
class Prediction:
    """One picture and what came of it."""

    file: Path
    answer: dict[str, Any]  # the error, where there is one
    good: bool
    seconds: float = 0.0
    saved: Path | None = None

    def as_json(self) -> dict[str, Any]:
        saved = {} if self.saved is None else {"saved": str(self.saved)}
        return {"file": str(self.file), **self.answer, **saved}


def pictures(words: Sequence[str]) -> list[Path]:
    """The files that are meant, each once, in the order given."""
    files: dict[Path, None] = {}
    for word in words:
        path = Path(word)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
            if not inside:
                raise InvalidInput(f"{word}: no pictures in this folder")
        elif path.is_file():
            inside = [path]
        else:
            anchor = Path(path.anchor)
            pattern = str(path.relative_to(anchor)) if path.anchor else word
            patterned = any(sign in word for sign in "*?[")
            inside = sorted(file for file in anchor.glob(pattern) if file.is_file()) if patterned else []
            if not inside:
                raise InvalidInput(f"{word}: no such picture")
        files |= dict.fromkeys(inside)
    return list(files)


def _path(options: Predict, server: RunningServer) -> str:
    chosen: dict[str, object] = {"score": options.score, "iou": options.iou, "top_k": options.top_k}
    query = {name: value for name, value in chosen.items() if value is not None}
    if options.model is None:
        path = f"/{options.task}" if options.task is not None else _first_model(server)
    elif options.task is None:
        path = f"/models/{quote(options.model, safe='')}/predict"
    else:
        path = f"/{options.task}"
        query = {"model": options.model, **query}
    return f"{path}?{urlencode(query)}" if query else path


def _first_model(server: RunningServer) -> str:
    from carpool.lab.load.facts import Failed

    status, body = server.ask("GET", "/openapi.json", seconds=_ANSWER_S)
    models = _read(body).get("x-carpool-models") if status == 200 else None
    if not isinstance(models, list):
        raise Failed("what answers there is no Carpool server that takes pictures; name a --task or --model")
    if not models:
        raise Failed("no model of this server takes pictures")
    return f"/models/{quote(models[0]['name'], safe='')}/predict"


def _names_to_save(options: Predict, files: Sequence[Path]) -> list[Path | None]:
    """Where each drawn picture goes; those of the same name in different folders are numbered."""
    if options.save is None:
        return [None] * len(files)
    options.save.mkdir(parents=True, exist_ok=True)
    seen: Counter[str] = Counter()
    names: list[Path | None] = []
    for file in files:
        seen[file.stem] += 1
        number = f"-{seen[file.stem]}" if seen[file.stem] > 1 else ""
        names.append(options.save / f"{file.stem}{number}.jpg")
    return names


def _ask(server: RunningServer, path: str, file: Path, save: Path | None) -> Prediction:
    try:
        if file.stat().st_size > _LARGEST:
            raise OSError(f"larger than {_LARGEST} bytes, which no picture is")
        data = file.read_bytes()
    except OSError as error:
        return Prediction(file, {"error": f"cannot be read: {error.strerror or error}"}, good=False)
    started = monotonic()
    status, body = _ask_patiently(server, path, data, "application/json")
    prediction = Prediction(file, _read(body), status == 200, monotonic() - started)
    if prediction.good and save is not None:
        status, body = _ask_patiently(server, path, data, "image/jpeg")
        if status != 200:
            return Prediction(file, _read(body), good=False)
        save.write_bytes(body)
        prediction.saved = save
    return prediction


def _ask_patiently(server: RunningServer, path: str, data: bytes, accept: str) -> tuple[int, bytes]:
    """Who is refused and told when to come back comes back: later each time, since there are others."""
    end = monotonic() + _PATIENCE_S
    wait = _SHORTEST_S
    while True:
        headers = (("Accept", accept), ("Content-Type", "application/octet-stream"))
        status, body = server.ask("POST", path, data, seconds=_ANSWER_S, headers=headers)
        later = _read(body).get("retry_after_s") if status in _COME_BACK else None
        if not isinstance(later, int | float) or monotonic() > end:
            return status, body
        wait = min(max(wait * _LATER, float(later)), _LONGEST_S)
        sleep(wait * uniform(1.0, _LATER))


def _read(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "the answer is not that of a model server"}


def in_words(answer: dict[str, Any]) -> str:
    """The gist of an answer in a line."""
    for key in ("detections", "classes", "masks"):
        if key in answer:
            things = [f"{one['label']} {one['score']:.2f}" for one in answer[key]]
            more = f" and {len(things) - _MOST_SHOWN} more" if len(things) > _MOST_SHOWN else ""
            return (", ".join(things[:_MOST_SHOWN]) or "nothing") + more
    if "depth" in answer:
        return f"from {answer['depth']['low']:g} to {answer['depth']['high']:g}"
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
        print(f"Saved {len(saved)} drawn picture{'' if len(saved) == 1 else 's'} in {saved[0].parent}")
