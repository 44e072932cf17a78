"""The first process: starts one engine and the front ends, restarts what dies, and stops them in order.

It owns what must outlive them: the listening sockets, the memory of each front end, the counters. A front end
that dies takes its connections with it and nothing else: those that the kernel has queued for it wait for the
next one, since its socket stays open here. While one stands still, or is not there yet, another one of its
kind gets its socket, too, and accepts for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError
from carpool.frontend.http.http_server import check_free, listen
from carpool.link.advice import GATE_BYTES
from carpool.link.catalog import LoadingStep
from carpool.link.child_process import Child, Message, Watchdog
from carpool.link.typed_json import write_document
from carpool.memory.arena import create_memory, map_memory
from carpool.memory.pulse import BEAT_S, Beats, Pulses, Watch, pulse_bytes
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.counters import Table, table_bytes
from carpool.observe.history import keep_history
from carpool.observe.logs import logger
from carpool.process.children import ENGINE_BLOCK, EXIT_CONFIG, EXIT_CUT_OFF, EXIT_FAILED
from carpool.process.forking import ENGINE, FRONTEND
from carpool.process.shared_settings import apply_log_settings
from carpool.process.standby import Imports, Standby
from carpool.process.stop_signals import heard_signals

_log = logger("supervisor")

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 5.0
_STABLE_S = 10.0  # a process that lived so long starts with a clean sheet
_HELP_S = 3 * BEAT_S  # for a front end that stands still for longer, another one accepts
_FRONTENDS_SHARE = 0.9  # of the time to drain; the rest is the engine's


_Words = Mapping[str, str]
Ready = Callable[[Mapping[str, int], _Words, Mapping[str, float], _Words, _Words, _Words], None]
"""Called each time that an engine has warmed up its models: with the ports in use, and by the models' names
the tasks of those that take pictures, the milliseconds that they promise, why others do not serve, and what
nothing says about their pixels."""


@dataclass(frozen=True, slots=True)
class FrontendKind:
    """Describes front ends that are alike: how many, on which ports (0 takes a free one), and what starts
    them. Those that are not `vital` may be absent: the server is ready without them, and goes on when they
    cannot be started."""

    name: str  # as in the metrics: http or grpc
    start: str  # module:function, a StartFrontend
    count: int
    ports: Mapping[str, int]
    imports: Sequence[str] = ()  # modules that it needs beside that of `start`
    vital: bool = True

    @property
    def needs(self) -> Imports:
        """Returns what the zygote imports for it: nothing of what is not vital, which may be broken."""
        return Imports((module_of(self.start), *self.imports) if self.vital else ())


def module_of(start: str) -> str:
    return start.partition(":")[0]


@dataclass(slots=True, eq=False)
class Post:
    """Represents a place that is filled by one process after another."""

    role: str
    block: int  # of the counters
    child: Child | None = None
    guard: Watchdog | None = None
    is_up: bool = False  # until then it imports, which may hold its interpreter lock for long
    was_up: bool = False
    error: str = ""
    delay: float = 0.0  # before the next is started: none for the first that dies
    kind: FrontendKind | None = None  # None for the engine
    arena: int = -1
    sockets: dict[str, list[socket.socket]] = field(default_factory=dict)
    helper: Child | None = None  # what accepts for this one

    @property
    def must_start(self) -> bool:
        """Returns whether the server ends if this cannot be started the first time."""
        return not self.was_up and (self.kind is None or self.kind.vital)

    @property
    def moves(self) -> bool:
        return self.is_up and self.guard is not None and self.guard.still < _HELP_S

    def listening(self) -> tuple[list[int], dict[str, int]]:
        """Returns the descriptors of its sockets, and how many there are for each port."""
        files = [sock.fileno() for socks in self.sockets.values() for sock in socks]
        return files, {name: len(socks) for name, socks in self.sockets.items()}

    def back_off(self) -> float:
        """Returns how long to wait before the next attempt; those after it wait longer."""
        delay, self.delay = self.delay, min(max(2 * self.delay, _FIRST_DELAY_S), _LONGEST_DELAY_S)
        return delay

    def close(self) -> None:
        for listening in self.sockets.values():
            for sock in listening:
                sock.close()
        self.sockets = {}
        if self.arena >= 0:
            os.close(self.arena)
            self.arena = -1


class Supervisor:
    """`ports` holds the numbers that are really listened on, once `run` has begun."""

    def __init__(
        self,
        settings: ServerSettings,
        paths: Sequence[str],
        *,
        engine: str,
        frontends: Sequence[FrontendKind],
        begin: str = "",
        imports: Sequence[str] = (),
        ready: Ready = lambda *_: None,
        loading: Callable[[LoadingStep], None] = lambda _step: None,
    ) -> None:
        """Takes `loading`, called with each step while the engine loads its models; `begin`, the name of what
        its process does first, before it imports the rest; and `imports`, modules that it needs beside that
        of `engine`."""
        self._settings = settings
        self._began = time.monotonic()
        self._paths = list(paths)
        self._start_engine = engine
        self._begin_engine = begin
        self._standby = Standby()
        self._engine_needs = Imports((module_of(engine), *imports), before=bool(begin))
        self._ready = ready
        self._loading = loading
        self._engine = Post("engine", ENGINE_BLOCK)
        kinds = [kind for kind in frontends for _ in range(kind.count)]
        self._posts = [
            Post(kind.name, ENGINE_BLOCK + 1 + index, kind=kind) for index, kind in enumerate(kinds)
        ]
        self.ports: dict[str, int] = {}
        self._stopping = asyncio.Event()
        self._finished: asyncio.Future[int]
        self._keepers: dict[Post, asyncio.Task[None]] = {}
        self._draining: asyncio.Task[None] | None = None
        self._cut_off = False
        self._warm: Mapping[str, Any] | None = None  # what is ready, until that was announced

    async def run(self) -> int:
        """Serve until a signal or until it is clear that nothing can be served; returns the exit code."""
        self._finished = asyncio.get_running_loop().create_future()
        with contextlib.ExitStack() as stack:
            try:
                for post in self._posts:
                    stack.callback(post.close)
                    self._listen(post)
            except ConfigError as error:
                _log.error("cannot-serve", error=error.message)
                return EXIT_CONFIG
            self._table_fd = self._memory(stack, "carpool-metrics", table_bytes(2 + len(self._posts)))
            self._gates_fd = self._memory(stack, "carpool-gates", GATE_BYTES)
            self._pulses_fd = self._memory(stack, "carpool-pulses", pulse_bytes(2 + len(self._posts)))
            self._pulses = Pulses(map_memory(self._pulses_fd))
            self._table = Table(map_memory(self._table_fd))
            self._block = self._table.block(0)
            stack.enter_context(heard_signals(self._signalled, _log))
            _log.info("listening", host=self._settings.host, **self.ports)
            stack.callback(Beats(self._look).stop)
            stack.callback(keep_history(self._table))
            self._standby.begin()
            for post in (self._engine, *self._posts):
                self._keepers[post] = asyncio.create_task(self._keep(post))
            code = await self._finished
            await self._end_all()
        _log.info("stopped", code=code)
        return code

    # Processes.

    async def _keep(self, post: Post) -> None:
        """Keeps one process after the other, until it is time to stop."""
        while not self._stopping.is_set():
            try:
                child = await self._fill(post)
            except Exception as error:  # no process, no memory, no descriptor: there may be one later
                if self._stopping.is_set():
                    return
                await self._could_not_start(post, error)
                continue
            if child is None:
                return
            watch = Watch(partial(self._pulses.read, post.block))
            post.guard = Watchdog(
                child, watch, self._settings.watchdog_s, _log, "process", {"role": post.role}
            )
            code = await child.watch(lambda message: self._hear(post, message))
            post.child, post.guard, post.is_up = None, None, False
            self._pulses.clear(post.block)  # what it left there says nothing about the next
            if post is self._engine:
                self._block.server.set(UP, 0.0)  # with the engine's own cell, which goes next
            self._table.block(post.block)  # its gauges are not true any more
            if self._stopping.is_set():
                self._cut_off |= code != 0
            else:
                await self._pause(post, child, code)

    def _look(self) -> None:
        for post in (self._engine, *self._posts):
            if post.guard is not None:
                post.guard.look(patient=not post.is_up)
        if not self._stopping.is_set():
            self._help()
        stalled = self._engine.guard is not None and self._engine.guard.stalled
        self._block.server.set(UP, -float(stalled))

    def _help(self) -> None:
        """Sees to it that some process accepts on the sockets of every front end."""
        for post in self._posts:
            if post.moves:
                if post.helper is not None:
                    post.helper.control.send("help", other=post.block, sockets=dict.fromkeys(post.sockets, 0))
                    post.helper = None
                continue
            able = [one for one in self._posts if one.kind is post.kind and one.moves]
            if not post.was_up or not able or post.helper in [one.child for one in able]:
                continue
            helper = post.helper = able[post.block % len(able)].child
            files, counts = post.listening()
            if helper is not None:
                helper.control.send("help", files, other=post.block, sockets=counts)

    async def _could_not_start(self, post: Post, error: Exception) -> None:
        post.child = None
        if post.must_start:
            _log.exception("cannot-serve", role=post.role, error=str(error))
            self._finish(EXIT_FAILED)
            await self._stopping.wait()
            return
        delay = post.back_off()
        _log.exception("process-not-started", role=post.role, error=str(error), again_in_s=delay)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    async def _pause(self, post: Post, child: Child, code: int) -> None:
        """Waits after a death: backs off, or gives up if it has never been any better."""
        if post.must_start:
            _log.error("cannot-serve", role=post.role, error=post.error or _ending(code))
            self._finish(EXIT_CONFIG if code == EXIT_CONFIG else EXIT_FAILED)
            await self._stopping.wait()
            return
        if child.age >= _STABLE_S:
            post.delay = 0.0
        delay = post.back_off()
        fields = {"child": child.pid, "ending": _ending(code), "restart_in_s": delay}
        _log.error("process-died", role=post.role, **fields, **({"error": post.error} if post.error else {}))
        self._block.server.add(RESTARTS[post.role])
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    async def _fill(self, post: Post) -> Child | None:
        """Returns None where it is time to stop by now."""
        post.error = ""
        if post.kind is None:
            child = await self._standby.start(ENGINE, self._engine_needs)
        else:
            self._renew(post)
            child = await self._standby.start(FRONTEND, post.kind.needs)
        if self._stopping.is_set():
            child.abandon()
            return None
        try:
            self._introduce(post, child)
        except BaseException:
            post.child = None
            child.abandon()
            raise
        return child

    def _introduce(self, post: Post, child: Child) -> None:
        """Sends a child its role, and connects it with those that it works with."""
        shared = [self._table_fd, self._gates_fd, self._pulses_fd]
        if post.kind is None:
            names = {"begin": self._begin_engine, "start": self._start_engine}
            self._brief(child, post, shared, **names, paths=self._paths, restarted=post.was_up)
        else:
            listening, counts = post.listening()
            files = [post.arena, *shared, *listening]
            self._brief(child, post, files, start=post.kind.start, sockets=counts)
        _log.info("process-started", role=post.role, child=child.pid, forked=child.is_fork)
        post.child = child
        engine = self._engine.child
        for frontend in self._posts if post.kind is None else (post,):
            if engine is not None and frontend.child is not None:
                _connect(engine, frontend)

    def _brief(self, child: Child, post: Post, files: Sequence[int], **fields: object) -> None:
        settings = write_document(self._settings).decode()
        common = {"settings": settings, "block": post.block, "began": self._began}
        child.control.send("start", files, **common, **fields)

    def _hear(self, post: Post, message: Message) -> None:
        try:
            self._heard(post, message)
        except Exception:  # a child that says nonsense is no reason to lose sight of it
            _log.exception("not-understood", role=post.role, word=message.word)

    def _heard(self, post: Post, message: Message) -> None:
        if message.word == "up":
            post.was_up = True
            post.is_up = True
            _log.info("process-up", role=post.role, child=post.child.pid if post.child else None)
            self._announce()
        elif message.word == "ready":
            self._warm = message.body
            self._announce()
        elif message.word == "loading":
            body = message.body
            self._loading(LoadingStep(body["model"], body["step"], body["number"], body["of"]))
        elif message.word == "logging":
            apply_log_settings(message.body["settings"])
        elif message.word == "imported":
            self._standby.bring(message.body["names"])
        elif message.word == "failed":
            post.error = str(message.body["error"])
        elif message.word == "dropped":
            # The engine may still write to slots of a link that it gave up, so they must not be used again.
            for frontend in self._posts:
                if frontend.child is not None and frontend.child.pid == message.body["frontend"]:
                    frontend.child.kill()

    def _announce(self) -> None:
        """Announces the server once models are warm and every port is served: requests may come at once."""
        if self._warm is not None and not any(post.must_start for post in self._posts):
            warm, self._warm = self._warm, None
            _log.info("ready", models=" ".join(warm["models"]), host=self._settings.host, **self.ports)
            said = ("tasks", "promises", "failed", "assumed", "versions", "unbatched")
            self._ready(self.ports, *(warm[name] for name in said))

    def _finish(self, code: int) -> None:
        if not self._finished.done():
            self._finished.set_result(code)

    async def _end_all(self) -> None:
        """Whatever still lives is killed, and everything is collected."""
        self._stopping.set()
        if self._draining is not None:
            self._draining.cancel()
        for post in (*self._posts, self._engine):  # front ends first: no client need hear of the engine's end
            if post.child is not None:
                post.child.kill()
        self._standby.stop()
        await asyncio.wait(self._keepers.values())
        await self._standby.close()

    # Stopping.

    def _signalled(self, number: signal.Signals) -> None:
        if self._draining is not None:
            self._finish(128 + number)
            return
        lame_duck, drain = self._settings.lame_duck_s, self._settings.drain_s
        _log.info("stopping", signal=number.name, after_s=lame_duck, within_s=drain)
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Stops front ends first, so that nothing new comes in; the engine when it has no requests left.
        Before that the server still serves for a while though it is not ready, until every health check has
        noticed."""
        if self._settings.lame_duck_s:
            if self._engine.child is not None:
                self._engine.child.control.send("lame-duck")
            await asyncio.sleep(self._settings.lame_duck_s)
        self._stopping.set()
        self._standby.stop()
        if self._engine.child is not None:
            self._engine.child.control.send("stopping")
        for post in self._posts:
            post.close()
        total = self._settings.drain_s
        end = asyncio.get_running_loop().time() + total
        share = total * _FRONTENDS_SHARE
        for post in self._posts:
            if post.child is not None:
                post.child.control.send("drain", within_s=share)
        # They cut off what is late themselves, and then need a moment to end.
        in_time = await self._gone(self._posts, end - (total - share) / 2)
        if self._engine.child is not None:
            left = max(0.0, end - asyncio.get_running_loop().time())
            self._engine.child.control.send("drain", within_s=left)
        in_time &= await self._gone([self._engine], end)
        self._finish(0 if in_time and not self._cut_off else EXIT_CUT_OFF)

    async def _gone(self, posts: Sequence[Post], end: float) -> bool:
        keepers = [self._keepers[post] for post in posts]
        if not keepers:
            return True
        timeout = max(0.0, end - asyncio.get_running_loop().time())
        _, left = await asyncio.wait(keepers, timeout=timeout)
        return not left

    # What outlives the processes.

    def _memory(self, stack: contextlib.ExitStack, name: str, size: int) -> int:
        fd = create_memory(name, size)
        stack.callback(os.close, fd)
        return fd

    def _listen(self, post: Post) -> None:
        assert post.kind is not None
        for name, port in post.kind.ports.items():
            known = self.ports.get(name)
            if known is None and port:
                check_free(self._settings.host, port)
            post.sockets[name] = listen(self._settings.host, known or port)
            self.ports[name] = post.sockets[name][0].getsockname()[1]

    def _renew(self, post: Post) -> None:
        """A new front end gets memory that nothing can still write to: the engine may not be done yet."""
        if post.arena >= 0:
            os.close(post.arena)
        post.arena = create_memory("carpool-slots", self._settings.arena_bytes)


def _connect(engine: Child, frontend: Post) -> None:
    """Give each its end of a new link. If one is gone, the other sees the end of the link at once."""
    assert frontend.child is not None
    ours, theirs = socket.socketpair()
    with ours, theirs:
        engine.control.send("link", [ours.fileno(), frontend.arena], frontend=frontend.child.pid)
        frontend.child.control.send("link", [theirs.fileno()])


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
