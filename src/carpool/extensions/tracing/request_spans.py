"""Requests as spans of OpenTelemetry: which of them have some, and what those say.

Nothing is made while a request is on its way: when it was answered, a few numbers are noted of one that was
chosen, and the exporter's thread makes spans of many at once. A batch of several requests has a span of its
own, in a trace of its own, which links to them; every message of a front end has one for its own requests, in
the same trace, since the batch's number gives that trace its name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from random import Random
from time import monotonic, monotonic_ns, time, time_ns
from typing import Any, NamedTuple

from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Refused, Replaced, Unavailable
from carpool.extensions.tracing.settings import OtelSettings
from carpool.extensions.tracing.span_export import SpanExporter
from carpool.frontend.calls.reused_answer import AnswerNote
from carpool.frontend.calls.trace_context import (
    PARENT_FIELD,
    STATE_FIELD,
    Caller,
    RequestOrigin,
    TracedCall,
    read_parent,
    read_state,
)
from carpool.link.catalog import ModelEntry
from carpool.observe.columns import BATCH_SIZE, INFER_SECONDS, QUEUE_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import Row
from carpool.observe.exemplars import Exemplars
from carpool.types import PartTiming, StepTiming, Timing

SPANS_EACH = 6  # of a request without steps: itself, decode, queue, batch, infer and post
_LONGEST_TEXT = 256
_FAILURES = (Refused, Replaced, Unavailable, DeadlineExceeded, ModelError)


class _Context(NamedTuple):
    trace: bytes
    span: bytes
    parent: bytes
    state: str


@dataclass(slots=True)
class _Ended:
    """Describes a request that is over. Times are `time.monotonic()`; `offered` and `done` are 0 where it did
    not get so far. It holds nothing that holds the request's memory, so no exception either."""

    context: _Context
    origin: RequestOrigin
    entry: ModelEntry | None
    arrived: float
    ended: float
    offered: float = 0.0
    done: float = 0.0
    images: int = 0
    request_id: str = ""
    timing: Timing = field(default_factory=Timing)
    reason: str = ""  # of a request that was answered with an error
    failure: str = ""  # the sentence, where it was no mistake of the client's
    note: AnswerNote | None = None  # what a wrapper said of the answer


class RequestSpans:
    """Writes the spans of one front end. Called in its loop's thread, after answers were written."""

    def __init__(self, settings: OtelSettings, version: str, row: Row, exemplars: Exemplars) -> None:
        self._sample = settings.sample
        self._follows = settings.follows
        self._random = Random().random
        self._exemplars = exemplars
        self._secret = os.urandom(16)
        messages = SpanMessages(settings, version)
        self._exporter = SpanExporter(settings, row, messages.encode, SPANS_EACH)

    def answered(self, call: TracedCall, timing: Timing, times: tuple[float, float, float]) -> None:
        """Notes an answered call, with `times`: when it was offered, when the engine was done with it, and
        now."""
        context = self._choose(call)
        if context is None:
            return
        offered, done, now = times
        entry = call.entry
        self._exporter.put(
            _Ended(
                context,
                call.origin(None),
                entry,
                call.arrived,
                now,
                offered,
                done,
                call.head.batch,
                call.request_id,
                timing,
                note=call.note,
            )
        )
        noted = partial(self._exemplars.note, entry.row, context.trace, context.span, time())
        noted(REQUEST_SECONDS, now - call.arrived)
        if timing.batch:
            noted(QUEUE_SECONDS, timing.queue)
            noted(INFER_SECONDS, timing.infer)
            if timing.number:
                noted(BATCH_SIZE, float(timing.batch))

    def failed(self, call: TracedCall, error: CarpoolError, timing: Timing | None, now: float) -> None:
        """Notes a failed call, also of one whose model is not known, and of one whose client left."""
        context = self._choose(call)
        if context is not None:
            self._exporter.put(
                _Ended(
                    context,
                    call.origin(error),
                    getattr(call, "entry", None),
                    call.arrived or now,
                    now,
                    images=call.head.batch,
                    request_id=call.request_id,
                    timing=timing or Timing(),
                    reason=error.reason,
                    failure=_failure(error),
                )
            )

    def refused(self, caller: Caller, entry: ModelEntry | None, error: CarpoolError, head_at: float) -> None:
        """Before its body was read."""
        context = self._choose(caller)
        if context is not None:
            ended = _Ended(context, caller.origin(error), entry, head_at, monotonic(), reason=error.reason)
            ended.failure = _failure(error)
            self._exporter.put(ended)

    def close(self) -> None:
        self._exporter.close()

    def _choose(self, caller: Caller) -> _Context | None:
        """Returns a span for the request, if it is to have one: as its caller decided, or by chance."""
        said = caller.sent_fields.get(PARENT_FIELD)
        parent = None if said is None else read_parent(said)
        if parent is None:
            if caller.siblings:  # all of them or none, in one trace
                trace = blake2b(caller.siblings, digest_size=16, key=self._secret).digest()
                chosen = int.from_bytes(trace[:7]) < self._sample * 2.0**56
                return _Context(trace, os.urandom(8), b"", "") if chosen else None
            if self._random() >= self._sample:
                return None
            return _Context(os.urandom(16), os.urandom(8), b"", "")
        if not (parent.sampled if self._follows else self._random() < self._sample):
            return None
        state = read_state(caller.sent_fields.get(STATE_FIELD))
        return _Context(parent.trace, os.urandom(8), parent.span, state)


class SpanMessages:
    """Makes what a collector understands. Used in the exporter's thread alone."""

    def __init__(self, settings: OtelSettings, version: str) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2  # of the extra `otel`
        from opentelemetry.proto.trace.v1 import trace_pb2

        self._request: Any = trace_service_pb2.ExportTraceServiceRequest
        self._trace: Any = trace_pb2
        self._version = version
        # Batches are numbered by each engine, from a clock that begins with the machine: this is the same in
        # all front ends of a server, which have one parent, and in no other server.
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        whole = f"{machine} {os.uname().nodename} {os.getppid()}"  # of two containers, both may be process 1
        self._server = blake2b(whole.encode()).digest()  # no longer than a key may be
        self._resource = {
            "service.version": version,
            "service.instance.id": f"{os.uname().nodename}-{os.getpid()}",
            "telemetry.sdk.name": "carpool",
            "telemetry.sdk.language": "python",
            "telemetry.sdk.version": version,
            **settings.resource,
            "service.name": settings.service,
        }

    def encode(self, records: Sequence[_Ended]) -> tuple[bytes, int]:
        request = self._request()
        resource = request.resource_spans.add()
        _describe(resource.resource.attributes, self._resource)
        scope = resource.scope_spans.add()
        scope.scope.name, scope.scope.version = "carpool", self._version
        writing = _Writing(scope.spans, self._trace, self._server)
        for record in records:
            writing.request(record)
        writing.batches()
        return bytes(request.SerializeToString()), len(scope.spans)


class _Batch(NamedTuple):
    """Describes a batch as the requests of this front end know it."""

    entry: str
    trace: bytes
    span: bytes
    start: float
    end: float
    images: int
    riders: list[_Context]


class _Writing:
    """Represents one message."""

    def __init__(self, spans: Any, trace: Any, server: bytes) -> None:
        self._spans = spans
        self._kinds: Any = trace.Span
        self._error: int = trace.Status.STATUS_CODE_ERROR
        self._server = server
        self._offset = time_ns() - monotonic_ns()
        self._batches: dict[int, _Batch] = {}  # by number

    def request(self, ended: _Ended) -> None:
        context = ended.context
        span = self._add(context, context.span, context.parent, ended.origin.name, ended.arrived, ended.ended)
        span.kind = self._kinds.SPAN_KIND_SERVER
        _describe(span.attributes, {**ended.origin.attributes, **_about(ended)})
        if ended.failure:
            span.status.code = self._error
            span.status.message = ended.failure
        if isinstance(ended.timing, StepTiming):
            self._of_steps(ended, ended.timing)
        else:
            self._of_batch(ended)

    def batches(self) -> None:
        """Writes the batches, of which it is known now who rode in them."""
        for number, batch in self._batches.items():
            context = _Context(batch.trace, batch.span, b"", "")
            span = self._add(context, batch.span, b"", f"batch {batch.entry}", batch.start, batch.end)
            span.kind = self._kinds.SPAN_KIND_INTERNAL
            _describe(
                span.attributes,
                {
                    "carpool.model": batch.entry,
                    "carpool.batch.number": number,
                    "carpool.batch.images": batch.images,
                    "carpool.batch.linked": len(batch.riders),
                },
            )
            for rider in batch.riders:
                span.links.add(trace_id=rider.trace, span_id=rider.span, trace_state=rider.state, flags=1)

    def _of_batch(self, ended: _Ended) -> None:
        """Writes the parts of a request for one model, end to end. The engine reports durations, counted from
        when the request arrived; rounding must not let times run back."""
        context, timing, now = ended.context, ended.timing, ended.ended
        offered = min(ended.offered or ended.arrived, now)
        if offered > ended.arrived:
            self._part(context, context.span, "decode", ended.arrived, offered)
        began = min(max(offered, ended.arrived + timing.queue), now)
        if timing.queue > 0.0:
            self._part(context, context.span, "queue", offered, began)
        over = began
        if timing.batch:
            over = min(began + timing.input + timing.infer + timing.output, now)
            assert ended.entry is not None
            alone = timing.batch <= ended.images
            self._batch(context, context.span, ended.entry.name, timing, (began, over), alone=alone)
        if ended.done and max(ended.done, over) < now:
            self._part(context, context.span, "post", max(ended.done, over), now)

    def _of_steps(self, ended: _Ended, timing: StepTiming) -> None:
        """It is known how long each took, and not when it began: they are laid end to end, in their order."""
        context, at = ended.context, min(ended.offered or ended.arrived, ended.ended)
        if at > ended.arrived:
            self._part(context, context.span, "decode", ended.arrived, at)
        for name, each in timing.steps:
            seconds = each.queue + each.input + each.infer + each.output
            cut = each.cut if isinstance(each, PartTiming) else 0.0
            end = min(at + cut + seconds, ended.ended)
            step = self._part(context, context.span, f"step {name}", at, end)
            _describe(step.attributes, {"carpool.step": name, "carpool.step.laid_end_to_end": True})
            if each.batch:
                began = min(at + cut + each.queue, end)
                self._part(context, step.span_id, "queue", min(at + cut, end), began)
                self._batch(context, step.span_id, name, each, (began, end), alone=each.batch == 1)
            at = end

    def _batch(
        self,
        context: _Context,
        parent: bytes,
        model: str,
        timing: Timing,
        during: tuple[float, float],
        *,
        alone: bool,
    ) -> None:
        began, over = during
        span = self._part(context, parent, "batch", began, over)
        _describe(span.attributes, {"carpool.batch.images": timing.batch})
        ran = min(began + timing.input, over)
        self._part(context, span.span_id, "infer", ran, min(ran + timing.infer, over))
        if alone or not timing.number:
            return
        batch = self._batches.get(timing.number)
        if batch is None:
            trace = blake2b(timing.number.to_bytes(8), digest_size=16, key=self._server).digest()
            batch = _Batch(model, trace, os.urandom(8), began, over, timing.batch, [])
            self._batches[timing.number] = batch
        batch.riders.append(context)
        span.links.add(trace_id=batch.trace, span_id=batch.span, flags=1)

    def _part(self, context: _Context, parent: bytes, name: str, start: float, end: float) -> Any:
        span = self._add(context, os.urandom(8), parent, name, start, end)
        span.kind = self._kinds.SPAN_KIND_INTERNAL
        return span

    def _add(self, context: _Context, own: bytes, parent: bytes, name: str, start: float, end: float) -> Any:
        return self._spans.add(
            trace_id=context.trace,
            span_id=own,
            parent_span_id=parent,
            name=name,
            trace_state=context.state,
            flags=1,
            start_time_unix_nano=self._offset + int(start * 1e9),
            end_time_unix_nano=self._offset + int(max(start, end) * 1e9),
        )


def _failure(error: CarpoolError) -> str:
    """Returns what a span's status says. Refusals are among it: who looks for lost requests looks there.
    Mistakes of clients are not, as the conventions for servers have it."""
    if not isinstance(error, _FAILURES) and type(error) is not CarpoolError:
        return ""
    return f"{error.reason}: {error.message[:_LONGEST_TEXT]}".encode(errors="replace").decode()


def _about(ended: _Ended) -> dict[str, str | int]:
    about: dict[str, str | int] = {}
    entry = ended.entry
    if entry is not None:
        about |= {"carpool.model": entry.name, "carpool.model.version": entry.version}
        about["carpool.device"] = ",".join(_devices(entry)) or "cpu"
    if ended.images:
        about["carpool.images"] = ended.images
    if ended.request_id:
        about["carpool.request.id"] = ended.request_id[:_LONGEST_TEXT]
    if ended.note is not None:
        attribute, said = ended.note.attribute
        about[attribute] = said
    if ended.reason:
        about["error.type"] = ended.reason
    return about


def _devices(entry: ModelEntry) -> Iterator[str]:
    for group in entry.published.config.get("instance_group", ()):
        if group.get("kind") == "KIND_GPU":
            yield from (f"cuda:{gpu}" for gpu in group.get("gpus") or (0,))


def _describe(attributes: Any, told: Mapping[str, str | int | bool]) -> None:
    for name, value in told.items():
        kept = attributes.add(key=name).value
        if isinstance(value, bool):
            kept.bool_value = value
        elif isinstance(value, int):
            kept.int_value = value
        else:
            kept.string_value = value.encode(errors="replace").decode()  # half a character is none
