"""Warnings that repeat are counted instead of written: one line at first, one that says how many followed.

Two bounds, within an interval that begins with the first line: the same line, with the same fields, is
written once; and of one kind of event only so many different ones are. What was held back is told when the
interval is over: `repeated=1443` for the same line, `more=80` for others of its kind. It is told the time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

INTERVAL_S = 10.0
MOST_OF_A_KIND = 20

_MOST_KINDS = 256


class Kind(NamedTuple):
    """What bounds a record: its kind, itself (None: every line is told), and how many of its kind."""

    kind: Hashable
    exact: Hashable | None
    most: int = MOST_OF_A_KIND


@dataclass(slots=True)
class _Held:
    record: logging.LogRecord
    count: int = 0


@dataclass(slots=True)
class _Window:
    began: float
    shown: int = 0
    same: dict[Hashable, _Held] = field(default_factory=dict)
    others: _Held | None = None


class Repeats:
    """`note` makes the line that is written in the end: of a record, the word and the count."""

    def __init__(self, note: Callable[[logging.LogRecord, str, int], logging.LogRecord]) -> None:
        self._note = note
        self._windows: dict[Hashable, _Window] = {}

    @property
    def next_at(self) -> float | None:
        """When something that was held back is to be told, if anything was."""
        held = [window.began for window in self._windows.values() if _holds(window)]
        return min(held) + INTERVAL_S if held else None

    def shows(self, record: logging.LogRecord, kind: Kind, now: float) -> bool:
        """Whether to write it; if not, it is counted. To be asked after `due`."""
        window = self._windows.get(kind.kind)
        if window is None:
            if len(self._windows) >= _MOST_KINDS:
                return True  # nobody has so many kinds of events: better too much than a growing table
            window = self._windows[kind.kind] = _Window(now)
        held = window.same.get(kind.exact)
        if held is not None:
            held.count += 1
            return False
        if window.shown >= kind.most:
            window.others = window.others or _Held(record)
            window.others.record = record
            window.others.count += 1
            return False
        window.shown += 1
        if kind.exact is not None:
            window.same[kind.exact] = _Held(record)
        return True

    def due(self, now: float) -> list[logging.LogRecord]:
        """What to write of intervals that are over. All of it with `now` at infinity."""
        over = [kind for kind, window in self._windows.items() if now >= window.began + INTERVAL_S]
        found = []
        for kind in over:
            window = self._windows.pop(kind)
            found += [self._note(h.record, "repeated", h.count) for h in window.same.values() if h.count]
            if window.others is not None:
                found.append(self._note(window.others.record, "more", window.others.count))
        return found


def _holds(window: _Window) -> bool:
    return window.others is not None or any(held.count for held in window.same.values())


def without_traceback(record: logging.LogRecord, created: float) -> logging.LogRecord:
    """A copy to be written now; where it happened was told with the first one."""
    again = copy.copy(record)
    again.exc_info = again.exc_text = again.stack_info = None
    again.created = created
    return again
