"""A server of the sweep's own: `carpool serve` on free loopback ports, and its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from carpool.errors import CarpoolError

_CODE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
_ADDRESS = re.compile(r"Carpool serves .* at (http://\S+)")
_ERROR = re.compile(r"""^carpool: (.+)|\berror="(.+)"$""")
_STARTING_S = 900.0  # a model may be measured first
_LOOK_S = 0.05
_STOPPING_S = 20.0
_OURS = (
    "CARPOOL_SLO_MS",
    "CARPOOL_MODEL_CONTROL_MODE",
    "CARPOOL_LOAD_MODELS",
)  # would change what is measured


class NoServer(CarpoolError):
    """It did not start, or it ended too early."""

    reason = "server-died"


class OwnServer:
    """One process with its children, and its log beside the results."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = ()) -> None:
        self._log = log
        arguments = [sys.executable, "-P", "-c", _CODE, "serve", str(model), "--host", "127.0.0.1"]
        for port in ("--http-port", "--metrics-port"):
            arguments += [port, "0"]
        arguments += ["--grpc-frontends", "0", "--model-control-mode", "none", "--drain-s", "1", *options]
        kept = {name: value for name, value in os.environ.items() if name not in _OURS}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=kept,
                start_new_session=True,  # Ctrl-C is ours to hear
            )

    async def address(self) -> str:
        """Where it serves, once it does."""
        give_up = time.monotonic() + _STARTING_S
        while time.monotonic() < give_up:
            found = _ADDRESS.search(self._said())
            if found:
                return found[1]
            self.check()
            await asyncio.sleep(_LOOK_S)
        raise NoServer(f"the server was not ready within {_STARTING_S:g} s; its log is {self._log}")

    def check(self) -> None:
        """Raises `NoServer` with its last words if it is gone."""
        if self._process.poll() is None:
            return
        raise NoServer(f"the server ended: {last_words(self._said())} (its log is {self._log})")

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait until it has; with those that were not asked, or do not listen, it is brought about."""
        try:
            self._process.wait(_STOPPING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_STOPPING_S)

    def _said(self) -> str:
        return self._log.read_text("utf-8", "replace")


def last_words(log: str) -> str:
    """The last error in it, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [found[1] or found[2] for line in lines if (found := _ERROR.search(line))]
    return (errors or lines or ["it said nothing"])[-1][:500]
