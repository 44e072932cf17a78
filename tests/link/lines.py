"""A front end that speaks lines, and a server of them: what the supervisor's tests start and shoot at.

infer SOURCE NUMBER…    the numbers again, or `error REASON`
ask WHAT                what the engine says
status                  what this front end knows
lie                     breaks the protocol of the link
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError
from carpool.link.engine_client import Answer, Ask
from carpool.link.senders import Sender
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.logs import configure
from carpool.process.children import FrontendParts
from carpool.process.supervisor import FrontendKind, Supervisor
from heard import Heard
from link.joined import packed
from waiting import until_in_loop as until


class LineFrontend:
    def __init__(self, parts: FrontendParts) -> None:
        self._parts = parts
        self._door = parts.engine_client
        self._server: asyncio.Server
        self._of_others: dict[int, list[asyncio.Server]] = {}
        self._busy = 0
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listening)

    async def help(self, other: int, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        for server in self._of_others.pop(other, ()):
            server.close()
        made = [await asyncio.start_server(self._serve, sock=sock) for sock in sockets["http"]]
        self._of_others[other] = made

    async def stop(self, within_s: float) -> int:
        """Connections stay open while any request is under way."""
        self._server.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await until(lambda: not self._busy)
        for writer in self._writers:
            writer.close()
        return self._busy

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                self._busy += 1
                try:
                    answer = await self._answer(line.decode().split())
                except CarpoolError as error:
                    answer = f"error {error.reason}"
                finally:
                    self._busy -= 1
                writer.write(f"{answer}\n".encode())
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, words: list[str]) -> str:
        door = self._door
        if words[0] == "infer":
            return await self._infer(words[1], [float(word) for word in words[2:]])
        if words[0] == "ask":
            return json.dumps(await door.ask(words[1], {}))
        if words[0] == "lie":
            assert door._link is not None
            door._link._outbox.put(b"\xff" * 640)
            return "lied"
        return json.dumps(
            {
                "pid": os.getpid(),
                "serving": door.serving,
                "ready": door.catalog.ready,
                "slots": door.arena.slots_used,
                "restarts": {word: self._parts.table.server()[column] for word, column in RESTARTS.items()},
            }
        )

    async def _infer(self, source: str, numbers: list[float]) -> str:
        if not self._door.serving:
            return "error not-serving"
        entry = self._door.catalog.newest["fixed"]
        body, head, tail = packed(entry, np.array([numbers], np.float32))
        slot = self._door.slot(len(body))
        assert slot is not None
        slot.view[:] = body
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        ask = Ask(entry, head, slot, tail, time.monotonic(), sender=Sender(source))
        call = self._door.infer(ask, Heard(answered.set_result))
        answer = await answered
        try:
            if answer.error is not None:
                return f"error {answer.error.reason}"
            return " ".join(f"{number:g}" for number in answer.outputs[0].data[0])
        finally:
            call.release()


async def start(parts: FrontendParts) -> LineFrontend:
    frontend = LineFrontend(parts)
    await frontend.start(parts.sockets["http"][0])
    return frontend


async def start_late(parts: FrontendParts) -> LineFrontend:
    """The engine became ready while this was prepared, and nothing of the link was read meanwhile."""
    up = parts.table.block(parts.block).server
    up.set(UP, 1.0)
    await parts.until_catalogued()
    up.set(UP, 0.0)
    return await start(parts)


async def start_aside(parts: FrontendParts) -> LineFrontend:
    frontend = LineFrontend(parts)
    await frontend.start(parts.sockets["grpc"][0])
    return frontend


async def fail(_parts: FrontendParts) -> LineFrontend:
    raise RuntimeError("no camera")


def main() -> int:
    given: dict[str, Any] = json.loads(sys.argv[1])
    paths, engine, frontend = given.pop("paths"), given.pop("engine"), given.pop("frontend")
    aside = given.pop("aside")
    settings = ServerSettings(host="127.0.0.1", slots=64, slot_bytes=65536, log_format="json", **given)
    configure(settings.log_format, settings.log_level)
    kind = FrontendKind("http", frontend, settings.frontends, {"http": settings.http_port})

    kinds = [kind, *([FrontendKind("grpc", aside, 1, {"grpc": 0}, vital=False)] if aside else ())]

    async def run() -> int:
        return await Supervisor(settings, paths, engine=engine, frontends=kinds).run()

    return asyncio.run(run())


if __name__ == "__main__":
    sys.exit(main())
