"""ModelStreamInfer: many requests on one call, answered as they finish.

A request that fails is answered with its error, and the stream stays open. Only a bounded number of requests
is read before their answers are written, so a client that sends and does not read cannot fill the server.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import grpc

from carpool.errors import InvalidInput, Unavailable
from carpool.frontend.access.keys import Principal
from carpool.frontend.grpc.answers import final_parameter, in_stream
from carpool.frontend.grpc.asking import Asking, Metadata, read_metadata
from carpool.frontend.grpc.grpc_inference import Asked, Inference
from carpool.frontend.grpc.grpc_service import Service
from carpool.frontend.grpc.schema import message_class
from carpool.frontend.grpc.statuses import Failure, details_of, metadata_of, refuse
from carpool.frontend.grpc.unary import deadline_of

MOST_UNANSWERED = 256

_ModelStreamInferResponse = message_class("ModelStreamInferResponse")
_FINAL = final_parameter()


class Stream:
    """One call: a task reads requests, another writes answers, and the inferences are in between."""

    def __init__(self, service: Service, metadata: Metadata, who: Principal | None = None) -> None:
        self._service = service
        self._metadata = metadata
        self._who = who
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._room = asyncio.Semaphore(MOST_UNANSWERED)
        self._unanswered = 0
        self._answered = asyncio.Event()
        self._answered.set()
        self._waiting: set[Inference] = set()

    async def run(self, _requests: object, context: Any) -> None:
        with self._service:
            try:
                asking = read_metadata(self._metadata, self._who)
            except InvalidInput as error:
                refuse(context, error)
                return
            if asking.compression is not None:
                context.set_compression(asking.compression)
            if not await self._serve(context, asking):
                refuse(context, Unavailable("the server is stopping", reason="stopping"))

    async def _serve(self, context: Any, asking: Asking) -> bool:
        """Answer everything that is read; False when the server stops before the client is done."""
        reading = asyncio.create_task(self._read(context, asking))
        writing = asyncio.create_task(self._write(context))
        stopping = asyncio.create_task(self._service.stopping.wait())
        tasks = {reading, writing, stopping}
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
            for inference in self._waiting:
                inference.leave()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, context: Any, asking: Asking) -> None:
        while True:
            await self._room.acquire()
            message = await context.read()
            if message is grpc.aio.EOF:
                return
            self._unanswered += 1
            self._answered.clear()
            await self._begin(message, context, asking)

    async def _begin(self, message: bytes, context: Any, asking: Asking) -> None:
        def finish(result: bytes | Failure) -> None:
            self._waiting.discard(inference)
            answer = _failed(result, inference.id) if isinstance(result, Failure) else in_stream(result)
            self._answers.put_nowait(answer)

        now = monotonic()
        asked = Asked(deadline_of(context, now, asking), asking.sender, self._who)
        inference = Inference(self._service, asked, finish, _FINAL)
        self._waiting.add(inference)
        await inference.begin(message)

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
    response.MergeFromString(_FINAL)
    return bytes(message.SerializeToString())
