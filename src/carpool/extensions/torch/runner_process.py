"""Implements the runner: a fork of the zygote, or
`python -m carpool.extensions.torch.runner_process [MODULE …] CONTROL_FD`.

It gets all orders over its control socket, loads in threads of its own, and lives no longer than the engine.
`… runner_process zygote CONTROL_FD` is the zygote: see `zygote.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar
from weakref import WeakSet, WeakValueDictionary

from carpool.backends.backend import Backend, CompiledSize, Compiles, SharesDevice
from carpool.backends.device_memory import limit_device_memory, room_for_pictures
from carpool.engine.loading.loading import Loading, Ready, ReportStep
from carpool.engine.profile.model_profile import ProfileStore
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.torch import compiler_process
from carpool.extensions.torch.hosted_part import HostedPart, LoadsHere, ServesHere, hosted_part
from carpool.extensions.torch.picture_slots import PictureSlots
from carpool.extensions.torch.runner_instance import Arenas, RunnerInstance
from carpool.extensions.torch.runner_messages import (
    CompiledInstances,
    LoadOrder,
    OpenedAs,
    Opening,
    Prepared,
    RunnerFailure,
    imported_packages,
)
from carpool.extensions.torch.zygote import bring_packages
from carpool.extensions.torch.zygote_start import COMPILER, RUNNER, ZYGOTE
from carpool.link.catalog import Batching, ModelEntry
from carpool.link.child_process import Control, Message, collect_rarely, live_as_child, switch_often
from carpool.link.link_failures import write_failure
from carpool.link.typed_json import as_file, from_file
from carpool.link.zygote_process import import_all, live_as_zygote
from carpool.memory.arena import take_memory
from carpool.memory.pulse import Beats, Pulses
from carpool.observe.logs import configure, logger
from carpool.process.shared_settings import apply_log_settings
from carpool.vision.plans.settings import write as write_vision

_log = logger("runner")
_QUIET_S = 0.5  # in which no instance is being opened
_FIRST_PAUSE_S, _TRIES = 1.0, 4
_PICTURES_S = 1.0
_COMPILING_SWITCH_S = 1e-5
"""How long the thread that compiles keeps the interpreter while batches want it: it is all Python, for
seconds, and each batch asks for the interpreter a dozen times."""
_LONG_COLLECTION_S = 0.01
COMPILER_MODULES = ("torch._dynamo", "triton", "torch._inductor.compile_fx")
_PAUSE, _LONGEST_PAUSE_S = 2.0, 0.5
"""Times what was worked: the compiler's own modules take seconds, and batches run in between."""
_SLICE_S, _CALLS = 0.002, 32  # worked at least before a pause; calls between two looks at the time
_BUSY_S = 0.05  # after a batch another one is expected
_PR_SET_TIMERSLACK, _TIMER_SLACK_NS = 29, 1000


class _Job(NamedTuple):
    model: str
    load: Callable[[], Backend]
    use: Callable[[Backend], None]
    event: str


class Later:
    """Runs jobs one at a time, in a thread of its own, and only while no instance is being opened: a model
    that does not answer at all comes before one that answers slowly. What makes an instance whole comes after
    what makes another one nearly as fast in far less time."""

    def __init__(self) -> None:
        self._soon: deque[_Job] = deque()
        self._last: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._opening = 0
        self._busy = False
        self._thread: threading.Thread | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._changed:
            self._opening += 1
        try:
            yield
        finally:
            with self._changed:
                self._opening -= 1
                self._changed.notify_all()

    def add(
        self, model: str, load: Callable[[], Backend], use: Callable[[Backend], None], *, whole: bool = True
    ) -> None:
        job = _Job(model, load, use, "instance-whole" if whole else "instance-captured")
        with self._changed:
            (self._last if whole else self._soon).append(job)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="later", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                waited = not self._is_free()
                self._changed.wait_for(self._is_free)
            if waited:
                time.sleep(_QUIET_S)
            with self._changed:
                if not self._is_free():
                    continue
                job = (self._soon or self._last).popleft()
                self._busy = True
            _prepare(job)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _is_free(self) -> bool:
        return bool(self._soon or self._last) and not self._opening

    def until_quiet(self) -> None:
        """Until no instance is being opened, nor made nearly as fast as it can be."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._opening or self._soon or self._busy))


def _prepare(job: _Job) -> None:
    """Where it fails for good, the instance goes on as it is: slower, and right."""
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    for tried in range(1, _TRIES + 1):
        try:
            job.use(job.load())
        except Exception as error:
            _log.warning("instance-not-whole", model=job.model, error=str(error), tries=tried)
            time.sleep(pause)
            pause *= 2
        else:
            _log.info(job.event, model=job.model, seconds=round(time.monotonic() - began, 3))
            return


T = TypeVar("T")
Work: TypeAlias = Callable[[dict[str, Any], T, ReportStep], object]
_SERVED_S, _LOOK_S = 60.0, 0.02


@dataclass(frozen=True, slots=True)
class Opened:
    """Represents an instance that is loaded and does not serve yet."""

    backend: Any  # a `Backend`, unless a part runs it
    ready: Ready
    loading: LoadsHere  # kept for as long as an instance of it lives
    part: HostedPart | None  # of the extension that runs it


class RunnerProcess:
    def __init__(self, control: Control, first: Message) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        settings = first.body
        cache_dir = settings["cache_dir"]
        self._profiles = ProfileStore.of(
            None if cache_dir is None else Path(cache_dir), settings["shared_profiles"], settings["secret"]
        )
        self._most: int = settings["max_answer_bytes"]
        limit_device_memory(settings["device_memory_gb"])
        self._pictures = PictureSlots(room_for_pictures)
        self._arenas = Arenas(self._pictures)
        self._numbers = count(settings["first"])
        self._loadings: WeakValueDictionary[int, LoadsHere] = WeakValueDictionary()
        self._opened: dict[int, Opened] = {}
        self._serving: dict[int, tuple[ServesHere, Opened]] = {}
        self._resumed: WeakSet[Loading] = WeakSet()  # their first instances are opened in a hurry
        self._later = Later()
        self._timing = threading.Lock()  # models load side by side, and are measured one by one
        self._compiling = threading.Lock()
        self._words: dict[str, Callable[[Message], None]] = {
            "arena": lambda message: self._arenas.add(message.body["number"], take_memory(message.files[0])),
            "forget": lambda message: self._arenas.forget(message.body["number"]),
            "logging": lambda message: apply_log_settings(message.body["settings"]),
            "prepare": lambda message: self._work(message, LoadOrder, self._prepare),
            "open": lambda message: self._work(message, Opening, self._open),
            "compile": lambda message: self._work(message, Opening, self._compile, opens=False),
            "keep": lambda message: self._work(message, Opening, self._keep_profile, opens=False),
            "serve": self._serve,
            "drop": self._drop,
            "abort": self._abort,
        }

    async def run(self) -> None:
        self._look_at_pictures()
        while (message := await self._control.receive()) is not None:
            self._words[message.word](message)

    def _look_at_pictures(self) -> None:
        """Those of the last requests before a pause must go, too."""
        self._pictures.look()
        self._loop.call_later(_PICTURES_S, self._look_at_pictures)

    # ---- loading, in threads ----------------------------------------------------------------------------

    def _work(self, message: Message, kind: type[T], what: Work[T], *, opens: bool = True) -> None:
        """Answers in a thread of its own. `opens`: it opens an instance, and what only makes others faster
        waits for that."""
        arguments = (message, kind, what, opens)
        threading.Thread(target=self._answer, args=arguments, name="loader", daemon=True).start()

    def _answer(self, message: Message, kind: type[T], what: Work[T], opens: bool) -> None:
        ask = message.body["ask"]

        def tell(step: str) -> None:
            self._loop.call_soon_threadsafe(partial(self._control.send, "step", ask=ask, step=step))

        with self._later.held() if opens else nullcontext():
            try:
                word, document = "answer", what(message.body, from_file(kind, message.files[0]), tell)
            except CarpoolError as error:
                word, document = "failure", _failure(error)
            except BaseException as error:  # a model's code may raise anything, and the engine waits
                _log.exception("load-failed")
                word, document = "failure", _failure(ModelError(f"{type(error).__name__}: {error}"))
            self._loop.call_soon_threadsafe(self._reply, word, ask, document)

    def _reply(self, word: str, ask: int, document: object) -> None:
        with as_file(document) as file:
            self._control.send(word, [file], ask=ask)

    def _prepare(self, fields: dict[str, Any], asked: LoadOrder, tell: ReportStep) -> Prepared:
        loading = self._new_loading(asked)
        told: list[str] = []

        def step(words: str) -> None:
            if not told:  # its code is imported by now: the next runner can begin with that
                self._loop.call_soon_threadsafe(self._tell_packages)
            told.append(words)
            tell(words)

        ready = loading.prepare(step)
        self._loadings[fields["loading"]] = loading
        backends = ready.backends
        ready = replace(ready, backends=())
        kept = [self._keep(backend, ready, loading) for backend in backends]
        artifacts = loading.compiled if isinstance(loading, Loading) else None
        sizes = [] if artifacts is None else list(artifacts.sizes)
        key = loading.kept_as if isinstance(loading, Loading) else ""
        return Prepared(ready, loading.threads, kept, imported_packages(), sizes, key)

    def _tell_packages(self) -> None:
        self._control.send("packages", names=imported_packages())

    def _new_loading(self, asked: LoadOrder) -> LoadsHere:
        part = hosted_part(asked.config)
        if part is not None:
            return part.loading(asked.config, asked.version)
        return Loading(asked.config, asked.version, self._profiles, turn=self._timing, behind=True)

    def _open(self, fields: dict[str, Any], opening: Opening, tell: ReportStep) -> OpenedAs:
        config, ready = opening.asked.config, opening.ready
        loading = self._loadings.get(fields["loading"])
        if loading is None:  # of a process before this one
            loading = self._new_loading(opening.asked)
            loading.resume(ready.config, opening.threads)
            self._loadings[fields["loading"]] = loading
            if isinstance(loading, Loading):
                self._resumed.add(loading)
        place = (fields["index"], fields["count"])
        if not isinstance(loading, Loading):
            return self._keep(loading.backend(*place, tell), ready, loading)
        hurry = loading in self._resumed
        backend = loading.backend(*place, tell, hurry=hurry)
        kept = self._keep(backend, ready, loading)
        if hurry:
            use = partial(self._swap, kept.number)
            if loading.behind or (kept.device and ready.config.pytorch.compile != "off"):
                self._later.add(config.name, partial(loading.backend, *place, plain=True), use, whole=False)
            if not loading.behind:  # else the engine asks for it, size by size
                self._later.add(config.name, partial(loading.backend, *place), use)
        return kept

    def _compile(self, fields: dict[str, Any], _opening: Opening, _tell: ReportStep) -> CompiledInstances:
        """Compiles one batch size of every instance that serves, beside its batches."""
        loading = self._loadings.get(fields["loading"])
        if not isinstance(loading, Loading):
            raise ModelError("it is not loaded here", reason="model-died")
        with self._compiling:
            self._later.until_quiet()
            with imports_in_pieces(self._runs_batches) as pauses:
                return CompiledInstances(self._compile_all(loading, fields["size"], pauses))

    def _runs_batches(self) -> bool:
        since = time.monotonic() - _BUSY_S
        return any(
            isinstance(instance, RunnerInstance) and instance.ran > since
            for instance, _ in list(self._serving.values())
        )

    def _compile_all(self, loading: Loading, size: int, pauses: Pauses) -> list[CompiledSize]:
        newest = [
            instance.newest
            for instance, opened in list(self._serving.values())
            if opened.loading is loading and isinstance(instance, RunnerInstance)
        ]
        backends = [backend for backend in newest if isinstance(backend, Compiles)]
        if any(isinstance(backend, SharesDevice) and backend.device for backend in backends):
            import_compiler(pauses)
        loading.bring_artifacts()
        return [backend.compile(size) for backend in backends]

    def _keep_profile(self, fields: dict[str, Any], opening: Opening, _tell: ReportStep) -> None:
        loading = self._loadings.get(fields["loading"])
        if isinstance(loading, Loading):
            loading.keep(opening.ready.profile)

    def _swap(self, number: int, backend: Backend) -> None:
        """The instance has by now what makes it fast; in vain for one that has left."""
        end = time.monotonic() + _SERVED_S
        while number in self._opened and time.monotonic() < end:
            time.sleep(_LOOK_S)  # the engine has not said yet that it is to serve
        known = self._serving.get(number)
        if known is None or not isinstance(known[0], RunnerInstance):
            backend.close()
        else:
            known[0].swap(backend)

    def _keep(self, backend: Any, ready: Ready, loading: LoadsHere) -> OpenedAs:
        number = next(self._numbers)
        self._opened[number] = Opened(backend, ready, loading, hosted_part(ready.config))
        return OpenedAs(number, backend.device if isinstance(backend, SharesDevice) else "")

    # ---- instances --------------------------------------------------------------------------------------

    def _serve(self, message: Message) -> None:
        number = message.body["instance"]
        sock = socket.socket(fileno=message.files[0])
        opened = self._opened.pop(number, None)
        if opened is None:  # of a runner before this one
            sock.close()
            return
        entry, left = _entry(opened.ready), partial(self._left, number)
        instance: ServesHere
        if opened.part is not None:
            instance = opened.part.serve(opened.backend, opened.ready, entry, self._arenas, sock, left)
        else:
            piece = message.body["piece"]
            instance = RunnerInstance(opened.backend, entry, self._arenas, sock, piece, self._most, left)
        self._serving[number] = (instance, opened)

    def _left(self, number: int) -> None:
        with suppress(RuntimeError):  # the process ends, and so has its loop
            self._loop.call_soon_threadsafe(self._serving.pop, number, None)

    def _drop(self, message: Message) -> None:
        opened = self._opened.pop(message.body["instance"], None)
        if opened is not None:
            threading.Thread(target=opened.backend.close, name="closer", daemon=True).start()

    def _abort(self, message: Message) -> None:
        threading.Thread(
            target=self._settle, args=(message.body["instance"],), name="aborter", daemon=True
        ).start()

    def _settle(self, number: int) -> None:
        known = self._serving.get(number)
        if known is not None:
            known[0].abort()
        self._loop.call_soon_threadsafe(partial(self._control.send, "settled", instance=number))


class Pauses:
    """While batches run, this thread sleeps for longer than it worked, every few milliseconds. As a finder of
    modules, which finds none, it looks at the time before each import; as a profiler, after so many calls."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self._busy = busy
        self._thread = threading.get_ident()
        self._calls = 0
        self._last = time.monotonic()

    def find_spec(self, _name: str, _path: object = None, _target: object = None) -> None:
        if threading.get_ident() == self._thread:
            self._look()

    def __call__(self, _frame: object, _event: str, _argument: object) -> None:
        self._calls += 1
        if not self._calls % _CALLS:
            self._look()

    def _look(self) -> None:
        worked = time.monotonic() - self._last
        if worked < _SLICE_S:
            return
        if self._busy():
            time.sleep(min(_LONGEST_PAUSE_S, _PAUSE * worked))
        self._last = time.monotonic()


class _Collections:
    """Logs how long the garbage collector kept all threads from the interpreter, where it took long."""

    def __init__(self) -> None:
        self.long: list[dict[str, float]] = []
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        elif (seconds := time.monotonic() - self._began) > _LONG_COLLECTION_S:
            said = {"at": round(time.time(), 3), "seconds": round(seconds, 3)}
            self.long.append({**said, "generation": info["generation"]})


@contextmanager
def imports_in_pieces(busy: Callable[[], bool]) -> Iterator[Pauses]:
    """What this thread does inside leaves the interpreter to others as often as it can."""
    switched, pauses, collections = sys.getswitchinterval(), Pauses(busy), _Collections()
    sys.setswitchinterval(_COMPILING_SWITCH_S)
    sys.meta_path.insert(0, pauses)
    gc.callbacks.append(collections)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(collections)
        sys.meta_path.remove(pauses)
        sys.setswitchinterval(switched)
        if collections.long:
            _log.info("long-collections", seen=collections.long)


def import_compiler(pauses: Pauses, names: Sequence[str] = COMPILER_MODULES) -> None:
    """Imports the compiler once, apart from compiling: the log shows which of the two delayed batches. Half
    of the time is in modules that work for 25 to 250 ms each, so that pauses between them are not enough."""
    missing = [name for name in names if name not in sys.modules]
    if not missing:
        return
    began, at = time.monotonic(), time.time()
    sys.setprofile(pauses)
    try:
        import_all(missing, aside=False)
    finally:
        sys.setprofile(None)
    _log.info("compiler-imported", began=round(at, 3), seconds=round(time.monotonic() - began, 3))


def _failure(error: CarpoolError) -> RunnerFailure:
    status, payload = write_failure(error)
    return RunnerFailure(status, payload.decode())


def _entry(ready: Ready) -> ModelEntry:
    """Returns as much of an entry as templates are checked against."""
    return ModelEntry(
        key=0,
        name=ready.config.name,
        version="",
        signature=ready.signature,
        batching=Batching(""),
        vision=None if ready.vision is None else write_vision(ready.vision),
    )


def _as_runner(record: logging.LogRecord) -> bool:
    record.name = "carpool.runner"
    return True


async def _live(names: Sequence[str], control: Control, stream: int) -> int:
    # A fork of the zygote has this behind it. What is made at import stays for ever.
    import_all(("torch", *names), aside=False)
    collect_rarely()
    first = await control.receive()
    if first is None:
        return 0
    configure(first.body["log_format"], first.body["log_level"], stream)
    logging.getLogger("carpool.engine").addFilter(_as_runner)  # the code that loads is the engine's as well
    pulses = Pulses(take_memory(first.files[0]))
    beats = Beats(lambda: pulses.beat(0))
    await RunnerProcess(control, first).run()
    beats.stop()
    return 0


def live_as_runner(fd: int, names: Sequence[str] = ()) -> NoReturn:
    switch_often()
    os.environ.setdefault("TORCH_WARM_POOL", "0")  # others compile, and this one takes it from their cache
    # Threads that want the interpreter wait with a timer; its slack is 50 µs unless the process sets less.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS)
    live_as_child("runner", fd, partial(_live, names))


def live_as_compiler(fd: int) -> NoReturn:
    live_as_child("compiler", fd, compiler_process.live)


if __name__ == "__main__":
    if sys.argv[1] == ZYGOTE:
        lives = {RUNNER: live_as_runner, COMPILER: live_as_compiler}
        live_as_zygote(int(sys.argv[-1]), ("torch",), bring_packages, lives)
    if sys.argv[1] == COMPILER:
        live_as_compiler(int(sys.argv[-1]))
    live_as_runner(int(sys.argv[-1]), sys.argv[2:-1])
