"""One server under test: started, checked for the right answer, asked what it cost, stopped."""

import http.client
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from load import processes
from load.wrk import Target

READY_WITHIN_S = 60.0
STOP_WITHIN_S = 10.0
Answer = Callable[[Mapping[str, str], bytes], np.ndarray]


class ServerError(Exception):
    """A server did not start, or does not answer what it should."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to start a server and how to ask it. Settings of the same server share a `row`."""

    row: str
    protocol: str
    command: Sequence[str]
    env: Mapping[str, str]
    target: Target
    read_answer: Answer
    setting: str = ""

    @property
    def name(self) -> str:
        return f"{self.row} ({self.setting})" if self.setting else self.row


class Server:
    """A running server. It is a child of this process, in a session of its own."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        self.recipe = recipe
        self.name = recipe.name
        slug = "".join(c if c.isalnum() else "-" for c in recipe.name.lower())
        self.script_env = recipe.target.write(folder, slug)
        self._log = folder / f"{slug}.log"
        self._family: Iterable[int] = ()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                recipe.command,
                env=_clean_environment() | dict(recipe.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def port(self) -> int:
        return self.recipe.target.port

    def wait_ready(self, expected: np.ndarray) -> None:
        """Ask until the first 200; then the answer must be the expected one."""
        last = "no answer"
        give_up = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                status, headers, body = self._ask()
            except OSError as error:
                last = str(error)
            else:
                if status == http.client.OK:
                    self._check(self.recipe.read_answer(headers, body), expected)
                    return
                last = f"{status} {body[:300]!r}"
            time.sleep(0.05)
        raise ServerError(f"{self.name} is not ready: {last}\n{self._log_tail()}")

    def cpu(self) -> dict[int, float]:
        """CPU seconds so far, by process."""
        if self._process.poll() is not None:
            raise ServerError(f"{self.name} ended with {self._process.returncode}\n{self._log_tail()}")
        return processes.tree_cpu(self._process.pid)

    def ask_to_stop(self) -> None:
        self._family = processes.tree_cpu(self._process.pid).keys()
        self._process.terminate()

    def wait_stopped(self) -> None:
        """Wait for it; past the limit, end what is left of the tree, by process id."""
        try:
            self._process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            for pid in self._family:
                _kill_if_ours(pid, session=self._process.pid)
            self._process.wait(STOP_WITHIN_S)

    def _ask(self) -> tuple[int, Mapping[str, str], bytes]:
        target = self.recipe.target
        connection = http.client.HTTPConnection("127.0.0.1", target.port, timeout=10)
        try:
            connection.request("POST", target.path, target.body, dict(target.headers))
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def _check(self, answer: np.ndarray, expected: np.ndarray) -> None:
        if answer.shape != expected.shape or not np.allclose(answer, expected, rtol=1e-3, atol=1e-3):
            raise ServerError(f"{self.name} answers {answer.tolist()}, not {expected.tolist()}")

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


def free_port() -> int:
    """A loopback port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


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
