"""The zygote: it has imported what runners need, and forks them. It has one thread and touches no device.

A device that is in use before a fork cannot be used after it, so that what an import does to one is looked
for, and a zygote that it happened to says so and ends: runners are then started as fresh processes."""

from __future__ import annotations

import gc
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import orjson

from carpool.link.child_process import belong_to_parent, spare_the_collector
from carpool.observe.output import keep_stream

_LONGEST = 1 << 16
_FILES = 3  # of a fork: its control, the pipe for what it prints, the log
_HANDED_OVER_S = 10.0
_STARTS_DEVICES = ("torch._inductor",)
"""What initialises CUDA when it is imported: processes that compile import it themselves."""
_IN_USE = "/dev/nvidia-uvm"  # open in every process that has initialised CUDA

Lives = Mapping[str, Callable[[int], NoReturn]]
"""By kind: what a forked process does, with the number of its control socket."""


def live_as_zygote(fd: int, import_all: Callable[..., None], lives: Lives) -> NoReturn:
    belong_to_parent()
    log = keep_stream()
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    import_all(("torch",), aside=False)
    spare_the_collector()
    _say(control, "imported")
    while True:
        data, files, _, _ = socket.recv_fds(control, _LONGEST, _FILES)
        if not data:
            os._exit(0)
        message = orjson.loads(data)
        if message["word"] == "import":
            _bring(control, message["names"], import_all)
        elif message["word"] == "fork":
            pid = _fork(control, message, files, log, lives)
            _say(control, "born", number=message["number"], pid=pid)


def _say(control: socket.socket, word: str, **fields: Any) -> None:
    try:
        control.send(orjson.dumps({"word": word, **fields}))
    except OSError:
        os._exit(0)  # nobody is there any more


def _bring(control: socket.socket, names: Sequence[str], import_all: Callable[..., None]) -> None:
    import_all([name for name in names if not name.startswith(_STARTS_DEVICES)], aside=True)
    if device_is_used():
        _say(control, "spoiled", why="one of the imported packages has initialised CUDA")
        time.sleep(_HANDED_OVER_S)  # until somebody ends us: what was asked for is answered by that
        os._exit(0)
    gc.collect()
    gc.freeze()
    _say(control, "imported")


def device_is_used(files: Path = Path("/proc/self/fd")) -> bool:
    for file in files.iterdir():
        try:
            if str(file.readlink()) == _IN_USE:
                return True
        except OSError:
            """It was the listing's own."""
    return False


def _fork(
    control: socket.socket, message: Mapping[str, Any], files: list[int], log: int, lives: Lives
) -> int:
    """Its number; 0: there is none. Between it and us is one that ends at once, so that it becomes the child
    of our parent, which takes orphans meanwhile."""
    reading, writing = os.pipe()
    try:
        middle = _forked()
        if middle == 0:
            try:
                pid = _forked()
            except OSError:
                os._exit(1)
            if pid:
                os.write(writing, str(pid).encode())
                os._exit(0)
            for unused in (reading, writing, log, control.detach()):
                os.close(unused)
            _begin(message, files, lives)
        os.close(writing)
        writing = -1
        number = os.read(reading, 32)
        os.waitpid(middle, 0)
        return int(number or b"0")
    except OSError:
        return 0
    finally:
        for file in (reading, writing, *files):
            if file >= 0:
                os.close(file)


def _forked() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # libraries for linear algebra have threads, and know about forks
        return os.fork()


def _begin(message: Mapping[str, Any], files: list[int], lives: Lives) -> NoReturn:
    """As a fresh process would, that was started with these files."""
    try:
        end = time.monotonic() + _HANDED_OVER_S
        while os.getppid() != message["parent"] and time.monotonic() < end:
            time.sleep(0.001)
        if os.getppid() != message["parent"]:
            os._exit(1)
        os.setsid()
        control, output, stream = files
        os.dup2(stream, 1)
        os.dup2(output, 2)
        for file in (output, stream):
            os.close(file)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        lives[message["kind"]](control)
    finally:
        os._exit(1)
