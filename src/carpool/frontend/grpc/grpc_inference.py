"""One inference over gRPC: from its message, over a slot and the door, to its answer: the hot path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import NamedTuple

from carpool.errors import CarpoolError, TooLarge, without_stack
from carpool.frontend.access.guard import check_model
from carpool.frontend.access.keys import Principal
from carpool.frontend.client_memory import Fetch, Outlets, names_regions
from carpool.frontend.grpc.answers import encode_answer, list_outputs
from carpool.frontend.grpc.grpc_families import Family, input_bytes, parse_rest, read_family
from carpool.frontend.grpc.grpc_pictures import compose
from carpool.frontend.grpc.grpc_service import Service, log
from carpool.frontend.grpc.parts import Parts, check_text, parse_whole, take_apart
from carpool.frontend.grpc.statuses import Failure
from carpool.frontend.http.body_slots import no_slots
from carpool.frontend.http.packing import AT_ONCE, check, is_in_place
from carpool.frontend.model_lookup import not_serving
from carpool.frontend.pictures.picture import told
from carpool.frontend.pictures.picture_batch import PictureBatch, check_pictures, sends_pictures
from carpool.frontend.pictures.picture_decoding import Decoding
from carpool.frontend.pictures.picture_service import promised
from carpool.frontend.server_timing import Times, times_of
from carpool.link.asked_fields import Sender
from carpool.link.door import Answer, Call, ModelEntry, Slot
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT, DECODE_SECONDS, REQUEST_SECONDS
from carpool.observe.counters import Row, count_failure
from carpool.types import Timing
from carpool.wire.v2 import Placed, RequestHead, check_head

_NONE_PLACED: Mapping[str, Placed] = {}
_LEFT = asyncio.CancelledError("the client left")


class Asked(NamedTuple):
    """What a call says beside its message."""

    deadline: float
    sender: Sender
    who: Principal | None = None  # whose key it brings


class Inference:
    """One request. `finish` gets the answer or the failure, once, unless the client has left."""

    __slots__ = (
        *("_arrived", "_batch", "_call", "_decoding", "_entry", "_finish", "_head", "_more", "_offered"),
        "_outlets",
        *("_over", "_row", "_service", "_slot", "asked", "id"),
    )

    def __init__(
        self, service: Service, asked: Asked, finish: Callable[[bytes | Failure], None], more: bytes = b""
    ) -> None:
        self.asked = asked
        self.id = b""
        self._service = service
        self._finish = finish
        self._more = more  # parameters of the answer
        self._arrived = self._offered = monotonic()
        self._row: Row | None = None  # once it is known whose counters this belongs to
        self._entry: ModelEntry
        self._head: RequestHead
        self._slot: Slot | None = None
        self._call: Call | None = None
        self._outlets: Outlets | None = None  # for outputs that the client wants in its own memory
        self._batch: PictureBatch | None = None  # of a request with pictures in place of a tensor
        self._decoding: Decoding[float] | None = None
        self._over = False

    # ── the request ──

    async def begin(self, message: bytes) -> None:
        """Understand the request and give it to the engine. Waits only for what is not done in the loop."""
        self._service.server_row.add(BYTES_RECEIVED, len(message))
        try:
            if not self._service.door.serving:
                raise not_serving()
            parts = take_apart(message)
            if parts is None:
                parts = await self._service.aside(len(message), parse_whole, message)
            family = await self._understood(parts)
            check_model(self.asked.who, family.model)
            try:
                await self._offer(family, parts)
            except CarpoolError as error:
                source = self.asked.sender.source or self._head.options.source
                self._service.door.turned_away(self._entry, error, self._arrived, self._head.batch, source)
                raise
        except CarpoolError as error:
            self._fail(error)
        except Exception as error:
            self._fail_unexpectedly(error)

    async def _understood(self, parts: Parts) -> Family:
        """What it asks for, of which model. From here on this is its model, whatever is loaded meanwhile."""
        service = self._service
        self.id = parts.id
        family = service.families.find(parts)
        if not self.id.isascii():
            check_text(self.id)
        if family is None:
            request = await service.aside(len(parts.rest), parse_rest, parts)
            self._look_up(request.model_name, request.model_version)
            family = await service.aside(len(parts.rest), read_family, request, parts.contents)
            self._check(family)
            service.families.keep(parts, family)
        elif family.catalog is not service.door.catalog:
            self._check(family)
        self._entry, self._row, self._head = family.entry, family.row, family.head
        return family

    def _check(self, family: Family) -> None:
        """Against the model as it is now."""
        family.entry, family.row = self._look_up(family.model, family.version)
        if sends_pictures(family.entry, family.head):
            check_pictures(family.entry, family.head)
        else:
            check_head(family.head, family.entry.signature)
        family.catalog = self._service.door.catalog

    def _look_up(self, model: str, version: str) -> tuple[ModelEntry, Row]:
        entry = self._service.look_up(model, version)
        row = self._row = self._service.row(entry)
        return entry, row

    async def _offer(self, family: Family, parts: Parts) -> None:
        """Into a slot, and through the door."""
        service, head = self._service, self._head
        sender = self.asked.sender.with_options(head.options)
        if not (head.options.priority or sender.priority):  # else only the engine can say
            refusal = service.door.refuses(self._entry, self.asked.deadline, self._arrived, sender)
            if refusal is not None:
                raise refusal
        if head.tail_size > service.max_body_bytes:
            raise TooLarge(
                f"the inputs take {head.tail_size} bytes, more than the {service.max_body_bytes} allowed"
            )
        if sends_pictures(self._entry, head):
            await self._offer_pictures(family, parts)
            return
        fetch = None if family.is_plain or not names_regions(head) else service.memory.fetch(head)
        slot = self._slot = service.door.slot(head.tail_size if fetch is None else fetch.size)
        if slot is None:
            raise no_slots()
        position, view = 0, slot.view
        for piece in input_bytes(family, parts):
            end = position + len(piece)
            view[position:end] = piece
            position = end
        if not family.is_plain:
            head = await self._checked(head, fetch, slot)
            self._renew(family)
        self._infer(head, slot)

    async def _offer_pictures(self, family: Family, parts: Parts) -> None:
        """Offered at once, decoded when they are let in."""
        service, entry = self._service, self._entry
        tail = b"".join(input_bytes(family, parts))
        until = promised(entry, self._arrived, self.asked.deadline)
        model = service.pictures.model(entry)
        batch = await service.aside(len(tail), PictureBatch, model, self._head, tail)
        if not batch.is_file:
            refusal = service.pictures.cannot_decode(entry, until, self._arrived, batch.weight)
            if refusal is not None:
                raise refusal
        slot = self._slot = service.door.slot(batch.size)
        if slot is None:
            raise no_slots()
        self._batch = batch
        self._outlets = service.memory.outlets(self._head.outputs)
        self._renew(family)
        if batch.is_file:
            batch.put_file(slot.view)
            self._infer(batch.head, slot)
            return
        work = partial(batch.prepare, slot.view)
        decoding = Decoding(service.pictures.workers, slot, work, self._prepared, until, batch.weight)
        self._infer(batch.head, slot, decoding.ready_in, decoding.admitted)
        assert self._call is not None
        decoding.call = self._call
        self._decoding = decoding

    def _prepared(self, seconds: float | None, error: BaseException | None) -> None:
        """The call has the slot now; without tensors in it, it was cancelled."""
        self._decoding = None
        if seconds is None:
            self._call = None
            self._fail(told(error, self._entry.name))
        else:
            assert self._row is not None
            self._row.observe(DECODE_SECONDS, seconds)
            self._offered = monotonic()

    def _stop_decoding(self) -> None:
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.stop()

    def _renew(self, family: Family) -> None:
        """Threads take their time: meanwhile a model may have been replaced by one that takes the same."""
        if family.catalog is self._service.door.catalog:
            return
        with contextlib.suppress(CarpoolError):
            entry = self._service.look_up(family.model, family.version)
            if entry.signature.is_like(self._entry.signature):
                self._entry, self._row = entry, self._service.row(entry)

    async def _checked(self, head: RequestHead, fetch: Fetch | None, slot: Slot) -> RequestHead:
        """Not every sequence of bytes is BYTES or BOOL, and some inputs are still in the client's memory."""
        size = 0 if is_in_place(head) else head.tail_size
        view = slot.view
        await self._with_slot(slot, size, check, head, view[: head.tail_size])
        if fetch is None:
            return head
        self._outlets = fetch.outlets
        await self._with_slot(slot, AT_ONCE + 1 if fetch.takes_long else 0, fetch.into, view)
        return fetch.head

    async def _with_slot(
        self, slot: Slot, size: int, function: Callable[..., None], *arguments: object
    ) -> None:
        """A thread that uses the slot keeps it, even when nobody waits for the answer any more."""
        if size <= AT_ONCE:
            function(*arguments)
            return
        work = asyncio.get_running_loop().run_in_executor(self._service.threads, function, *arguments)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._slot = None
            work.add_done_callback(partial(_release, slot))
            raise

    def _infer(
        self,
        head: RequestHead,
        slot: Slot,
        ready_in: float | None = None,
        admitted: Callable[[], None] | None = None,
    ) -> None:
        entry, options, asked = self._entry, head.options, self.asked
        deadline = asked.deadline
        if options.timeout is not None and entry.mode != "knobs":
            deadline = min(deadline, self._arrived + options.timeout)
        self._offered = monotonic()
        self._call = self._service.door.infer(
            entry,
            head,
            slot,
            0,
            self._done,
            arrived=self._arrived,
            deadline=deadline,
            sender=asked.sender.with_options(options),
            ready_in=ready_in,
            admitted=admitted,
        )
        self._slot = None

    # ── the answer ──

    def _done(self, answer: Answer) -> None:
        call, self._call = self._call, None
        self._stop_decoding()  # refused, or given up, before it was decoded
        assert call is not None
        go_on = partial(self._put_out, call, monotonic())
        if self._batch is None or not self._batch.wants_answer or answer.error is not None:
            go_on(answer)
        else:
            compose(self._service, self._entry, self._batch, answer, go_on)

    def _put_out(self, call: Call, done_at: float, answer: Answer) -> None:
        """Write outputs that are wanted there to the client's own memory, long ones in a thread."""
        outlets = self._outlets
        if outlets is None or answer.error is not None:
            self._close(answer, call, done_at)
            return

        def written(placed: Callable[[], Mapping[str, Placed]] | None) -> None:
            if placed is None:
                call.release()
            else:
                self._close(answer, call, done_at, placed)

        outlets.put(answer.outputs, self._entry, self._service.threads, written)

    def _close(
        self,
        answer: Answer,
        call: Call,
        done_at: float,
        placed: Callable[[], Mapping[str, Placed]] = lambda: _NONE_PLACED,
    ) -> None:
        """Answer, and give back the slots. Never raises, since others wait behind it."""
        try:
            if answer.error is None:
                self._answer(answer, done_at, placed())
            else:
                self._fail(answer.error, answer.timing)
            answer.left()  # how long its request was unread, the library does not tell
        except CarpoolError as error:
            self._fail(error, answer.timing)
        except Exception as error:
            self._fail_unexpectedly(error)
        finally:
            call.release()

    def _answer(self, answer: Answer, done_at: float, placed: Mapping[str, Placed]) -> None:
        service, entry, row = self._service, self._entry, self._row
        assert row is not None
        listed = list_outputs(entry, self._head.outputs, answer.outputs, placed)
        now = monotonic()
        times = self._times(answer.timing, now - done_at)
        response = encode_answer(entry, self.id, listed, times, self._more)
        service.server_row.add(BYTES_SENT, len(response))
        row.observe(REQUEST_SECONDS, now - self._arrived)
        if service.tracer.on:
            head = replace(self._head, id=self.id.decode())
            service.tracer.answered(entry, head, answer.timing, self._arrived, self._offered, now)
        self._end(response)

    def _times(self, timing: Timing, post: float) -> Times:
        return times_of(timing, self._offered - self._arrived, post)

    def _fail(self, error: CarpoolError, timing: Timing | None = None) -> None:
        self._release_slot()
        if not self._over:
            self._count(error)
            self._end(Failure(error, None if timing is None else self._times(timing, 0.0)))

    def _fail_unexpectedly(self, error: Exception) -> None:
        """A bug: it must not reach whoever called, which serves others too."""
        log.exception("request-failed", id=self.id.decode(errors="replace")[:80])
        self._fail(CarpoolError(f"the server failed on this request: {type(error).__name__}"))
        without_stack(error)

    def leave(self) -> None:
        """The client has gone: `finish` is not called any more, and what has not started is not run."""
        call, self._call = self._call, None
        self._stop_decoding()
        if call is not None:
            call.cancel()
        self._release_slot()
        if not self._over:
            self._over = True
            self._count(_LEFT)

    def _end(self, result: bytes | Failure) -> None:
        if not self._over:
            self._over = True
            self._finish(result)

    def _count(self, error: BaseException) -> None:
        """A failure, if it is known whose."""
        if self._row is not None:
            count_failure(self._row, error, monotonic() - self._arrived)

    def _release_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            slot.release()


def _release(slot: Slot, _work: object) -> None:
    slot.release()
