"""What tracing costs: Carpool without spans, twice, beside Carpool with spans of few requests and of all.

Two servers that are started alike differ by a few percent for as long as they run, as memory and processes
happen to lie. So all are started again and again; a difference is taken within each turn, its median within
each start, and the interval comes from the starts. The second server without spans shows what noise is.

Few spans cost less than that noise. So their cost is also told from what it is made of: a look at every
request, which is timed alone, and of some the spans, which are the difference between all and none.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median

from carpool.extensions.tracing.front import Tracer
from carpool.extensions.tracing.request_spans import RequestSpans
from carpool.extensions.tracing.settings import OtelSettings
from carpool.observe.counters import Table, table_bytes
from load.slices import Turn
from peers import recipes
from peers.server import Recipe

AGAIN = "carpool once more"
SHARES = (0.01, 1.0)
_RESAMPLES, _OUTSIDE = 4000, 0.025
_LOOKS, _REPEATS = 100_000, 7


class _Call:
    """As much of a request as is looked at when it gets no spans; and of the door that it came through."""

    siblings = b""

    def __init__(self) -> None:
        self.entry, self.name = self, "tiny"
        self._fields = {b"host": b"localhost", b"content-type": b"application/octet-stream"}

    def sent_field(self, name: bytes) -> bytes | None:
        return self._fields.get(name)


def looking_us() -> float:
    """CPU of a look at a request that gets no spans."""
    table = Table(memoryview(bytearray(table_bytes(1))))
    spans = RequestSpans(
        OtelSettings("http://127.0.0.1:9/", sample=0.0), "0", table.block(0).server, table.block_exemplars(0)
    )
    call, times, least = _Call(), (0.0, 0.0, 0.0), float("inf")
    tracer = Tracer(call, spans)  # type: ignore[arg-type]
    for _ in range(_REPEATS):
        began = time.thread_time()
        for _ in range(_LOOKS):
            tracer.answered(call, None, times)  # type: ignore[arg-type]
        least = min(least, time.thread_time() - began)
    tracer.close()
    return 1e6 * least / _LOOKS


class _Collector(BaseHTTPRequestHandler):
    """Reads what it gets and throws it away."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def collector() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def servers(job: recipes.Job, frontends: int | None, url: str) -> list[Recipe]:
    wanted: dict[str, list[str]] = {recipes.CARPOOL: [], AGAIN: []}
    wanted |= {
        f"spans of {share:.0%}": ["--otlp-endpoint", url, "--trace-sample", f"{share:g}"] for share in SHARES
    }
    found = []
    for number, (name, options) in enumerate(wanted.items()):
        folder = job.folder / f"traced-{number}"
        folder.mkdir()
        one = recipes.carpool(replace(job, folder=folder), frontends)
        found.append(replace(one, row=name, command=[*one.command, *options]))
    return found


@dataclass(frozen=True, slots=True)
class Difference:
    """CPU per request of one server, and how much more that is than without spans, as a share of it."""

    server: str
    group: str
    concurrency: int
    cpu_us: float
    more: float
    low: float
    high: float
    starts: Sequence[float]


def differences(starts: Sequence[Sequence[Turn]]) -> list[Difference]:
    """`starts`: the turns of each."""
    found = []
    cases = dict.fromkeys((turn.group, turn.concurrency) for turns in starts for turn in turns)
    for group, concurrency in cases:
        here = [[t for t in turns if (t.group, t.concurrency) == (group, concurrency)] for turns in starts]
        for name in sorted(next(turns for turns in here if turns)[0].slices):
            cpu = median(turn.slices[name].cpu_us for turns in here for turn in turns)
            each = [median(_more(turn, name) for turn in turns) for turns in here if turns]
            low, high = _interval(each)
            found.append(Difference(name, group, concurrency, cpu, median(each), low, high, each))
    return found


def _more(turn: Turn, name: str) -> float:
    return turn.slices[name].cpu_us / turn.slices[recipes.CARPOOL].cpu_us - 1.0


def _interval(each: Sequence[float]) -> tuple[float, float]:
    """95 %, by drawing starts with replacement."""
    draw = random.Random(1)
    medians = sorted(median(draw.choices(each, k=len(each))) for _ in range(_RESAMPLES))
    return medians[int(_OUTSIDE * _RESAMPLES)], medians[int((1 - _OUTSIDE) * _RESAMPLES)]


def as_text(found: Sequence[Difference]) -> str:
    lines = [f"{'':>20}  {'asked by':>9}  at a time  CPU µs/request      more  95 % of draws       starts"]
    for one in found:
        if one.server == recipes.CARPOOL:
            more = "without spans"
        else:
            more = f"{one.more:+8.1%}  {one.low:+6.1%} … {one.high:+6.1%}  {len(one.starts):11}"
        lines.append(f"{one.server:>20}  {one.group:>9}  {one.concurrency:9}  {one.cpu_us:14.1f}  {more}")
    looking = looking_us()
    none = {(one.group, one.concurrency): one.cpu_us for one in found if one.server == recipes.CARPOOL}
    for one in found:
        if one.server == f"spans of {SHARES[-1]:.0%}":
            cpu = none[one.group, one.concurrency]
            share = (looking + SHARES[0] * one.more * cpu) / cpu
            lines.append(
                f"{one.group}: a look at each request {looking:.2f} µs, and of {SHARES[0]:.0%} the spans, "
                f"{one.more * cpu:.0f} µs each: {share:.1%} more"
            )
    return "\n".join(lines)
