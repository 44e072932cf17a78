"""This runs one whole `carpool serve` as a child process: started, awaited, watched and asked to stop."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from carpool.errors import CarpoolError
from carpool.extensions.ray.address_book import Place
from carpool.extensions.ray.leash import start_on_leash
from carpool.extensions.ray.serve_metrics import COUNTED, GAUGED, Sample

_SAID_LINES = 30
_LONGEST_LINE = 8192
_ASK_S = 2.0
_LONGEST_PAGE = 16 << 20
_SAMPLE = re.compile(rf"^({'|'.join([*COUNTED, *GAUGED])})\{{(.*)\}} (\S+)$", re.MULTILINE)
_PORTS = ("http", "grpc", "metrics")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class ReplicaFailed(CarpoolError):
    reason = "replica-failed"


class ServerChild:
    """A thread starts it, reads what it writes, and waits for its end: the kernel ends the child when that
    thread ends, so it must be one that does nothing else."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: logging.Logger) -> None:
        """`log` gets every line that the server writes."""
        self._command = [sys.executable, "-P", "-m", "carpool", *arguments]
        self._environment = os.environ | dict(environment)
        self._environment.pop("OMP_NUM_THREADS", None)  # Ray's: the server finds out what serves best
        self._log = log
        self._said: deque[str] = deque(maxlen=_SAID_LINES)
        self._ready, self._ended = threading.Event(), threading.Event()
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._why = ""
        self._keeper = threading.Thread(target=self._keep, name="carpool-serve", daemon=True)

    def start(self, host: str, ready_s: float) -> Place:
        """Returns where it listens, when its models are loaded and it answers."""
        self._keeper.start()
        self._ready.wait(ready_s)
        if "http" not in self._ports:
            ended = self._ended.is_set()
            self.kill()
            why = f"ended with {self._why}" if ended else f"was not ready within {ready_s:g} s"
            raise ReplicaFailed(f"carpool serve {why}: {self.said()}")
        return Place(host, self._ports["http"], self._ports.get("grpc", 0))

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def metrics_port(self) -> int:
        return self._ports.get("metrics", 0)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def said(self) -> str:
        """Returns its last words, with those that are about a mistake alone where there are any."""
        lines = list(self._said)
        return " | ".join([line for line in lines if '"error"' in line or "carpool:" in line] or lines)[
            -2000:
        ]

    def stop(self, patience_s: float) -> bool:
        """Its ports stay open for the lame duck, and what it has accepted is answered. Whether it ended in
        time."""
        with contextlib.suppress(ProcessLookupError):
            if self._process is not None and not self.has_ended:
                self._process.send_signal(signal.SIGTERM)
        if self._ended.wait(patience_s):
            return True
        self.kill()
        return False

    def kill(self) -> None:
        if self._process is not None and not self.has_ended:
            self._process.kill()  # its own children end with it
            self._ended.wait(_ASK_S)

    def _keep(self) -> None:
        try:
            self._process = start_on_leash(self._command, self._environment, subprocess.PIPE)
            assert self._process.stdout is not None
            with self._process.stdout as lines:
                while line := lines.readline(_LONGEST_LINE):
                    self._hear(line.decode("utf-8", "replace").rstrip())
            code = self._process.wait()
            self._why = f"signal {-code}" if code < 0 else f"status {code}"
        except OSError as error:
            self._why = str(error)
        finally:
            self._ended.set()
            self._ready.set()

    def _hear(self, line: str) -> None:
        if line:
            self._said.append(line)
        event = _event(line)
        level, text = _as_logged(event, line)
        self._log.log(level, "carpool: %s", text)
        if not self._ready.is_set() and event.get("event") == "ready":
            with contextlib.suppress(ValueError, TypeError):
                self._ports = {name: int(event[name]) for name in _PORTS if name in event}
                self._ready.set()


def _event(line: str) -> dict[str, Any]:
    """Returns an empty one for what is no event: a crash of the interpreter, a library's own words."""
    with contextlib.suppress(ValueError):
        found = json.loads(line) if line.startswith("{") else {}
        return found if isinstance(found, dict) else {}
    return {}


def _as_logged(event: Mapping[str, object], line: str) -> tuple[int, str]:
    """Returns the event's word and fields; who logs it has a time and a level of its own."""
    if "event" not in event:
        return logging.INFO, line
    level = logging.getLevelNamesMapping().get(str(event.get("level")).upper(), logging.INFO)
    fields = [f"{name}={value}" for name, value in event.items() if name not in ("time", "level", "event")]
    return level, " ".join([str(event["event"]), *fields])


class LoadReports:
    """Returns what a server has been asked for and can answer, by model, from its metrics page."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.answered_at = time.monotonic()
        self.samples: list[Sample] = []
        self.offered: dict[str, float] = {}
        self.capacity: dict[str, float] = {}

    def look(self) -> None:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_ASK_S)
        with contextlib.closing(connection):
            try:
                connection.request("GET", "/metrics", headers={"Host": "localhost"})
                page = connection.getresponse().read(_LONGEST_PAGE).decode("utf-8", "replace")
            except (OSError, http.client.HTTPException):
                return
        self.answered_at = time.monotonic()
        self.read(page)

    def read(self, page: str) -> None:
        """Reads the samples by model and version."""
        samples = []
        for metric, labels, value in _SAMPLE.findall(page):
            with contextlib.suppress(ValueError):
                samples.append(Sample(metric, dict(_LABEL.findall(labels)), float(value)))
        self.samples = samples
        self.offered = _by_model(samples, "carpool_offered_images_total")
        self.capacity = _by_model(samples, "carpool_capacity_images_per_second")


def _by_model(samples: Sequence[Sample], metric: str) -> dict[str, float]:
    return {
        f"{each.labels.get('model', '')}/{each.labels.get('version', '')}": each.value
        for each in samples
        if each.metric == metric
    }
