"""Connects a process of the server and its parent: how it is started, what the two say to each other, how it
ends.

They say JSON messages that can carry files, on a Unix socket, which keeps messages apart: nothing has to be
cut or joined. It takes none that is longer than its buffer, so a long one (the names of thousands of models)
goes as a file. The end of the socket also shows each side that the other is gone."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import orjson

from carpool.memory.pulse import STALE_S, START_S, Watch
from carpool.observe.logs import Logger, finish, logger, stream
from carpool.observe.output import ProcessOutput, keep_stream, read_some

_LONGEST = 1 << 15  # of a message as such; the kernel's buffer is several times that
_MOST_FILES = 64
_AS_FILE = b"file"  # the message is what the last file holds; no JSON object looks like this
_log = logger("control")


@dataclass(slots=True)
class Message:
    """What was said, and the files that came with it: they belong to the receiver."""

    body: dict[str, Any]
    files: list[int] = field(default_factory=list)

    @property
    def word(self) -> str:
        return str(self.body.get("word", ""))


def control_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Control:
    """Represents one end. To be made and used on a running loop."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue()
        self._open = True
        self._loop.add_reader(sock.fileno(), self._read)

    def send(self, word: str, files: Sequence[int] = (), **fields: object) -> bool:
        """False when the other side is gone or does not listen; its end is then noticed elsewhere too."""
        if not self._open:
            return False
        message = orjson.dumps({"word": word, **fields})
        try:
            if len(message) > _LONGEST:
                self._send_as_file(message, files)
            else:
                socket.send_fds(self._socket, [message], list(files))
        except OSError as error:
            if not isinstance(error, BrokenPipeError | ConnectionError):
                _log.warning("not-sent", word=word, bytes=len(message), error=str(error))
            return False
        return True

    def _send_as_file(self, message: bytes, files: Sequence[int]) -> None:
        fd = os.memfd_create("carpool-message", os.MFD_CLOEXEC)
        with os.fdopen(fd, "wb") as file:
            file.write(message)
            file.flush()
            socket.send_fds(self._socket, [_AS_FILE], [*files, fd])

    async def receive(self) -> Message | None:
        """The next message; None for ever once the other side is gone."""
        message = await self._messages.get()
        if message is None:
            self._messages.put_nowait(None)
        return message

    def close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._messages.put_nowait(None)

    def _read(self) -> None:
        try:
            data, files, _, _ = socket.recv_fds(self._socket, 2 * _LONGEST, _MOST_FILES)
        except BlockingIOError:
            return
        except OSError:
            data, files = b"", []
        if not data:
            self.close()
            return
        for fd in files:
            os.set_inheritable(fd, False)
        if data == _AS_FILE:
            with os.fdopen(files.pop(), "rb") as file:
                file.seek(0)
                data = file.read()
        self._messages.put_nowait(Message(orjson.loads(data), files))


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OTHER_SIGNALS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # that would end a process by default
_PR_SET_PDEATHSIG = 1
_COLLECT_AT = (20_000, 20, 50)
_SWITCH_S = 1e-4
"""How long a thread keeps the interpreter while another wants it. A model's thread asks for it after each
call into its device, and with Python's 5 ms a GPU waits for the others (docs/gpu.md)."""


def collect_rarely() -> None:
    """What is loaded now stays, and requests leave no cycles behind: looking for some is time lost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def switch_often() -> None:
    sys.setswitchinterval(_SWITCH_S)


def belong_to_parent() -> None:
    """Ends with the process that started us, at once and in every case, and only then.

    A terminal or a service manager may signal the whole group: when to stop is for the parent to say. A
    handler that does nothing, rather than SIG_IGN, since children of ours would inherit that.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (*STOP_SIGNALS, *OTHER_SIGNALS):
        signal.signal(number, lambda *_: None)


def live_as_child(
    part: str,
    fd: int,
    live: Callable[[Control, int], Coroutine[Any, Any, int]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> NoReturn:
    """All that a process does which a `Child` started: `live` gets its control and the stream of its log."""
    belong_to_parent()
    stream = keep_stream()
    os.set_inheritable(fd, False)

    async def living() -> int:
        return await live(Control(socket.socket(fileno=fd)), stream)

    try:
        code = asyncio.Runner(loop_factory=loop_factory).run(living())
    except Exception:
        logger(part).exception("process-failed")
        code = 1
    finish()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # neither a thread that is stuck in a model nor a link that is open may keep us


class ProcessHandle(Protocol):
    """Has as much of a process as its parent uses."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Returns the exit code, or None until it was waited for."""

    def kill(self) -> None: ...

    def wait(self) -> int: ...


_LAST_READS = 64  # of what a process wrote before it ended: more than a pipe holds


class Child:
    """A fresh interpreter, or a fork of one that has no threads and no device (`forked_child.py`): models and
    their libraries keep both.

    It gets a session of its own, so that a Ctrl-C in the terminal reaches the supervisor only. Its standard
    output is the log, for its logger (`keep_stream`); its standard error is a pipe that is read here.
    """

    is_fork = False  # of a zygote

    def __init__(
        self, module: str, *arguments: str, called: str = "", environment: Mapping[str, str] | None = None
    ) -> None:
        """`python -m module arguments… fd`: the last is its end of the control socket. `environment` is added
        to ours, where that does not say otherwise; the log knows it as `called`, or by its first argument."""
        ours, theirs = control_pair()
        try:
            self._written, writing = os.pipe()
        except OSError:
            ours.close()
            theirs.close()
            raise
        try:
            with theirs:
                self._process: ProcessHandle = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, *arguments, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=stream(),
                    stderr=writing,
                    pass_fds=[theirs.fileno()],
                    env={**(environment or {}), **os.environ},
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            os.close(self._written)
            raise
        finally:
            os.close(writing)
        try:
            pidfd = os.pidfd_open(self._process.pid)
        except BaseException:  # no descriptor is left: it must not live on unwatched
            ours.close()
            os.close(self._written)
            self._process.kill()
            self._process.wait()
            raise
        self._listen(ours, called or arguments[0])
        self.begin(pidfd)

    @classmethod
    def around(cls, process: ProcessHandle, ours: socket.socket, written: int, called: str) -> Child:
        """Returns a child for a process that other code starts: `begin` says when."""
        child = cls.__new__(cls)
        child._process, child._written = process, written
        child.is_fork = True
        child._listen(ours, called)
        return child

    def _listen(self, ours: socket.socket, called: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self.begun = asyncio.Event()
        self._pidfd = -1
        self._called = called
        self._output = ProcessOutput(process=called, child=self._process.pid)
        os.set_blocking(self._written, False)
        self._loop.add_reader(self._written, self._read_output)
        self._started = time.monotonic()
        self.control = Control(ours)

    def begin(self, pidfd: int) -> None:
        """Notes that the process has begun, and the descriptor that signals its end; -1: it never begins."""
        self.begun.set()
        self._pidfd = pidfd
        if pidfd < 0:
            self._ended.set()
            self.control.close()
        else:
            self._loop.add_reader(pidfd, self._ended.set)
            self._output = ProcessOutput(process=self._called, child=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def age(self) -> float:
        return time.monotonic() - self._started

    def kill(self) -> None:
        """Kills the process. Its number stays its own until `watch` has collected it: no other one is hit."""
        if self._process.returncode is None:
            self._process.kill()

    def abandon(self) -> None:
        """Ends a process that cannot be used as it is and that is not watched yet, here and now."""
        self.kill()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.control.close()
        self._close_output()

    async def watch(self, heard: Callable[[Message], None]) -> int:
        """Pass on what it says, to its last word, and return its exit code: negative for a signal."""
        while (message := await self.control.receive()) is not None:
            heard(message)
        await self._ended.wait()
        self._close()
        return self._process.wait()

    def _read_output(self) -> bool:
        """Returns whether there was something to read."""
        data = read_some(self._written)
        if data:
            self._output.feed(data)
        elif data is not None:
            self._loop.remove_reader(self._written)  # its end: every process that could write is gone
        return bool(data)

    def _close_output(self) -> None:
        """Its last words; what it started itself may still have the pipe, and is not waited for."""
        for _ in range(_LAST_READS):
            if not self._read_output():
                break
        self._loop.remove_reader(self._written)
        os.close(self._written)
        self._output.close()


@dataclass(slots=True)
class Watchdog:
    """Looks at one process's signs of life: says when it stalls, kills it when that lasts for `kill_after`
    seconds; 0: never."""

    child: Child
    watch: Watch
    kill_after: float
    log: Logger
    what: str  # it is called in the log
    fields: Mapping[str, object] = field(default_factory=dict)
    still: float = 0.0  # for how long, at the last look
    stalled: bool = False
    killed: bool = False

    def look(self, *, patient: bool) -> None:
        """Checks the pulse, and must be called every `BEAT_S`. `patient`: what it imports or loads may hold
        its interpreter lock."""
        still = self.still = self.watch.look()
        patient = patient or not self.watch.begun
        if (still >= STALE_S and not patient) != self.stalled:
            self.stalled = not self.stalled
            if self.stalled:
                self.log.warning(f"{self.what}-stalled", **self.fields, child=self.child.pid)
            else:
                self.log.info(f"{self.what}-moves-again", **self.fields, child=self.child.pid)
        limit = max(self.kill_after, START_S) if patient else self.kill_after
        if self.kill_after and still >= limit and not self.killed:
            self.killed = True  # said once; its end may take a while to be seen
            self.log.error(f"{self.what}-hangs", **self.fields, child=self.child.pid, still_s=round(still, 1))
            self.child.kill()
