"""Which cameras are meant: files, folders, streams and devices, each with a name; passwords are kept to the
address itself, which nothing shows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from carpool.errors import InvalidInput

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".ts", ".mts", ".mpg", ".mpeg", ".flv", ".3gp")
STREAMS = ("rtsp", "rtsps", "rtmp", "http", "https")
MOST_CAMERAS = 1000
_LONGEST_NAME = 100
_MOST_LIST_BYTES = 1 << 20
_UNFIT = re.compile(r"[^!-~]+")


@dataclass(frozen=True, slots=True)
class CameraAddress:
    name: str  # of its source, at the server
    address: str = field(repr=False)
    live: bool  # it goes on by itself and has no end
    shown: str  # the address for people

    @property
    def is_device(self) -> bool:
        return self.live and "://" not in self.address


def find_cameras(words: Sequence[str], listed: Path | None = None) -> list[CameraAddress]:
    """In the order given, then those of the list; names that occur twice are numbered."""
    found: list[CameraAddress] = []
    for name, word in (*(("", word) for word in words), *(_lines(listed) if listed else ())):
        found += _meant(word, name)
    if not found:
        raise InvalidInput("no camera: give a video, a folder with videos, rtsp://…, or /dev/video0")
    if len(found) > MOST_CAMERAS:
        raise InvalidInput(f"{len(found)} cameras are more than the {MOST_CAMERAS} that are watched at once")
    return list(_named_apart(found))


def _meant(word: str, name: str) -> Iterator[CameraAddress]:
    if "://" in word:
        yield _stream(word, name)
        return
    path = Path(word)
    if path.is_char_device():
        yield CameraAddress(name or path.name, word, True, word)
    elif path.is_dir():
        inside = sorted(file for file in path.rglob("*") if _is_video(file, path))
        if not inside:
            raise InvalidInput(f"{word}: no videos in this folder ({', '.join(SUFFIXES)})")
        for file in inside:
            own = f"{name}/{file.stem}" if name else file.stem
            yield CameraAddress(_fit(own), str(file), False, str(file))
    elif path.is_file():
        yield CameraAddress(_fit(name or path.stem), word, False, word)
    else:
        raise InvalidInput(f"{word}: no such video, folder or camera")


def _is_video(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return file.suffix.lower() in SUFFIXES and not hidden and file.is_file()


def _stream(word: str, name: str) -> CameraAddress:
    """Returns a stream's address; users, passwords and what follows a question mark are never shown."""
    try:
        parts = urlsplit(word)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        parts, port = urlsplit(""), ""
    if parts.scheme not in STREAMS or not parts.hostname:
        known = ", ".join(f"{scheme}://" for scheme in STREAMS)
        raise InvalidInput(f"a stream's address begins with {known} and a host, like rtsp://10.0.0.7/stream1")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    place = f"{host}{port}{parts.path}"
    return CameraAddress(_fit(name or place.rstrip("/")), word, True, f"{parts.scheme}://{place}")


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    """`name address` or `address`; what follows # is a remark."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_LIST_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InvalidInput(f"--list {file} cannot be read: {why}") from None
    if len(text) > _MOST_LIST_BYTES:
        raise InvalidInput(f"--list {file} is larger than {_MOST_LIST_BYTES} bytes, which no list is")
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise InvalidInput(f"--list {file}, line {number}: it must be 'name address' or 'address'")
        yield (words[0] if len(words) == 2 else ""), words[-1]


def _fit(name: str) -> str:
    """Returns a header's value: printable, without spaces, not too long."""
    return _UNFIT.sub("_", name)[-_LONGEST_NAME:] or "camera"


def _named_apart(cameras: Iterable[CameraAddress]) -> Iterator[CameraAddress]:
    taken: set[str] = set()
    for camera in cameras:
        name, number = camera.name, 1
        while name in taken:
            number += 1
            name = f"{camera.name}-{number}"
        taken.add(name)
        yield CameraAddress(name, camera.address, camera.live, camera.shown)
