"""A front end's door and an engine's side in one process, joined by a real link."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import uvloop

from carpool.engine.engine_link import EngineLink, EngineSide
from carpool.frontend.front_link import RemoteCall
from carpool.frontend.link_client import LinkClient
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer, Ask, Handling
from carpool.link.senders import Sender
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.types import Array, InferRequest, RequestOptions, Tensor
from carpool.wire.v2 import RequestHead, encode_request, read_head
from heard import Heard
from link.echo import EchoEngine
from waiting import until_in_loop as until

MAX_ANSWER = 4 << 20
LONG = 40.0
T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    return uvloop.run(asyncio.wait_for(main, 180.0))


@dataclass
class Asked:
    """One inference as a test sees it."""

    call: RemoteCall
    answers: list[Answer] = field(default_factory=list)
    parts: list[Answer] = field(default_factory=list)

    async def answer(self) -> Answer:
        await until(lambda: self.answers)
        (answer,) = self.answers
        return answer

    async def output(self) -> Any:
        answer = await self.answer()
        assert answer.error is None, answer.error
        values = np.array(answer.outputs[0].data).tolist()
        self.call.release()
        return values


class Client:
    """Asks through a door."""

    def __init__(self, door: LinkClient, arena: int) -> None:
        self.door = door
        self.arena = arena  # its file, kept for the next engine

    def model(self, name: str) -> ModelEntry:
        return self.door.catalog.newest[name]

    def infer(
        self,
        model: str | ModelEntry,
        x: Array,
        source: str = "",
        *,
        options: RequestOptions | None = None,
        parts: bool = False,
    ) -> Asked:
        entry = self.model(model) if isinstance(model, str) else model
        body, head, tail = packed(entry, x, options)
        slot = self.door.slot(len(body))
        assert slot is not None
        slot.view[:] = body
        heard = Heard()
        sender = Sender(source).with_options(head.options)
        ask = Ask(entry, head, slot, tail, time.monotonic(), sender=sender, handling=Handling(in_parts=parts))
        return Asked(self.door.infer(ask, heard), heard.answers, heard.parts)


def packed(
    entry: ModelEntry, x: Array, options: RequestOptions | None = None
) -> tuple[bytes, RequestHead, int]:
    """A body as a client sends it, its parsed head and where its tensors begin."""
    spec = entry.signature.inputs[0]
    tensor = Tensor(spec.name, spec.datatype, x.shape, x)
    request = InferRequest(entry.name, [tensor], options=options or RequestOptions(), binary_output=True)
    encoded = encode_request(request)
    body = b"".join(encoded.buffers)
    tail = encoded.header_length or 0
    return body, read_head(body[:tail], entry.signature), tail


@dataclass
class Joined:
    engine: EchoEngine
    side: EngineSide
    dropped: list[int]
    clients: list[Client] = field(default_factory=list)

    async def door(self, size: int = 64 << 20, broken: Callable[[], None] = lambda: None) -> Client:
        """One more front end."""
        arena = create_memory("test-arena", size)
        door = LinkClient(Arena(map_memory(arena)), max_answer_bytes=MAX_ANSWER, broken=broken)
        client = Client(door, arena)
        self.clients.append(client)
        await self.connect(client)
        await until(lambda: door.serving)
        return client

    async def connect(self, client: Client) -> EngineLink:
        ours, theirs = socket.socketpair()
        await client.door.attach(theirs)
        return await self.side.attach(7, ours, os.dup(client.arena))

    async def raw(self, size: int = 1 << 20) -> tuple[socket.socket, EngineLink]:
        """A front end that a test plays itself, on a bare socket."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        link = await self.side.attach(13, ours, create_memory("test-arena", size))
        return theirs, link


@asynccontextmanager
async def joined() -> AsyncIterator[Joined]:
    dropped: list[int] = []
    engine = EchoEngine()
    side = EngineSide(engine, max_answer_bytes=MAX_ANSWER, dropped=dropped.append)
    together = Joined(engine, side, dropped)
    try:
        yield together
    finally:
        side.close()
        for client in together.clients:
            client.door.close()
            os.close(client.arena)
        await until(lambda: not side.links)
        await until(lambda: not any(client.door._link for client in together.clients))
