"""Lets a machine look busier than it is, for tools/hunt.py: a plugin of pytest.

It shuffles the tests, and delays threads, callbacks and readers of clocks, at random but by a seed: the same
test has the same draws with the same seed, alone or among others. All of it may happen on any machine: what
has an order keeps it, and no clock goes wrong. So a test that fails under it may fail without it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pool
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop

SEED, FOLDER = "CARPOOL_HUNT_SEED", "CARPOOL_HUNT_FOLDER"
FAILED, RUNNING, STOPPING = "failed", "running", "stopping"  # files in that folder

_SWITCHES_S = (16e-6, 128e-6, 5e-3, 5e-3, 16e-3)  # between threads that compute; whole microseconds
_AT_A_CLOCK, _AT_A_CALLBACK, _AT_A_TIMER, _AT_A_THREAD = 0.01, 0.01, 0.1, 0.3  # how often, of all
_SHORT_S, _LONG_S = (0.0003, 0.003), (0.01, 0.06)
_LONG = 0.04  # of all delays
_MOST_S = 2.0  # in one test: more would be another machine, not a busy one


class Delays:
    """Draws whether to stand still, and for how long."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.begin("")

    def begin(self, test: str) -> None:
        self._random, self._left_s = Random(f"{self._seed} {test}"), _MOST_S
        sys.setswitchinterval(self._random.choice(_SWITCHES_S))

    def draw(self, chance: float) -> float:
        """Returns seconds to stand still; none, mostly."""
        if self._random.random() >= chance or self._left_s <= 0:
            return 0.0
        seconds = self._random.uniform(*(_LONG_S if self._random.random() < _LONG else _SHORT_S))
        self._left_s -= seconds
        return seconds

    def now(self, chance: float) -> None:
        if seconds := self.draw(chance):
            _sleep(seconds)


_sleep, _monotonic, _counter, _kill = time.sleep, time.monotonic, time.perf_counter, os.kill
_folder = Path(os.environ.get(FOLDER, "/nonexistent"))
_seed = int(os.environ.get(SEED, "0"))
_delays = Delays(_seed)


# Clocks are replaced when this is imported, before modules take them by name. The process that distributes
# the tests is left alone.


# No function stands between a caller and what is called: its frame would keep arguments that an exception
# refers to, and tests look for memory that is kept.


def _slow(clock: Callable[[], float]) -> Callable[[], float]:
    def read() -> float:
        now = clock()
        _delays.now(_AT_A_CLOCK)  # behind it: what was read is old when it is used
        return now

    return read


def _delay_soon(loop: type, name: str) -> None:
    """Something that takes a while comes before the callback."""
    take = getattr(loop, name)

    def method(self: Any, callback: Any, *args: Any, **more: Any) -> Any:
        if seconds := _delays.draw(_AT_A_CALLBACK):
            take(self, _sleep, seconds)
        return take(self, callback, *args, **more)

    setattr(loop, name, method)


def _delay_later(loop: type, name: str) -> None:
    take = getattr(loop, name)

    def method(self: Any, when: float, callback: Any, *args: Any, **more: Any) -> Any:
        return take(self, when + _delays.draw(_AT_A_TIMER), callback, *args, **more)

    setattr(loop, name, method)


def _delay_method(target: Any, name: str) -> None:
    run = getattr(target, name)

    def look_up(self: Any) -> Any:
        _delays.now(_AT_A_THREAD)
        return run.__get__(self)

    setattr(target, name, property(look_up))


def _stop_alone(pid: int, number: int) -> None:
    """A test that stops a process by itself is not to have it continued by the hunt."""
    if number != signal.SIGSTOP:
        _kill(pid, number)
        return
    with (_folder / STOPPING).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _kill(pid, number)


def install() -> None:
    time.monotonic, time.perf_counter = _slow(_monotonic), _slow(_counter)
    for loop in (asyncio.BaseEventLoop, uvloop.Loop):
        for name in ("call_soon", "call_soon_threadsafe"):
            _delay_soon(loop, name)
        for name in ("call_later", "call_at"):
            _delay_later(loop, name)
    _delay_method(threading.Thread, "_bootstrap_inner")
    _delay_method(pool._WorkItem, "run")
    os.kill = _stop_alone


if os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.pop("PYTHONPATH", None)  # by which this was found; processes of tests need not find it
    install()


# ---- what pytest calls


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests stay together, as in `make test`: what they share is made once."""
    random, files = Random(_seed), dict[str, list[pytest.Item]]()
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    names = sorted(files)
    random.shuffle(names)
    for name, tests in files.items():
        Random(f"{_seed} {name}").shuffle(tests)  # as where the file is run alone
    items[:] = [item for name in names for item in files[name]]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    note = _folder / f"{RUNNING}-{os.getpid()}"
    with contextlib.suppress(OSError):  # no hunt, but one test that is tried alone
        note.write_text(item.nodeid)
    _delays.begin(item.nodeid)
    found = yield
    note.unlink(missing_ok=True)
    return found


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
        why = lines[0][1:].strip() if lines else report.longreprtext[-200:]
        with (_folder / FAILED).open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, why[:200]]) + "\n")
