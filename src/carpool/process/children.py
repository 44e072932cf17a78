"""This module has the children of the supervisor: `python -m carpool.process.children engine|frontend
CONTROL_FD`, or forks of a zygote that has imported this (`forking.py`).

A child receives everything over its control socket, and lives no longer than the other end of it. What it
runs is named by the first message as `module:function`, so that this file knows neither models nor protocols.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `_load` has imported the rest: nothing of it is garbage

import asyncio
import contextlib
import importlib
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import uvloop

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError, ConfigError
from carpool.frontend.documents import (
    assumptions,
    failures,
    picture_tasks,
    promises,
    unbatched,
    versions_of,
)
from carpool.frontend.link_client import LinkClient
from carpool.link.advice import GateTable
from carpool.link.catalog import Catalog, LoadingStep
from carpool.link.child_process import Control, Message, collect_rarely, live_as_child, switch_often
from carpool.link.typed_json import read_document
from carpool.memory.arena import Arena, take_memory
from carpool.memory.pulse import Beats, Pulses, Watch
from carpool.observe.columns import UP
from carpool.observe.counters import Table
from carpool.observe.descriptors import Descriptors
from carpool.observe.logs import configure, logger
from carpool.process.shared_settings import apply_log_settings

if TYPE_CHECKING:
    from carpool.engine.engine_link import EngineSide

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_CUT_OFF = 3
"""The time to drain was over before everything was finished."""

ENGINE_BLOCK = 1
"""Of the counters, and the cell of its signs of life; those of front ends follow."""

_CATALOGUE_S = 5.0  # a process that has not sent or received the catalogue by then is stuck


class Frontend(Protocol):
    """Serves a protocol until it is stopped: `HttpServer` is one."""

    async def stop(self, within_s: float) -> int: ...

    async def help(self, other: int, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Accepts for another front end that stands still, on its sockets too. Without any, not any more."""


@dataclass(frozen=True, slots=True)
class FrontendParts:
    """Holds what a front end is built from. `sockets` listen already, by the name of their port."""

    engine_client: LinkClient
    gates: GateTable
    settings: ServerSettings
    sockets: Mapping[str, Sequence[socket.socket]]
    table: Table
    block: int
    began: float  # when the server did
    apart: bool = True  # in a process of its own, not in the engine's

    async def until_catalogued(self) -> None:
        """Waits for the catalogue, if the engine serves: then no client need hear from here that it does not.

        It is the last step before connections are accepted: whatever came before it took time in which the
        engine may have become ready.
        """
        end = time.monotonic() + _CATALOGUE_S
        while self.table.server()[UP] and not (
            self.engine_client.serving or self.engine_client.stalls or time.monotonic() > end
        ):
            await asyncio.sleep(0.001)


StartFrontend = Callable[[FrontendParts], Awaitable[Frontend]]
Open = Callable[[], Coroutine[Any, Any, None]]
StartEngine = Callable[..., Awaitable[tuple["EngineSide", Open]]]
"""Builds the engine, as `process.start.engine` does, which loads nothing before it is opened. Its `progress`
may be called from any thread with the model that is loaded and the step."""


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    gc.disable()
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    gc.freeze()
    gc.enable()
    return found


_OF_MODELS = ("carpool.config.", "carpool.core.", "carpool.engine.", "carpool.vision.")
"""What an engine imports for its models, but no runtime: one may start threads, or touch a device."""


class _NewImports:
    """Reports what the models of a new catalogue made a process import from these folders, for the next
    fork."""

    def __init__(self, control: Control, *folders: str) -> None:
        self._control = control
        self._folders = folders
        self._known = set(sys.modules)

    def report(self, catalog: Catalog) -> None:
        if catalog.ready and (new := set(sys.modules) - self._known):
            self._known |= new
            names = sorted(name for name in new if name.startswith(self._folders))
            self._control.send("imported", names=names)


class EngineProcess:
    def __init__(self, control: Control, first: Message, settings: ServerSettings) -> None:
        self._imports = _NewImports(control, *_OF_MODELS)
        self._control = control
        self._first = first
        self._settings = settings
        self._side: EngineSide | None = None
        self._early: list[Message] = []
        self._was_ready = self._has_opened = False
        self._leaves = False  # it is about to stop: not ready any more, whatever it loads
        self._logging: Mapping[str, Any] = {}
        self._loop = asyncio.get_running_loop()

    async def run(self) -> int:
        self._table, self._gates, pulses = map(take_memory, self._first.files)
        beats = Beats(partial(Pulses(pulses).beat, self._first.body["block"]))
        obeying = asyncio.create_task(self._obey())
        starting = asyncio.create_task(self._start())
        await asyncio.wait({obeying, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            os._exit(0)  # nothing to drain yet, and a thread that loads a model would be waited for
        try:
            self._side, open_models = starting.result()
        except Exception as error:
            return self._give_up(error)
        engine = self._side.engine
        for message in self._early:
            await self._attach(self._side, message)
        engine.listen(self._report)
        opening = asyncio.create_task(self._open(self._side, open_models))
        await asyncio.wait({obeying, opening}, return_when=asyncio.FIRST_COMPLETED)
        failure = None if obeying.done() else opening.exception()
        if failure is not None:
            return self._give_up(failure)
        within_s = await obeying
        if within_s is None and not opening.done():
            os._exit(0)
        if within_s is not None:
            await engine.drain(within_s)
            opening.cancel()  # it has nothing to wait for any more
            await asyncio.gather(opening, return_exceptions=True)
            logger("engine").info("drained")
        beats.stop()
        return 0

    async def _open(self, side: EngineSide, open_models: Open) -> None:
        await open_models()
        # No front end may say that the server is ready while another does not know the models.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(side.everyone_saw(side.engine.catalog.number), _CATALOGUE_S)
        collect_rarely()
        self._has_opened = True
        self._control.send("up")  # before a client can see that it is
        side.engine.set_ready(not self._leaves)
        self._report(side.engine.catalog)

    async def _start(self) -> tuple[EngineSide, Open]:
        begin = self._first.body["begin"]
        begun = {"begun": _load(begin)(self._settings)} if begin else {}
        start: StartEngine = _load(self._first.body["start"])
        gate_table = GateTable(self._gates)
        gate_table.clear()
        return await start(
            self._settings,
            self._first.body["paths"],
            table=Table(self._table),
            block=self._first.body["block"],
            write_gate=gate_table.write,
            progress=self._progress,
            dropped=self._report_dropped,
            restarted=self._first.body["restarted"],
            **begun,
        )

    def _progress(self, step: LoadingStep) -> None:
        """Is called from the thread that loads: the socket is the loop's."""
        self._loop.call_soon_threadsafe(partial(self._control.send, "loading", **asdict(step)))

    def _give_up(self, error: BaseException) -> int:
        if not isinstance(error, CarpoolError):
            logger("engine").exception("engine-failed")
        self._control.send("failed", error=str(error) or type(error).__name__)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED

    async def _obey(self) -> float | None:
        """Attaches front ends until it is time to stop; returns the seconds left, None without a parent."""
        while (message := await self._control.receive()) is not None:
            if message.word == "drain":
                return float(message.body["within_s"])
            if message.word == "lame-duck":
                self._leaves = True
                if self._side is not None:
                    self._side.engine.set_ready(False)
            elif message.word == "stopping":
                if self._side is not None and self._has_opened:
                    self._side.engine.give_up_loads()
            elif self._side is None:
                self._early.append(message)
            else:
                await self._attach(self._side, message)
        return None

    async def _attach(self, side: EngineSide, message: Message) -> None:
        link, arena = message.files
        await side.attach(message.body["frontend"], socket.socket(fileno=link), arena)

    def _report(self, catalog: Catalog) -> None:
        self._imports.report(catalog)
        if catalog.server.logging != self._logging:
            self._logging = catalog.server.logging
            self._control.send("logging", settings=dict(catalog.server.logging))
        if catalog.ready and not self._was_ready:
            self._was_ready = True
            models = [f"{name}:{version}" for name, version in catalog.entries]
            self._control.send(
                "ready",
                models=models,
                tasks=picture_tasks(catalog),
                promises=promises(catalog),
                failed=failures(catalog),
                assumed=assumptions(catalog),
                versions=versions_of(catalog),
                unbatched=unbatched(catalog),
            )

    def _report_dropped(self, frontend: int) -> None:
        self._control.send("dropped", frontend=frontend)


class FrontendProcess:
    def __init__(self, control: Control, first: Message, settings: ServerSettings) -> None:
        self._imports = _NewImports(control, "carpool.")
        self._control = control
        self._first = first
        self._settings = settings
        self._broken = asyncio.Event()
        self._frontend: Frontend | None = None

    async def run(self) -> int:
        arena, table, gates, pulse_file, *listening = self._first.files
        engine_client = LinkClient(
            Arena(take_memory(arena)),
            max_answer_bytes=self._settings.max_body_bytes,
            broken=self._broken.set,
        )
        pulses, block = Pulses(take_memory(pulse_file)), self._first.body["block"]
        engine = Watch(partial(pulses.read, ENGINE_BLOCK))
        Beats(partial(pulses.beat, block), lambda: engine_client.engine_stood_still(engine.look()))
        engine_client.watch(lambda catalog: apply_log_settings(catalog.server.logging))
        start: StartFrontend = _load(self._first.body["start"])
        parts = FrontendParts(
            engine_client=engine_client,
            gates=GateTable(take_memory(gates)),
            settings=self._settings,
            sockets=_sockets(listening, self._first.body["sockets"]),
            table=Table(take_memory(table)),
            block=block,
            began=self._first.body["began"],
        )
        obeying = asyncio.create_task(self._obey(engine_client))
        collect_rarely()
        frontend = self._frontend = await start(parts)
        self._control.send("up")
        engine_client.watch(self._imports.report)
        broken = asyncio.create_task(self._broken.wait())
        await asyncio.wait({obeying, broken}, return_when=asyncio.FIRST_COMPLETED)
        if not obeying.done():
            return EXIT_FAILED
        cut_off = await frontend.stop(obeying.result())
        logger("frontend").info("drained", cut_off=cut_off)
        return EXIT_CUT_OFF if cut_off else 0

    async def _obey(self, engine_client: LinkClient) -> float:
        """Take every new engine until it is time to stop; returns the seconds there are for that."""
        while (message := await self._control.receive()) is not None:
            if message.word == "drain":
                engine_client.drain()
                return float(message.body["within_s"])
            if message.word == "help":
                sockets = _sockets(message.files, message.body["sockets"])
                if self._frontend is not None:
                    await self._frontend.help(message.body["other"], sockets)
                continue
            await engine_client.attach(socket.socket(fileno=message.files[0]))
        return 0.0


def _sockets(files: Sequence[int], counts: Mapping[str, int]) -> dict[str, list[socket.socket]]:
    """Returns listening sockets by the name of their port, of which each has so many."""
    left = iter(files)
    return {name: [socket.socket(fileno=next(left)) for _ in range(count)] for name, count in counts.items()}


async def _live(role: str, control: Control, stream: int) -> int:
    first = await control.receive()
    if first is None:
        return 0
    settings = read_document(ServerSettings, first.body["settings"].encode())
    configure(settings.log_format, settings.log_level, stream)
    if role == "engine":
        switch_often()
    process = EngineProcess if role == "engine" else FrontendProcess
    watching = asyncio.create_task(Descriptors().watch())
    try:
        return await process(control, first, settings).run()
    finally:
        watching.cancel()


def live_as(role: str, fd: int) -> NoReturn:
    live_as_child(role, fd, partial(_live, role), uvloop.new_event_loop)


if __name__ == "__main__":
    live_as(sys.argv[1], int(sys.argv[2]))
