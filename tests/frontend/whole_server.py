"""Engine and HTTP front end in one process, as `--frontends 0` runs them, on a loop of their own thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from carpool.config.server import ServerSettings
from carpool.engine.control.engine_questions import ControlDesk
from carpool.engine.engine_host import EngineHost
from carpool.process import lone_server, start
from frontend.http.harness import Client

T = TypeVar("T")
PATIENCE_S = 60.0


@dataclass
class WholeServer:
    port: int
    desk: ControlDesk
    host: EngineHost
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event  # set in the loop, it begins to
    grpc_port: int = 0

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def connect(self) -> Client:
        return Client("127.0.0.1", self.port)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)


@contextlib.contextmanager
def whole_server(*paths: Path, **given: Any) -> Iterator[WholeServer]:
    usual = {"http_port": 0, "metrics_port": 0, "frontends": 0, "grpc_frontends": 0, "watchdog_s": 0}
    settings = ServerSettings(host="127.0.0.1", drain_s=5.0, **{**usual, **given})
    desks: list[ControlDesk] = []
    started: list[WholeServer | BaseException] = []
    ready = threading.Event()
    stops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    class Desk(ControlDesk):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            desks.append(self)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        stops.append((loop, stop))

        def up(_catalog: object, ports: Any) -> None:
            grpc = ports.get("grpc", 0)
            started.append(WholeServer(ports["http"], desks[0], desks[0]._host, loop, stop, grpc))
            ready.set()

        await lone_server.serve(list(paths), settings, stop, ready=up)

    def live() -> None:
        try:
            uvloop.run(main())
        except BaseException as error:
            started.append(error)
        ready.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "ControlDesk", Desk)
        thread = threading.Thread(target=live, name="whole-server", daemon=True)
        thread.start()
        assert ready.wait(PATIENCE_S)
    try:
        if isinstance(started[0], BaseException):
            raise started[0]
        yield started[0]
    finally:
        loop, stop = stops[0]
        if not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
