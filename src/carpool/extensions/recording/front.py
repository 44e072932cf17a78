"""Writes arrivals as they come to a file (`--record`), so that they can be played against other settings.

Each front end writes to the end of one file whatever is asked of it: also what it refuses before the engine
sees it, since without that an overload would look harmless when it is replayed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import orjson

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError, ConfigError, DeadlineExceeded, Refused, Unavailable
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Ask, Call, EngineClient, Hears, RequestGroup
from carpool.observe.logs import logger

_FLUSH_S = 1.0
_LONGEST_LINE = 1 << 16
_PIECE = 256  # lines made in one go: the loop's thread waits for no more than these
_MOST_WAITING = 200_000  # arrivals, while the disk does not take them
_CLOSE_S = 5.0
_OPEN = os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK

_FOR_WANT_OF_ROOM = (Refused, Unavailable, DeadlineExceeded)

_log = logger("record")


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Returns the settings with the whole path of a file that can be recorded to."""
    return replace(settings, record=str(claim(settings.record))), ""


def claim(file: str) -> Path:
    """Returns the file to record to: it is created here, or exists and is empty. Earlier recordings are never
    overwritten."""
    path = Path(file).absolute()
    try:
        fd = os.open(path, _OPEN | os.O_CREAT, 0o644)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise ConfigError(f"cannot record to {path}: {error.strerror}", field="record") from None
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"cannot record to {path}: it is not a plain file", field="record")
    if found.st_size:
        raise ConfigError(
            f"{path} holds {found.st_size:,} bytes already: name a new file to record to, or move that away",
            field="record",
        )
    return path


Arrival: TypeAlias = tuple[float, str, int, str, bool]
"""When, for which model, how many images, of which source, and whether a cache answered."""


class Recorder:
    """Writes from a thread of its own: `note` only appends. `began` is on the clock of `time.monotonic()`."""

    def __init__(self, path: Path, began: float, limit_bytes: int) -> None:
        self._path = path
        self._began = began
        self._limit = limit_bytes
        self._waiting: deque[Arrival] = deque()
        self._lost = 0
        self._over = threading.Event()
        self._fd = os.open(path, _OPEN | os.O_CREAT, 0o644)
        self._thread = threading.Thread(target=self._live, name="record", daemon=True)
        self._thread.start()

    def note(
        self, entry: ModelEntry, arrived: float, images: int, source: str, *, cached: bool = False
    ) -> None:
        if self._over.is_set():
            return
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append((arrived, entry.name, images, source, cached))
        else:
            self._lost += 1

    def close(self) -> None:
        """Write what waits, and end. Waits for a disk that is stuck, but not for ever."""
        self._over.set()
        self._thread.join(_CLOSE_S)

    # ── in the thread ──

    def _live(self) -> None:
        try:
            while not self._over.wait(_FLUSH_S):
                self._flush()
            self._flush()
        except OSError as error:
            self._stop(str(error.strerror or error))
        finally:
            os.close(self._fd)

    def _flush(self) -> None:
        while self._waiting:
            count = min(_PIECE, len(self._waiting))
            piece = b"".join(self._line(self._waiting.popleft()) for _ in range(count))
            with _alone(self._fd) as size:
                if size + len(piece) <= self._limit:
                    _write(self._fd, piece, size)
                    continue
            self._stop(f"it would be over {self._limit / 1e6:g} MB: --record-limit-mb allows more")
            return
        if self._lost:
            _log.warning("record-incomplete", file=str(self._path), lost=self._lost)
            self._lost = 0

    def _line(self, arrival: Arrival) -> bytes:
        at, model, images, source, cached = arrival
        line: dict[str, object] = {"time": round(at - self._began, 6), "model": model, "images": images}
        if source:
            line["source"] = source
        if cached:
            line["cached"] = True
        return orjson.dumps(line) + b"\n"

    def _stop(self, why: str) -> None:
        self._over.set()
        self._waiting.clear()
        _log.warning("record-stopped", file=str(self._path), why=why)


@contextlib.contextmanager
def _alone(fd: int) -> Iterator[int]:
    """Yields the length of the file, which ends with a whole line, while no other front end writes to it."""
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        size = _whole(fd, os.fstat(fd).st_size)
        yield size
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _whole(fd: int, size: int) -> int:
    """Cuts off half a line, which a front end that was killed has left; returns the length after that."""
    if not size or os.pread(fd, 1, size - 1) == b"\n":
        return size
    begin = max(0, size - _LONGEST_LINE)
    kept = begin + os.pread(fd, size - begin, begin).rfind(b"\n") + 1
    os.ftruncate(fd, kept)
    return kept


def _write(fd: int, piece: bytes, size: int) -> None:
    """Writes all of it, or leaves the file as long as it was: half a line would spoil it."""
    try:
        while piece:
            piece = piece[os.write(fd, piece) :]
    except OSError:
        os.ftruncate(fd, size)
        raise


class RecordingClient:
    """Notes every request, let in or not, on its way to the engine."""

    def __init__(self, engine: EngineClient, recorder: Recorder) -> None:
        self._engine = engine
        self._recorder = recorder
        self.watch = engine.watch
        self.refuses = engine.refuses
        self.slot = engine.slot
        self.first_slot = engine.first_slot
        self.large_slot = engine.large_slot
        self.larger_slot = engine.larger_slot
        self.ask = engine.ask

    @property
    def catalog(self) -> Catalog:
        return self._engine.catalog

    @property
    def serving(self) -> bool:
        return self._engine.serving

    def begin_booking(self, entry: ModelEntry) -> RequestGroup:
        return self._engine.begin_booking(entry)

    def rejected_here(
        self, entry: ModelEntry, error: CarpoolError, arrived: float, images: int = 1, source: str = ""
    ) -> None:
        """With another server, or other settings, they might have been let in; what is wrong stays wrong."""
        if isinstance(error, _FOR_WANT_OF_ROOM):
            self._recorder.note(entry, arrived, images, source)

    def answered_here(self, entry: ModelEntry, arrived: float, images: int, source: str) -> None:
        images = images if entry.signature.max_batch else 1
        self._recorder.note(entry, arrived, images, source, cached=True)

    def infer(self, ask: Ask, hears: Hears) -> Call:
        source = ask.sender.source or ask.head.options.source
        booking = ask.handling.booking
        if booking is not None:  # who came is who asked for the whole of it
            if not booking.begun:
                self._recorder.note(booking.entry, ask.arrived, 1, source)
        elif not ask.handling.background:
            images = ask.head.batch if ask.entry.signature.max_batch else 1
            self._recorder.note(ask.entry, ask.arrived, images, source)
        return self._engine.infer(ask, hears)


def front(server: FrontServer) -> FrontPart:
    """Returns the part of a front end that records. No request can arrive any more when it is closed."""
    settings = server.settings
    recorder = Recorder(Path(settings.record), server.began, int(settings.record_limit_mb * 1e6))
    return FrontPart(engine=lambda engine: RecordingClient(engine, recorder), close=recorder.close)
