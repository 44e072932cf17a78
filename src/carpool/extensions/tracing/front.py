"""Traces as a front end writes them: where the time of single requests went, one JSON line for each.

Which requests is for the trace settings to say; they come with the catalogue. Each front end counts its own
requests, and asks the engine for a place in the file only where the number of traces is limited.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

import carpool
from carpool.errors import CarpoolError
from carpool.extensions.tracing.settings import TIMESTAMPS, read_otel
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.trace_context import Caller, TracedCall
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.observe.logs import logger
from carpool.types import Timing

if TYPE_CHECKING:
    from carpool.extensions.tracing.request_spans import RequestSpans


_MOST_WAITING = 1024  # lines, while the engine says how many of them it wants

_log = logger("trace")


def front(server: FrontServer) -> FrontPart:
    """Returns what tracing does in a front end; it makes spans only where a collector is named."""
    otel = read_otel(server.settings)
    if otel is None:
        return Tracer(server).part
    from carpool.extensions.tracing.request_spans import RequestSpans  # needs a package that is optional

    spans = RequestSpans(otel, carpool.__version__, server.server_row, server.exemplars)
    return Tracer(server, spans).part


class _Scope(NamedTuple):
    """Holds what holds for one model, or for all that have nothing of their own."""

    file: str
    rate: int
    limited: bool


class Tracer:
    """Traces the requests of one front end. `on` is all that a request looks at while nothing is traced."""

    def __init__(self, server: FrontServer, spans: RequestSpans | None = None) -> None:
        """With `spans`, those are exported as well."""
        self.on = spans is not None
        self._spans = spans
        self._server = server
        self._scopes: dict[str, _Scope | None] = {}
        self._seen: Counter[str] = Counter()
        self._written = 0
        self._waiting: dict[tuple[str, str], list[bytes]] = {}  # by model and file
        self._asking: asyncio.Task[None] | None = None
        self.part = FrontPart(
            follow=self.follow,
            observe=lambda: self if self.on else None,
            refused=self.refused,
            close=self.close,
        )

    def close(self) -> None:
        if self._spans is not None:
            self._spans.close()

    def answered(self, call: TracedCall, answer: Answer, times: tuple[float, float, float]) -> None:
        """A request was answered well; of an answer that was kept, nothing but its end is traced."""
        timing = answer.timing
        if self._spans is not None:
            self._spans.answered(call, timing, times)
        if call.note is not None and call.note.reused:
            return
        name = call.entry.name
        scope = self._scopes.get(name if name in self._scopes else "")
        if scope is None:
            return
        self._seen[name] += 1
        if self._seen[name] % scope.rate:
            return
        line = self._line(call, timing, times[0], times[2])
        if scope.limited:
            self._wait(name, scope.file, line)
        else:
            _write(scope.file, line)

    def failed(self, call: TracedCall, error: CarpoolError, timing: Timing | None, now: float) -> None:
        if self._spans is not None:
            self._spans.failed(call, error, timing, now)

    def refused(self, caller: Caller, entry: ModelEntry | None, error: CarpoolError, head_at: float) -> None:
        if self._spans is not None:
            self._spans.refused(caller, entry, error, head_at)

    def _line(self, call: TracedCall, timing: Timing, offered: float, now: float) -> bytes:
        self._written += 1
        times = _timestamps(timing, call.arrived, offered, now)
        document = {
            "id": f"{os.getpid()}-{self._written}",
            "model": call.entry.name,
            "version": call.entry.version,
            "request_id": call.request_id,
            "images": call.head.batch,
            "batch": timing.batch,
            "timestamps": [{"name": name, "ns": ns} for name, ns in times],
        }
        return orjson.dumps(document) + b"\n"

    def _wait(self, model: str, file: str, line: bytes) -> None:
        lines = self._waiting.setdefault((model, file), [])
        if len(lines) < _MOST_WAITING:
            lines.append(line)
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask())

    async def _ask(self) -> None:
        try:
            while self._waiting:
                (model, file), lines = self._waiting.popitem()
                granted = await self._server.ask("tracing/places", {"model": model, "wanted": len(lines)})
                for line in lines[: int(granted)]:
                    _write(file, line)
        except CarpoolError as error:
            _log.warning("traces-lost", error=error.message)
        finally:
            self._asking = None

    def follow(self, catalog: Catalog) -> None:
        scopes = catalog.extra.get("tracing", {})
        self._scopes = {name: _scope(settings) for name, settings in scopes.items()}
        self.on = self._spans is not None or any(self._scopes.values())


def _scope(settings: Mapping[str, Any]) -> _Scope | None:
    if TIMESTAMPS not in settings["trace_level"] or settings["trace_count"] == "0":
        return None
    return _Scope(settings["trace_file"], int(settings["trace_rate"]), settings["trace_count"] != "-1")


def _timestamps(timing: Timing, arrived: float, offered: float, now: float) -> list[tuple[str, int]]:
    """Returns timestamps in nanoseconds since 1970, so that files of several machines can be laid side by
    side.

    `arrived`, `offered` and `now` are of this process. The engine reports durations, counted from when the
    request arrived, so that its times fall in between; rounding must not let times run back.
    """
    started = arrived + timing.queue
    steps = (
        ("REQUEST_START", arrived),
        ("QUEUE_START", min(offered, started)),
        ("COMPUTE_START", started),
        ("COMPUTE_INPUT_END", started + timing.input),
        ("COMPUTE_OUTPUT_START", started + timing.input + timing.infer),
        ("COMPUTE_END", started + timing.input + timing.infer + timing.output),
        ("REQUEST_END", now),
    )
    epoch = time.time_ns() - time.monotonic_ns()
    return [(name, epoch + int(min(at, now) * 1e9)) for name, at in steps]


def _write(file: str, line: bytes) -> None:
    """Writes once at the end of the file that all front ends share; opened anew, since it may be moved
    away."""
    try:
        fd = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)
    except OSError as error:
        _log.warning("trace-not-written", file=file, error=error.strerror)
