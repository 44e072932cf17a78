"""Logs: one line per event, as text or JSON, over the standard library's logging.

    log = logger("engine")
    log.info("model-ready", model="detector", seconds=1.2)

The event is a stable word and everything else a field, so that lines can be searched without parsing prose.
Several processes write to the same stream: each line is a single write of at most PIPE_BUF bytes, which the
system never mixes with another's. Values come from clients too: whatever could end a line or steer a terminal
is escaped. Warnings that repeat are counted.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import select
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

Scalar: TypeAlias = str | int | float | bool | None

_ROOT = "carpool"
_LIMIT = select.PIPE_BUF
_CUTS = (_LIMIT, 400, 40)  # characters per value, tried in turn until the line fits
_KINDS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
_PAST_THE_LOGGER = "output"
_MOST_PAST_THE_LOGGER = 500  # lines in an interval: those of one traceback are not repetitions
_UNQUOTED = re.compile(r"[\w.,:;@%+/()\[\]-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Event:
    """Represents a logging message that keeps its fields apart."""

    name: str
    fields: Mapping[str, object]

    def __str__(self) -> str:
        """Returns what a program sees that embeds Carpool and has its own logging."""
        return _words({"event": self.name, **_scalars(self.fields)}, bare=("event",))


@dataclass(frozen=True, slots=True)
class Logger:
    """Writes events of one part of the server. Not for the hot path: count there instead."""

    _log: logging.Logger
    _fields: Mapping[str, object]

    def bind(self, **fields: object) -> Logger:
        """Returns a logger that adds these to every event, such as the id of a request."""
        return Logger(self._log, {**self._fields, **fields})

    def debug(self, event: str, /, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Logs an unexpected error: adds the exception being handled and its traceback."""
        self._write(logging.ERROR, event, fields, trace=True)

    def _write(self, level: int, event: str, fields: Mapping[str, object], trace: bool = False) -> None:
        if self._log.isEnabledFor(level):
            self._log.log(level, Event(event, {**self._fields, **fields}), exc_info=trace)


def logger(part: str) -> Logger:
    return Logger(logging.getLogger(f"{_ROOT}.{part}"), {})


def tell(part: str, event: str, /, **fields: object) -> None:
    """Writes a warning that no setting keeps back: for what is done to the log itself."""
    log = logging.getLogger(f"{_ROOT}.{part}")
    record = log.makeRecord(log.name, logging.WARNING, "", 0, Event(event, fields), (), None)
    for handler in _handlers():
        handler.emit(record)


def configure(log_format: str, level: str, fd: int = 2) -> None:
    """Sends this process's logs to a file descriptor, and other libraries' warnings with them.

    For the server's own processes only: a program that embeds Carpool has its own idea of logging.
    """
    root = logging.getLogger()
    for old in _handlers():
        root.removeHandler(old)
    root.addHandler(LineHandler(fd, as_json=log_format == "json"))
    logging.getLogger(_ROOT).setLevel(level.upper())


def switch(*, verbose: bool, info: bool, warning: bool, error: bool) -> None:
    """Sets which kinds of lines this process writes from now on."""
    asked = {logging.DEBUG: verbose, logging.INFO: info, logging.WARNING: warning, logging.ERROR: error}
    kinds = frozenset(kind for kind, wanted in asked.items() if wanted)
    for handler in _handlers():
        handler.kinds = kinds
    logging.getLogger(_ROOT).setLevel(min(kinds, default=logging.CRITICAL))


def stream() -> int:
    return next((handler.fd for handler in _handlers()), 2)


def finish() -> None:
    """Write what is held back: this process is about to end."""
    for handler in _handlers():
        handler.flush()


def _handlers() -> list[LineHandler]:
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LineHandler)]


class LineHandler(logging.Handler):
    """Turns a record into one line and one write, if it is of a kind that is wanted and no repetition."""

    def __init__(self, fd: int, *, as_json: bool) -> None:
        super().__init__()
        self.fd = fd
        self._as_json = as_json
        self._repeats = Repeats(_noted)
        self._timer: threading.Timer | None = None
        self.kinds: frozenset[int] = frozenset(_KINDS)

    def filter(self, record: logging.LogRecord) -> bool:
        kind = max((kind for kind in _KINDS if kind <= record.levelno), default=logging.DEBUG)
        return kind in self.kinds

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record; it is called with the handler's lock, like everything here that touches what is
        held back."""
        now = time.monotonic()
        self._write_due(now)
        if record.levelno < logging.WARNING or self._repeats.shows(record, _kind_of(record), now):
            self._write(record)
        elif self._timer is None:
            self._wake_later(now)

    def flush(self) -> None:
        with self.lock or threading.RLock():
            self._write_due(math.inf)

    def _write_due(self, now: float) -> None:
        for held in self._repeats.due(now):
            self._write(held)

    def _wake_later(self, now: float) -> None:
        """Starts a timer that writes what was held back, if no other line comes first."""
        at = self._repeats.next_at
        if at is not None:
            self._timer = threading.Timer(max(0.0, at - now), self._wake)
            self._timer.daemon = True
            self._timer.start()

    def _wake(self) -> None:
        with self.lock or threading.RLock():
            now = time.monotonic()
            self._timer = None
            self._write_due(now)
            self._wake_later(now)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            line = line_of(record, self._as_json)
        except Exception:
            self.handleError(record)
            return
        try:
            os.write(self.fd, line)
        except OSError:
            return  # the log is no longer read; serving goes on


def _kind_of(record: logging.LogRecord) -> LineKind:
    """Returns the kind of a record: events of one name are of one kind; another library's messages, those of
    one logger."""
    if not isinstance(record.msg, Event):
        return LineKind((record.name, record.levelno), record.getMessage())
    name = record.msg.name
    if name == _PAST_THE_LOGGER:
        return LineKind(name, None, _MOST_PAST_THE_LOGGER)
    exact = tuple((key, str(_scalar(value))) for key, value in record.msg.fields.items())
    return LineKind((record.name, record.levelno, name), exact)


def _noted(record: logging.LogRecord, word: str, count: int) -> logging.LogRecord:
    """Returns a copy to be written now; where it happened was logged with the first one."""
    found = copy.copy(record)
    found.exc_info = found.exc_text = found.stack_info = None
    found.created = time.time()
    name = record.msg.name if isinstance(record.msg, Event) else "message"
    found.msg, found.args = Event(name, {**_fields(found), word: count}), None
    return found


def line_of(record: logging.LogRecord, as_json: bool) -> bytes:
    """Returns the whole line, its values cut as far as it takes to fit one write."""
    head, fields = _head(record), _fields(record)
    write = _json if as_json else _text
    for cut in _CUTS:
        line = write(_shorter(head, cut), _shorter(fields, cut))
        if len(line) <= _LIMIT:
            return line
    return write(_shorter(head, _CUTS[-1]), {"fields_left_out": len(fields)})


def _head(record: logging.LogRecord) -> dict[str, Scalar]:
    time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return {
        "time": time.replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "part": record.name.removeprefix(f"{_ROOT}."),
        "pid": record.process,
        "event": record.msg.name if isinstance(record.msg, Event) else "message",
    }


def _fields(record: logging.LogRecord) -> dict[str, Scalar]:
    """The event's own fields; another library's message becomes one."""
    given = record.msg.fields if isinstance(record.msg, Event) else {"text": record.getMessage()}
    fields = _scalars(given)
    if record.exc_info and record.exc_info[1] is not None:
        fields.setdefault("error", _scalar(record.exc_info[1]))
        fields["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
    return fields


def _scalars(fields: Mapping[str, object]) -> dict[str, Scalar]:
    return {key: _scalar(value) for key, value in fields.items()}


def _scalar(value: object) -> Scalar:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # JSON has no infinity
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, BaseException):
        return f"{type(value).__name__}: {value}"
    return str(value)


def _shorter(fields: Mapping[str, Scalar], cut: int) -> dict[str, Scalar]:
    return {
        key: value[:cut] + "…" if isinstance(value, str) and len(value) > cut else value
        for key, value in fields.items()
    }


def _json(head: Mapping[str, Scalar], fields: Mapping[str, Scalar]) -> bytes:
    clashing = {f"{key}_": value for key, value in fields.items() if key in head}
    rest = {key: value for key, value in fields.items() if key not in head}
    return json.dumps({**head, **rest, **clashing}, separators=(",", ":")).encode() + b"\n"


def _text(head: Mapping[str, Scalar], fields: Mapping[str, Scalar]) -> bytes:
    part = f"{head['part']}[{head['pid']}]"
    start = {"time": head["time"], "level": head["level"], "part": part, "event": head["event"]}
    words = [_words(start, bare=tuple(start)), _words(fields)]
    return " ".join(filter(None, words)).encode() + b"\n"


def _words(fields: Mapping[str, Scalar], bare: tuple[str, ...] = ()) -> str:
    return " ".join(_word(value) if key in bare else f"{key}={_word(value)}" for key, value in fields.items())


def _word(value: Scalar) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if _UNQUOTED.fullmatch(value):
        return value
    if value.isprintable():  # keeps names in any script readable
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return json.dumps(value)


# Warnings that repeat are counted instead of written: one line at first, one that says how many followed.
#
# Two bounds, within an interval that begins with the first line: the same line, with the same fields, is
# written once; and of one kind of event only so many different ones are. What was held back is logged when
# the interval is over: `repeated=1443` for the same line, `more=80` for others of its kind. Callers pass the
# time.


INTERVAL_S = 10.0
MOST_OF_A_KIND = 20
_MOST_KINDS = 256


class LineKind(NamedTuple):
    """Holds what bounds a record: its kind, itself (None: every line is written), how many of its kind."""

    kind: Hashable
    exact: Hashable | None
    most: int = MOST_OF_A_KIND


@dataclass(slots=True)
class _HeldLines:
    record: logging.LogRecord
    count: int = 0


@dataclass(slots=True)
class _Window:
    began: float
    shown: int = 0
    same: dict[Hashable, _HeldLines] = field(default_factory=dict)
    others: _HeldLines | None = None


class Repeats:
    """`note` makes the line that is written in the end: of a record, the word and the count."""

    def __init__(self, note: Callable[[logging.LogRecord, str, int], logging.LogRecord]) -> None:
        self._note = note
        self._windows: dict[Hashable, _Window] = {}

    @property
    def next_at(self) -> float | None:
        """Returns when something that was held back is to be logged, if anything was."""
        held = [
            window.began
            for window in self._windows.values()
            if window.others is not None or any(held.count for held in window.same.values())
        ]
        return min(held) + INTERVAL_S if held else None

    def shows(self, record: logging.LogRecord, kind: LineKind, now: float) -> bool:
        """Returns whether to write it; if not, it is counted. To be asked after `due`."""
        window = self._windows.get(kind.kind)
        if window is None:
            if len(self._windows) >= _MOST_KINDS:
                return True  # more kinds than any server logs: better too many lines than a growing table
            window = self._windows[kind.kind] = _Window(now)
        held = window.same.get(kind.exact)
        if held is not None:
            held.count += 1
            return False
        if window.shown >= kind.most:
            window.others = window.others or _HeldLines(record)
            window.others.record = record
            window.others.count += 1
            return False
        window.shown += 1
        if kind.exact is not None:
            window.same[kind.exact] = _HeldLines(record)
        return True

    def due(self, now: float) -> list[logging.LogRecord]:
        """Returns what to write of intervals that are over. All of it with `now` at infinity."""
        over = [kind for kind, window in self._windows.items() if now >= window.began + INTERVAL_S]
        found = []
        for kind in over:
            window = self._windows.pop(kind)
            found += [self._note(h.record, "repeated", h.count) for h in window.same.values() if h.count]
            if window.others is not None:
                found.append(self._note(window.others.record, "more", window.others.count))
        return found
