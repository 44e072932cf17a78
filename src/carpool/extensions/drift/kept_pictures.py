"""Stores pictures for labelling: which answers are doubtful, and a folder that never exceeds its limit. A
picture is in it whole and with its line in `index.jsonl`, or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from carpool.config.regular_file import read_regular
from carpool.extensions.drift.measures import numbers_of
from carpool.extensions.drift.settings import UncertainSettings

INDEX = "index.jsonl"
MOST_PICTURE_BYTES = 16 << 20
_MOST_INDEX = 256 << 20
_HOUR = 3600.0
_NAME = re.compile(r"[0-9]{13,16}-[0-9]{4}\.(jpg|png|webp|bmp|tiff|gif)")
_ENDINGS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff", "GIF": "gif"}


def doubt(answer: Mapping[str, Any], settings: UncertainSettings) -> str:
    """Returns why the answer should be reviewed, in a few words; empty for an answer that is certain."""
    objects: Sequence[Mapping[str, Any]] = answer.get("detections", answer.get("masks")) or ()
    low, high = settings.score
    for found in objects:
        for score in numbers_of([found]):
            if low <= score <= high:
                return f"{found.get('label')} at {score:.2f}"
    classes = answer.get("classes") or ()
    scores = numbers_of(classes[:2])
    if len(scores) == 2 and scores[0] - scores[1] <= settings.margin:
        first, second = (
            f"{one.get('label')} {score:.2f}" for one, score in zip(classes, scores, strict=False)
        )
        return f"{first} or {second}"
    return ""


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines that can be read, each of a picture in the folder. The process that wrote the index
    may have been killed."""
    try:
        written = read_regular(folder / INDEX, _MOST_INDEX)
    except FileNotFoundError:
        return []
    lines = []
    for text in written.splitlines():
        try:
            line = orjson.loads(text)
            name = line.get("picture") or line.get("file")  # as rollouts call it
            if isinstance(name, str) and name and "/" not in name and (folder / name).is_file():
                lines.append({**line, "picture": name})
        except (orjson.JSONDecodeError, AttributeError):
            continue
    return lines


class KeptPictures:
    """Keeps the pictures of one folder, which no other process writes to. Used by one thread at a time."""

    def __init__(self, folder: Path, settings: UncertainSettings) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.settings = settings
        self._lines = read_index(folder)
        known = {line["picture"] for line in self._lines}
        remove_unfinished(folder)
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in known:
                path.unlink(missing_ok=True)  # killed before its line was written
        self._sizes = {name: (folder / name).stat().st_size for name in known}
        self._number = len(self._lines)

    def room(self, now: float) -> int:
        """Returns how many more there is room for in this hour."""
        lately = sum(1 for line in self._lines if _time_of(line) > now - _HOUR)
        return max(0, self.settings.per_hour - lately)

    def keep(self, picture: bytes, form: str, line: Mapping[str, Any], now: float) -> bool:
        """Keeps a picture; False where it may not be kept: too many, too large, or no picture of a known
        form."""
        most = int(self.settings.mb * 1e6)
        ending = _ENDINGS.get(form)
        if ending is None or not self.room(now) or len(picture) > min(most, MOST_PICTURE_BYTES):
            return False
        self._number += 1
        name = f"{int(now * 1e3):013}-{self._number % 10_000:04}.{ending}"
        write_whole(self._folder / name, picture)
        self._sizes[name] = len(picture)
        self._lines.append({"picture": name, "time": round(now, 3), **line})
        gone = []
        while sum(self._sizes.values()) > most:  # the oldest go
            oldest = self._lines.pop(0)["picture"]
            del self._sizes[oldest]
            gone.append(oldest)
        write_whole(self._folder / INDEX, b"".join(orjson.dumps(line) + b"\n" for line in self._lines))
        for oldest in gone:
            (self._folder / oldest).unlink(missing_ok=True)
        return True


def _time_of(line: Mapping[str, Any]) -> float:
    time = line.get("time")
    return float(time) if isinstance(time, int | float) else 0.0


# ---- files that are whole or not there, whenever the process is killed


_UNFINISHED = ".unfinished"


def write_whole(path: Path, data: bytes) -> None:
    """Under another name first: who reads `path` sees what was there before, or all of this."""
    unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
    with unfinished.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f".*{_UNFINISHED}"):
        path.unlink(missing_ok=True)
