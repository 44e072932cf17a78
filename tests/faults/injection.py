"""Faults on purpose, SQLite's way: one call of one function raises, then the next call, then the next.

The server under test is whole but for its processes: a door, a link over a real socket, the engine with its
host, drivers and threads. Its supervisor is played by `Server.mend`: a link that was dropped is made again.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from carpool.config.model import ModelConfig, ModelSignature
from carpool.config.repository import ModelVersion
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.engine_link import EngineSide
from carpool.errors import ModelError
from carpool.frontend.link_client import LinkClient
from carpool.link.engine_client import Answer, Ask, Handling
from carpool.memory.arena import Arena, create_memory, map_memory
from carpool.types import Array
from heard import Heard
from link.joined import packed
from waiting import until as until_now
from waiting import until_in_loop as until

PATIENCE_S = 20.0
DEADLY, POISON = 13.0, 7.0


@dataclass
class Point:
    """A function that may raise: `owner` is the class or module in which its callers find it."""

    owner: Any
    name: str
    error: Callable[[], Exception] = lambda: RuntimeError("a fault that was made")
    after: bool = False  # it raises when it has done its work

    @property
    def is_compiled(self) -> bool:
        """Compiled callers go by it straight to what was compiled, whatever is put in its place."""
        return not inspect.isfunction(getattr(self.owner, self.name))

    def __str__(self) -> str:
        owner = getattr(self.owner, "__name__", type(self.owner).__name__)
        return f"{owner.removeprefix('carpool.')}.{self.name}{' (after)' if self.after else ''}"


class Fault:
    """Counts the calls of a point, and makes call number `at` raise; 0: none."""

    def __init__(self, point: Point, at: int) -> None:
        self._point = point
        self._at = at
        self.calls = 0
        self._lock = threading.Lock()  # models' threads call too

    @contextmanager
    def injected(self) -> Iterator[Fault]:
        point = self._point
        real = getattr(point.owner, point.name)

        def called(*arguments: Any, **named: Any) -> Any:
            with self._lock:
                self.calls += 1
                now = self.calls == self._at
            if now and not point.after:
                raise point.error()
            result = real(*arguments, **named)
            if now:
                raise point.error()
            return result

        setattr(point.owner, point.name, called)
        try:
            yield self
        finally:
            setattr(point.owner, point.name, real)


def settings(folder: Path, name: str, head: str, output: str = "[1]") -> None:
    (folder / name / "1").mkdir(parents=True)
    (folder / name / "model.toml").write_text(
        f'backend = "fake"\nmax_batch = 4\n{head}\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [1]\n'
        f'[[output]]\nname = "y"\ndatatype = "FP32"\nshape = {output}\n'
    )


def models(folder: Path) -> Path:
    """One that promises, one that answers in order, and one whose answers have a size that nobody knows."""
    fast = '\n[fake]\ncurve = "0.1+0.01"'
    settings(folder, "promise", "slo_ms = 15000" + fast)
    settings(folder, "ordered", "[batching]\nmax_delay_ms = 0.1\npreserve_ordering = true" + fast)
    settings(folder, "loose", fast, "[-1]")
    return folder


class Backend:
    """Answers its input, unless that kills it or is poison."""

    def __init__(self, config: ModelConfig) -> None:
        self.signature = ModelSignature()
        self.alive = True
        self._loose = config.name == "loose"

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        x = inputs["x"]
        if (x == DEADLY).any():
            self.alive = False
            raise ModelError("it died")
        if (x == POISON).any():
            raise RuntimeError("it cannot take that")
        return {"y": np.repeat(x, 3, axis=1) if self._loose else x.copy()}

    def abort(self) -> None:
        self.alive = False

    def close(self) -> None:
        self.alive = False


def load(config: ModelConfig, version: ModelVersion, *_: object) -> Backend:
    return Backend(config)


class Transport:
    """Around a transport, whose methods cannot be replaced. Every other time that it is asked it says that it
    has something to send: only then is it written to, rather than its socket."""

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self._asked = 0

    def get_write_buffer_size(self) -> int:
        self._asked += 1
        return self._transport.get_write_buffer_size() or self._asked % 2

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@dataclass
class Request:
    """One request as its client sees it: told by an answer or by an exception, never by both."""

    answers: list[Answer] = field(default_factory=list)
    raised: Exception | None = None
    cancelled: bool = False

    @property
    def over(self) -> bool:
        return bool(self.answers) or self.raised is not None or self.cancelled

    def told(self, answer: Answer) -> None:
        self.answers.append(answer)

    def check(self) -> None:
        told = len(self.answers) + (self.raised is not None)
        assert told == 1 or (self.cancelled and told == 0), f"told {told} times"


class Server:
    """The engine and one front end, joined."""

    def __init__(self, folder: Path, arena_bytes: int) -> None:
        self.dropped = 0
        self.host = EngineHost(partial(Engine, folder))
        self.engine = self.host.engine
        self.side = EngineSide(self.host, max_answer_bytes=1 << 20, dropped=self._drop)
        self._file = create_memory("test-arena", arena_bytes)
        self.door = LinkClient(Arena(map_memory(self._file)), max_answer_bytes=1 << 20)
        self.requests: list[Request] = []

    def _drop(self, _frontend: int) -> None:
        self.dropped += 1

    async def mend(self) -> None:
        """What the supervisor does: each side learns of the other when its end of the link is gone."""
        end = time.monotonic() + PATIENCE_S
        while not self.door.serving:
            assert time.monotonic() < end, "there is no link"
            self.door.close()
            self.side.close()
            await asyncio.sleep(0.001)
            if self.door._link is None and not self.side.links:
                ours, theirs = socket.socketpair()
                try:
                    await self.door.attach(theirs)
                    await self.side.attach(1, ours, os.dup(self._file))
                except Exception:
                    ours.close()
                    theirs.close()
                    self.door.close()
            for _ in range(20):
                if not self.door.serving:
                    await asyncio.sleep(0.001)

    def ask(self, model: str, x: float, ready_in: float | None = None, *, cancel: bool = False) -> Request:
        request = Request()
        self.requests.append(request)
        slot = None
        owned = True  # until the door has it
        try:
            entry = self.door.catalog.newest[model]
            body, head, tail = packed(entry, np.array([[x]], np.float32))
            slot = self.door.slot(len(body))
            assert slot is not None
            slot.view[:] = body

            def admitted() -> None:
                nonlocal owned
                if request.cancelled:
                    return
                owned = False
                call.ready(slot)

            def done(answer: Answer) -> None:
                if owned and ready_in is not None:  # it was never let in: its slot is still ours
                    slot.release()
                call.release()
                request.told(answer)

            ask = Ask(entry, head, slot, tail, time.monotonic(), handling=Handling(ready_in))
            call = self.door.infer(ask, Heard(done, admitted))
            owned = ready_in is not None
            if cancel:
                request.cancelled = True
                call.cancel()
                if owned:
                    slot.release()
        except Exception as error:
            if request.answers:
                raise
            request.raised = error
            if slot is not None and owned:
                slot.release()
        return request

    async def close(self) -> None:
        self.side.close()
        self.door.close()
        os.close(self._file)


async def ordinary_load(server: Server) -> None:
    """Each way that a request can go, once or twice."""
    for x in (1.0, 2.0, POISON, 3.0):
        server.ask("promise", x)
    server.ask("promise", 4.0, ready_in=0.001)
    server.ask("promise", 5.0, ready_in=0.001, cancel=True)
    server.ask("promise", 6.0, cancel=True)
    for x in (1.0, POISON, 2.0):
        server.ask("ordered", x)
    server.ask("loose", 1.0)
    await until(lambda: all(request.over for request in server.requests), "somebody was never told")
    try:
        await server.door.ask("statistics", {})
    except Exception:
        """Who asks is told as well."""
    await server.mend()
    server.ask("promise", DEADLY)
    server.ask("loose", 2.0)
    await until(lambda: all(request.over for request in server.requests), "somebody was never told")


async def comes_back(server: Server) -> None:
    """Each model answers again, right, after however many tries."""
    end = time.monotonic() + PATIENCE_S
    for model in ("promise", "ordered", "loose"):
        while True:
            assert time.monotonic() < end, f"{model} does not come back"
            await server.mend()
            answers: list[Answer] = []
            request = server.ask(model, 9.0)
            await until(lambda request=request: request.over, "somebody was never told")  # type: ignore[misc]
            answers = request.answers
            if answers and answers[0].error is None:
                break
            await asyncio.sleep(0.002)


def open_files() -> Counter[str]:
    """How many of each kind."""
    gc.collect()
    kinds: Counter[str] = Counter()
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the folder itself, which is closed by now
            kinds[str(file.readlink()).split("[")[0]] += 1
    return kinds


def held() -> Counter[str]:
    """Files, those of maps among them, and the threads of models."""
    names = (thread.name for thread in threading.enumerate())
    return open_files() + Counter(name for name in names if name.endswith("-instance"))


def check_given_back(before: Counter[str]) -> None:
    """When all is over nothing is left: an instance that nobody closed keeps its thread and its model."""
    until_now(lambda: not held() - before, lambda: f"left behind: {held() - before}")


async def story(folder: Path, point: Point, most: int) -> int:
    """One server's life, in which calls of the point raise, each once; returns how many did."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # told by what comes of it
    server = Server(folder, 1 << 20)
    await server.engine.start()
    server.host.set_ready(True)
    await server.mend()
    await chapter(server, point, 0)
    files = open_files()
    at = made = 0
    while made < most:
        at += 1 if at < most // 2 else 3  # the later ones are much like the first
        if not await chapter(server, point, at):
            break
        made += 1
    await until(
        lambda: not open_files() - files, lambda: f"files are open that were not: {open_files() - files}"
    )
    await server.close()
    await server.engine.stop()
    return made


async def chapter(server: Server, point: Point, at: int) -> bool:
    """The load, with one fault in it; whether it was reached."""
    server.requests.clear()
    server.side.close()  # a new link has everything to say again
    await until(lambda: not server.door.serving, "the link does not end")
    try:
        with Fault(point, at).injected() as fault:
            await server.mend()
            await ordinary_load(server)
            await comes_back(server)
            reached = fault.calls >= at
        await comes_back(server)
        for request in server.requests:
            request.check()
        await until(lambda: server.door.arena.slots_used == 0, "a slot is held for ever")
        await until(
            lambda: not any(link.calls for link in server.side.links),
            "the engine holds a call for ever",
        )
    except AssertionError as error:
        raise AssertionError(f"after fault {at} of {point}: {error}") from error
    return reached
