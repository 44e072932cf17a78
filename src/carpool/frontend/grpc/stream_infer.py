"""This module has ModelStreamInfer. A stream answers its requests as they finish; one that fails is answered
with its error, and the stream stays open. Only a bounded number of requests is read before their answers are
written, so a client that sends and does not read cannot fill the server. A request for a decoupled model has
any number of answers, and each says whether it is the last."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Final

from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable, Unsupported
from carpool.frontend.access.keys import Principal
from carpool.frontend.calls.request_facts import RequestFacts
from carpool.frontend.calls.thread_errors import stopping
from carpool.frontend.grpc import infer_messages as messages
from carpool.frontend.grpc.grpc_infer import CallMetadata, GrpcCall, LongReply, Reply, read_metadata
from carpool.frontend.grpc.grpc_service import (
    Failure,
    GrpcService,
    failed_in_stream,
    refuse,
)
from carpool.frontend.grpc.infer_messages import FINAL_PARAMETER, NOT_FINAL_PARAMETER
from carpool.frontend.grpc.rpc import TOO_SLOW, Ended, Message, Rpc, begin_now
from carpool.link.engine_client import Answer
from carpool.link.step_times import in_words, there
from carpool.observe.columns import BYTES_SENT
from carpool.types import StepTiming, Timing
from carpool.wire.classes import FEW_VALUES, any_takes_long
from carpool.wire.v2 import Buffer

MOST_UNANSWERED: Final = 256
MOST_UNWRITTEN: Final = 16 << 20
"""Bytes of answers that a stream's client has not read: beyond them the next piece of a request cuts that
request off. What there is already waits, as long as its client's account allows."""
EMPTY_FINAL: Final = "triton_enable_empty_final_response"
"""A client's wish to be notified of the end of a request, even if no answer marks it."""


class StreamCall(GrpcCall):
    __slots__ = ("_ended", "_last", "say_part")

    one_answer = ""
    say_part: Callable[[bytes], None]

    def __init__(
        self, service: GrpcService, asked: CallMetadata, deadline: float, who: Principal | None, reply: Reply
    ) -> None:
        super().__init__(service, asked, deadline, who, reply, FINAL_PARAMETER)
        self._ended = False  # an answer has said that it is the last
        self._last: Answer | None = None  # of a text: it waits for the times, which come right behind it

    def forget(self) -> None:
        """Drops the callbacks, since the call and the stream would keep each other alive."""
        self._reply = self.say_part = _nobody

    def part(self, request: RequestFacts, answer: Answer) -> None:
        self._ended = answer.last
        if answer.last and request.entry.traits.writes:
            self._last = answer
        else:
            self.say_part(self._part_of(request, answer, None))

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        if not request.entry.traits.decoupled:
            super().answer(request, answer)
        elif self._last is not None:
            self._reply(self._part_of(request, self._last, answer.timing))
        elif request.head.options.custom.get(EMPTY_FINAL) is True and not self._ended:
            self._reply(self._part_of(request, Answer(last=True), answer.timing))
        else:
            self._reply(b"")

    def _part_of(self, request: RequestFacts, answer: Answer, timing: Timing | None) -> bytes:
        """Returns one answer; with `timing`, the last. It has those outputs that are wanted and that it
        brings."""
        more = FINAL_PARAMETER if answer.last else NOT_FINAL_PARAMETER
        wanted, times = request.head.outputs, None
        listed: Sequence[tuple[bytes, Buffer]] = ()
        asked = there(wanted, answer.outputs)
        if any_takes_long(asked, answer.outputs):  # parts keep their order: none can be put aside
            raise InvalidInput(
                f"classes of a response of several are found among at most {FEW_VALUES:,} values: request the"
                " output itself",
                field="outputs",
            )
        if asked or not wanted:
            listed = messages.list_outputs(request.entry, asked, answer.outputs, {})
        if timing is not None:
            times = self.request.times(timing)
            if isinstance(timing, StepTiming) and timing.steps:
                more += messages.text_parameter("carpool_steps", in_words(timing))
        response = messages.encode_answer(request.entry, self.id, listed, times, more)
        self._service.server_row.add(BYTES_SENT, len(response))
        return response


class Stream:
    """Represents one call of ModelStreamInfer. It has no task of its own: its client's turns begin its
    messages, and what is not done at once is left to a task. Other keys may come to be in force while it is
    open: `holder` then says whose key it brought."""

    __slots__ = (
        *("_accounts", "_answers", "_asked", "_beginning", "_began", "_closing", "_failures"),
        *("_holder", "_queued", "_refusal", "_rpc", "_service", "_task", "_unanswered"),
        *("_unwritten", "_waiting", "_who", "_writer", "_writing", "client", "over"),
    )

    many = True

    def __init__(
        self,
        service: GrpcService,
        rpc: Rpc,
        who: Principal | None,
        holder: Callable[[], Principal | None],
    ) -> None:
        """Raises `InvalidInput` that names the entry of its metadata at fault."""
        self._asked = read_metadata(rpc.head.metadata, who, rpc.client)
        self._service = service
        self._rpc = rpc
        self._who = who
        self._holder = holder
        self._accounts = service.accounts
        stake = rpc.stake
        self.client = "" if stake is None or stake.account is None else stake.account.name
        # what comes
        self._queued = False  # for a turn of its client
        self._beginning = False  # its last message is not understood yet
        self._began = 0.0
        self._task: asyncio.Task[None] | None = None
        self._closing = False  # nothing more is read
        self._refusal: CarpoolError | None = None  # with which it ends
        self.over = False
        # what goes
        self._waiting: set[StreamCall] = set()
        self._unanswered = 0
        self._failures = 0
        self._answers: deque[tuple[bytes | LongReply, bool]] = deque()  # and whether one is the last
        self._unwritten = 0  # bytes of those
        self._writing = False
        self._writer: asyncio.Task[None] | None = None
        rpc.compress = self._asked.compression
        rpc.heard = self._heard
        service.__enter__()
        service.streams[self] = None

    # ── requests ──

    def memory(self, size: int) -> memoryview | None:
        return None

    def _heard(self) -> None:
        """A message is here, or there is room for one: it waits for its turn."""
        if self._queued or self._beginning or self._closing or self._unanswered >= MOST_UNANSWERED:
            return
        if self._rpc.has_more and not self._rpc.over:
            self._queued = True
            self._service.turns.push(self)

    def go_on(self, now: float) -> bool:
        """Begin its next message; whether that was a mistake."""
        self._queued = False
        rpc, stake = self._rpc, self._rpc.stake
        if rpc.over or stake is None or self._closing:
            return False
        found = rpc.next_message()
        if found is None:
            if rpc.ended:
                self._read_no_more(None)
            return False
        self._accounts.heard(stake, now)
        failures = self._failures
        self._began = now
        self.take(*found)
        return self._failures > failures

    def keys_changed(self) -> None:
        """Other keys are in force: without its own, it ends at once, and so does what it has begun."""
        if self._rpc.over:
            return
        try:
            self._who = self._holder()
        except CarpoolError as error:
            refuse(self._rpc, error)
            self.left()
            return
        self._asked = read_metadata(self._rpc.head.metadata, self._who, self._rpc.client)

    def take(self, message: Message, compressed: bool) -> None:
        self._unanswered += 1
        self._rpc.owed = self._beginning = True
        self._task = begin_now(self._begin(message, compressed))

    async def _begin(self, message: Message, compressed: bool) -> None:
        rpc, asked = self._rpc, self._asked
        try:
            if compressed:
                message = await rpc.plain(message, compressed)
            deadline = asked.deadline(rpc, self._began)
            call = StreamCall(
                self._service, asked, deadline, self._who, lambda result: self._reply(call, result)
            )
            call.say_part = self._say_part
            call.request.client = call.request.client or rpc.client
            self._waiting.add(call)
            await call.begin(message)
        except Ended:
            self.left()
            return
        except Exception as error:
            self._service.failed(rpc, error)
            self.left()
            return
        self._task = None
        self._beginning = False
        self._heard()

    def stop(self) -> None:
        """The server stops: what was read is answered."""
        self._read_no_more(stopping())

    def _read_no_more(self, refusal: CarpoolError | None) -> None:
        if not self._closing:
            self._closing = True
            self._refusal = refusal
            self._end_if_answered()

    def _end_if_answered(self) -> None:
        if not self._closing or self._unanswered or self.over:
            return
        if self._refusal is None:
            self._rpc.end()
        else:
            refuse(self._rpc, self._refusal)
        self._close()

    # ── answers ──

    def _reply(self, call: StreamCall, result: bytes | LongReply | Failure) -> None:
        self._waiting.discard(call)
        call.forget()
        if isinstance(result, Failure):
            self._failures += 1
            if isinstance(result.error, InvalidInput | NotFound | Unsupported):
                self._rpc.mistake()
            self._say(failed_in_stream(result, call.id), last=True)
        elif isinstance(result, LongReply):
            self._say_long(result)
        else:
            self._say(messages.in_stream(result) if result else b"", last=True)

    def _say_part(self, answer: bytes) -> None:
        if self._unwritten > MOST_UNWRITTEN:
            raise Unavailable(TOO_SLOW, reason="slow-reader")
        self._say(messages.in_stream(answer), last=False)

    def _say_long(self, reply: LongReply) -> None:
        """What has to wait for others is copied: it is not to keep its slot for so long."""
        size = sum(map(len, reply.pieces))
        pieces = [messages.before_in_stream(size), *reply.pieces]
        if self._writing or self._rpc.over or self._rpc.compresses:
            self._say(b"".join(pieces), last=True)
            reply.ended()
        else:
            self._say(LongReply(pieces, reply.ended), last=True)

    def _say(self, answer: bytes | LongReply, *, last: bool) -> None:
        rpc = self._rpc
        if rpc.over:
            return  # no client reads it
        size = _size_of(answer)
        self._unwritten += size
        self._answers.append((answer, last))
        if not self._writing:
            self._writing = True
            self._writer = begin_now(self._write())
        if self._writing and size:  # it has to wait
            stake = rpc.stake
            if stake is not None and not self._accounts.wait(stake, size, monotonic()):
                rpc.give_up()

    async def _write(self) -> None:
        rpc = self._rpc
        try:
            while self._answers:
                answer, last = self._answers.popleft()
                size = _size_of(answer)
                if isinstance(answer, LongReply):
                    await rpc.write_long(*answer)
                elif answer:
                    await rpc.write(answer)
                self._unwritten -= size
                if size and rpc.stake is not None and rpc.stake.unread:
                    self._accounts.read(rpc.stake, size)
                if last:
                    self._one_is_answered()
        except Ended:
            self.left()
        except Exception as error:
            self._service.failed(rpc, error)
            self.left()
        self._writer = None
        self._writing = False

    def _one_is_answered(self) -> None:
        self._unanswered -= 1
        if not self._unanswered:
            self._rpc.owed = False
            self._end_if_answered()
        self._heard()

    # ── the end ──

    def left(self) -> None:
        for task in (self._task, self._writer):
            if task is not None:
                task.cancel()
        self._close()

    def _close(self) -> None:
        """Closes the stream, once. What is still under way is left in a later turn: one of those calls may be
        answering."""
        if self.over:
            return
        self.over = self._closing = True
        self._task = self._writer = None
        self._answers.clear()
        if self._waiting:
            asyncio.get_running_loop().call_soon(_leave, self._waiting)
            self._waiting = set()
        del self._service.streams[self]
        self._service.__exit__()


def _size_of(answer: bytes | LongReply) -> int:
    return sum(map(len, answer.pieces)) if isinstance(answer, LongReply) else len(answer)


def _leave(calls: set[StreamCall]) -> None:
    for call in calls:
        call.request.leave()
        call.forget()


def _nobody(_answer: object) -> None:
    """Does nothing, in place of a callback that was dropped."""
