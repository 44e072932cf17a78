"""Keeps pictures that two versions answered differently: a bounded ring in a folder that the settings name.

`index.jsonl` has a line for each, with both answers; beside it the pictures as they came. A file is complete
or absent. The oldest go first, by number and by bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from carpool.config.regular_file import open_regular, read_regular
from carpool.extensions.rollout.rollout_file import write_document
from carpool.extensions.rollout.settings import KeepSettings

INDEX = "index.jsonl"
_MOST_BYTES = 256 << 20
_MARKS = (
    *((b"\xff\xd8", "jpg"), (b"\x89PNG", "png"), (b"RIFF", "webp"), (b"BM", "bmp"), (b"GIF8", "gif")),
    *((b"II*\0", "tif"), (b"MM\0*", "tif")),
)


class Disagreements:
    """Keeps pictures for one thread at a time."""

    def __init__(self, keep: KeepSettings, model: str) -> None:
        self.folder = Path(keep.folder).expanduser() / model
        self._most = keep.pictures
        self._most_bytes = int(keep.mb * 1e6)
        self._lines: list[dict[str, Any]] = []
        self._bytes = 0
        self._next = 1
        self._cut_off = False  # the index ends in the middle of a line
        self._read()

    def add(self, line: Mapping[str, Any], picture: bytes) -> int:
        """Returns its number. Raises `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number, file = self._next, ""
        if picture:
            file = f"{number:08d}.{_kind(picture)}"
            write_document(self.folder / file, picture)
        kept = {"number": number, **line, "file": file, "bytes": len(picture)}
        with (self.folder / INDEX).open("ab") as index:
            index.write((b"\n" if self._cut_off else b"") + orjson.dumps(kept) + b"\n")
        self._cut_off = False
        self._next += 1
        self._lines.append(kept)
        self._bytes += kept["bytes"]
        self._make_room()
        return number

    def worst(self, after: int = 0, limit: int = 50) -> list[dict[str, Any]]:
        """Returns those above a number, the worst first."""
        found = [line for line in self._lines if line["number"] > after]
        return sorted(found, key=lambda line: -line["how_much"])[:limit]

    def picture(self, number: int) -> bytes | None:
        line = next((line for line in self._lines if line["number"] == number), None)
        if line is None or not line["file"]:
            return None
        try:
            return read_regular(self.folder / str(line["file"]), _MOST_BYTES)
        except OSError:
            return None

    def _make_room(self) -> None:
        gone = 0
        while len(self._lines) > self._most or (self._bytes > self._most_bytes and self._lines):
            oldest = self._lines.pop(0)
            self._bytes -= oldest["bytes"]
            gone += 1
            if oldest["file"]:
                with contextlib.suppress(OSError):
                    (self.folder / oldest["file"]).unlink()
        if gone:
            lines = b"".join(orjson.dumps(line) + b"\n" for line in self._lines)
            write_document(self.folder / INDEX, lines)

    def _read(self) -> None:
        """What was kept before; a last line that was cut off, or anything else that is none, is left out."""
        try:
            with open_regular(self.folder / INDEX) as index:
                text = index.read(_MOST_BYTES)
        except OSError:
            return
        self._cut_off = not text.endswith(b"\n") and bool(text)
        for line in text.splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                kept = orjson.loads(line)
                number, file, how_much = int(kept["number"]), str(kept["file"]), float(kept["how_much"])
                if Path(file).name != file or how_much < 0.0:
                    continue
                read = {"number": number, "file": file, "how_much": how_much, "bytes": int(kept["bytes"])}
                self._lines.append(kept | read)
                self._next = max(self._next, number + 1)
        self._bytes = sum(line["bytes"] for line in self._lines)


def _kind(picture: bytes) -> str:
    return next((ending for mark, ending in _MARKS if picture.startswith(mark)), "bin")
