"""Implements `carpool load`: traffic for a running server, and what it made of it."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.load.aim import Aim
    from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
    from carpool.lab.load.load_report import Counts, LoadReport
    from carpool.lab.load.tally import Slice, Spread
    from carpool.sim.arrivals import Recording, Traffic

    Watch = Callable[[float, Slice], None]

_SECONDS = 10.0
_FASTEST = 100_000.0  # requests per second
_LONGEST = 86_400.0
_MOST_CLIENTS = 4096
_MOST_PROCESSES = 64
_OTHER_FILES = 64  # beside the connections
_WINDOW_S = 5.0  # what is shown while it runs is of the last seconds
_LINE_EVERY_S = 5.0  # where stderr is no terminal
_COUNTED = ("offered", "answered", "refused", "failed")
_SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

_REQUESTS = "Requests"


@dataclass(frozen=True, kw_only=True)
class Load(o.AsksServer, shared.HasTraffic):
    """Send load to a running server, and measure responses and latencies.

    Open loop: 500 requests/s, and how many are answered within 50 ms:

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    A surge, with figures for each step:

        carpool load http://localhost:8000 --rate 800:20,2400:20,800:20 --slo-ms 50

    Closed loop: 32 clients that each wait for a response:

        carpool load grpc://localhost:8001 --concurrency 32

    Streamed text, with the times of the first token and between tokens:

        carpool load http://localhost:8000/read --image line.png --stream --concurrency 16
    """

    url: str = o.argument(
        "Address: http://HOST:PORT or grpc://HOST:PORT; with --image the route, like "
        "http://HOST:PORT/detect.",
        metavar="URL",
        envvar=o.URL_VARIABLE,
    )
    rate: str | None = o.option(
        None,
        "Open loop: requests per second, 800; or steps of rate:seconds, 800:20,2400:20,800:20.",
        o.TRAFFIC,
    )
    arrivals: str = o.option(
        "poisson", "Open loop: poisson, constant, bursty, cameras, or trace:FILE.", o.TRAFFIC
    )
    duration: float | None = o.option(
        None, "Length in seconds. Default: 10, the sum of the steps, or the whole trace.", o.TRAFFIC
    )
    concurrency: int | None = o.option(
        None, "Closed loop: number of clients that each wait for a response.", o.TRAFFIC
    )
    requests: int | None = o.option(None, "Closed loop: stop after this many requests.", o.TRAFFIC)
    think_ms: float = o.option(
        0.0, "Closed loop: pause from a response to the next request, in ms.", o.TRAFFIC
    )
    warmup: float = o.option(0.0, "Warm-up with the same traffic, in seconds.", o.TRAFFIC)
    seed: o.Seed = 1
    model: str = o.option("", "The model. Default: the server's only one.", _REQUESTS)
    model_version: str = o.option("", "Its version. Default: the newest.", _REQUESTS)
    images: list[Path] | None = o.option(None, "Image to upload; repeatable.", _REQUESTS, name="--image")
    data: str = o.option("random", "Tensors: random, zeros, or a .npy, .npz or .json file.", _REQUESTS)
    shapes: list[str] | None = o.option(
        None, "Shape of a tensor with open lengths, name:1,3,224,224.", _REQUESTS, name="--shape"
    )
    batch: int = o.option(1, "Images per request.", _REQUESTS)
    distinct: int = o.option(8, "Number of different random requests that are sent in turn.", _REQUESTS)
    shared_memory: bool = o.option(
        False, "Pass tensors in system shared memory. Only on the server's machine.", _REQUESTS
    )
    stream: bool = o.option(
        False,
        "Stream text: measure the first piece and the gaps, and check that none is missing.",
        _REQUESTS,
    )
    headers: list[str] | None = o.option(
        None, "Header of every request, 'Name: value'; repeatable.", _REQUESTS, name="--header"
    )
    sources: list[str] | None = o.option(
        None, "Source of the requests, NAME or NAME:WEIGHT; repeatable.", _REQUESTS, name="--source"
    )
    latest: bool = o.option(False, "A newer request replaces a waiting one of the same source.", _REQUESTS)
    priorities: list[str] | None = o.option(
        None, "Priority, N or N:WEIGHT, 1 is the highest; repeatable.", _REQUESTS, name="--priority"
    )
    deadline_ms: float | None = o.option(None, "Deadline that requests send to the server, in ms.", _REQUESTS)
    slo_ms: float | None = o.option(None, "Count the responses within this many ms (goodput).", o.RUN)
    timeout: float = o.option(10.0, "Timeout of a request, in seconds.", o.RUN)
    drain: float = o.option(10.0, "Time to wait for open requests at the end, in seconds.", o.RUN)
    connections: int | None = o.option(
        None, "Most connections. Default: 256; 4 for gRPC, whose calls share connections.", o.RUN
    )
    processes: int = o.option(1, "Number of generator processes, if one core is not enough.", o.RUN)
    save: Path | None = o.option(
        None, "File for every single request, .jsonl or .csv.", o.RUN, metavar="FILE"
    )

    def run(self) -> None:
        """Exits with 1 if the server is unreachable."""
        import uvloop

        from carpool.lab.load.aim import read_url
        from carpool.lab.load.load_plan import Closed

        plan, aim = plan_of(self), aim_of(self)
        processes = o.whole("--processes", self.processes, least=1, most=_MOST_PROCESSES)
        if self.concurrency is not None and self.concurrency < processes:
            raise InvalidInput(
                f"--processes {processes} are more than the --concurrency of {self.concurrency}"
            )
        if self.save is not None and processes > 1:
            raise InvalidInput("--save needs --processes 1: other processes do not report single requests")
        read_url(aim.url)
        endless = isinstance(plan.load, Closed) and plan.load.seconds is None
        seconds = None if endless else sum(phase.seconds for phase in plan.load.phases)
        with progress(seconds, self.slo_ms) as watch:
            report = uvloop.run(_generate(plan, aim, self, watch))
        if self.as_json:
            settings = {name: value for name, value in vars(self).items() if name != "as_json"}
            print(json.dumps(report.as_json() | {"settings": settings}, indent=2, default=str))
        else:
            show_report(report)


async def _generate(plan: Plan, aim: Aim, options: Load, watch: Watch) -> LoadReport:
    """Ctrl-C ends it early and still reports; the second one does not wait for anything."""
    from carpool.lab.load.aim import take_aim
    from carpool.lab.load.generator import collect_rarely, run, run_shared
    from carpool.lab.load.tally import request_log

    stop = o.stop_on_signal(partial(os._exit, 130))
    if options.processes > 1:
        return await run_shared(plan, aim, options.processes, watch=watch, stop=stop)
    target = take_aim(aim)
    collect_rarely()
    with request_log(options.save) if options.save is not None else nullcontext() as record:
        return await run(plan, target, watch=watch, stop=stop, record=record)


# ---- from the options to a plan and an aim


def plan_of(options: Load) -> Plan:
    from carpool.lab.load.load_plan import Plan

    own_rate = options.arrivals == "cameras" or options.arrivals.startswith("trace:")
    if options.rate is None and not own_rate and options.concurrency is None:
        raise InvalidInput("set the traffic: --rate 100 for an open loop, --concurrency 8 for a closed one")
    slo = options.slo_ms
    return Plan(
        _open(options) if options.concurrency is None else _closed(options, options.concurrency),
        slo=None if slo is None else o.number("--slo-ms", slo, above=0, most=1e7) / 1e3,
        timeout=o.number("--timeout", options.timeout, above=0, most=3600),
        drain=o.number("--drain", options.drain, most=3600),
        batch=options.batch,
    )


def aim_of(options: Load) -> Aim:
    from carpool.lab.load.aim import Aim
    from carpool.lab.load.messages import LATEST, Filling, check_headers, check_source

    split = [text.partition(":") for text in options.headers or ()]
    for name, colon, _ in split:
        if not colon:
            raise InvalidInput(f"--header must be like 'Name: value', not {name!r}")
    headers = tuple((name.strip(), value.strip()) for name, _, value in split)
    check_headers(headers)
    if options.latest:
        if not options.sources and options.arrivals in ("poisson", "bursty", "constant"):
            raise InvalidInput("--latest needs sources: give --source, or --arrivals cameras")
        headers += ((LATEST, "1"),)
    tensors_only = options.priorities or options.shapes or options.batch != 1 or options.data != "random"
    if options.images and tensors_only:
        raise InvalidInput("--priority, --shape, --batch and --data go with tensors, not with --image")
    sources = tuple(_weighted("--source", options.sources))
    for name, _ in sources:
        check_source(name)
    priorities = tuple(_weighted("--priority", options.priorities))
    for name, _ in priorities:
        if not name.isascii() or not name.isdigit() or len(name) > 9:
            raise InvalidInput(f"--priority must be a whole number from 0, not {name!r}")
    shapes = dict(shared.shape(text) for text in options.shapes or ())
    distinct = o.whole("--distinct", options.distinct, least=1, most=10_000)
    deadline = options.deadline_ms
    return Aim(
        options.url,
        options.model,
        options.model_version,
        tuple(options.images or ()),
        o.whole("--batch", options.batch, least=1, most=o.MOST_IN_A_BATCH),
        Filling(options.data, shapes, options.seed, distinct),
        sources,
        tuple((int(name), weight) for name, weight in priorities),
        headers,
        None if deadline is None else o.number("--deadline-ms", deadline, above=0, most=1e8),
        _connections(options),
        options.shared_memory,
        options.trust(),
        options.stream,
    )


def _connections(options: Load) -> int | None:
    """Returns the number for each process; a closed loop has no use for more than its clients."""
    wanted = options.connections
    if wanted is None and not options.url.startswith(("grpc:", "grpcs:")):
        wanted = options.concurrency
    if wanted is None:
        return None
    o.whole("--connections", wanted, least=1, most=_MOST_CLIENTS)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    if wanted > allowed:
        raise InvalidInput(f"--connections {wanted}: this shell allows {allowed} at most (ulimit -n)")
    return wanted


def _closed(options: Load, clients: int) -> Closed:
    from carpool.lab.load.load_plan import MOST_REQUESTS, Closed

    if options.rate is not None or options.arrivals != "poisson":
        raise InvalidInput("--concurrency is a closed loop: it cannot be given with --rate or --arrivals")
    seconds, requests = options.duration, options.requests
    if seconds is None and requests is None:
        seconds = _SECONDS
    return Closed(
        o.whole("--concurrency", clients, least=1, most=_MOST_CLIENTS),
        seconds=None if seconds is None else o.number("--duration", seconds, above=0, most=_LONGEST),
        requests=None if requests is None else o.whole("--requests", requests, least=1, most=MOST_REQUESTS),
        think=o.number("--think-ms", options.think_ms, most=1e7) / 1e3,
        warmup=o.number("--warmup", options.warmup, most=_LONGEST),
    )


def _open(options: Load) -> Open:
    from carpool.lab.load.load_plan import Open, Phase, check_length

    for option, value in (("--requests", options.requests), ("--think-ms", options.think_ms or None)):
        if value is not None:
            raise InvalidInput(f"{option} goes with --concurrency, a closed loop")
    traffic = _traffic(options)
    phases = _phases(options, traffic)
    warmup = o.number("--warmup", options.warmup, most=_LONGEST)
    if warmup:
        phases = (Phase(phases[0].rate, warmup, warmup=True), *phases)
    for phase in phases:
        o.number("--rate", phase.rate, above=0, most=_FASTEST)
    check_length(phases)
    return Open(phases, traffic, options.seed)


def _phases(options: Load, traffic: Traffic) -> tuple[Phase, ...]:
    from carpool.lab.load.load_plan import Phase
    from carpool.sim.arrivals import Cameras, Recording

    if options.rate is not None and ":" in options.rate:
        if options.duration is not None or isinstance(traffic, Recording | Cameras):
            raise InvalidInput(
                "--rate with steps sets the whole traffic: leave out --duration, cameras and traces"
            )
        steps = (text.partition(":") for text in options.rate.split(","))
        return tuple(Phase(_rate(rate), _length("--rate", _rate(seconds))) for rate, _, seconds in steps)
    rate = traffic.own_rate if options.rate is None else _rate(options.rate)
    assert rate is not None
    if options.duration is not None:
        return (Phase(rate, _length("--duration", options.duration)),)
    if not isinstance(traffic, Recording):
        return (Phase(rate, _SECONDS),)
    # A hair more than its span, so that the last arrival of a trace is played too.
    return (Phase(rate, traffic.span * traffic.own_rate / rate * (1 + 1e-9)),)


def _length(option: str, seconds: float) -> float:
    return o.number(option, seconds, above=0, most=_LONGEST)


def _rate(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(
            f"--rate must be a number like 800, or steps like 800:20,2400:20, not {text!r}"
        ) from None


def _traffic(options: Load) -> Traffic:
    from carpool.sim.arrivals import Constant, Poisson, Recording

    if options.arrivals == "cameras" and options.rate is not None:
        raise InvalidInput("--arrivals cameras takes no --rate: it is --cameras times --fps")

    def read(file: Path) -> Recording:
        """Reads the trace of the model that is asked, if the trace names models; else all of it."""
        try:
            return Recording.read(file, per_source=True)
        except InvalidInput:
            if not options.model:
                raise
            return Recording.read(file, per_source=True, model=options.model)

    return options.traffic({"poisson": Poisson(), "constant": Constant()}, read, per_source=True)


def _weighted(option: str, texts: list[str] | None) -> Iterator[tuple[str, float]]:
    """What follows the last colon is the weight, if it is a number."""
    for text in texts or ():
        name, colon, weight = text.rpartition(":")
        try:
            value = float(weight) if colon else None
        except ValueError:
            value = None
        if value is None:
            yield text, 1.0
        else:
            yield name, o.number(f"the weight of {option}", value, above=0)


# ---- while it runs, on stderr, and when it is over, on stdout


class Window:
    """Holds the last seconds of a run, from the reports of its processes. The time is an argument."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Slice]] = deque()
        self.elapsed = 0.0
        self.p99_ms = 0.0

    def add(self, elapsed: float, seen: Slice) -> None:
        self._seen.append((elapsed, seen))
        self.elapsed = max(self.elapsed, elapsed)
        while self._seen[0][0] <= self.elapsed - _WINDOW_S:
            self._seen.popleft()

    def facts(self, slo_ms: float | None) -> dict[str, str]:
        from carpool.lab.load.tally import Slice

        total = Slice()
        for _, seen in self._seen:
            total.merge(seen)
        seconds = max(min(self.elapsed, _WINDOW_S), 1e-3)
        counted = {name: f"{getattr(total, name) / seconds:,.0f}/s" for name in _COUNTED}
        percentiles = [seconds * 1e3 for seconds in total.response.percentiles(_SHARES.values())]
        self.p99_ms = percentiles[-1]
        found = {name: counted.pop(name) for name in ("offered", "answered")}
        found |= {name: f"{ms:,.1f} ms" for name, ms in zip(_SHARES, percentiles, strict=True)}
        if slo_ms is not None and total.offered:
            ended = total.answered + total.refused + total.failed
            found[f"within {slo_ms:g} ms"] = show.percent(total.good / ended) if ended else "–"
        return found | {show.count_label(name): rate for name, rate in counted.items()}


def line(window: Window, slo_ms: float | None) -> str:
    """Returns the window in one line."""
    facts = (f"{label} {fact}" for label, fact in window.facts(slo_ms).items())
    return "  ".join((f"{window.elapsed:.0f} s", *facts))


@contextmanager
def progress(total_s: float | None, slo_ms: float | None) -> Iterator[Watch]:
    """Call what it yields with what happened; it draws in a terminal and writes lines elsewhere."""
    window = Window()
    if not sys.stderr.isatty():
        yield _lines(window, slo_ms)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def watch(elapsed: float, seen: Slice) -> None:
            window.add(elapsed, seen)
            table = Table(box=None, show_header=False, pad_edge=False)
            if total_s is not None:
                done = min(window.elapsed, total_s)
                bar = ProgressBar(total_s, done, width=30)
                table.add_row("progress", bar, f"{total_s - done:.0f} s left")
            for label, fact in window.facts(slo_ms).items():
                late = label == "p99" and slo_ms is not None and window.p99_ms > slo_ms
                table.add_row(label, fact, style="red" if late else "")
            live.update(table, refresh=True)

        yield watch


def _lines(window: Window, slo_ms: float | None) -> Watch:
    last = time.monotonic()

    def watch(elapsed: float, seen: Slice) -> None:
        nonlocal last
        window.add(elapsed, seen)
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            print(line(window, slo_ms), file=sys.stderr, flush=True)

    return watch


def show_report(report: LoadReport) -> None:
    g = report.generator
    early = ", ended early" if report.stopped_early else ""
    show.paragraph(f"{report.target}: {report.loop} loop, {report.total.seconds:g} s{early}.")
    columns = [report.total] if len(report.phases) == 1 else [*report.phases, report.total]
    titles = ["", *(" " if len(columns) == 1 else counts.name for counts in columns)]
    rows = [(label, *cells) for label, cells in _rows(columns, report.slo_ms)]
    show.table(titles, rows, left=("",))
    show.paragraph(
        f"The generator used {100 * g.busiest_core_share:.0f} % of a core, "
        f"{g.processor_us_per_request:.0f} µs for a request, {g.connections} connections; "
        f"p99 of its lag was {g.send_lag_ms.p99:.1f} ms.",
        "· ",
    )
    for reason in report.late_because:
        show.paragraph(f"These numbers are unreliable: {reason}.", "! ")


def _rows(columns: list[Counts], slo_ms: float | None) -> Iterator[tuple[str, list[str]]]:
    def row(label: str, of: Callable[[Counts], str]) -> tuple[str, list[str]]:
        return label, [of(counts) for counts in columns]

    yield row("offered", lambda c: f"{c.offered:,}  ({c.offered_rps:,.1f}/s)")
    yield row("answered", lambda c: f"{c.answered:,}  ({c.answered_rps:,.1f}/s)")
    if slo_ms is not None:
        yield row(f"… within {slo_ms:g} ms (goodput)", lambda c: f"{c.good:,}  ({c.goodput_rps:,.1f}/s)")
        yield row("… of offered (attainment)", lambda c: show.percent(c.attainment))
    for kind in ("refused", "failed"):
        for reason in sorted({reason for counts in columns for reason in getattr(counts, kind)}):
            yield (
                f"{show.count_label(kind)}: {reason}",
                [f"{getattr(counts, kind).get(reason, 0):,}" for counts in columns],
            )
    for label, name in (("timed out at this client", "timed_out"), ("unanswered at the end", "unanswered")):
        if any(getattr(counts, name) for counts in columns):
            yield label, [f"{getattr(counts, name):,}" for counts in columns]
    yield row("response p50 / p95", lambda c: _pair(c.response_ms, "p50", "p95"))
    yield row("response p99 / p99.9", lambda c: _pair(c.response_ms, "p99", "p99_9"))
    yield row("response max", lambda c: f"{c.response_ms.max:,.1f} ms")
    yield row("service p50 / p99", lambda c: _pair(c.service_ms, "p50", "p99"))
    yield from _token_rows([counts for counts in columns if any(one.tokens for one in columns)])
    if any(counts.refusal_ms.count for counts in columns):
        yield row("rejection p50 / p99", lambda c: _pair(c.refusal_ms, "p50", "p99"))
    if any(counts.batch.count for counts in columns):
        yield row("batch mean / p99", lambda c: f"{c.batch.mean:.1f} / {round(c.batch.p99)}")
        yield row("queue p50 / p99", lambda c: _pair(c.queue_ms, "p50", "p99"))
        yield row("infer p50 / p99", lambda c: _pair(c.infer_ms, "p50", "p99"))
    if any(counts.outside_ms.count for counts in columns):
        yield row("outside p50 / p99", lambda c: _pair(c.outside_ms, "p50", "p99"))


def _token_rows(columns: list[Counts]) -> Iterator[tuple[str, list[str]]]:
    """Yields rows of streamed answers; nothing where there are none."""
    if columns:
        yield "tokens", [f"{c.tokens:,}  ({c.tokens_per_second:,.1f}/s)" for c in columns]
        yield "first token p50 / p99", [_pair(c.first_token_ms, "p50", "p99") for c in columns]
        yield "between tokens p50 / p99", [_pair(c.token_interval_ms, "p50", "p99") for c in columns]


def _pair(spread: Spread, first: str, second: str) -> str:
    return f"{getattr(spread, first):,.1f} / {getattr(spread, second):,.1f} ms"
