"""A zygote: a process that has imported what others need, and forks them. It has one thread, and does nothing
else.

Importing takes seconds, a fork takes milliseconds, and what was imported is shared memory. `forked_child.py`
is the parent's side of it."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import orjson

from carpool.link.child_process import belong_to_parent, collect_rarely
from carpool.observe.output import keep_stream

_LONGEST = 1 << 16
_FILES = 3  # of a fork: its control, the pipe for what it prints, the log
_HANDED_OVER_S = 10.0
_NICER = 10

Lives = Mapping[str, Callable[[int], NoReturn]]
"""By kind: what a forked process does, with the number of its control socket."""
Bring = Callable[[Sequence[str], bool], str]
"""Imports modules, aside if that is wanted; returns why nothing can be forked any more, if so."""


def live_as_zygote(fd: int, first: Sequence[str], bring: Bring, lives: Lives) -> NoReturn:
    """Imports `first` at once, and more when it is asked to."""
    belong_to_parent()
    log = keep_stream()
    os.set_inheritable(fd, False)
    control = socket.socket(fileno=fd)
    import_all(first, aside=False)
    collect_rarely()
    _say(control, "imported")
    while True:
        data, files, _, _ = socket.recv_fds(control, _LONGEST, _FILES)
        if not data:
            os._exit(0)
        message = orjson.loads(data)
        if message["word"] == "import":
            _bring(control, bring(message["names"], message["aside"]))
        elif message["word"] == "fork":
            pid = _fork(control, message, files, log, lives)
            _say(control, "born", number=message["number"], pid=pid)


def import_all(names: Sequence[str], *, aside: bool) -> None:
    """Imports packages; with `aside`, when nothing else has to be done. In a thread, which alone has the
    lower priority: a process without privileges cannot raise its own again, and what it forks needs it."""
    if aside:
        importing = threading.Thread(target=_import_all, args=(names, _NICER))
        importing.start()
        importing.join()
    else:
        _import_all(names, 0)


def _import_all(names: Sequence[str], nicer: int) -> None:
    if nicer:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nicer)
    gc.disable()  # what is imported stays: to look for garbage in it takes a fifth of the time
    for name in names:
        with suppress(Exception):  # a process that needs it says so
            importlib.import_module(name)
    gc.enable()


def _say(control: socket.socket, word: str, **fields: Any) -> None:
    try:
        control.send(orjson.dumps({"word": word, **fields}))
    except OSError:
        os._exit(0)  # the other end is gone


def _bring(control: socket.socket, spoiled: str) -> None:
    if spoiled:
        _say(control, "spoiled", why=spoiled)
        time.sleep(_HANDED_OVER_S)  # until the parent ends this process, which answers what was asked for
        os._exit(0)
    gc.freeze()
    _say(control, "imported")


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
