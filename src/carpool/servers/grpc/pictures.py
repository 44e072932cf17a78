"""Pictures in place of a tensor: decoded into a slot, and answered for, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from carpool.errors import CarpoolError
from carpool.observe.columns import DECODE_SECONDS
from carpool.observe.counters import Row
from carpool.servers.asked_fields import Sender
from carpool.servers.door import Answer, ModelEntry, Slot
from carpool.servers.grpc.service import Service
from carpool.servers.http.body_slots import no_slots
from carpool.servers.pictures.batch import PictureBatch
from carpool.servers.pictures.picture import told
from carpool.servers.pictures.service import promised
from carpool.types import Tensor
from carpool.wire.v2 import Buffer, RequestHead

Close = Callable[[Answer], None]


async def prepare(
    service: Service,
    entry: ModelEntry,
    row: Row,
    head: RequestHead,
    tail: Buffer,
    arrived: float,
    deadline: float,
    sender: Sender,
) -> tuple[PictureBatch, Slot]:
    """A slot that holds the inputs. Whoever stops waiting loses it: the thread gives it back."""
    until = promised(entry, arrived, deadline)
    workers = service.pictures.workers
    refusal = workers.refuses(entry.name, until, arrived)
    if refusal is not None:
        raise refusal
    model = service.pictures.model(entry)
    batch = await service.aside(len(tail), PictureBatch, model, head, tail)
    slot = service.door.slot(batch.size)
    if slot is None:
        raise no_slots()
    ready: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def then(seconds: float | None, error: BaseException | None) -> None:
        if seconds is None or ready.done():
            slot.release()
        if ready.done():
            return
        if seconds is None:
            ready.set_exception(told(error, entry.name))
        else:
            ready.set_result(seconds)

    def replaced(error: CarpoolError) -> None:
        batch.unwanted = True
        if not ready.done():
            ready.set_exception(error)

    decoded = service.pictures.frames.enter(entry, sender, replaced)
    try:
        workers.begin(partial(batch.prepare, slot.view, until), then)
        row.observe(DECODE_SECONDS, await ready)
    finally:
        decoded()
    return batch, slot


def compose(service: Service, entry: ModelEntry, batch: PictureBatch, answer: Answer, close: Close) -> None:
    """Add the answers to the outputs, then go on."""

    def then(outputs: list[Tensor] | None, error: BaseException | None) -> None:
        if outputs is None:
            answer.error = told(error, entry.name)
        else:
            answer.outputs = outputs
        close(answer)

    service.pictures.workers.finish(partial(batch.with_answers, answer.outputs), then)
