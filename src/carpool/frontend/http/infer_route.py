"""Implements inference over HTTP, the v2 protocol: what a head asks for, worked out once for all requests
that repeat it; where their bodies go; and how their answers leave. What happens in between is in
`frontend.calls.request`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from carpool.errors import CarpoolError, TooLarge
from carpool.frontend.calls.packing import AT_ONCE, check, is_in_place, prepare, takes_long
from carpool.frontend.calls.request import ModelLane, Request
from carpool.frontend.calls.request_facts import RequestFacts, RequestReply
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.http.body import body_encoding
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Receive,
    Start,
    choose_encoding,
)
from carpool.frontend.http.http_service import WORTH_COMPRESSING, HttpService
from carpool.frontend.http.model_route import ModelRoute, origin_of
from carpool.frontend.pictures.image_tensors import may_hold_pictures
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import (
    ATTEMPT,
    DEADLINE,
    LATEST,
    SOURCE,
    Sender,
    read_attempt,
    read_budget,
    read_latest,
    read_source,
)
from carpool.link.step_times import Times, in_words, there
from carpool.link.templates import DeclaredOutputs
from carpool.memory.arena import LARGE, Slot
from carpool.memory.layout import answer_size
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.types import InferResponse, StepTiming
from carpool.wire.head import parse_head
from carpool.wire.v2 import (
    HEADER_LENGTH,
    Buffer,
    Encoded,
    RequestHead,
    check_tail,
    encode_response,
    is_all_binary,
    raw_head,
    read_head,
    read_header_length,
    with_id,
)

if TYPE_CHECKING:
    from carpool.frontend.http.long_answer import LongBody, LongEvents
    from carpool.frontend.pictures.sent_pictures import TensorPictures
    from carpool.wire.slices import SlicedJson

_ONE_ANSWER = "HTTP end point doesn't support models with decoupled transaction policy"  # Triton's words
_LENGTH_FIELD = HEADER_LENGTH.lower().encode()
DEADLINE_FIELD = DEADLINE.lower().encode()
SOURCE_FIELD = SOURCE.lower().encode()
LATEST_FIELD = LATEST.lower().encode()
ATTEMPT_FIELD = ATTEMPT.lower().encode()

TIMING: Final = (
    b'Server-Timing: decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, post;dur=%.3f, batch;desc="%d"\r\n'
)
VERSION: Final = b"X-Carpool-Version: %b\r\n"
_JSON_ANSWER: Final = b"Content-Type: application/json\r\n" + TIMING
_BINARY_ANSWER = b"Content-Type: application/octet-stream\r\n" + HEADER_LENGTH.encode() + b": %d\r\n" + TIMING
_MIXED_ANSWER = b"Content-Type: application/octet-stream\r\n" + TIMING
LONG_ANSWER: Final = 1 << 20
"""Bytes, above which an answer is written in pieces."""
_JOINED: Final = 8 * 1024  # up to here one more copy is cheaper than sending pieces
_JSON_NUMBER: Final = 32  # bytes, with its comma and some space
_TYPED_NUMBER: Final = 10  # the longest that protobuf writes
_JSON_REST: Final = 1 << 20  # names, parameters, unknown fields
_ALWAYS_READ: Final = (
    64 * 1024
)  # up to here a body is read in any case: what is wrong with it can then be said exactly


class InferHead(NamedTuple):
    """Holds what the fields of a head ask for, besides the model."""

    header_length: int | None  # of the JSON; None when the whole body is JSON, 0 for a raw request
    shortest: int  # that the body may be by this, where its length is known
    in_place: bool  # the body can be received where it will be used
    budget: float  # seconds from the head to the client's deadline
    sender: Sender
    json_encoding: bytes | None  # how an answer in JSON may be compressed
    binary_encoding: bytes | None


def read_infer_head(head: HttpHead) -> InferHead:
    """Raises `InvalidInput` that names the field at fault."""
    headers = head.headers
    encoded = body_encoding(headers.get(b"content-encoding")) is not None
    sized = head.content_length is not None and not encoded
    header_length = read_header_length(headers.get(_LENGTH_FIELD))
    json_encoding, binary_encoding = _answer_encodings(headers.get(b"accept-encoding"))
    source, latest = read_source(headers.get(SOURCE_FIELD)), read_latest(headers.get(LATEST_FIELD))
    sender = Sender(source, latest, again=read_attempt(headers.get(ATTEMPT_FIELD)))
    return InferHead(
        header_length,
        header_length or 0 if sized else 0,
        sized and header_length is not None and header_length <= AT_ONCE,
        read_budget(headers.get(DEADLINE_FIELD)),
        sender if head.who is None else sender.with_key(head.who),
        json_encoding,
        binary_encoding,
    )


def _answer_encodings(field: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Returns the encodings of JSON and of tensors. So those are compressed only for a client that names one
    encoding, and so means it."""
    if field is None:
        return None, None
    encoding = choose_encoding(field)
    return encoding, None if b"," in field or field.startswith(b"*") else encoding


class LargestBody:
    """Bounds the bodies of requests for one model. Without a bound of its own, that of all bodies."""

    __slots__ = ("_bytes", "_elements", "_limit", "_model", "_rows")

    def __init__(self, entry: ModelEntry, limit: int) -> None:
        signature = entry.signature
        self._limit = limit
        self._model = entry.name
        self._rows = signature.max_batch
        # Pictures may come in a tensor's place.
        fixed = all(spec.datatype.size and -1 not in spec.shape for spec in signature.inputs)
        bounded = entry.vision is None and fixed
        rows = max(1, signature.max_batch)
        elements = [(rows * math.prod(spec.shape), spec.datatype.size) for spec in signature.inputs]
        self._bytes = sum(count * size for count, size in elements) if bounded else None
        self._elements = sum(count for count, _ in elements)

    def in_place(self, header_length: int) -> int:
        """Returns the bound of a body with so much JSON before its tensors."""
        return self._limit if self._bytes is None else self._most(header_length + self._bytes)

    def gathered(self) -> int:
        """Returns the bound of one whose tensors may be JSON."""
        return self._limit if self._bytes is None else self._most(_JSON_NUMBER * self._elements + _JSON_REST)

    def typed(self) -> int:
        """Returns the bound of one whose tensors may be in the typed fields of a protobuf message."""
        return self._limit if self._bytes is None else self._most(_TYPED_NUMBER * self._elements)

    def _most(self, size: int) -> int:
        return min(self._limit, max(size, _ALWAYS_READ))

    def check(self, announced: int, most: int) -> None:
        if announced > most and self._bytes is not None:
            batch = f": batch-size must be <= {self._rows} for '{self._model}'" if self._rows else ""
            raise TooLarge(
                f"the body has {announced} bytes, but a request for model '{self._model}' takes at most "
                f"{most}{batch}",
                field="Content-Length",
            )


class InferTarget(NamedTuple):
    """Describes what serves a request, and how long its body can be."""

    lane: ModelLane
    largest: LargestBody
    most_in_place: int


def start_infer(service: HttpService, head: HttpHead, variables: Mapping[str, str]) -> Start:
    return InferRoute(service, head, variables["model"], variables.get("version", "")).begin


class InferRoute(ModelRoute[InferTarget]):
    def __init__(self, service: HttpService, head: HttpHead, model: str, version: str) -> None:
        self.asked = read_infer_head(head)
        super().__init__(service, self.asked.sender, self.asked.budget, head, named=bool(version))
        self._model = model
        self.version = version

    def _find(self, catalog: Catalog) -> ModelEntry:
        return self.service.look_up(self._model, self.version)

    def _made(self, entry: ModelEntry) -> InferTarget:
        largest = LargestBody(entry, self.service.max_body_bytes)
        most = largest.in_place(self.asked.header_length or 0)
        return InferTarget(self.service.lane(entry), largest, most)

    def _advised(self, exchange: Exchange, target: InferTarget) -> CarpoolError | None:
        asked, now = self.asked, exchange.head_at
        if (exchange.head.content_length or 0) < asked.shortest:
            read_header_length(str(asked.header_length), exchange.head.content_length)  # raises
        entry, holds_back = target.lane.entry, target.lane.holds_back
        if holds_back is not None and holds_back():
            return None  # it may be answered without the engine; the gate is asked again where it is not
        return self.service.engine.refuses(entry, now + asked.budget, now, exchange.sender, certain=False)

    def _plan(self, exchange: Exchange, target: InferTarget) -> BodyPlan:
        size = exchange.head.content_length or 0
        if not self.asked.in_place:
            most = target.largest.gathered()
            target.largest.check(size, most)
            return Collect(most, HttpCall(self, exchange, target, None).collected)
        if size > target.most_in_place:
            target.largest.check(size, target.most_in_place)
        # See `BodyIntake` for what the byte is for.
        engine, make_room = self.service.engine, exchange.make_room
        if size > LARGE:
            answer = answer_size(target.lane.entry.signature, size)
            slot = engine.large_slot(size + 1, answer, exchange.payer, make_room)
        else:
            slot = engine.first_slot(size + 1, make_room)
        call = HttpCall(self, exchange, target, slot)
        return Receive(slot.view, call.received, call.more)

    def _checked_unloaded(self, body: bytes | bytearray) -> Callable[[], object] | None:
        length = self.asked.header_length
        if length == 0:
            return None  # what raw bytes are, only the model knows
        return partial(check_unloaded, body, length, self._model)


def check_unloaded(body: bytes | bytearray, header_length: int | None, model: str) -> None:
    """Raises what is wrong with a body whose model is not known yet."""
    end = len(body) if header_length is None else header_length
    read_header_length(str(end), len(body))
    with memoryview(body) as view:
        check_tail(parse_head(view[:end], model), len(body) - end, model)


class HttpCall(RequestReply):
    __slots__ = ("_exchange", "_route", "request")

    form = "http"

    def __init__(self, route: InferRoute, exchange: Exchange, target: InferTarget, slot: Slot | None) -> None:
        asked = route.asked
        self.request = request = Request(
            route.service, self, exchange.sender, exchange.head_at + asked.budget
        )
        request.entry, request.row, request.infer = target.lane[:3]
        request.choice = route.choice
        request.slot = slot
        request.client = exchange.payer
        request.refuses_many = _ONE_ANSWER
        self._route = route
        self._exchange = exchange
        exchange.on_disconnect = request.leave

    # ── the body ──

    def more(self, received: int) -> memoryview | None:
        request, exchange = self.request, self._exchange
        slot, request.slot = request.slot, None
        assert slot is not None
        size = (exchange.head.content_length or 0) + 1
        try:
            request.slot = slot = request.service.engine.larger_slot(slot, received, size, exchange.make_room)
        except CarpoolError as error:
            request.arrived = exchange.head_at
            request.fail(error)
            return None
        return slot.view

    def received(self, at: float) -> None:
        exchange, route, request = self._exchange, self._route, self.request
        slot = request.slot
        request.arrived, request.unread = at, exchange.unread
        size, end = exchange.head.content_length or 0, route.asked.header_length or 0
        assert slot is not None
        request.service.server_row.add(BYTES_RECEIVED, size)
        try:
            view = slot.view
            lane = route.current(exchange.head_at).lane  # it may have changed while the body came
            entry, request.row, request.infer = lane[:3]
            request.entry, request.choice = entry, route.choice
            signature = entry.signature
            if entry.vision is not None and end and may_hold_pictures(bytes(view[:end])):
                self._look_for_pictures(bytes(view[:size]))
                return
            head = read_head(view[:end], signature) if end else raw_head(signature, size)
            if head.tail_size != size - end:
                check_tail(head, size - end, signature.model)
            if not head.plain:
                if not is_in_place(head):
                    self._offer_elsewhere(head, view[:size])
                    return
                check(head, view[end:size], signature.model)
                request.wants_outputs(head)
            if request.choice is not None:
                self._keep_to_source(head)
            request.offer_in_place(head, end)
        except CarpoolError as error:
            request.fail(error)

    def collected(self, body: bytes | bytearray, at: float) -> None:
        """The body was chunked, compressed or all JSON: only its tensors go into a slot."""
        exchange, request, end = self._exchange, self.request, self._route.asked.header_length
        request.arrived, request.unread = at, exchange.unread
        request.service.server_row.add(BYTES_RECEIVED, exchange.head.content_length or len(body))
        try:
            request.enter(request.service.lane(self.current()))
            json = body if end is None else body[:end]
            if request.entry.vision is not None and may_hold_pictures(json):
                self._look_for_pictures(body)
            else:
                self._prepare(body)
        except CarpoolError as error:
            request.fail(error)

    def _offer_elsewhere(self, head: RequestHead, body: memoryview) -> None:
        """Its tensors are not where they can be used. If all are in its client's memory, the head is all that
        there is of it."""
        if all(tensor.shared_memory is not None for tensor in head.inputs):
            self.request.give_back()
            self._prepared(head, ())
        else:
            self._prepare(bytes(body))

    def _prepare(self, body: bytes | bytearray) -> None:
        """The rarer requests: their tensors have to be checked one by one, or made binary first."""
        request = self.request
        request.give_back()
        length, signature = self._route.asked.header_length, request.entry.signature
        work = partial(prepare, body, length, signature)
        long = takes_long(len(body), length, signature)
        request.aside(long, work, lambda prepared: self._prepared(*prepared))

    def _prepared(self, head: RequestHead, pieces: Sequence[Buffer]) -> None:
        if self.request.choice is not None:
            self._keep_to_source(head)
        self.request.offer_pieces(head, pieces, checked=True)

    def _look_for_pictures(self, body: bytes | bytearray) -> None:
        request = self.request
        request.give_back()
        model = request.service.pictures.model(request.entry)
        from carpool.frontend.pictures.sent_pictures import read_tensor_pictures

        work = partial(read_tensor_pictures, body, self._route.asked.header_length, model)
        request.aside(len(body) > AT_ONCE, lambda _: work(), partial(self._looked, body))

    def _looked(self, body: bytes | bytearray, pictures: TensorPictures | None) -> None:
        if pictures is None:  # BYTES only in a name
            self._prepare(body)
        else:
            self.request.offer_pictures(pictures)

    # ── as a `RequestReply` ──

    def current(self) -> ModelEntry:
        target = self._route.current(self._exchange.head_at)
        self.request.choice = self._route.choice
        return target.lane.entry

    def _keep_to_source(self, head: RequestHead) -> None:
        """Its own parameters may name a source: between two versions, the choice is that source's."""
        if not head.options.source:
            return
        sender = self.request.sender.with_options(head.options)
        self.request.enter(self._route.for_sender(sender, self._exchange.head_at).lane)

    def fields(self) -> Mapping[bytes, bytes]:
        return self._exchange.head.headers

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return origin_of(self._exchange, error, self._route.service.fair.gate_status)

    def facts(self, request: RequestFacts) -> Mapping[str, str]:
        return {"model": request.entry.name, "path": self._exchange.head.path}

    def takes_long(self) -> None:
        self._exchange.on_disconnect = None  # the model's work is done: there is nothing left to save

    def encode(self, request: RequestFacts, answer: Answer) -> EncodedAnswer:
        buffers, _, length, _ = self._encoded(request, answer, sliced=False)
        return EncodedAnswer(b"".join(buffers), length)

    def _encoded(
        self, request: RequestFacts, answer: Answer, request_id: str = "", *, sliced: bool = True
    ) -> Encoded:
        entry, head, outputs = request.entry, request.head, answer.outputs
        of_steps = answer.timing.__class__ is StepTiming
        response = InferResponse(entry.name, list(outputs), entry.version, request_id)
        asked = there(head.outputs, outputs) if of_steps else head.outputs
        encoded = encode_response(
            response,
            asked,
            binary_output=head.binary_output,
            labels=entry.published.labels,
            batched=entry.signature.max_batch > 0,
            placed=request.placed,
            sliced=sliced,
        )
        bare = not of_steps and not head.id and is_all_binary(response, asked, head.binary_output)
        if bare and isinstance(outputs, DeclaredOutputs) and encoded.header_length is not None:
            outputs.template.said = head, [bytes(encoded.buffers[0])]
        return encoded

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        entry, head, ready, asked = request.entry, request.head, request.encoded, self._route.asked
        of_steps = answer.timing.__class__ is StepTiming
        outputs = answer.outputs
        declared = outputs if isinstance(outputs, DeclaredOutputs) and not of_steps else None
        known = None if declared is None else declared.known(head)
        json: SlicedJson | None = None
        if ready is not None:
            buffers, size, length, _ = with_id(ready.body, ready.header_length, head.id)
        elif declared is not None and known is not None:
            buffers, length = [known[0], *declared.pieces()], len(known[0])
            size = sum(map(len, buffers))
        else:
            buffers, size, length, json = self._encoded(request, answer, head.id)
        times = self.request.times(answer.timing)
        if json is not None and buffers:
            fields, encoding = _MIXED_ANSWER % times, asked.binary_encoding
        elif length is None:
            fields, encoding = _JSON_ANSWER % times, asked.json_encoding
        else:
            fields, encoding = _BINARY_ANSWER % (length, *times), asked.binary_encoding
        if of_steps:
            fields = b"%b, %b\r\n" % (fields[:-2], in_words(answer.timing).encode())  # the last is the times
        if request.note is not None:
            fields += request.note.fields
        if request.choice is not None:
            fields += VERSION % entry.version.encode()
        fields += request.more_fields
        if json is not None or size > LONG_ANSWER:
            self._write_in_pieces(request, answer, fields, Encoded(buffers, size, length, json), encoding)
            return
        if encoding is not None and size >= WORTH_COMPRESSING:
            self._route.service.answer_compressed(self._exchange, fields, b"".join(buffers), encoding)
            return
        self._route.service.server_row.add(BYTES_SENT, size)
        self._exchange.respond(200, fields, b"".join(buffers) if size <= _JOINED else buffers)

    def _write_in_pieces(
        self, request: RequestFacts, answer: Answer, fields: bytes, encoded: Encoded, encoding: bytes | None
    ) -> None:
        """Writes what would hold up the loop. Until that is over, the answer has what its outputs lie in."""
        from carpool.frontend.http.long_answer import LongBody, WholeBody

        buffers, size, _, json = encoded
        service = self._route.service
        events = self._long_events(answer)
        body: LongBody
        if encoding is not None or (json is not None and buffers):
            begin = partial(service.fair_threads.begin, request.client)
            body = WholeBody(json, buffers, events, fields, encoding, begin)
        elif json is not None:
            body = LongBody(json, events, fields)
        else:
            from carpool.wire.slices import SlicedBytes

            body = LongBody(SlicedBytes(buffers), events, fields, size)
        self._respond_long(body, answer)

    def _long_events(self, answer: Answer) -> LongEvents:
        from carpool.frontend.http.long_answer import LongEvents

        request = self.request
        return LongEvents(
            begun=partial(self._begun, answer),
            failed=partial(request.end_with, timing=answer.timing),
            ended=partial(self._written, answer),
            sent=partial(request.service.server_row.add, BYTES_SENT),
        )

    def _respond_long(self, body: LongBody, answer: Answer) -> None:
        exchange, request = self._exchange, self.request
        if answer.held is None and answer.outputs:  # they may end when this returns
            body.move()
        answer.taken = True
        if exchange.pending:
            exchange.on_disconnect = request.leave  # until it has begun, so that the request is counted
        exchange.respond_long(body)
        if not exchange.pending:  # its client has left while a thread worked, or it was rejected already
            request.leave()

    def _begun(self, answer: Answer) -> None:
        """The head is out: a client that sends no more may still read."""
        self._exchange.on_disconnect = None
        self.request.written(answer)

    def _written(self, answer: Answer) -> None:
        held, answer.held = answer.held, None
        if held is not None:
            held.release()

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        more = b"" if times is None else TIMING % times
        source = request.sender.source or request.head.options.source
        self._route.service.fair.tell(self._exchange, error, request.entry, source, more)
