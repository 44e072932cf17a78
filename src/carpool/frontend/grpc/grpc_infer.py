"""ModelInfer and ModelStreamInfer: what calls say in their metadata and messages, and how they are answered.
What happens in between is in `frontend.call`.

A stream answers its requests as they finish; one that fails is answered with its error, and the stream stays
open. Only a bounded number of requests is read before their answers are written, so a client that sends and
does not read cannot fill the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any, NamedTuple

import grpc

from carpool.cache.answer_store import Kept
from carpool.cache.cache_key import ANY, CACHE_CONTROL, Wish, read_cache_control
from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, InvalidInput, TooLarge
from carpool.frontend.access.guard import Guard, check_model
from carpool.frontend.access.keys import Principal
from carpool.frontend.call import ClientCall, Times
from carpool.frontend.demands import NotLoaded
from carpool.frontend.front_service import not_serving
from carpool.frontend.grpc import infer_messages as messages
from carpool.frontend.grpc.grpc_service import Failure, Service, details_of, metadata_of, refuse
from carpool.frontend.grpc.infer_messages import FINAL_PARAMETER, Family, Parts
from carpool.frontend.pictures.sent_pictures import TensorPictures, check_pictures, sends_pictures
from carpool.frontend.pictures.workers import stopping
from carpool.link.door import (
    DEADLINE,
    LATEST,
    ROLLOUT,
    SOURCE,
    Answer,
    ModelEntry,
    Sender,
    read_budget,
    read_latest,
    read_side,
    read_source,
)
from carpool.link.step_times import there
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.observe.counters import Row
from carpool.types import StepTiming
from carpool.wire.proto import message_class
from carpool.wire.v2 import Buffer, Placed, RequestHead, check_head

COMPRESSION = "x-carpool-compression"
CACHE_WORDS = "x_carpool_cache"
"""What an answer says of the cache: a parameter in a stream, else metadata."""
MOST_UNANSWERED = 256

_DEADLINE = DEADLINE.lower()
_SOURCE = SOURCE.lower()
_LATEST = LATEST.lower()
_CACHE_CONTROL = CACHE_CONTROL.lower()
_ROLLOUT = ROLLOUT.lower()
_ALGORITHMS: dict[Any, Any] = {
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
_ModelStreamInferResponse = message_class("ModelStreamInferResponse")

Metadata = Iterable[tuple[str, str | bytes]]
Reply = Callable[[bytes | Failure], None]


class Asked(NamedTuple):
    """What a call says beside its message."""

    budget: float = INFINITY  # seconds from its head to the client's deadline
    sender: Sender = Sender()
    compression: grpc.Compression | None = None  # of its answers
    wish: Wish = ANY  # what it says about caches
    side: str = ""  # of a rollout
    metadata: Metadata = ()

    @property
    def headers(self) -> dict[bytes, bytes]:
        """As HTTP has them, for what keeps to one side of a rollout by one of them."""
        return {
            key.encode(): value if isinstance(value, bytes) else value.encode(errors="replace")
            for key, value in self.metadata
        }

    def deadline(self, context: Any, head_at: float) -> float:
        """The client's: that of the call, or the one in its metadata, whichever comes first."""
        remaining = context.time_remaining()
        called = INFINITY if remaining is None else monotonic() + remaining
        return float(min(called, head_at + self.budget))


def read_metadata(metadata: Metadata, who: Principal | None = None) -> Asked:
    """Raises `InvalidInput` that names the entry at fault. `who` is whose key is among them."""
    budget, source, latest, compression = INFINITY, "", False, None
    wish, side = ANY, ""
    for key, value in metadata:
        if not key.startswith("x-carpool-"):
            if key == _CACHE_CONTROL:
                wish = read_cache_control(value if isinstance(value, bytes) else value.encode())
            continue
        field = value if isinstance(value, bytes) else value.encode(errors="replace")
        if key == _DEADLINE:
            budget = read_budget(field)
        elif key == _SOURCE:
            source = read_source(field)
        elif key == _LATEST:
            latest = read_latest(field)
        elif key == _ROLLOUT:
            side = read_side(field)
        elif key == COMPRESSION:
            if value != "identity" and value not in _ALGORITHMS:
                raise InvalidInput(f"{COMPRESSION} must be gzip, deflate or identity", field=COMPRESSION)
            compression = _ALGORITHMS.get(value)
    sender = Sender(source, latest)
    sender = sender if who is None else sender.with_key(who)
    return Asked(budget, sender, compression, wish, side, metadata)


class GrpcCall(ClientCall):
    """`reply` gets the answer or the failure, once, unless the client has left."""

    __slots__ = ("_asked", "_family", "_more", "_reply", "_who", "id")

    form = "grpc"
    service: Service

    def __init__(
        self,
        service: Service,
        asked: Asked,
        deadline: float,
        who: Principal | None,
        reply: Reply,
        more: bytes = b"",
    ) -> None:
        super().__init__(service, asked.sender, deadline, monotonic())
        self._asked = asked
        self.row = None
        self.id = b""
        self._family: Family | None = None
        self._who = who
        self._reply = reply
        self._more = more  # parameters of the answer

    async def begin(self, message: bytes) -> None:
        """Understand the request and give it to the engine. Waits only for what is not done in the loop."""
        service = self.service
        service.server_row.add(BYTES_RECEIVED, len(message))
        try:
            if not service.door.serving:
                raise not_serving()
            parts = messages.take_apart(message)
            if parts is None:
                parts = await service.aside(len(message), messages.parse_whole, message)
            try:
                family = await self._understood(parts)
            except NotLoaded as missing:
                check_model(self._who, missing.model)
                await service.demands.loaded(missing.model, self.deadline, len(message))
                self.arrived = self._offered_at = monotonic()  # the promise begins now
                family = await self._understood(parts)
            self._family = family
            check_model(self._who, family.model)
            head = family.head
            if head.tail_size > service.max_body_bytes:
                raise TooLarge(
                    f"the inputs take {head.tail_size} bytes, more than the {service.max_body_bytes} allowed"
                )
            if sends_pictures(self.entry, head):
                model = service.pictures.model(self.entry)
                tail = b"".join(family.tensor_bytes(parts))
                pictures = await service.aside(len(tail), TensorPictures, model, head, tail)
                self._renew()
                self._offer_pictures(pictures)
                return
            work = self._offer_pieces(head, family.tensor_bytes(parts), checked=False)
            if work is not None:
                await asyncio.wait([work])  # so that the requests of a stream keep their order
        except CarpoolError as error:
            self._fail(error)
        except Exception as error:
            self._fail_unexpectedly(error)

    async def _understood(self, parts: Parts) -> Family:
        """What it asks for, of which model. From here on this is its model, whatever is loaded meanwhile."""
        service = self.service
        self.id = parts.id
        family = service.families.find(parts)
        if not self.id.isascii():
            messages.check_text(self.id)
        if family is None:
            request = await service.aside(
                len(parts.rest), messages.parse, messages.ModelInferRequest, parts.rest
            )
            self._look_up(request.model_name, request.model_version)
            family = await service.aside(len(parts.rest), messages.read_family, request, parts.contents)
            self._check(family)
            service.families.keep(parts, family)
        elif family.catalog is not service.door.catalog:
            self._check(family)
        self.entry, self.row, self.head = family.entry, family.row, family.head
        if (service.routing.splits or self._asked.side) and not family.version:
            self._choose_side()
        return family

    def _choose_side(self) -> None:
        """It names no version, and there may be two."""
        asked, service = self._asked, self.service
        self.split = split = service.routing.split(self.entry.name, asked.side, tensors=True)
        if split is not None:
            sender = self.sender.with_options(self.head.options)
            self.entry = split.choose(sender, self.arrived, asked.headers, asked.side)
            self.row = service.row(self.entry)

    def _check(self, family: Family) -> None:
        family.entry, family.row = self._look_up(family.model, family.version)
        if sends_pictures(family.entry, family.head):
            check_pictures(family.entry, family.head)
        else:
            check_head(family.head, family.entry.signature)
        family.catalog = self.service.door.catalog

    def _look_up(self, model: str, version: str) -> tuple[ModelEntry, Row]:
        self.entry = entry = self.service.look_up(model, version)
        self.row = row = self.service.row(entry)
        return entry, row

    # ── as `ClientCall` asks ──

    def _current(self) -> tuple[ModelEntry, Row]:
        family = self._family
        assert family is not None
        entry = self.service.look_up(family.model, family.version)
        if self.split is not None:
            self.split = split = self.service.routing.split(entry.name, tensors=True)
            if split is not None:
                entry = split.candidate if self.entry.version == split.candidate.version else split.stable
        return entry, self.service.row(entry)

    @property
    def request_id(self) -> str:
        return self.id.decode(errors="replace")

    def _traced(self) -> RequestHead:
        return self._named(self.head)

    def _named(self, head: RequestHead) -> RequestHead:
        return replace(head, id=self.id.decode())

    def _what(self) -> Mapping[str, str]:
        return {"id": self.id.decode(errors="replace")[:80]}

    def _encode(self, answer: Answer, placed: Mapping[str, Placed]) -> Kept:
        return Kept(messages.encode_outputs(self._listed(answer, placed)))

    def _listed(self, answer: Answer, placed: Mapping[str, Placed]) -> Sequence[tuple[bytes, Buffer]]:
        asked = self.head.outputs
        if answer.timing.__class__ is StepTiming:
            asked = there(asked, answer.outputs)
        return messages.list_outputs(self.entry, asked, answer.outputs, placed)

    def _write(self, answer: Answer, placed: Mapping[str, Placed], kept: Kept | None = None) -> None:
        entry, more = self.entry, self._more
        listed: Sequence[tuple[bytes, Buffer]] = ()
        if kept is None:
            listed = self._listed(answer, placed)
        else:
            if more and self.told is not None:  # a stream has no metadata for each of its answers
                more += messages.text_parameter(CACHE_WORDS, self.told.words)
            more = kept.body + more
        response = messages.encode_answer(entry, self.id, listed, self._times(answer.timing), more)
        self.service.server_row.add(BYTES_SENT, len(response))
        self._reply(response)

    def _write_error(self, error: CarpoolError, times: Times | None) -> None:
        self._reply(Failure(error, times))


class UnaryInfer:
    """One call of ModelInfer. It begins when its head is here, before its message."""

    __slots__ = ("_head_at", "_metadata", "_service", "_who")

    def __init__(self, service: Service, metadata: Metadata, who: Principal | None = None) -> None:
        self._service = service
        self._metadata = metadata
        self._who = who
        self._head_at = monotonic()

    async def run(self, message: bytes, context: Any) -> bytes:
        with self._service, self._service.holding(message) as refusal:
            if refusal is not None:
                return refuse(context, refusal)
            try:
                asked = read_metadata(self._metadata, self._who)
            except InvalidInput as error:
                return refuse(context, error)
            if asked.compression is not None:
                context.set_compression(asked.compression)
            result = await self._infer(message, asked, context)
            if isinstance(result, Failure):
                return refuse(context, result.error, result.times)
            return result

    async def _infer(self, message: bytes, asked: Asked, context: Any) -> bytes | Failure:
        deadline = asked.deadline(context, self._head_at)
        waiting: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()

        def reply(result: bytes | Failure) -> None:
            if not waiting.done():  # cancelled, but the call has not heard of it yet
                waiting.set_result(result)

        call = GrpcCall(self._service, asked, deadline, self._who, reply)
        call.wish = asked.wish
        try:
            await call.begin(message)
            result = await waiting
            if call.told is not None:
                words = (CACHE_WORDS.replace("_", "-"), call.told.words)
                context.set_trailing_metadata((words, ("cache-status", f"carpool; {call.told.status}")))
            return result
        except asyncio.CancelledError:
            call.leave()
            raise


class Stream:
    """One call of ModelStreamInfer: a task reads requests, another writes answers, and the calls are in
    between. `guard` may come to know other keys while it is open: `holder` then says whose key it brought."""

    def __init__(
        self,
        service: Service,
        metadata: Metadata,
        who: Principal | None,
        guard: Guard,
        holder: Callable[[], Principal | None],
    ) -> None:
        self._service = service
        self._metadata = metadata
        self._who = who
        self._guard = guard
        self._keys = guard.generation
        self._holder = holder
        self._locked_out: CarpoolError | None = None
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_UNANSWERED)
        self._unanswered = 0
        self._answered = asyncio.Event()
        self._answered.set()
        self._waiting: set[GrpcCall] = set()

    async def run(self, _requests: object, context: Any) -> None:
        with self._service:
            try:
                asked = read_metadata(self._metadata, self._who)
            except InvalidInput as error:
                refuse(context, error)
                return
            if asked.compression is not None:
                context.set_compression(asked.compression)
            if not await self._serve(context, asked):
                refuse(context, stopping())
            elif self._locked_out is not None:
                refuse(context, self._locked_out)

    async def _serve(self, context: Any, asked: Asked) -> bool:
        """Answer everything that is read; False when the server stops before the client is done."""
        reading = asyncio.create_task(self._read(context, asked))
        writing = asyncio.create_task(self._write(context))
        stop = asyncio.create_task(self._service.stopping.wait())
        tasks = {reading, writing, stop}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = reading.done()
            reading.cancel()
            emptied = asyncio.create_task(self._answered.wait())
            tasks.add(emptied)
            await asyncio.wait({emptied, writing}, return_when=asyncio.FIRST_COMPLETED)
            return ended
        finally:
            for task in tasks:
                task.cancel()
            for call in self._waiting:
                call.leave()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, context: Any, asked: Asked) -> None:
        while True:
            await self._room.acquire()
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            if self._guard.generation != self._keys:
                try:
                    self._who = self._holder()
                except CarpoolError as error:
                    self._locked_out = error
                    return
                self._keys = self._guard.generation
                asked = read_metadata(self._metadata, self._who)
            self._unanswered += 1
            self._answered.clear()
            await self._begin(message, asked, asked.deadline(context, monotonic()))

    async def _begin(self, message: bytes, asked: Asked, deadline: float) -> None:
        def reply(result: bytes | Failure) -> None:
            self._waiting.discard(call)
            answer = _failed(result, call.id) if isinstance(result, Failure) else messages.in_stream(result)
            self._answers.put_nowait(answer)

        call = GrpcCall(self._service, asked, deadline, self._who, reply, FINAL_PARAMETER)
        call.wish = asked.wish
        self._waiting.add(call)
        await call.begin(message)

    async def _write(self, context: Any) -> None:
        while True:
            await context.write(await self._answers.get())
            self._room.release()
            self._unanswered -= 1
            if not self._unanswered:
                self._answered.set()


def _failed(failure: Failure, request_id: bytes) -> bytes:
    """The sentence where clients look for it; whose it was, and the stable words, where there is room."""
    message = _ModelStreamInferResponse(error_message=details_of(failure.error))
    response = message.infer_response
    response.id = request_id.decode(errors="replace")
    for name, value in metadata_of(failure.error, failure.times):
        response.parameters[name.replace("-", "_")].string_param = value
    response.MergeFromString(FINAL_PARAMETER)
    return bytes(message.SerializeToString())
