"""Pictures in place of a tensor: answered for in threads, as their tensors are made in threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from carpool.frontend.grpc.grpc_service import Service
from carpool.frontend.pictures.picture import told
from carpool.frontend.pictures.picture_batch import PictureBatch
from carpool.link.door import Answer, ModelEntry
from carpool.types import Tensor

Close = Callable[[Answer], None]


def compose(service: Service, entry: ModelEntry, batch: PictureBatch, answer: Answer, close: Close) -> None:
    """Add the answers to the outputs, then go on."""

    def then(outputs: list[Tensor] | None, error: BaseException | None) -> None:
        if outputs is None:
            answer.error = told(error, entry.name)
        else:
            answer.outputs = outputs
        close(answer)

    service.pictures.workers.finish(partial(batch.with_answers, answer.outputs), then)
