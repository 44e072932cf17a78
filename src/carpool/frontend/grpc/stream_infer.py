"""ModelStreamInfer. A stream answers its requests as they finish; one that fails is answered with its error,
and the stream stays open. Only a bounded number of requests is read before their answers are written, so a
client that sends and does not read cannot fill the server. A request for a decoupled model has any number of
answers, and each says whether it is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from carpool.cache.answer_store import Kept
from carpool.errors import CarpoolError, InvalidInput, NotFound, Unavailable, Unsupported
from carpool.frontend.access.guard import Guard
from carpool.frontend.access.keys import Principal
from carpool.frontend.grpc import infer_messages as messages
from carpool.frontend.grpc.grpc_infer import Asked, GrpcCall, Reply, read_metadata
from carpool.frontend.grpc.grpc_service import (
    Failure,
    Service,
    failed_in_stream,
    refuse,
)
from carpool.frontend.grpc.infer_messages import FINAL_PARAMETER, NOT_FINAL_PARAMETER
from carpool.frontend.grpc.rpc import TOO_SLOW, Message, Rpc
from carpool.frontend.pictures.workers import stopping
from carpool.link.door import Answer
from carpool.link.step_times import in_words, there
from carpool.observe.columns import BYTES_SENT
from carpool.types import StepTiming, Timing
from carpool.wire.v2 import Buffer, Placed

MOST_UNANSWERED = 256
MOST_UNWRITTEN = 16 << 20
"""Bytes of answers that a stream's client has not read: beyond them the next piece of a request cuts that
request off. What there is already waits, as long as its client's account allows."""
EMPTY_FINAL = "triton_enable_empty_final_response"
"""A client's wish to be told of the end of a request also where no answer says so."""


class StreamCall(GrpcCall):
    __slots__ = ("_ended", "_last", "say_part")

    one_answer = ""
    say_part: Callable[[bytes], None]

    def __init__(
        self, service: Service, asked: Asked, deadline: float, who: Principal | None, reply: Reply
    ) -> None:
        super().__init__(service, asked, deadline, who, reply, FINAL_PARAMETER)
        self._ended = False  # an answer has said that it is the last
        self._last: Answer | None = None  # of a text: it waits for the times, which come right behind it

    def _write_part(self, answer: Answer) -> None:
        self._ended = answer.last
        if answer.last and self.entry.writes:
            self._last = answer
        else:
            self.say_part(self._part_of(answer, None))

    def _write(self, answer: Answer, placed: Mapping[str, Placed], kept: Kept | None = None) -> None:
        if not self.entry.decoupled:
            super()._write(answer, placed, kept)
        elif self._last is not None:
            self._reply(self._part_of(self._last, answer.timing))
        elif self.head.options.custom.get(EMPTY_FINAL) is True and not self._ended:
            self._reply(self._part_of(Answer(last=True), answer.timing))
        else:
            self._reply(b"")

    def _part_of(self, answer: Answer, timing: Timing | None) -> bytes:
        """One answer; with `timing`, the last. It has those outputs that are wanted and that it brings."""
        more = FINAL_PARAMETER if answer.last else NOT_FINAL_PARAMETER
        wanted, times = self.head.outputs, None
        listed: Sequence[tuple[bytes, Buffer]] = ()
        asked = there(wanted, answer.outputs)
        if asked or not wanted:
            listed = messages.list_outputs(self.entry, asked, answer.outputs, {})
        if timing is not None:
            times = self._times(timing)
            if isinstance(timing, StepTiming) and timing.steps:
                more += messages.text_parameter("carpool_steps", in_words(timing))
        response = messages.encode_answer(self.entry, self.id, listed, times, more)
        self.service.server_row.add(BYTES_SENT, len(response))
        return response


class Stream:
    """One call of ModelStreamInfer: a task reads requests, another writes answers, and the calls are in
    between. `guard` may come to know other keys while it is open: `holder` then says whose key it brought."""

    def __init__(
        self,
        service: Service,
        rpc: Rpc,
        who: Principal | None,
        guard: Guard,
        holder: Callable[[], Principal | None],
    ) -> None:
        self._service = service
        self._rpc = rpc
        self._who = who
        self._guard = guard
        self._keys = guard.generation
        self._holder = holder
        self._locked_out: CarpoolError | None = None
        self._answers: asyncio.Queue[tuple[bytes, bool]] = asyncio.Queue()  # and whether one is the last
        self._unwritten = 0  # bytes of those
        self._accounts = service.accounts
        self._room = asyncio.Semaphore(MOST_UNANSWERED)
        self._unanswered = 0
        self._failures = 0
        self._answered = asyncio.Event()
        self._answered.set()
        self._waiting: set[GrpcCall] = set()

    async def run(self) -> None:
        rpc = self._rpc
        with self._service:
            try:
                asked = read_metadata(rpc.head.metadata, self._who)
            except InvalidInput as error:
                refuse(rpc, error)
                return
            rpc.compress = asked.compression
            if not await self._serve(asked):
                refuse(rpc, stopping())
            elif self._locked_out is not None:
                refuse(rpc, self._locked_out)

    async def _serve(self, asked: Asked) -> bool:
        """Answer everything that is read; False when the server stops before the client is done."""
        reading = asyncio.create_task(self._read(asked))
        writing = asyncio.create_task(self._write())
        stop = asyncio.create_task(self._service.stopping.wait())
        tasks = {reading, writing, stop}
        ended, failure = False, None  # no finally: compiled code forgets what was raised when it waits there
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = reading.done()
            reading.cancel()
            emptied = asyncio.create_task(self._answered.wait())
            tasks.add(emptied)
            await asyncio.wait({emptied, writing}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            failure = error
        for task in tasks:
            task.cancel()
        for call in self._waiting:
            call.leave()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._answers = asyncio.Queue()  # what nobody has read is not kept by a frame that is left behind
        self._waiting = set()
        try:
            if failure is not None:
                raise failure
        finally:
            failure = None  # or it and this frame would keep each other
        return ended

    async def _read(self, asked: Asked) -> None:
        turns = self._service.turns
        while True:
            await self._room.acquire()
            message = await self._rpc.read()
            if message is None:
                return
            stake = self._rpc.stake
            account = None if stake is None else stake.account
            if stake is None or account is None:
                return  # it is being given up
            began = await turns.begin(account)
            self._accounts.heard(stake, began)
            if self._guard.generation != self._keys:
                try:
                    self._who = self._holder()
                except CarpoolError as error:
                    self._locked_out = error
                    return
                self._keys = self._guard.generation
                asked = read_metadata(self._rpc.head.metadata, self._who)
            self._unanswered += 1
            self._answered.clear()
            self._rpc.owed = True
            failures = self._failures
            await self._begin(message, asked, asked.deadline(self._rpc, began))
            turns.ended(account, monotonic() - began, failed=self._failures > failures)

    async def _begin(self, message: Message, asked: Asked, deadline: float) -> None:
        def reply(result: bytes | Failure) -> None:
            self._waiting.discard(call)
            if isinstance(result, Failure):
                self._failures += 1
                if isinstance(result.error, InvalidInput | NotFound | Unsupported):
                    self._rpc.mistake()
                self._say(failed_in_stream(result, call.id), last=True)
            else:
                self._say(messages.in_stream(result) if result else b"", last=True)

        call = StreamCall(self._service, asked, deadline, self._who, reply)
        call.say_part = self._say_part
        call.wish = asked.wish
        call.address = self._rpc.client
        self._waiting.add(call)
        await call.begin(message)

    def _say_part(self, answer: bytes) -> None:
        if self._unwritten > MOST_UNWRITTEN:
            raise Unavailable(TOO_SLOW, reason="slow-reader")
        self._say(messages.in_stream(answer), last=False)

    def _say(self, answer: bytes, *, last: bool) -> None:
        if self._rpc.over:
            return  # nobody hears it
        self._unwritten += len(answer)
        self._answers.put_nowait((answer, last))
        stake = self._rpc.stake
        if answer and stake is not None and not self._accounts.wait(stake, len(answer), monotonic()):
            self._rpc.give_up()

    async def _write(self) -> None:
        while True:
            answer, last = await self._answers.get()
            if answer:
                await self._rpc.write(answer)
                self._unwritten -= len(answer)
                if self._rpc.stake is not None:
                    self._accounts.read(self._rpc.stake, len(answer))
            if not last:
                continue
            self._room.release()
            self._unanswered -= 1
            if not self._unanswered:
                self._rpc.owed = False
                self._answered.set()
