"""Processes that are forked from one that has imported what they need: the zygote, as its parent sees it.

Importing takes seconds, and is done once: the zygote (`zygote_process.py`) has done it, does nothing else and
has touched no device. What it forks is handed over to its parent: it is the parent's child, whatever becomes
of the zygote."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Sequence

from carpool.link.child_process import Child, Message, control_pair
from carpool.memory.pulse import START_S
from carpool.observe.logs import Logger, logger, stream

_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 20.0  # a fork takes milliseconds, unless the zygote is importing


def _take_orphans(yes: bool) -> None:
    """Makes processes whose parent has ended ours: so a zygote hands over what it forks."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


class _Born:
    """Represents a process whose number is reported later; what `Child` needs of one."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._pidfd = -1
        self._doomed = False
        self.given_up: Callable[[], None] = lambda: None  # it was killed before it was born

    def born(self, pid: int) -> int:
        """Returns a descriptor for its end; -1: it is no longer wanted. Raises OSError where there is no such
        process."""
        self._pidfd = os.pidfd_open(pid)
        self.pid = pid
        if self._doomed:  # the caller that gave it up has its end already, and must not wait for the real one
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            threading.Thread(target=self._reap, name="reaper", daemon=True).start()
            return -1
        return os.dup(self._pidfd)

    def kill(self) -> None:
        if self._pidfd < 0:
            self._doomed = True
            self.given_up()
        elif self.returncode is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = self._reap()
        return self.returncode

    def _reap(self) -> int:
        if self._pidfd < 0:
            return -signal.SIGKILL  # it was never born
        try:  # by its number, which stays its own until here: the loop has made the descriptor non-blocking
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED)
        except ChildProcessError:  # it was not handed over, and its parent knows more
            ended = None
        os.close(self._pidfd)
        if ended is None:
            return -signal.SIGKILL
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


class Zygote:
    """`child` is its process, which has just been started; `gone` is called once, when it has ended or cannot
    be used any more. A fork that takes longer than `look_s` ends it, but while it imports."""

    def __init__(
        self,
        child: Child,
        ready: Callable[[], None],
        gone: Callable[[], None],
        *,
        log: Logger | None = None,
        look_s: float = _LOOK_S,
    ) -> None:
        self._child = child
        self._log = log or logger("runner")
        self._look_s = look_s
        self._ready, self._gone = ready, gone
        self._forks: dict[int, Callable[[int], None]] = {}
        self._number = 0
        self._imports = 1  # under way: what it imports first is one
        self._imported = 0  # and those that have ended
        self.usable = True
        self.spoiled = False  # what it imported has touched a device
        self.task = asyncio.get_running_loop().create_task(self._watch())

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def imports(self) -> bool:
        """Returns whether it is importing, and forks nothing before it has done so."""
        return self._imports > 0

    def bring(self, names: Sequence[str], *, aside: bool = True) -> None:
        """Import these as well, for whatever is forked later."""
        self._imports += 1
        self._child.control.send("import", names=list(names), aside=aside)

    def fork(self, kind: str, called: str) -> Child:
        """Returns a process of this kind, which exists soon. It ends at once where the zygote does before."""
        ours, theirs = control_pair()
        written, writing = os.pipe()
        born = _Born()
        child = Child.around(born, ours, written, called)
        born.given_up = lambda: child.begin(-1)
        self._number += 1
        self._forks[self._number] = lambda pid: self._hand_over(child, born, pid)
        _take_orphans(True)
        with theirs:
            files = [theirs.fileno(), writing, stream()]
            sent = self._child.control.send("fork", files, number=self._number, kind=kind, parent=os.getpid())
        os.close(writing)
        if not sent:
            self._born(self._number, 0)
        self._look_later(self._number, 1)
        return child

    def _look_later(self, number: int, looks: int) -> None:
        asyncio.get_running_loop().call_later(self._look_s, self._look, number, looks, self._imported)

    def _look(self, number: int, looks: int, imported: int) -> None:
        """Ends the zygote if it has not forked what it was asked for long ago: nothing else would notice, and
        all that are asked for later would wait for it, too. It should not import for as long as a process may
        take to start. `imported` were over at the last look: of what ended since, it may just have come."""
        if number not in self._forks or not self.usable:
            return
        if (self._imports or self._imported != imported) and looks * self._look_s < START_S:
            self._look_later(number, looks + 1)
            return
        self._log.error("zygote-hangs", child=self.pid)
        self.close()

    def _hand_over(self, child: Child, born: _Born, pid: int) -> None:
        try:
            pidfd = born.born(pid) if pid else -1
        except OSError:
            pidfd = -1
        child.begin(pidfd)

    def _born(self, number: int, pid: int) -> None:
        told = self._forks.pop(number, None)
        if not self._forks:
            _take_orphans(False)
        if told is not None:
            told(pid)

    async def _watch(self) -> None:
        code = await self._child.watch(self._hear)
        self.usable = False
        for number in list(self._forks):
            self._born(number, 0)
        self._log.debug("zygote-ended", code=code)
        self._gone()

    def _hear(self, message: Message) -> None:
        body = message.body
        if message.word == "born":
            self._born(int(body["number"]), int(body["pid"]))
        elif message.word == "imported":
            self._imports -= 1
            self._imported += 1
            self._ready()
        elif message.word == "spoiled":
            self.spoiled = True
            self._log.warning("zygote-spoiled", why=str(body.get("why", "")))
            self.close()

    def close(self) -> None:
        self.usable = False
        self._child.kill()  # it holds nothing
