"""The folder of a sweep: what was asked, and a line for every finished run, so that it can go on later."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from carpool.errors import InvalidInput
from carpool.lab.sweep.sweep_runs import Measured, read_measured

_ASKED, _RUNS = "sweep.json", "runs.jsonl"
_MOST_BYTES = 256 << 20
_LEFT = re.compile(r"server-\d+\.log|sweep\.json\.part")  # by a sweep that did not get to its first run


def digest(asked: Mapping[str, Any]) -> str:
    """Runs belong together if this is equal."""
    text = json.dumps(asked, sort_keys=True, ensure_ascii=False)
    return blake2b(text.encode(), digest_size=8).hexdigest()


@dataclass
class Journal:
    """`found` is what was learned before the first run (the rates, the curve): the same for all of them."""

    folder: Path
    digest: str
    found: dict[str, Any] | None
    runs: list[Measured]

    @classmethod
    def open(cls, folder: Path, asked: Mapping[str, Any]) -> Journal:
        """A new folder, or one in which the same was begun; anything else is refused."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            before = _read_document(folder / _ASKED)
        except OSError as error:
            raise InvalidInput(f"--out: {folder}: {error.strerror or error}", field="--out") from None
        if before is None:
            if any(not _LEFT.fullmatch(entry.name) for entry in folder.iterdir()):
                raise InvalidInput(
                    f"--out: {folder} holds something else than a sweep: name a new folder", field="--out"
                )
            return cls(folder, digest(asked), None, [])
        _check_same(folder, before.get("asked"), asked)
        own = digest(asked)
        runs = _read_runs(folder / _RUNS, own)
        with (folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write("\n")  # ends a line that was cut off; an empty one is skipped
        return cls(folder, own, before.get("found"), runs)

    def begin(self, asked: Mapping[str, Any], found: dict[str, Any]) -> None:
        """Written once, whole or not at all."""
        self.found = found
        text = json.dumps({"asked": asked, "found": found}, indent=2, ensure_ascii=False)
        part = self.folder / (_ASKED + ".part")
        part.write_text(text + "\n", "utf-8")
        part.replace(self.folder / _ASKED)

    def add(self, run: Measured) -> None:
        """Kept from now on, whatever happens next."""
        line = json.dumps({"digest": self.digest} | run.as_json(), ensure_ascii=False)
        with (self.folder / _RUNS).open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.runs.append(run)


def _check_same(folder: Path, before: Any, asked: Mapping[str, Any]) -> None:
    if not isinstance(before, dict):
        raise InvalidInput(f"--out: {folder / _ASKED} is not of a sweep: name a new folder", field="--out")
    differ = [
        f"{name} was {_short(before.get(name))} and is {_short(asked.get(name))} now"
        for name in dict.fromkeys((*before, *asked))
        if before.get(name) != asked.get(name)
    ]
    if differ:
        raise InvalidInput(
            f"--out: another sweep was begun in {folder}: {'; '.join(differ)}. "
            "Ask the same again, or name a new folder",
            field="--out",
        )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def _read_document(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        document = json.loads(_text(file))
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {}


def _read_runs(file: Path, own: str) -> list[Measured]:
    """The last line may have been cut off by whatever ended the sweep; it is measured again."""
    found: dict[tuple[str, float, int], Measured] = {}
    for line in _text(file).splitlines() if file.exists() else ():
        try:
            document = json.loads(line)
            if document["digest"] == own:
                run = read_measured(document)
                found[run.key] = run
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return list(found.values())


def _text(file: Path) -> str:
    if file.stat().st_size > _MOST_BYTES:
        raise InvalidInput(f"--out: {file} is over {_MOST_BYTES:,} bytes: name a new folder", field="--out")
    return file.read_text("utf-8", "replace")
