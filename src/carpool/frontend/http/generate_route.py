"""Triton's generate extension: a flat JSON object in, whose fields are inputs or parameters; one answer of
that kind out, or a server-sent event for each answer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from carpool.cache.answer_store import Kept
from carpool.errors import CarpoolError, InvalidInput
from carpool.frontend.http.event_stream import EventStream
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange
from carpool.frontend.http.http_service import Service, Start, Starter
from carpool.frontend.http.infer_route import TIMING, HttpCall, InferRoute, InferTarget
from carpool.frontend.http.parsing import RequestHead as HttpHead
from carpool.frontend.packing import AT_ONCE
from carpool.link.door import Answer, ModelEntry
from carpool.link.step_times import Times
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.types import Datatype, Signature, Tensor
from carpool.wire.v2 import Placed

_EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
_KINDS = {Datatype.BYTES: (str, "string"), Datatype.BOOL: (bool, "boolean")}
_JSON = b"Content-Type: application/json\r\n"


def start_generate(*, streams: bool) -> Starter:
    def start(service: Service, head: HttpHead, variables: Mapping[str, str]) -> Start:
        return GenerateRoute(service, head, variables["model"], variables.get("version", ""), streams).begin

    return start


class GenerateRoute(InferRoute):
    def __init__(self, service: Service, head: HttpHead, model: str, version: str, streams: bool) -> None:
        super().__init__(service, head, model, version)
        self.streams = streams

    def _plan(self, exchange: Exchange, target: InferTarget) -> BodyPlan:
        most = target.largest.gathered()
        target.largest.check(exchange.head.content_length or 0, most)
        return Collect(most, GenerateCall(self, exchange, target).collected)


class GenerateCall(HttpCall):
    """What is answered waits for the end, or is streamed."""

    __slots__ = ("_events", "_only")

    form = "generate"
    one_answer = ""
    _route: GenerateRoute

    def __init__(self, route: GenerateRoute, exchange: Exchange, target: InferTarget) -> None:
        super().__init__(route, exchange, target, None)
        self._events: EventStream | None = None  # its head is sent with the first event: errors have a status
        self._only: bytes | None = None

    def collected(self, body: bytes | bytearray, at: float) -> None:
        exchange = self._exchange
        self.arrived, self.unread = at, exchange.unread
        self.service.server_row.add(BYTES_RECEIVED, exchange.head.content_length or len(body))
        try:
            self.entry, self.row = self._current()
            work = partial(self._packed, body)
            self._aside(len(body) > AT_ONCE, work, lambda made: self._offer_pieces(*made, checked=True))
        except CarpoolError as error:
            self._fail(error)

    def _packed(self, body: bytes | bytearray) -> Any:
        signature = self.entry.signature
        return self.service.long_json.prepare(as_infer_request(body, signature), None, signature)

    # ── as `ClientCall` asks ──

    def _write_part(self, answer: Answer) -> None:
        document = as_document(self.entry, self.head.id, answer.outputs)
        if self._route.streams:
            self._stream().send([document])
            self.service.server_row.add(BYTES_SENT, len(document))
        elif self._only is not None:
            raise InvalidInput(_EXACTLY_ONE, reason="many-answers")
        else:
            self._only = document

    def _write(self, answer: Answer, placed: Mapping[str, Placed], kept: Kept | None = None) -> None:
        if not self.entry.decoupled:
            self._write_part(answer)
        if self._route.streams:
            self._stream().end()  # also of one without events
            return
        if self._only is None:
            raise InvalidInput(_EXACTLY_ONE, reason="many-answers")
        self.service.server_row.add(BYTES_SENT, len(self._only))
        self._exchange.respond(200, _JSON + TIMING % self._times(answer.timing), self._only)

    def _look_in_cache(self, asked: Any, again: Any) -> bool:
        return False  # what is kept are answers of the other form

    def _write_error(self, error: CarpoolError, times: Times | None) -> None:
        if self._events is None:
            super()._write_error(error, times)
        elif self._exchange.pending:  # else it did not read, and was cut off
            with contextlib.suppress(CarpoolError):  # it may not read that either
                self._events.send([orjson.dumps({"error": error.message})])
                self._events.end()

    def _stream(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events


def as_infer_request(body: bytes | bytearray, signature: Signature) -> bytes:
    """The same in the words of the v2 protocol. Raises `InvalidInput`, in Triton's words."""
    try:
        fields = json.loads(body, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(fields, _Pairs):
        raise InvalidInput("the request must be a JSON object")
    inputs: dict[str, Any] = {}
    document: dict[str, Any] = {"id": "", "parameters": {}}
    for name, value in fields.pairs:
        if name in inputs:
            raise InvalidInput(f"input '{name}' already exists in request", field=name)
        if name in signature.input_named:
            inputs[name] = _input(name, value, signature)
        elif name == "parameters":
            if not isinstance(value, _Pairs):
                raise InvalidInput("Expected JSON object for keyword: 'parameters'", field=name)
            document[name] |= {key: _parameter(key, one) for key, one in value.pairs}
        elif name == "id":
            document["id"] = str(_parameter(name, value))
        else:
            document["parameters"][name] = _parameter(name, value)
    try:
        return orjson.dumps({**document, "inputs": list(inputs.values())})
    except TypeError as error:
        raise InvalidInput(f"the request cannot be understood: {error}") from None


class _Pairs:
    """A JSON object with what it says twice."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _input(name: str, value: Any, signature: Signature) -> dict[str, Any]:
    """One element, or a list of them, which is one row of a batch."""
    data = value if isinstance(value, list) else [value]
    datatype = signature.input_named[name].datatype
    kind, words = _KINDS.get(datatype, ((int, float), "number"))
    if not all(isinstance(one, kind) and (words != "number" or not isinstance(one, bool)) for one in data):
        raise InvalidInput(
            f"Unable to parse '{name}': attempt to access JSON non-{words} as {words}", field=name
        )
    shape = [1, len(data)] if signature.max_batch else [len(data)]
    return {"name": name, "datatype": datatype.value, "shape": shape, "data": data}


def _parameter(name: str, value: Any) -> Any:
    if not isinstance(value, str | int | float):
        raise InvalidInput(
            f"parameter '{name}' has invalid type. It should be either 'int', 'bool', 'double' or 'string'.",
            field=name,
        )
    return value


def as_document(entry: ModelEntry, request_id: str, outputs: Sequence[Tensor]) -> bytes:
    """One line of JSON: an output with a single element is that, others are lists of theirs."""
    document: dict[str, Any] = {"model_name": entry.name, "model_version": entry.version}
    if request_id:
        document["id"] = request_id
    for tensor in outputs:
        values = tensor.data.ravel().tolist()
        if tensor.datatype is Datatype.BYTES:
            values = [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in values]
        document[tensor.name] = values[0] if len(values) == 1 else values
    return orjson.dumps(document)
