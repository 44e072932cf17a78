"""What a server says of itself: how many of its answers were in time, from the request's last byte to the
answer's first. What its clients saw beyond that happened on the way, or in the generator."""

import re
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

_BUCKET = re.compile(r'^carpool_request_duration_seconds_bucket\{.*le="([^"]+)"\} (\d+)$', re.MULTILINE)
_PATIENCE_S = 5.0


class Answered(NamedTuple):
    everything: int
    in_time: int


def read_page(page: str, within_s: float) -> Answered | None:
    """Over all models; None if the page has no such bound."""
    everything, in_time = 0, None
    for bound, count in _BUCKET.findall(page):
        if bound == "+Inf":
            everything += int(count)
        elif abs(float(bound) - within_s) < 1e-9:
            in_time = int(count) + (in_time or 0)
    return None if in_time is None else Answered(everything, in_time)


class Account:
    """Asked twice, from a thread of its own, since an overloaded server may take its time to say it."""

    def __init__(self, url: str, within_s: float | None) -> None:
        self._url = f"{url}/metrics"
        self._within = within_s
        self._thread = ThreadPoolExecutor(1)
        self._said: list[Future[Answered | None]] = []

    def look(self) -> None:
        if self._within is not None:
            self._said.append(self._thread.submit(self._ask, self._within))

    def _ask(self, within_s: float) -> Answered | None:
        with suppress(OSError), urllib.request.urlopen(self._url, timeout=_PATIENCE_S) as answer:
            return read_page(answer.read().decode(), within_s)
        return None

    def share(self) -> float | None:
        """Of the answers between the first look and the last one; None if the server cannot tell."""
        self._thread.shutdown()
        said = [future.result() for future in self._said]
        if len(said) < 2 or said[0] is None or said[-1] is None:
            return None
        answered = said[-1].everything - said[0].everything
        return round((said[-1].in_time - said[0].in_time) / answered, 4) if answered > 0 else None
