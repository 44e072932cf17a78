"""The cameras of `carpool demo rollout`: they ask, and say of each answer whether it was right."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from carpool.demo.labelled import Labelled

SOURCES = 200
_SENDERS, _STOPPING_S = 8, 5.0


@dataclass
class Traffic:
    """Runs cameras that ask, and say of each answer whether it was right."""

    url: str
    model: str
    pictures: list[Labelled]
    rate: float
    failed: Counter[str] = field(default_factory=Counter)  # by reason
    _right: dict[str, list[int]] = field(default_factory=dict)  # by version: right, asked
    _lock: threading.Lock = field(default_factory=threading.Lock)  # counts come from several threads
    _stop: threading.Event = field(default_factory=threading.Event)
    _sent: int = 0
    _next: float = 0.0  # when to send it

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Sends traffic while inside."""
        threads = [threading.Thread(target=self._send, daemon=True) for _ in range(_SENDERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_STOPPING_S)

    def ask_for(self, rate: float) -> None:
        with self._lock:
            self.rate = rate

    def judged(self) -> list[tuple[str, tuple[int, int]]]:
        with self._lock:
            return [(version, (right, asked)) for version, (right, asked) in sorted(self._right.items())]

    def _send(self) -> None:
        """Sends requests in a thread, until it is stopped. A camera shows another picture each time it
        asks."""
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=30.0)
        while True:
            with self._lock:
                number, now = self._sent, time.monotonic()
                at = max(self._next, now - 1.0)  # a second is caught up on, not more
                self._sent, self._next = number + 1, at + 1.0 / self.rate
            if self._stop.wait(max(0.0, at - now)):
                break
            one = self.pictures[(number + number // SOURCES) % len(self.pictures)]
            try:
                self._ask(connection, one, f"camera-{number % SOURCES}")
            except (OSError, HTTPException, ValueError) as error:
                connection.close()
                with self._lock:
                    self.failed[type(error).__name__] += 1
        connection.close()

    def _ask(self, connection: HTTPConnection, one: Labelled, source: str) -> None:
        headers = {"Content-Type": "image/jpeg", "X-Carpool-Source": source}
        connection.request("POST", f"/models/{self.model}/predict?top_k=5", one.picture, headers)
        answer = connection.getresponse()
        document = json.loads(answer.read())
        if answer.status != 200:
            with self._lock:
                self.failed[str(document.get("reason", answer.status))] += 1
            return
        right = one.is_right([found["label"] for found in document["classes"]])
        with self._lock:
            counts = self._right.setdefault(document["version"], [0, 0])
            counts[0] += right
            counts[1] += 1
        told = {"id": answer.getheader("X-Carpool-Id"), "verdict": "right" if right else "false-alert"}
        connection.request("POST", f"/v2/models/{self.model}/feedback", json.dumps(told))
        connection.getresponse().read()  # feedback on an answer that the server has forgotten is not counted
