"""ModelInfer: one request, one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Any

from carpool.core.job import INFINITY
from carpool.errors import InvalidInput
from carpool.frontend.access.keys import Principal
from carpool.frontend.grpc.asking import Asking, Metadata, read_metadata
from carpool.frontend.grpc.grpc_inference import Asked, Inference
from carpool.frontend.grpc.grpc_service import Service
from carpool.frontend.grpc.statuses import Failure, refuse


def deadline_of(context: Any, head_at: float, asking: Asking) -> float:
    """The client's: that of the call, or the one in its metadata, whichever comes first."""
    remaining = context.time_remaining()
    called = INFINITY if remaining is None else monotonic() + remaining
    return min(called, head_at + asking.budget)


class UnaryInfer:
    """One call. It begins when its head is here, before its message."""

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
                asking = read_metadata(self._metadata, self._who)
            except InvalidInput as error:
                return refuse(context, error)
            if asking.compression is not None:
                context.set_compression(asking.compression)
            asked = Asked(deadline_of(context, self._head_at, asking), asking.sender, self._who)
            result = await self._infer(message, asked)
            if isinstance(result, Failure):
                return refuse(context, result.error, result.times)
            return result

    async def _infer(self, message: bytes, asked: Asked) -> bytes | Failure:
        waiting: asyncio.Future[bytes | Failure] = asyncio.get_running_loop().create_future()
        inference = Inference(self._service, asked, _into(waiting))
        try:
            await inference.begin(message)
            return await waiting
        except asyncio.CancelledError:
            inference.leave()
            raise


def _into(waiting: asyncio.Future[bytes | Failure]) -> Callable[[bytes | Failure], None]:
    def finish(result: bytes | Failure) -> None:
        if not waiting.done():  # cancelled, but the call has not heard of it yet
            waiting.set_result(result)

    return finish
