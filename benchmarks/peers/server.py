"""One server under test: started, checked for the right answer, asked what it cost, stopped."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from load import processes
from load.burst import Fire
from load.program import tied
from load.wrk import Target
from peers.ways import NotYet, Way, post

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0
Answer = TypeVar("Answer")


class ServerError(Exception):
    """A server did not start, or does not answer what it should."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a server and how to ask it. Settings of the same server share a `row`."""

    row: str
    command: Sequence[str]
    env: Mapping[str, str]
    ways: Sequence[Way]
    setting: str = ""
    first: Target | None = None  # to be sent once, before anything else

    @property
    def name(self) -> str:
        return f"{self.row} ({self.setting})" if self.setting else self.row


@dataclass(frozen=True, slots=True)
class Lane:
    """A server asked in one way: what takes its turn and has a row."""

    server: "Server"
    way: Way
    fire: Fire

    @property
    def row(self) -> str:
        return self.server.recipe.row

    @property
    def setting(self) -> str:
        return self.server.recipe.setting

    @property
    def name(self) -> str:
        return self.server.name

    @property
    def group(self) -> str:
        return self.way.group

    @property
    def protocol(self) -> str:
        return self.way.protocol

    def cpu(self) -> dict[int, float]:
        return self.server.cpu()


class Server:
    """A running server. It is a child of this process, in a session of its own."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.name = recipe.name
        self._folder = folder
        self._log = folder / f"{_slug(recipe.name)}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                recipe.command,
                env=_clean_environment() | dict(recipe.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied(),
            )

    def wait_ready(self, expected: np.ndarray) -> list[Lane]:
        """Ask in each way until there is an answer, which must be the expected one."""
        lanes = []
        give_up = time.monotonic() + READY_WITHIN_S
        if self.recipe.first is not None:
            self._retry(partial(post, self.recipe.first), give_up)
        for way in self.recipe.ways:
            self._check(self._retry(way.ask, give_up), expected)
            fire = way.loader(self._folder, _slug(f"{self.name} {way.group}"))
            lanes.append(Lane(self, way, fire))
        return lanes

    def cpu(self) -> dict[int, float]:
        """CPU seconds so far, by process."""
        if self._process.poll() is not None:
            raise ServerError(f"{self.name} {_how_it_ended(self._process.returncode)}\n{self._log_tail()}")
        return processes.tree_cpu(self._process.pid)

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait for it; past the limit it is ended, and so is what outlives it, by process id."""
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            _kill_if_ours(self._process.pid, session=self._process.pid)
            self._process.wait(STOP_WITHIN_S)
        for pid in processes.session(self._process.pid):
            _kill_if_ours(pid, session=self._process.pid)

    def _retry(self, step: Callable[[], Answer], give_up: float) -> Answer:
        last = "no answer"
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                return step()
            except NotYet as error:
                last = str(error)
            time.sleep(0.05)
        raise ServerError(f"{self.name} is not ready: {last}\n{self._log_tail()}")

    def _check(self, answer: np.ndarray, expected: np.ndarray) -> None:
        if answer.shape != expected.shape or not np.allclose(answer, expected, rtol=1e-3, atol=1e-3):
            raise ServerError(f"{self.name} answers {answer.tolist()}, not {expected.tolist()}")

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def _how_it_ended(code: int) -> str:
    return f"was ended by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"ended with {code}"


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())


def _clean_environment() -> dict[str, str]:
    """This environment without what would send loopback traffic elsewhere or change how Python starts."""
    return {
        key: value
        for key, value in os.environ.items()
        if not key.lower().endswith("_proxy") and not key.startswith(("PYTHON", "VIRTUAL_ENV"))
    }


def _kill_if_ours(pid: int, session: int) -> None:
    """End a process only while it still belongs to the session that this server began."""
    try:
        if os.getsid(pid) == session:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
