"""What `carpool predict` does once it knows its options."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from random import uniform
from time import monotonic, sleep
from typing import Any
from urllib.parse import quote, urlencode

from carpool.cli import show
from carpool.cli.models_run import Failed, Server
from carpool.cli.predict_command import Predict
from carpool.cli.running_server import trust
from carpool.errors import InvalidInput

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif")
_LARGEST = 1 << 30
_ANSWER_S = 60.0
_MOST_SHOWN = 4
_PATIENCE_S = 60.0  # for a picture that is refused, and told to come back
_COME_BACK = (429, 503)
_LATER = 1.5
_SHORTEST_S, _LONGEST_S = 0.05, 5.0  # between two tries


@dataclass(slots=True)
class Found:
    """One picture and what came of it."""

    file: Path
    answer: dict[str, Any]  # the error, where there is one
    good: bool
    seconds: float = 0.0
    saved: Path | None = None


class PictureServer(Server):
    """As `Server`, with bytes both ways; every question has a connection of its own."""

    def ask(self, path: str, body: bytes | None, accept: str) -> tuple[int, bytes]:
        connection = self.connection(_ANSWER_S)
        headers = {**self._headers, "Accept": accept, "Content-Type": "application/octet-stream"}
        try:
            connection.request("GET" if body is None else "POST", self._prefix + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise Failed(f"{self._url}: no answer: {why}; is the server running there?") from None
        except HTTPException:
            raise Failed(f"{self._url}: what answers there does not speak HTTP") from None
        finally:
            connection.close()


def run(asked: Predict) -> bool:
    """Whether every picture was answered."""
    files = pictures(asked.images)
    server = PictureServer(asked.url, trust(asked.api_key_file, asked.ca, asked.insecure))
    try:
        path = _path(asked, server)
        names = _names_to_save(asked, files)
        with (
            ThreadPoolExecutor(asked.at_once) as pool,
            show.steps("Asking", len(files)) as step,
        ):

            def ask(file: Path, name: Path | None) -> Found:
                found = _ask(server, path, file, name)
                step()
                return found

            found = list(pool.map(ask, files, names))
    except Failed as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return False
    if asked.as_json:
        print(json.dumps([_document(one) for one in found], indent=2, ensure_ascii=False))
    else:
        _show(found)
    for one in found:
        if not one.good:
            print(f"carpool: {one.file}: {_sentence(one.answer)}", file=sys.stderr)
    return all(one.good for one in found)


def pictures(given: Sequence[str]) -> list[Path]:
    """The files that are meant, each once, in the order given."""
    files: dict[Path, None] = {}
    for word in given:
        path = Path(word)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES)
            if not inside:
                raise InvalidInput(f"{word}: no pictures in this folder")
        elif path.is_file():
            inside = [path]
        else:
            inside = _matching(path)
            if not inside:
                raise InvalidInput(f"{word}: no such picture")
        files |= dict.fromkeys(inside)
    return list(files)


def _matching(pattern: Path) -> list[Path]:
    if not any(sign in str(pattern) for sign in "*?["):
        return []
    anchor = Path(pattern.anchor)
    relative = str(pattern.relative_to(anchor)) if pattern.anchor else str(pattern)
    return sorted(path for path in anchor.glob(relative) if path.is_file())


def _path(asked: Predict, server: PictureServer) -> str:
    given: dict[str, object] = {"score": asked.score, "iou": asked.iou, "top_k": asked.top_k}
    query = {name: value for name, value in given.items() if value is not None}
    if asked.model is None:
        path = f"/{asked.task}" if asked.task is not None else _first_model(server)
    elif asked.task is None:
        path = f"/models/{quote(asked.model, safe='')}/predict"
    else:
        path = f"/{asked.task}"
        query = {"model": asked.model, **query}
    return f"{path}?{urlencode(query)}" if query else path


def _first_model(server: PictureServer) -> str:
    status, body = server.ask("/openapi.json", None, "application/json")
    try:
        models = json.loads(body)["x-carpool-models"] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        models = None
    if models is None:
        raise Failed("what answers there is no Carpool server that takes pictures; name a --task or --model")
    if not models:
        raise Failed("no model of this server takes pictures")
    return f"/models/{quote(models[0]['name'], safe='')}/predict"


def _names_to_save(asked: Predict, files: Sequence[Path]) -> list[Path | None]:
    """Where each drawn picture goes; those of the same name in different folders are numbered."""
    if asked.save is None:
        return [None] * len(files)
    try:
        asked.save.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failed(f"{asked.save}: cannot be written to: {error.strerror or error}") from None
    seen: Counter[str] = Counter()
    names: list[Path | None] = []
    for file in files:
        seen[file.stem] += 1
        number = f"-{seen[file.stem]}" if seen[file.stem] > 1 else ""
        names.append(asked.save / f"{file.stem}{number}.jpg")
    return names


def _ask(server: PictureServer, path: str, file: Path, save: Path | None) -> Found:
    try:
        if file.stat().st_size > _LARGEST:
            raise OSError(f"larger than {_LARGEST} bytes, which no picture is")
        data = file.read_bytes()
    except OSError as error:
        return Found(file, {"error": f"cannot be read: {error.strerror or error}"}, good=False)
    started = monotonic()
    status, body = _ask_patiently(server, path, data, "application/json")
    found = Found(file, _read(body), status == 200, monotonic() - started)
    if found.good and save is not None:
        _save(server, path, data, save, found)
    return found


def _ask_patiently(server: PictureServer, path: str, data: bytes, accept: str) -> tuple[int, bytes]:
    """Who is refused and told when to come back comes back: later each time, since there are others."""
    end = monotonic() + _PATIENCE_S
    wait = _SHORTEST_S
    while True:
        status, body = server.ask(path, data, accept)
        told = _read(body).get("retry_after_s") if status in _COME_BACK else None
        if not isinstance(told, int | float) or monotonic() > end:
            return status, body
        wait = min(max(wait * _LATER, float(told)), _LONGEST_S)
        sleep(wait * uniform(1.0, _LATER))


def _save(server: PictureServer, path: str, data: bytes, save: Path, found: Found) -> None:
    status, body = _ask_patiently(server, path, data, "image/jpeg")
    if status != 200:
        found.answer, found.good = _read(body), False
        return
    try:
        save.write_bytes(body)
    except OSError as error:
        raise Failed(f"{save}: cannot be written: {error.strerror or error}") from None
    found.saved = save


def _read(body: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(body)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "the answer is not that of a model server"}


def _document(found: Found) -> dict[str, Any]:
    saved = {} if found.saved is None else {"saved": str(found.saved)}
    return {"file": str(found.file), **found.answer, **saved}


def _sentence(error: dict[str, Any]) -> str:
    message = str(error.get("error", "no answer"))
    reason = f" ({error['reason']})" if error.get("reason") else ""
    return (message if message.isprintable() else repr(message)) + reason


def in_words(answer: dict[str, Any]) -> str:
    """The gist of an answer in a line."""
    for key in ("detections", "classes", "masks"):
        if key in answer:
            things = [f"{one['label']} {one['score']:.2f}" for one in answer[key]]
            more = f" and {len(things) - _MOST_SHOWN} more" if len(things) > _MOST_SHOWN else ""
            return (", ".join(things[:_MOST_SHOWN]) or "nothing") + more
    if "embedding" in answer:
        return f"a vector of {len(answer['embedding'])} numbers"
    shapes = [f"{one['name']} {one['shape']}" for one in answer.get("outputs", ())]
    return ", ".join(shapes) or "an answer of another kind"


def _show(found: Sequence[Found]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    good = [one for one in found if one.good]
    if not good:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("picture", "size", "answer", "model", "ms"):
        table.add_column(title, justify="right" if title == "ms" else "left")
    alike = len({one.file.name for one in good}) < len(good)
    for one in good:
        image = one.answer.get("image", {})
        cells = [
            str(one.file) if alike else one.file.name,
            f"{image.get('width', '?')}×{image.get('height', '?')}",
            in_words(one.answer),
            str(one.answer.get("model", "")),
            f"{one.seconds * 1e3:.0f}",
        ]
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    saved = [one.saved for one in good if one.saved is not None]
    if saved:
        print(f"Saved {len(saved)} drawn picture{'' if len(saved) == 1 else 's'} in {saved[0].parent}")
