"""Implements ModelInfer: what calls say in their metadata and messages, and how they are answered. What
happens in between is in `frontend.calls.request`; streams are in `stream_infer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Final, NamedTuple

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, InvalidInput, TooLarge
from carpool.extensions import choice_fields
from carpool.frontend.access.guard import check_model
from carpool.frontend.access.keys import Principal
from carpool.frontend.calls.request import ModelLane, Request
from carpool.frontend.calls.request_facts import RequestFacts, RequestReply
from carpool.frontend.calls.reused_answer import EncodedAnswer
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.demands import NotLoaded
from carpool.frontend.front_service import not_serving
from carpool.frontend.grpc import infer_messages as messages
from carpool.frontend.grpc.grpc_service import Failure, GrpcService, origin_of, refuse
from carpool.frontend.grpc.infer_messages import Family, Parts
from carpool.frontend.grpc.rpc import Ended, Message, Rpc, begin_now
from carpool.frontend.grpc.rpc_heads import Metadata
from carpool.frontend.pictures.image_tensors import sends_pictures
from carpool.link.catalog import ModelEntry
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
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.types import Datatype, StepTiming
from carpool.wire.v2 import Buffer, RequestHead, check_head

COMPRESSION: Final = "x-carpool-compression"

_ATTEMPT = ATTEMPT.lower()
_DEADLINE = DEADLINE.lower()
_SOURCE = SOURCE.lower()
_LATEST = LATEST.lower()
_WORTH_A_SLOT, _ALGORITHMS = 16 * 1024, ("identity", "gzip", "deflate")
_DEARER: Final = 16  # fields that are walked one by one, than as many bytes of tensors


class LongReply(NamedTuple):
    """Describes an answer that is sent from where it lies. `ended` is called when it can be released."""

    pieces: Sequence[Buffer]
    ended: Callable[[], None]


Reply = Callable[[bytes | LongReply | Failure], None]


class CallMetadata(NamedTuple):
    """Holds what a call says beside its message."""

    budget: float = INFINITY  # seconds from its head to the client's deadline
    sender: Sender = Sender()
    compression: str = ""  # of its answers
    chooses: bool = False  # it has a field that asks for one of several versions
    metadata: Metadata = ()

    @property
    def headers(self) -> dict[bytes, bytes]:
        """Returns them as HTTP has them, for what chooses between versions by one of them."""
        listed = (
            (key, value.encode(errors="replace") if isinstance(value, str) else value)
            for key, value in self.metadata
        )
        return {key.encode(): value for key, value in listed}

    def deadline(self, rpc: Rpc, head_at: float) -> float:
        """Returns the client's deadline: that of the call, or the one in its metadata, whichever comes
        first."""
        return min(rpc.deadline, head_at + self.budget)


def read_metadata(metadata: Metadata, who: Principal | None = None, client: str = "") -> CallMetadata:
    """Raises `InvalidInput` that names the entry at fault. `who` is whose key is among them, and `client` is
    where they come from."""
    budget, source, latest, compression, chooses = INFINITY, "", False, "", False
    for key, value in metadata:
        if not key.startswith("x-carpool-"):
            continue
        field = value if isinstance(value, bytes) else value.encode(errors="replace")
        if key == _DEADLINE:
            budget = read_budget(field)
        elif key == _SOURCE:
            source = read_source(field)
        elif key == _LATEST:
            latest = read_latest(field)
        elif key.encode() in choice_fields():
            chooses = True
        elif key == COMPRESSION:
            if value not in _ALGORITHMS:
                raise InvalidInput(f"{COMPRESSION} must be gzip, deflate or identity", field=COMPRESSION)
            compression = "" if value == "identity" else str(value)
    sender = Sender(source, latest, again=read_attempt(dict(metadata).get(_ATTEMPT)))
    sender = sender.paid_by(client) if who is None else sender.with_key(who)
    return CallMetadata(budget, sender, compression, chooses, metadata)


class GrpcCall(RequestReply):
    """`reply` gets the answer or the failure, once, unless the client has left."""

    __slots__ = ("_asked", "_family", "_more", "_reply", "_service", "_who", "id", "request")

    form = "grpc"
    one_answer = "ModelInfer RPC doesn't support models with decoupled transaction policy"  # Triton's words

    def __init__(
        self,
        service: GrpcService,
        asked: CallMetadata,
        deadline: float,
        who: Principal | None,
        reply: Reply,
        more: bytes = b"",
        slot: Slot | None = None,
    ) -> None:
        self.request = request = Request(service, self, asked.sender, deadline, monotonic())
        request.refuses_many = self.one_answer
        request.slot = slot  # that the message is in
        self._service = service
        self._asked = asked
        self.id = b""
        self._family: Family | None = None
        self._who = who
        self._reply = reply
        self._more = more  # parameters of the answer

    def begin_known(self, message: Message) -> bool:
        """As `begin`, for a message like one that came before and whose tensor can stay where it is, or is in
        its client's memory: then nothing is waited for. False: nothing was done."""
        service, in_slot = self._service, self.request.slot is not None
        parts = service.families.recognise(message)
        if parts is None or parts.family is None or in_slot != bool(parts.contents):
            return False
        family = parts.family
        head = family.head
        if family.catalog is not service.engine.catalog or not service.engine.serving:
            return False
        if in_slot and not head.plain:
            return False
        if family.lane.divided or self._asked.chooses or sends_pictures(family.lane.entry, head):
            return False
        service.server_row.add(BYTES_RECEIVED, len(message))
        self.request.entry, self.request.row, self.request.infer = family.lane[:3]
        self.request.head, self._family = head, family
        try:
            check_model(self._who, family.model)
            self._check_size(head)
            if in_slot:
                self.request.offer_in_place(head, parts.tail)
            else:
                self.request.offer_pieces(head, (), checked=False)
        except CarpoolError as error:
            self.request.fail(error)
        except Exception as fault:
            self.request.fail_unexpectedly(fault)
        return True

    def _check_size(self, head: RequestHead) -> None:
        most = self._service.max_body_bytes
        if head.tail_size > most:
            raise TooLarge(f"the inputs take {head.tail_size} bytes, more than the {most} allowed")

    async def begin(self, message: Message) -> None:
        """Understand the request and give it to the engine. Waits only for what is not done in the loop."""
        service = self._service
        service.server_row.add(BYTES_RECEIVED, len(message))
        try:
            if not service.engine.serving:
                known = service.families.recognise(message)
                if known is not None and known.family is not None:  # of the last engine: counted there
                    self.request.enter(known.family.lane)
                raise not_serving()
            parts = service.families.recognise(message) or messages.take_apart(message)
            if parts is None:
                parts = await service.aside(
                    self.request.client, _DEARER * len(message), messages.take_apart_whole, message
                )
            missing = ""
            try:
                family = await self._understood(parts)
            except NotLoaded as unloaded:
                missing = unloaded.model
            if missing:
                check_model(self._who, missing)
                parts = self._moved(message, parts)
                await service.demands.loaded(missing, self.request.deadline, len(message))
                self.request.loaded(monotonic())
                family = await self._understood(parts)
            elif parts.family is None:
                service.families.remember(message, parts, family)
            self._family = family
            check_model(self._who, family.model)
            await self._offer_message(family, message, parts)
        except CarpoolError as error:
            self.request.fail(error)
        except Exception as fault:
            self.request.fail_unexpectedly(fault)

    async def _offer_message(self, family: Family, message: Message, parts: Parts) -> None:
        service, head = self._service, family.head
        self._check_size(head)
        pictures = sends_pictures(self.request.entry, head)
        if self.request.slot is not None and family.contents is not None:
            self.request.give_back()
        if self.request.slot is not None:
            if len(parts.contents) == 1 and head.plain and not pictures:
                self.request.offer_in_place(head, parts.tail)
                return
            parts = self._moved(message, parts)
        if pictures:
            from carpool.frontend.pictures.sent_pictures import TensorPictures

            model = service.pictures.model(self.request.entry)
            tail = b"".join(family.tensor_bytes(parts))
            read = await service.aside(self.request.client, len(tail), TensorPictures, model, head, tail)
            self.request.renew()
            self.request.offer_pictures(read)
            return
        work = self.request.offer_pieces(head, family.tensor_bytes(parts), checked=False)
        if work is not None:
            await asyncio.wait([work])  # so that the requests of a stream keep their order

    def _moved(self, message: Message, parts: Parts) -> Parts:
        """Returns the same in other memory, if they came into a slot and cannot stay there."""
        if self.request.slot is None:
            return parts
        copied = bytes(message)
        self.request.give_back()
        return messages.take_apart(copied) or messages.take_apart_whole(copied)

    async def _understood(self, parts: Parts) -> Family:
        """Returns what it asks for, of which model. From here on this is its model, whatever is loaded
        meanwhile."""
        service = self._service
        self.id = parts.id
        family = parts.family or (None if parts.is_typed else service.families.find(parts))
        if not self.id.isascii():
            messages.check_text(self.id)
        if family is None:
            size = len(parts.rest)
            request, typed = await service.aside(self.request.client, size, messages.read_request, parts)
            missing: NotLoaded | None = None
            try:
                self._look_up(request.model_name, request.model_version)
            except NotLoaded as unloaded:
                missing = unloaded
            family = await service.aside(
                self.request.client, size, messages.read_family, request, parts.contents, typed
            )
            if missing is not None:  # and the request is not wrong for any model, for which none is loaded
                raise missing
            self._check(family)
            if family.typed:
                await self._read_typed(family)
            service.families.keep(parts, family)
        elif family.catalog is not service.engine.catalog:
            self._check(family)
        self.request.enter(family.lane)
        self.request.head = family.head
        if (family.lane.divided or self._asked.chooses) and not family.version:
            self._choose_version(family.lane.entry)
        return family

    async def _read_typed(self, family: Family) -> None:
        """The tensors are typed fields of the message, and in memory of their own when this is done."""
        service = self._service
        size = sum(len(piece) for contents in family.typed for piece in contents or ())
        if any(tensor.datatype is Datatype.BYTES for tensor in family.head.inputs):
            size *= _DEARER
        await service.aside(self.request.client, size, messages.read_typed, family, service.max_body_bytes)

    def _choose_version(self, newest: ModelEntry) -> None:
        """It names no version, and there may be several to choose from."""
        service = self._service
        self.request.choice = choice = service.choose(newest, self._asked.headers, True)
        if choice is not None:
            sender = self.request.sender.with_options(self.request.head.options)
            self.request.enter(service.lane(choice.choose(sender, self.request.arrived)))

    def _check(self, family: Family) -> None:
        family.lane = self._look_up(family.model, family.version)
        entry = family.lane.entry
        if sends_pictures(entry, family.head):
            from carpool.frontend.pictures.sent_pictures import check_pictures

            check_pictures(entry, family.head)
        else:
            check_head(family.head, entry.signature)
        family.catalog = self._service.engine.catalog

    def _look_up(self, model: str, version: str) -> ModelLane:
        lane = self._service.lane(self._service.look_up(model, version))
        self.request.enter(lane)
        return lane

    # ── as a `RequestReply` ──

    def current(self) -> ModelEntry:
        family = self._family
        assert family is not None
        entry = self._service.look_up(family.model, family.version)
        if self.request.choice is not None:
            self.request.choice = choice = self._service.choose(entry, {}, True)
            if choice is not None:
                same = (one for one in choice.entries if one.version == self.request.entry.version)
                entry = next(same, choice.entries[0])
        return entry

    def request_id(self, request: RequestFacts) -> str:
        return self.id.decode(errors="replace")

    def fields(self) -> Mapping[bytes, bytes]:
        return self._asked.headers

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return origin_of("ModelStreamInfer" if self._more else "ModelInfer", error)

    def named(self, head: RequestHead) -> RequestHead:
        return replace(head, id=self.id.decode())

    def facts(self, request: RequestFacts) -> Mapping[str, str]:
        return {"id": self.id.decode(errors="replace")[:80]}

    def encode(self, request: RequestFacts, answer: Answer) -> EncodedAnswer:
        return EncodedAnswer(messages.encode_outputs(self._listed(request, answer)))

    def _listed(self, request: RequestFacts, answer: Answer) -> Sequence[tuple[bytes, Buffer]]:
        head, outputs, placed = request.head, answer.outputs, request.placed
        asked = head.outputs
        if answer.timing.__class__ is StepTiming:
            return messages.list_outputs(request.entry, there(asked, outputs), outputs, placed)
        if not isinstance(outputs, DeclaredOutputs):
            return messages.list_outputs(request.entry, asked, outputs, placed)
        known = outputs.known(head)
        if known is not None:
            return list(zip(known, outputs.pieces(), strict=True))
        listed = messages.list_outputs(request.entry, asked, outputs, placed)
        if all(one.shared_memory is None and not one.classification for one in asked):
            outputs.template.said = head, [head for head, _ in listed]
        return listed

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        encoded, more = request.encoded, self._more
        listed: Sequence[tuple[bytes, Buffer]] = ()
        if more and request.note is not None:
            more += messages.text_parameter(*request.note.parameter)
        if encoded is None:
            listed = self._listed(request, answer)
        else:
            more = encoded.body + more
        if answer.timing.__class__ is StepTiming:
            more += messages.text_parameter("carpool_steps", in_words(answer.timing))
        times = self.request.times(answer.timing)
        pieces, size = messages.answer_pieces(request.entry, self.id, listed, times, more)
        held = answer.held
        if size > LARGE and held is not None:
            answer.taken = True
            self._service.server_row.add(BYTES_SENT, sum(map(len, pieces)))
            self._reply(LongReply(pieces, held.release))
            self.request.written(answer)
            return
        response = b"".join(pieces)
        self._service.server_row.add(BYTES_SENT, len(response))
        self._reply(response)

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        self._reply(Failure(error, times))


def _no_room() -> bool:
    """Never cuts a client off for slow sending: messages have no pace."""
    return False


class UnaryInfer:
    """Represents one call of ModelInfer. It begins when its head is here, before its message."""

    __slots__ = ("_call", "_rpc", "_service", "_slot", "_task", "_who")

    many = False

    def __init__(self, service: GrpcService, rpc: Rpc, who: Principal | None = None) -> None:
        self._service = service
        self._rpc: Rpc | None = rpc
        self._who = who
        self._call: GrpcCall | None = None
        self._task: asyncio.Task[None] | None = None
        self._slot: Slot | None = None  # while the message comes

    def memory(self, size: int) -> memoryview | None:
        """Returns a slot, if there are plenty: mostly the one tensor stays where it is in the message. A long
        message without room for it and its answer is rejected before it comes."""
        rpc, engine = self._rpc, self._service.engine
        if size < _WORTH_A_SLOT or rpc is None:
            return None
        client = rpc.client if self._who is None else self._who.name
        try:
            if size > LARGE:
                slot = engine.large_slot(size, self._service.answer_room(size), client, _no_room)
            else:
                slot = engine.first_slot(size, _no_room)
        except CarpoolError as error:
            if size > LARGE:
                self._service.end(rpc, error)
            return None  # the tensors of others may still find one when they are here
        if len(slot.view) < size:
            slot.release()
            return None
        self._slot = slot
        return slot.view[:size]

    def take(self, message: Message, compressed: bool) -> None:
        service, rpc, who = self._service, self._rpc, self._who
        assert rpc is not None
        asked: CallMetadata | None = rpc.head.asked if who is None else None
        if asked is None:
            try:
                asked = read_metadata(rpc.head.metadata, who, rpc.client)
            except InvalidInput as error:
                self.left()
                refuse(rpc, error)
                return
            if who is None:
                rpc.head.asked = asked
        rpc.compress = asked.compression
        service.__enter__()
        slot, self._slot = self._slot, None
        deadline = asked.deadline(rpc, rpc.since)
        call = self._call = GrpcCall(service, asked, deadline, who, self._reply, slot=slot)
        call.request.client = call.request.client or rpc.client
        if compressed:
            self._task = begin_now(self._inflate(message))
        elif not call.begin_known(message):
            self._task = begin_now(call.begin(message))

    async def _inflate(self, message: Message) -> None:
        rpc, call = self._rpc, self._call
        assert rpc is not None
        assert call is not None
        try:
            plain = await rpc.plain(message, compressed=True)
        except Ended:
            self.left()
            return
        call.request.arrived = monotonic()
        await call.begin(plain)

    def _reply(self, result: bytes | LongReply | Failure) -> None:
        rpc, call = self._rpc, self._call
        if rpc is None or call is None:
            if isinstance(result, LongReply):
                result.ended()
            return
        note = call.request.note
        metadata: Metadata = () if note is None else note.metadata
        self._over()
        if isinstance(result, Failure):
            refuse(rpc, result.error, result.times)
        elif isinstance(result, LongReply):
            rpc.answer_long(result.pieces, result.ended, metadata)
        else:
            rpc.answer(result, metadata)

    def left(self) -> None:
        call, task = self._call, self._task
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()
        if call is not None:
            self._over()
            call.request.leave()
        if task is not None:
            task.cancel()

    def _over(self) -> None:
        """Ends the call, once. It forgets the call, which knows it too."""
        self._rpc = self._call = self._task = None
        self._service.__exit__()
