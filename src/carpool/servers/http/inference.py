"""One inference over HTTP: from its body, over a slot and the door, to its answer. This is the hot path."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, TypeAlias

from carpool.engine.work import Timing
from carpool.errors import CarpoolError, Unavailable
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT, REQUEST_SECONDS
from carpool.servers.door import Answer, Call, Slot
from carpool.servers.http.compressing import WORTH_COMPRESSING, answer_compressed
from carpool.servers.http.exchange import Exchange
from carpool.servers.http.packing import check, is_in_place, is_plain, prepare, takes_long
from carpool.servers.http.refusals import answer_error
from carpool.servers.http.service import log
from carpool.types import InferResponse
from carpool.wire.v2 import (
    HEADER_LENGTH,
    Buffer,
    Encoded,
    RequestHead,
    check_tail,
    encode_response,
    raw_head,
    read_head,
)

if TYPE_CHECKING:
    from carpool.servers.http.infer import InferRoute

_Prepared: TypeAlias = tuple[RequestHead, list[Buffer]]

_TIMING = (
    b'Server-Timing: decode;dur=%.3f, queue;dur=%.3f, infer;dur=%.3f, post;dur=%.3f, batch;desc="%d"\r\n'
)
_JSON_ANSWER = b"Content-Type: application/json\r\n" + _TIMING
_BINARY_ANSWER = (
    b"Content-Type: application/octet-stream\r\n" + HEADER_LENGTH.encode() + b": %d\r\n" + _TIMING
)
_JOINED = 8 * 1024  # up to here one more copy is cheaper than sending pieces
_LEFT = asyncio.CancelledError("the client left")


class Inference:
    """One request. It holds a slot until the door takes it over, then a call until the answer is sent."""

    __slots__ = ("_arrived", "_call", "_exchange", "_head", "_offered", "_route", "_slot")

    def __init__(self, route: InferRoute, exchange: Exchange, slot: Slot | None) -> None:
        self._route = route
        self._exchange = exchange
        self._slot = slot
        self._call: Call | None = None
        self._arrived = 0.0
        self._offered = 0.0
        self._head: RequestHead
        exchange.on_disconnect = self._left

    # ── the request ──

    def received(self, at: float) -> None:
        """The body is in the slot."""
        self._arrived = at
        route = self._route
        slot = self._slot
        size = route.size
        end = route.asked.header_length
        assert slot is not None
        assert end is not None
        route.service.server_row.add(BYTES_RECEIVED, size)
        try:
            view = slot.view
            signature = route.entry.signature
            head = read_head(view[:end], signature) if end else raw_head(signature, size)
            check_tail(head, size - end)
            if not is_plain(head):
                if not is_in_place(head):
                    self._prepare(bytes(view[:size]))
                    return
                check(head, view[end:size])
            self._offer(head, slot, end)
        except CarpoolError as error:
            self._fail(error)

    def collected(self, body: bytes | bytearray, at: float) -> None:
        """The body was chunked, compressed or all JSON: only its tensors go into a slot."""
        self._arrived = at
        self._route.service.server_row.add(BYTES_RECEIVED, self._route.size or len(body))
        try:
            self._prepare(body)
        except CarpoolError as error:
            self._fail(error)

    def _prepare(self, body: bytes | bytearray) -> None:
        """The rarer requests: their tensors have to be checked one by one, or made binary first."""
        self._release_slot()
        route = self._route
        length = route.asked.header_length
        signature = route.entry.signature
        if not takes_long(len(body), length, signature):
            self._offer_prepared(prepare(body, length, signature))
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(route.service.threads, prepare, body, length, signature)
        work.add_done_callback(self._prepared)

    def _prepared(self, work: asyncio.Future[_Prepared]) -> None:
        error = None if work.cancelled() else work.exception()
        if work.cancelled() or not self._exchange.pending:
            return
        try:
            if error is not None:
                raise error
            self._offer_prepared(work.result())
        except CarpoolError as known:
            self._fail(known)
        except Exception as unknown:
            self._fail_unexpectedly(unknown)

    def _offer_prepared(self, prepared: _Prepared) -> None:
        head, pieces = prepared
        slot = self._slot = self._route.service.door.slot(sum(map(len, pieces)))
        if slot is None:
            raise no_slots()
        position = 0
        for piece in pieces:
            slot.view[position : position + len(piece)] = piece
            position += len(piece)
        self._offer(head, slot, 0)

    def _offer(self, head: RequestHead, slot: Slot, tail: int) -> None:
        route = self._route
        entry = route.entry
        options = head.options
        asked = route.asked
        deadline = self._exchange.head_at + asked.budget
        if options.timeout is not None and entry.mode != "knobs":
            deadline = min(deadline, self._arrived + options.timeout)
        self._head = head
        self._offered = monotonic()
        self._call = route.service.door.infer(
            entry,
            head,
            slot,
            tail,
            self._done,
            arrived=self._arrived,
            deadline=deadline,
            source=asked.source or options.source,
        )
        self._slot = None

    # ── the answer ──

    def _done(self, answer: Answer) -> None:
        call, self._call = self._call, None  # it knows us too: let go, or only the collector could free both
        assert call is not None
        try:
            if answer.error is None:
                self._answer(answer, monotonic())
            else:
                self._fail(answer.error, answer.timing)
        except CarpoolError as error:
            self._fail(error, answer.timing)
        except Exception as error:
            self._fail_unexpectedly(error)
        finally:
            call.release()

    def _answer(self, answer: Answer, done_at: float) -> None:
        route = self._route
        entry = route.entry
        head = self._head
        response = InferResponse(entry.name, list(answer.outputs), entry.version, head.id)
        encoded = encode_response(
            response,
            head.outputs,
            binary_output=head.binary_output,
            labels=entry.labels,
            batched=entry.signature.max_batch > 0,
        )
        timing = answer.timing
        now = monotonic()
        times = (
            (self._offered - self._arrived + timing.input) * 1e3,
            timing.queue * 1e3,
            timing.infer * 1e3,
            (now - done_at + timing.output) * 1e3,
            timing.batch,
        )
        length = encoded.header_length
        if length is None:
            self._send(_JSON_ANSWER % times, encoded, route.asked.json_encoding)
        else:
            self._send(_BINARY_ANSWER % (length, *times), encoded, route.asked.binary_encoding)
        route.row.observe(REQUEST_SECONDS, now - self._arrived)

    def _send(self, fields: bytes, encoded: Encoded, encoding: bytes | None) -> None:
        service = self._route.service
        buffers, size, _ = encoded
        if encoding is not None and size >= WORTH_COMPRESSING:
            answer_compressed(service, self._exchange, fields, b"".join(buffers), encoding)
            return
        service.server_row.add(BYTES_SENT, size)
        self._exchange.respond(200, fields, b"".join(buffers) if size <= _JOINED else buffers)

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        """Answer with an error, and let go of the slot if the door has not taken it."""
        now = monotonic()
        more = b""
        if timing is not None:
            decode = self._offered - self._arrived + timing.input
            times = (decode, timing.queue, timing.infer, timing.output)
            more = _TIMING % (*(seconds * 1e3 for seconds in times), timing.batch)
        answer_error(self._exchange, error, more)
        self._release_slot()
        self._route.failed(error, now - self._arrived)

    def _fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach whoever called, which serves others too."""
        log.exception("request-failed", model=self._route.entry.name, path=self._exchange.head.path)
        self._fail(CarpoolError(f"the server failed on this request: {type(error).__name__}"))

    def _left(self) -> None:
        """No answer is wanted any more, and `_done` will not come."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._release_slot()
        seconds = monotonic() - self._arrived if self._arrived else 0.0
        self._route.failed(_LEFT, seconds)

    def _release_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


def no_slots() -> Unavailable:
    return Unavailable("all memory for request bodies is in use", reason="no-slots")
