"""Inference for models that also take pictures: a request may carry them as BYTES in place of a tensor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from carpool.errors import CarpoolError
from carpool.observe.columns import BYTES_RECEIVED, DECODE_SECONDS
from carpool.servers.door import Answer, Slot
from carpool.servers.http.body_slots import no_slots
from carpool.servers.http.inference import Inference
from carpool.servers.http.packing import AT_ONCE
from carpool.servers.pictures.batch import PictureBatch, check_pictures, may_hold_pictures, sends_pictures
from carpool.servers.pictures.models import PictureModel
from carpool.servers.pictures.picture import told
from carpool.servers.pictures.service import promised
from carpool.types import Tensor
from carpool.wire.v2 import check_tail, parse_head, read_header_length


class PictureInference(Inference):
    """As any other inference, unless its head lists BYTES."""

    __slots__ = ("_batch", "_decoded")

    _batch: PictureBatch | None
    _decoded: Callable[[], None]

    def received(self, at: float) -> None:
        slot, end = self._slot, self._route.asked.header_length
        assert slot is not None
        self._batch = None
        if end and may_hold_pictures(bytes(slot.view[:end])):
            body = bytes(slot.view[: self._exchange.head.content_length])
            self._let_go()
            self._look(body, at)
        else:
            super().received(at)

    def collected(self, body: bytes | bytearray, at: float) -> None:
        end = self._route.asked.header_length
        self._batch = None
        if end != 0 and may_hold_pictures(body if end is None else body[:end]):
            self._look(body, at)
        else:
            super().collected(body, at)

    def _look(self, body: bytes | bytearray, at: float) -> None:
        self._arrived = at
        route = self._route
        try:
            self._target = route.current()
            model = route.service.pictures.model(self._target.entry)
            if len(body) <= AT_ONCE:
                self._read(body, read_batch(body, route.asked.header_length, model))
                return
        except CarpoolError as error:
            self._fail(error)
            return
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(route.service.threads, read_batch, body, route.asked.header_length, model)
        work.add_done_callback(partial(self._go_on, partial(self._read, body)))

    def _read(self, body: bytes | bytearray, batch: PictureBatch | None) -> None:
        if batch is None:  # BYTES only in a name
            super().collected(body, self._arrived)
            return
        route = self._route
        service = route.service
        service.server_row.add(BYTES_RECEIVED, self._exchange.head.content_length or len(body))
        entry = self._target.entry
        self._head = batch.asked
        deadline = promised(entry, self._arrived, self._exchange.head_at + route.asked.budget)
        refusal = service.pictures.workers.refuses(entry.name, deadline, self._arrived)
        if refusal is not None:
            raise refusal
        self._outlets = service.memory.outlets(batch.asked.outputs)
        slot = service.door.slot(batch.size)
        if slot is None:
            raise no_slots()
        self._batch = batch
        sender = route.asked.sender.with_options(batch.asked.options)
        self._decoded = service.pictures.frames.enter(entry, sender, partial(self._replaced, batch))
        work = partial(batch.prepare, slot.view, deadline)
        service.pictures.workers.begin(work, partial(self._prepared, slot))

    def _replaced(self, batch: PictureBatch, error: CarpoolError) -> None:
        """A newer frame came before this one was decoded."""
        batch.unwanted = True
        if self._exchange.pending:
            self._fail(error)

    def _prepared(self, slot: Slot, seconds: float | None, error: BaseException | None) -> None:
        batch = self._batch
        assert batch is not None
        self._decoded()
        self._slot = slot  # while the thread wrote to it nobody could give it back
        if not self._exchange.pending:
            self._let_go()
        elif seconds is None:
            self._fail(told(error, self._target.entry.name))
        else:
            self._target.row.observe(DECODE_SECONDS, seconds)
            try:
                self._offer(batch.head, slot, 0)
                self._head = batch.asked
            except CarpoolError as refused:
                self._fail(refused)

    def _done(self, answer: Answer) -> None:
        batch = self._batch
        if batch is None or not batch.wants_answer or answer.error is not None:
            super()._done(answer)
            return
        self._exchange.on_disconnect = None  # the model's work is done: there is nothing left to save
        work = partial(batch.with_answers, answer.outputs)
        self._route.service.pictures.workers.finish(work, partial(self._composed, answer))

    def _composed(self, answer: Answer, outputs: list[Tensor] | None, error: BaseException | None) -> None:
        if outputs is None:
            answer.error = told(error, self._target.entry.name)
        else:
            answer.outputs = outputs
        super()._done(answer)


def read_batch(
    body: bytes | bytearray, header_length: int | None, model: PictureModel
) -> PictureBatch | None:
    """The pictures in a body; None if it has none. Safe in any thread."""
    view = memoryview(body)
    end = len(view) if header_length is None else header_length
    read_header_length(str(end), len(view))
    head = parse_head(view[:end], model.entry.name)
    if not sends_pictures(model.entry, head):
        return None
    check_pictures(model.entry, head)
    check_tail(head, len(view) - end, model.entry.name)
    return PictureBatch(model, head, view[end:])
