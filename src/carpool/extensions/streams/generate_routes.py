"""Implements Triton's generate extension: a flat JSON object in, whose fields are inputs or parameters; one
answer of that kind out, or a server-sent event for each answer. To models that make text of pictures, a
picture can be sent as it is, in base64: it goes the way of all pictures, and the words of the answer are
Triton's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import orjson

from carpool.errors import CarpoolError, InvalidInput, ModelError
from carpool.frontend.calls.packing import AT_ONCE, packed
from carpool.frontend.calls.request_facts import OVER, RequestFacts
from carpool.frontend.documents import task_of
from carpool.frontend.http.event_stream import EVENT_FIELDS, EventStream, as_event
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Start,
    hand_over,
    status_of,
)
from carpool.frontend.http.http_service import HttpService, Variables
from carpool.frontend.http.image_reading import BodyLayout
from carpool.frontend.http.image_route import ImageRoute, ImageTarget
from carpool.frontend.http.infer_route import TIMING, HttpCall, InferRoute, InferTarget
from carpool.frontend.http.long_answer import LongBody
from carpool.frontend.http.read_aside import read_aside
from carpool.frontend.http.text_answer import TextAnswer, Written
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.step_times import Times
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.types import Datatype, Signature, Tensor
from carpool.vision.picture_answers import Options
from carpool.vision.tasks.written import TEXT_TASKS
from carpool.wire.head import (
    Buffer,
    RequestHead,
    check_cost,
    cut_long,
    load_object,
    parse_document,
    read_object,
)
from carpool.wire.long_json import LongNumbers
from carpool.wire.slices import SlicedJson, Values, is_long
from carpool.wire.v2 import check_head

_EXACTLY_ONE = (
    "generate expects model to produce exactly 1 response, "
    "use generate stream for model that generates various number of responses"
)
_KINDS = {Datatype.BYTES: (str, "string"), Datatype.BOOL: (bool, "boolean")}
_JSON = b"Content-Type: application/json\r\n"


def _start(streams: bool, service: HttpService, head: HttpHead, variables: Variables) -> Start:
    return GenerateRoute(service, head, variables["model"], variables.get("version", ""), streams).begin


start_generate, start_stream = partial(_start, False), partial(_start, True)


class GenerateRoute(InferRoute):
    def __init__(self, service: HttpService, head: HttpHead, model: str, version: str, streams: bool) -> None:
        super().__init__(service, head, model, version)
        self.streams = streams
        self._head = head

    def _plan(self, exchange: Exchange, target: InferTarget) -> BodyPlan:
        if task_of(target.lane.entry) in TEXT_TASKS:
            return Collect(self.service.max_body_bytes, partial(self._either, exchange, target))
        most = target.largest.gathered()
        target.largest.check(exchange.head.content_length or 0, most)
        return Collect(most, GenerateCall(self, exchange, target).collected)

    def _checked_unloaded(self, body: bytes | bytearray) -> Callable[[], object] | None:
        return partial(check_object, body)

    def _either(self, exchange: Exchange, target: InferTarget, body: bytes | bytearray, at: float) -> None:
        """Takes a picture, or what the model makes of one."""

        def go_on(sent: SentPicture | None) -> None:
            if sent is None:
                target.largest.check(len(body), target.largest.gathered())
                GenerateCall(self, exchange, target).collected(body, at)
            else:
                PictureRoute(self, self._head, target.lane.entry, sent).take(exchange, at)

        read_aside(self.service, exchange, body, read_picture, go_on, target.lane.entry.signature)


def check_object(body: bytes | bytearray) -> None:
    """Raises what is wrong with a body whose model is not known yet."""
    load_object(body, "request")


class GenerateCall(HttpCall):
    """What is answered waits for the end, or is streamed."""

    __slots__ = ("_events", "_only", "_streams")

    form = ""  # what is kept are answers of the other form

    def __init__(self, route: GenerateRoute, exchange: Exchange, target: InferTarget) -> None:
        super().__init__(route, exchange, target, None)
        self._events: EventStream | None = None  # its head is sent with the first event: errors have a status
        self._only: bytes | SlicedJson | None = None
        self._streams = route.streams
        self.request.refuses_many = ""  # but of a text that is written, all at once

    def collected(self, body: bytes | bytearray, at: float) -> None:
        exchange, request = self._exchange, self.request
        request.arrived, request.unread = at, exchange.unread
        request.service.server_row.add(BYTES_RECEIVED, exchange.head.content_length or len(body))
        try:
            request.enter(request.service.lane(self.current()))
            if request.entry.traits.writes and not self._streams:
                request.refuses_many = _EXACTLY_ONE
            signature = request.entry.signature
            work = partial(read_tensors, body, signature)
            request.aside(len(body) > AT_ONCE, lambda _: work(), lambda made: self._prepared(*made))
        except CarpoolError as error:
            request.fail(error)

    # ── as a `RequestReply` ──

    def part(self, request: RequestFacts, answer: Answer) -> None:
        document = as_document(request.entry, request.head.id, answer.outputs)
        if not self._streams:
            if self._only is not None:
                raise InvalidInput(_EXACTLY_ONE, reason="many-answers")
            self._only = document
        elif isinstance(document, bytes):
            self._stream().send([document])
            self._route.service.server_row.add(BYTES_SENT, len(document))
        else:
            answer.taken = True
            sent = partial(self._route.service.server_row.add, BYTES_SENT)
            self._stream().send_long(document, partial(self._written, answer), sent)

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        if not request.entry.traits.in_parts(request.refuses_many):
            self.part(request, answer)
        if self._streams:
            self._stream().end()  # also of one without events
            if answer.taken and request.state != OVER:  # else it was given up while it was prepared
                self.request.written(answer)
            return
        if self._only is None:
            raise InvalidInput(_EXACTLY_ONE, reason="many-answers")
        fields = _JSON + TIMING % self.request.times(answer.timing)
        if isinstance(self._only, bytes):
            self._route.service.server_row.add(BYTES_SENT, len(self._only))
            self._exchange.respond(200, fields, self._only)
        else:
            body = LongBody(self._only, self._long_events(answer), fields)
            self._respond_long(body, answer)

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        if self._events is None and self._streams and isinstance(error, ModelError):
            # As Triton's: what the model says instead of a first answer is an event, with its status.
            fields = EVENT_FIELDS + (b"" if times is None else TIMING % times)
            self._exchange.respond(status_of(error), fields, as_event(_failed(error)))
        elif self._events is None:
            super().error(request, error, times)
        elif self._exchange.pending:  # else it did not read, and was cut off
            with contextlib.suppress(CarpoolError):  # it may not read that either
                self._events.send([_failed(error)])
                self._events.end()

    def _stream(self) -> EventStream:
        if self._events is None:
            self._events = EventStream(self._exchange)
        return self._events


# ── pictures as they are ──


class SentPicture(NamedTuple):
    picture: bytes
    id: str
    parameters: Mapping[str, int | float | str]  # for the model


def read_picture(body: bytes | bytearray, signature: Signature) -> SentPicture | None:
    """None: there is none, or it is not for us to read. What is wrong with such a body is said later."""
    if len(signature.inputs) != 1 or signature.inputs[0].datatype is Datatype.BYTES:
        return None
    name = signature.inputs[0].name
    try:
        fields = load_object(body, "request")
    except InvalidInput:
        return None
    if not isinstance(fields.get(name), str):
        return None
    picture = from_base64(fields.pop(name), name)
    if not picture:
        raise InvalidInput(f"{name} holds no image", field=name)
    parameters = fields.pop("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidInput("Expected JSON object for keyword: 'parameters'", field="parameters")
    own = str(_parameter("id", fields.pop("id", "")))
    given = read_object(parameters | fields, "parameters")
    return SentPicture(picture, own, {key: _parameter(key, one) for key, one in given.items()})


class PictureRoute(ImageRoute):
    """Serves one request, which has passed the gate."""

    in_parts = True

    def __init__(self, route: GenerateRoute, head: HttpHead, entry: ModelEntry, sent: SentPicture) -> None:
        super().__init__(route.service, head, None, entry.name, route.version)
        self.asked = self.asked._replace(
            layout=BodyLayout("raw"), in_place=False, wants_drawn=False, options={}
        )
        self._streams, self._sent = route.streams, sent

    def parts(self, exchange: Exchange, target: ImageTarget) -> TextAnswer:
        words = TritonWords(target.lane.entry, self._sent.id, streams=self._streams)
        return TextAnswer(exchange, words, self.service.server_row)

    def take(self, exchange: Exchange, at: float) -> None:
        hand_over(self._plan(exchange, self.current(exchange.head_at)), self._sent.picture, at)

    def _made(self, entry: ModelEntry) -> ImageTarget:
        target, given = super()._made(entry), self._sent.parameters
        if not entry.traits.decoupled and "max_tokens" in given:
            raise InvalidInput(f"{entry.name} does not take max_tokens", field="max_tokens")
        return target._replace(options=Options(extra=given)) if entry.traits.decoupled else target


class TritonWords:
    """Writes the fields of Triton's answers; with `streams`, an event for each piece."""

    def __init__(self, entry: ModelEntry, own_id: str, *, streams: bool) -> None:
        self.streams = streams
        self._words = {"model_name": entry.name, "model_version": entry.version}
        if own_id:
            self._words["id"] = own_id

    def head(self) -> Sequence[bytes]:
        return ()

    def piece(self, text: str, _number: int) -> Sequence[bytes]:
        return [as_event(orjson.dumps(self._words | {"text_output": text}))]

    def last(self, written: Written) -> Sequence[bytes]:
        return [as_event(self._ended("", written.finish))]

    def whole(self, written: Written) -> bytes:
        return self._ended(written.text, written.finish)

    def _ended(self, text: str, finish: str) -> bytes:
        return orjson.dumps(self._words | {"text_output": text, "finish_reason": finish})

    def error(self, error: CarpoolError) -> Sequence[bytes]:
        return [as_event(_failed(error))]


def _failed(error: CarpoolError) -> bytes:
    return orjson.dumps({"error": error.message})


# ── tensors ──


def read_tensors(body: bytes | bytearray, signature: Signature) -> tuple[RequestHead, Sequence[Buffer]]:
    """Raises `InvalidInput`, in Triton's words."""
    document = as_infer_request(body, signature)
    return packed(check_head(parse_document(document, signature.model), signature), b"", signature.model)


def as_infer_request(body: bytes | bytearray, signature: Signature) -> dict[str, Any]:
    """Returns the same in the words of the v2 protocol."""
    check_cost(body, "request")
    cut = cut_long(body, "request")
    try:
        fields = json.loads(cut.left, object_pairs_hook=_Pairs, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"failed to parse the request JSON buffer: {error}") from None
    if not isinstance(fields, _Pairs):
        raise InvalidInput("the request must be a JSON object")
    inputs: dict[str, Any] = {}
    document: dict[str, Any] = {"id": "", "parameters": {}}
    for name, value in ((cut.restored(name), cut.restored(value)) for name, value in fields.pairs):
        if name in inputs:
            raise InvalidInput(f"input '{name}' already exists in request", field=name)
        if name in signature.input_named:
            inputs[name] = _input(name, value, signature)
        elif name == "parameters":
            if not isinstance(value, _Pairs):
                raise InvalidInput("Expected JSON object for keyword: 'parameters'", field=name)
            converting = "Converting keyword: 'parameters': "
            given = ((cut.restored(key), cut.restored(one)) for key, one in value.pairs)
            document[name] |= {key: _parameter(key, one, converting) for key, one in given}
        elif name == "id":
            document["id"] = str(_parameter(name, value))
        else:
            document["parameters"][name] = _parameter(name, value)
    return _as_read({**document, "inputs": list(inputs.values())})


def _as_read(document: dict[str, Any]) -> dict[str, Any]:
    """Returns what a reader of the document, written as JSON, would find."""
    try:
        written: dict[str, Any] = orjson.loads(orjson.dumps(document, default=_nothing))
    except TypeError as fault:
        raise InvalidInput(f"the request cannot be parsed: {fault}") from None
    for entry, given in zip(written["inputs"], document["inputs"], strict=True):
        if isinstance(given["data"], LongNumbers):
            entry["data"] = given["data"]
    return written


def _nothing(_long: LongNumbers) -> None:
    """Stands for what is JSON already."""


def _no_number(word: str) -> None:
    """Rejects what Python's reader takes for a number, and JSON has not."""
    raise ValueError(f"{word} is not a JSON number")


class _Pairs:
    """Reads a JSON object with what it says twice."""

    __slots__ = ("pairs",)

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        self.pairs = pairs


def _input(name: str, value: Any, signature: Signature) -> dict[str, Any]:
    """Returns one element, or a list of them, which is one row of a batch."""
    datatype = signature.input_named[name].datatype
    if isinstance(value, LongNumbers):
        return _entry(name, value, value.shape(), signature)
    data = value if isinstance(value, list) else [value]
    kind, words = _KINDS.get(datatype, ((int, float), "number"))
    if not all(isinstance(one, kind) and (words != "number" or not isinstance(one, bool)) for one in data):
        raise InvalidInput(
            f"Unable to parse '{name}': attempt to access JSON non-{words} as {words}", field=name
        )
    if any(_is_too_long(one) for one in data):
        raise InvalidInput(f"Unable to parse '{name}': a number has more than 64 bits", field=name)
    return _entry(name, data, (len(data),), signature)


def _entry(name: str, data: object, given: tuple[int, ...], signature: Signature) -> dict[str, Any]:
    spec = signature.input_named[name]
    if len(given) > 1:
        raise InvalidInput(
            f"Unable to parse '{name}': attempt to access JSON non-number as number", field=name
        )
    shape = _fitted(spec.shape, given[0])
    if signature.max_batch:
        shape = [1, *shape]
    return {"name": name, "datatype": spec.datatype.value, "shape": shape, "data": data}


def _fitted(dims: Sequence[int], count: int) -> list[int]:
    """Returns the shape of what has more dimensions than one: it is given as its elements in order, and at
    most one length is open."""
    known = prod(length for length in dims if length >= 0)
    if len(dims) < 2 or dims.count(-1) > 1 or not known or count % known:
        return [count]
    return [count // known if length < 0 else length for length in dims]


def _parameter(name: str, value: Any, where: str = "") -> Any:
    if not isinstance(value, str | int | float):
        kinds = "It should be either 'int', 'bool', 'double' or 'string'."
        raise InvalidInput(f"{where}parameter '{name}' has invalid type. {kinds}", field=name)
    if _is_too_long(value):
        raise InvalidInput(f"{where}parameter '{name}' has more than 64 bits", field=name)
    return value


def _is_too_long(value: object) -> bool:
    return isinstance(value, int) and not -(1 << 63) <= value < 1 << 64


def as_document(entry: ModelEntry, request_id: str, outputs: Sequence[Tensor]) -> bytes | SlicedJson:
    """One line of JSON: an output with a single element is that, others are lists of theirs. What takes long
    is still to be written."""
    document: dict[str, Any] = {"model_name": entry.name, "model_version": entry.version}
    if request_id:
        document["id"] = request_id
    sliced = False
    for tensor in outputs:
        if is_long(tensor):
            sliced = True
            document[tensor.name] = Values(tensor, as_python=True)
            continue
        values = tensor.data.ravel().tolist()
        if tensor.datatype is Datatype.BYTES:
            values = [one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in values]
        document[tensor.name] = values[0] if len(values) == 1 else values
    return _in_slices(document) if sliced else orjson.dumps(document)


def _in_slices(document: Mapping[str, Any]) -> SlicedJson:
    parts: list[bytes | Values] = []
    for key, value in document.items():
        parts.append((b"," if parts else b"{") + orjson.dumps(key) + b":")
        if not isinstance(value, Values):
            parts.append(orjson.dumps(value))
        elif value.data.size == 1:
            parts.append(value)
        else:
            parts += [b"[", value, b"]"]
    return SlicedJson([*parts, b"}"])
