"""Inference for models that also take pictures: a request may carry them as BYTES in place of a tensor."""

from __future__ import annotations

import asyncio
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from carpool.errors import CarpoolError
from carpool.frontend.http.body_slots import no_slots
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_inference import Inference
from carpool.frontend.http.packing import AT_ONCE
from carpool.frontend.pictures.picture import told
from carpool.frontend.pictures.picture_batch import (
    PictureBatch,
    check_pictures,
    may_hold_pictures,
    sends_pictures,
)
from carpool.frontend.pictures.picture_decoding import Decoding
from carpool.frontend.pictures.picture_models import PictureModel
from carpool.frontend.pictures.picture_service import promised
from carpool.link.door import Answer, Slot
from carpool.observe.columns import BYTES_RECEIVED, DECODE_SECONDS
from carpool.types import Tensor, Timing
from carpool.wire.v2 import check_tail, parse_head, read_header_length

if TYPE_CHECKING:
    from carpool.frontend.http.infer import InferRoute, Target


class PictureInference(Inference):
    """As any other inference, unless its head lists BYTES."""

    __slots__ = ("_batch", "_decoding")

    def __init__(self, route: InferRoute, exchange: Exchange, target: Target, slot: Slot | None) -> None:
        super().__init__(route, exchange, target, slot)
        self._batch: PictureBatch | None = None
        self._decoding: Decoding[float] | None = None

    def received(self, at: float) -> None:
        slot, end = self._slot, self._route.asked.header_length
        assert slot is not None
        if end and may_hold_pictures(bytes(slot.view[:end])):
            body = bytes(slot.view[: self._exchange.head.content_length])
            self._let_go()
            self._look(body, at)
        else:
            super().received(at)

    def collected(self, body: bytes | bytearray, at: float) -> None:
        end = self._route.asked.header_length
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
        service = self._route.service
        service.server_row.add(BYTES_RECEIVED, self._exchange.head.content_length or len(body))
        entry = self._target.entry
        self._head = batch.asked
        deadline = promised(entry, self._arrived, self._exchange.head_at + self._route.asked.budget)
        if not batch.is_file:
            refusal = service.pictures.cannot_decode(entry, deadline, self._arrived, batch.weight)
            if refusal is not None:
                raise refusal
        self._outlets = service.memory.outlets(batch.asked.outputs)
        slot = self._slot = service.door.slot(batch.size)
        if slot is None:
            raise no_slots()
        self._batch = batch
        if batch.is_file:
            batch.put_file(slot.view)
            self._offer(batch.head, slot, 0)
        else:
            self._decode(batch, slot, deadline)
        self._head = batch.asked

    def _decode(self, batch: PictureBatch, slot: Slot, deadline: float) -> None:
        """Offered at once, decoded when it is let in."""
        work = partial(batch.prepare, slot.view)
        workers = self._route.service.pictures.workers
        decoding = Decoding(workers, slot, work, self._prepared, deadline, batch.weight)
        self._offer(batch.head, slot, 0, decoding.ready_in, decoding.admitted)
        assert self._call is not None
        decoding.call = self._call
        self._decoding = decoding

    def _prepared(self, seconds: float | None, error: BaseException | None) -> None:
        """The call has the slot now; without tensors in it, it was cancelled."""
        self._decoding = None
        if seconds is None:
            self._call = None
            self._fail(told(error, self._target.entry.name), Timing())
        else:
            self._target.row.observe(DECODE_SECONDS, seconds)
            self._offered = monotonic()

    def _stop_decoding(self) -> None:
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            decoding.stop()

    def _left(self) -> None:
        self._stop_decoding()
        super()._left()

    def _done(self, answer: Answer) -> None:
        batch = self._batch
        self._stop_decoding()  # refused, or given up, before it was decoded
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
