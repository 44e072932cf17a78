"""The runner as the engine keeps it: started for the first model that needs it, and again when it dies.

It is forked from a zygote that has imported torch and what models need, and so are the processes that compile
for it: a runner that replaces another one is there at once."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, TypeVar

from carpool.config.server import ServerSettings
from carpool.config.usable_cores import usable_cores
from carpool.engine.loading.loading import ReportStep
from carpool.errors import ModelError, Unavailable
from carpool.extensions.torch.runner_messages import (
    CompiledInstances,
    Opening,
    RunnerFailure,
    SavedArtifacts,
    Settles,
    imported_names,
)
from carpool.extensions.torch.zygote_start import (
    COMPILER,
    RUNNER,
    RUNNER_MODULE,
    runner_environment,
    start_zygote,
)
from carpool.link.child_process import Child, Message, Watchdog
from carpool.link.forked_child import Zygote
from carpool.link.link_failures import read_failure
from carpool.link.typed_json import as_file, from_file
from carpool.memory.arena import create_memory, map_memory
from carpool.memory.pulse import Beats, Pulses, Watch, pulse_bytes
from carpool.observe.logs import logger

T = TypeVar("T")
_log = logger("runner")
_NUMBERS = 1_000_000  # instances in the life of one process: a number never means one of another life
_END_S = 5.0
_ZYGOTES = 8  # that may end before we do without: whatever ends them ends the next one, too
_MOST_COMPILERS, _CORES_EACH = 3, 3


class _Died(Exception):
    """The process ended before it answered; the text says how."""


class Runner:
    """Keeps the process that models run in. Belongs to the loop's thread, but for `wait_for` and `drop`."""

    def __init__(
        self,
        settings: ServerSettings,
        restarted: Callable[[], None] = lambda: None,
        stall_changed: Callable[[], None] = lambda: None,
        zygote: Child | None = None,
    ) -> None:
        """`zygote` is one that was started before."""
        self.max_answer_bytes = settings.max_body_bytes
        self._settings = settings
        self._restarted, self._stall_changed = restarted, stall_changed
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None
        self._watches: set[asyncio.Task[None]] = set()
        self._begun = zygote
        self._zygote: Zygote | None = None
        self._zygotes = 0
        self._packages: Sequence[str] = ()
        self._brings = True  # the zygote imports what models do; not any more if that spoiled one
        self._compilers = asyncio.Semaphore(max(1, min(_MOST_COMPILERS, usable_cores() // _CORES_EACH)))
        self._lives = 0
        self._closed = False
        self._arenas: dict[int, int] = {}  # files, for a runner that is started later
        self._logging: Mapping[str, Any] = {}
        self.loadings = count(1)  # the numbers of those that follow
        self._questions = count(1)
        self._asks: dict[int, tuple[asyncio.Future[int], ReportStep]] = {}
        self._serving: dict[int, Settles] = {}
        self._pulse_file = create_memory("carpool-runner-pulse", pulse_bytes(1))
        self._pulses = Pulses(map_memory(self._pulse_file))
        self._guard: Watchdog | None = None
        self._beats: Beats | None = None
        self.stalled = False  # it shows no sign of life, and is killed if that lasts

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    # ---- what the link says -----------------------------------------------------------------------------

    def share(self, arena: int, file: int) -> None:
        self._arenas[arena] = mine = os.dup(file)
        self._say("arena", [mine], number=arena)

    def unshare(self, arena: int) -> None:
        mine = self._arenas.pop(arena, None)
        if mine is not None:
            os.close(mine)
            self._say("forget", number=arena)

    def follow_logging(self, settings: Mapping[str, Any]) -> None:
        if settings != self._logging:
            self._logging = settings
            self._say("logging", settings=dict(settings))

    # ---- loading ----------------------------------------------------------------------------------------

    def wait_for(
        self, word: str, kind: type[T], document: object, tell: ReportStep = lambda _: None, **fields: int
    ) -> T:
        """Waits for its answer, of that kind, from a thread that may wait. Raises what it says is wrong."""
        asking = self._ask(word, document, tell, fields)
        file: int = asyncio.run_coroutine_threadsafe(asking, self._loop).result()
        try:
            return from_file(kind, file)
        except ValueError as error:
            _log.error("runner-not-understood", word=word, error=str(error))
            self._loop.call_soon_threadsafe(self.kill)
            why = "the process that runs such models said what cannot be"
            raise ModelError(why, reason="model-died") from None

    async def _ask(self, word: str, document: object, tell: ReportStep, fields: Mapping[str, int]) -> int:
        """A process that dies while it is asked may die of another model: a new one is asked once more."""
        while not self._closed:
            fresh = self._child is None
            if fresh:
                self._start()
            try:
                return await self._question(word, document, tell, fields)
            except _Died as died:
                if fresh:
                    why = f"the process that runs such models died while it loaded this one ({died})"
                    raise ModelError(why, reason="model-died") from None
        raise Unavailable("the engine is stopping", reason="stopping")

    async def _question(
        self, word: str, document: object, tell: ReportStep, fields: Mapping[str, int]
    ) -> int:
        """Returns the file with its answer."""
        number = next(self._questions)
        answer: asyncio.Future[int] = self._loop.create_future()
        self._asks[number] = (answer, tell)
        with as_file(document) as file:
            self._say(word, [file], ask=number, **fields)
        return await answer  # also when it died: its watcher sets the error

    # ---- the zygote, and what is forked from it ---------------------------------------------------------

    def stand_by_with(self, packages: object) -> None:
        """Passes on, from a loader's thread, what the runner has imported, for the next one to have at
        hand."""
        self._loop.call_soon_threadsafe(self._bring, imported_names(packages))

    def _bring(self, packages: Sequence[str]) -> None:
        if not self._brings:
            return
        news = sorted({*packages} - {*self._packages})
        self._packages = sorted({*self._packages, *packages})
        if news and self._zygote is not None:
            self._zygote.bring(news)

    def keep_zygote(self) -> None:
        if self._zygote is not None or self._closed or self._zygotes >= _ZYGOTES:
            return
        self._zygotes += 1
        try:
            child, self._begun = self._begun or start_zygote(self._settings), None
            self._zygote = zygote = Zygote(child, self._stands_by, self._zygote_gone)
        except OSError as error:
            _log.warning("no-zygote", error=str(error))
            return
        if self._packages:
            zygote.bring(self._packages)

    def _stands_by(self) -> None:
        if self._zygote is not None:
            _log.info("runner-stands-by", pid=self._zygote.pid)

    def _zygote_gone(self) -> None:
        """Replaces a zygote that packages made useless by one without them."""
        gone, self._zygote = self._zygote, None
        if gone is not None and gone.spoiled:
            self._brings, self._packages = False, ()
        self.keep_zygote()

    def _new_child(self, kind: str) -> Child:
        if self._zygote is not None and self._zygote.usable:
            return self._zygote.fork(kind, kind)
        return Child(RUNNER_MODULE, kind, called=kind, environment=runner_environment(self._settings))

    def compiler(self, opening: Opening) -> Compiler:
        return Compiler(self, opening)

    def _start(self) -> None:
        self._child = child = self._new_child(RUNNER)
        task = self._loop.create_task(self._watch(child))
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)
        self._lives += 1
        if self._lives > 1:
            self._restarted()
        self._pulses.clear(0)
        settings = self._settings
        watch = Watch(partial(self._pulses.read, 0))
        self._guard = Watchdog(child, watch, settings.watchdog_s, _log, "runner")
        if self._beats is None:
            self._beats = Beats(self._look)
        said = {
            "max_answer_bytes": self.max_answer_bytes,
            "first": self._lives * _NUMBERS,
            "shared_profiles": settings.shared_profiles,
            "secret": settings.cache_secret,
        }
        self._say("start", [self._pulse_file], **self._said_first(), **said)
        for arena, file in self._arenas.items():
            self._say("arena", [file], number=arena)
        if self._logging:
            self._say("logging", settings=dict(self._logging))
        _log.info("runner-started")

    def _said_first(self) -> dict[str, object]:
        settings = self._settings
        return {
            "log_format": settings.log_format,
            "log_level": settings.log_level,
            "cache_dir": None if settings.cache_dir is None else str(settings.cache_dir),
            "device_memory_gb": settings.device_memory_gb,
        }

    def _look(self) -> None:
        if self._guard is not None:
            self._guard.look(patient=bool(self._asks))
            self._set_stalled(self._guard.stalled)

    def _set_stalled(self, stalled: bool) -> None:
        if stalled != self.stalled:
            self.stalled = stalled
            self._stall_changed()

    async def _watch(self, child: Child) -> None:
        code = await child.watch(self._hear)
        self._child = None
        self._guard = None
        self._set_stalled(False)
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        if not self._closed:
            _log.error("runner-died", how=how)
        asks, self._asks = self._asks, {}
        for answer, _ in asks.values():
            if not answer.done():
                answer.set_exception(_Died(how))

    def _hear(self, message: Message) -> None:
        try:
            self._heard(message)
        except Exception:  # it runs code of others: whatever it says must not stop us from watching it
            _log.exception("runner-not-understood", word=message.word)
            self.kill()

    def _heard(self, message: Message) -> None:
        body = message.body
        if message.word == "step":
            ask = self._asks.get(body["ask"])
            if ask is not None:
                ask[1](body["step"])
        elif message.word == "packages":
            self._bring(imported_names(body["names"]))
        elif message.word == "settled":
            instance = self._serving.get(body["instance"])
            if instance is not None:
                instance.settled()
        else:
            (file,) = message.files
            answer, _ = self._asks.pop(body["ask"])
            if answer.done():
                os.close(file)  # no caller waits any more: the engine is stopping
            elif message.word == "answer":
                answer.set_result(file)
            else:
                failure = from_file(RunnerFailure, file)
                answer.set_exception(read_failure(failure.status, failure.text.encode()))

    # ---- instances --------------------------------------------------------------------------------------

    def serve(self, instance: Settles, piece: int, sock: socket.socket) -> None:
        self._serving[instance.number] = instance
        self._say("serve", [sock.fileno()], instance=instance.number, piece=piece)

    def abort(self, instance: Settles) -> None:
        self._say("abort", instance=instance.number)

    def drop(self, instance: Settles) -> None:
        """Drops an instance that never served; from any thread."""
        self._loop.call_soon_threadsafe(lambda: self._say("drop", instance=instance.number))

    def left(self, instance: Settles) -> None:
        self._serving.pop(instance.number, None)

    # ---- the process ------------------------------------------------------------------------------------

    def kill(self) -> None:
        """It says what cannot be: nothing of it can be relied on."""
        if self._child is not None:
            self._child.kill()

    async def close(self) -> None:
        """Stops the runner: no model is left, or no request waits for the remaining ones."""
        self._closed = True
        if self._beats is not None:
            self._beats.stop()
        if self._zygote is not None:
            self._zygote.close()
            self._watches.add(self._zygote.task)
            self._zygote.task.add_done_callback(self._watches.discard)
        if self._child is not None:
            self._child.control.close()
        if self._watches:
            await asyncio.wait(self._watches, timeout=_END_S)
        if self._watches:
            self.kill()
            await asyncio.wait(self._watches, timeout=_END_S)
        for file in self._arenas.values():
            os.close(file)
        self._arenas.clear()
        if self._pulse_file >= 0:
            os.close(self._pulse_file)
            self._pulse_file = -1

    def _say(self, word: str, files: list[int] | None = None, **fields: object) -> None:
        """Sends a word, or nothing where there is no process; what is waited for then ends with it."""
        if self._child is not None and not self._child.control.send(word, files or [], **fields):
            self._child.kill()  # it is gone, or has not listened for as long as it takes to fill a socket


class Compiler:
    """Represents a process that compiles one model, for as long as it is entered. Only few are there at
    once."""

    def __init__(self, runner: Runner, opening: Opening) -> None:
        self._runner = runner
        self._opening = opening
        self._questions = count(1)
        self._answer: asyncio.Future[int] | None = None

    async def __aenter__(self) -> Compiler:
        await self._runner._compilers.acquire()
        try:
            self._child = self._runner._new_child(COMPILER)
        except BaseException:
            self._runner._compilers.release()
            raise
        self._child.control.send("start", (), **self._runner._said_first())
        self._watch = asyncio.get_running_loop().create_task(self._watched())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._child.kill()  # it holds nothing
        self._runner._compilers.release()
        await self._watch

    async def compile(self, size: int) -> CompiledInstances:
        return await self._ask(CompiledInstances, "compile", size=size)

    async def save(self) -> SavedArtifacts:
        return await self._ask(SavedArtifacts, "save")

    async def _ask(self, kind: type[T], word: str, **fields: int) -> T:
        """Asks the compiler. Raises ModelError, also for one that died: the caller continues without it."""
        if self._watch.done():
            raise ModelError("the process that compiles has died", reason="model-died")
        self._answer = asyncio.get_running_loop().create_future()
        with as_file(self._opening) as file:
            self._child.control.send(word, [file], ask=next(self._questions), **fields)
        try:
            return from_file(kind, await self._answer)
        except ValueError as error:
            raise ModelError(f"the process that compiles said what cannot be: {error}") from None

    async def _watched(self) -> None:
        code = await self._child.watch(self._hear)
        if self._answer is not None and not self._answer.done():
            why = f"the process that compiles has died ({code})"
            self._answer.set_exception(ModelError(why, reason="model-died"))

    def _hear(self, message: Message) -> None:
        answer = self._answer
        if not message.files:
            return
        if answer is None or answer.done():
            os.close(message.files[0])
        elif message.word == "answer":
            answer.set_result(message.files[0])
        else:
            failure = from_file(RunnerFailure, message.files[0])
            answer.set_exception(read_failure(failure.status, failure.text.encode()))
