"""`carpool load`: traffic for a running server, and what it made of it."""

from __future__ import annotations

import json
import os
import resource
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.cli import verb_options as o
from carpool.errors import InvalidInput
from carpool.lab.load.load_plan import MOST_REQUESTS, Closed, Open, Phase, Plan, check_length
from carpool.sim.arrivals import Cameras, Constant, Poisson, Recording, Traffic

if TYPE_CHECKING:
    from carpool.lab.load.aim import Aim
    from carpool.lab.load.generator import Watch
    from carpool.lab.load.load_report import LoadReport

_SECONDS = 10.0
_FASTEST = 100_000.0  # requests per second
_LONGEST = 86_400.0
_MOST_CLIENTS = 4096
_MOST_PROCESSES = 64
_OTHER_FILES = 64  # beside the connections

_REQUESTS = "Requests"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Send traffic to a running server and measure what comes back.

    Open loop, 500 requests a second whatever the server does, and how many were answered within 50 ms:

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    A surge, with the numbers of each step:

        carpool load http://localhost:8000 --rate 800:20,2400:20,800:20 --slo-ms 50

    Closed loop, 32 clients that each wait for an answer:

        carpool load grpc://localhost:8001 --concurrency 32
    """

    url: Annotated[
        str,
        typer.Argument(
            metavar="URL",
            help="http://HOST:PORT, grpc://HOST:PORT, or with --image the route, like http://HOST:PORT/detect.",
            show_default=False,
        ),
    ]
    rate: str | None = o.option(
        None,
        "Open loop: requests per second, 800; or steps of rate:seconds, 800:20,2400:20,800:20.",
        o.TRAFFIC,
    )
    arrivals: str = o.option(
        "poisson", "Open loop: poisson, constant, bursty, cameras, or trace:FILE.", o.TRAFFIC
    )
    burst_factor: o.BurstFactor = 3.0
    burst_seconds: o.BurstSeconds = 0.5
    burst_period: o.BurstPeriod = 2.5
    cameras: o.CameraCount = None
    fps: o.Fps = None
    aligned: o.Aligned = False
    duration: float | None = o.option(
        None, "Seconds. Default: 10, the sum of the steps, or all of a trace.", o.TRAFFIC
    )
    concurrency: int | None = o.option(
        None, "Closed loop: so many clients that each wait for an answer.", o.TRAFFIC
    )
    requests: int | None = o.option(None, "Closed loop: stop after so many.", o.TRAFFIC)
    think_ms: float = o.option(0.0, "Closed loop: from an answer to the next request.", o.TRAFFIC)
    warmup: float = o.option(0.0, "Seconds of the same traffic before it counts.", o.TRAFFIC)
    seed: o.Seed = 1
    model: str = o.option("", "The model. Not needed if the server has one.", _REQUESTS)
    model_version: str = o.option("", "Its version. Default: the newest.", _REQUESTS)
    images: list[Path] | None = o.option(
        None, "Upload this picture; again for more.", _REQUESTS, name="--image"
    )
    data: str = o.option("random", "Tensors: random, zeros, or a .npy, .npz or .json file.", _REQUESTS)
    shapes: list[str] | None = o.option(
        None, "Lengths the model leaves open, name:1,3,224,224.", _REQUESTS, name="--shape"
    )
    batch: int = o.option(1, "Images in a request.", _REQUESTS)
    distinct: int = o.option(8, "Different random requests that take turns.", _REQUESTS)
    shared_memory: bool = o.option(
        False,
        "Tensors lie in system shared memory; requests only say where. Same machine.",
        _REQUESTS,
        name="--shared-memory",
    )
    headers: list[str] | None = o.option(
        None, "'Name: value', on every request; again for more.", _REQUESTS, name="--header"
    )
    sources: list[str] | None = o.option(
        None, "Who asks, NAME or NAME:WEIGHT; again for more.", _REQUESTS, name="--source"
    )
    latest: bool = o.option(
        False, "A newer request of a source takes the place of one that waits.", _REQUESTS, name="--latest"
    )
    priorities: list[str] | None = o.option(
        None, "How urgent, N or N:WEIGHT, 1 is first; again for more.", _REQUESTS, name="--priority"
    )
    deadline_ms: float | None = o.option(None, "The deadline that requests tell the server.", _REQUESTS)
    slo_ms: float | None = o.option(None, "Count what is answered within so many ms.", o.RUN)
    timeout: float = o.option(10.0, "Seconds after which a request is given up.", o.RUN)
    drain: float = o.option(10.0, "Seconds to wait at the end for what is open.", o.RUN)
    connections: int | None = o.option(
        None, "At most so many. Default: 256; 4 for gRPC, where calls share.", o.RUN
    )
    processes: int = o.option(1, "Generate with so many, if a core is not enough.", o.RUN)
    save: Path | None = o.option(
        None, "Every single request, as .jsonl or .csv.", o.RUN, metavar="FILE", show_default=False
    )
    as_json: o.Json = False
    api_key_file: o.ApiKeyFile = None
    ca: o.Ca = None
    insecure: o.Insecure = False

    def run(self) -> None:
        """Exits with 1 if there was nobody to ask."""
        import uvloop

        from carpool.cli import load_display
        from carpool.lab.load.aim import read_url

        plan = plan_of(self)
        aim = aim_of(self)
        _check_processes(self)
        read_url(aim.url)
        with load_display.progress(_planned_seconds(plan), self.slo_ms) as watch:
            report = uvloop.run(_generate(plan, aim, self, watch))
        if self.as_json:
            print(json.dumps(report.as_json() | {"settings": _settings(self)}, indent=2))
        else:
            load_display.show_report(report)


def _check_processes(options: Load) -> None:
    processes = o.whole("--processes", options.processes, least=1, most=_MOST_PROCESSES)
    if options.concurrency is not None and options.concurrency < processes:
        raise InvalidInput(
            f"--processes {processes} are more than the clients of --concurrency {options.concurrency}"
        )
    if options.save is not None and processes > 1:
        raise InvalidInput("--save needs --processes 1: single requests are not passed on")


async def _generate(plan: Plan, aim: Aim, options: Load, watch: Watch) -> LoadReport:
    """Ctrl-C ends it early and still reports; the second one does not wait for anything."""
    from carpool.lab.load.aim import take_aim
    from carpool.lab.load.generator import run, run_shared, spare_the_collector
    from carpool.lab.load.tally import RequestLog

    stop = o.stop_on_signal(partial(os._exit, 130))
    if options.processes > 1:
        return await run_shared(plan, aim, options.processes, watch=watch, stop=stop)
    target = take_aim(aim)
    spare_the_collector()
    with RequestLog(options.save) if options.save is not None else nullcontext() as record:
        return await run(plan, target, watch=watch, stop=stop, record=record)


def _planned_seconds(plan: Plan) -> float | None:
    """How long it will take, if that is known."""
    if isinstance(plan.load, Closed) and plan.load.seconds is None:
        return None
    return sum(phase.seconds for phase in plan.load.phases)


def _settings(options: Load) -> dict[str, object]:
    """Everything that was asked for, with the defaults filled in."""
    return {
        name: [str(entry) for entry in value] if isinstance(value, list) else _plain(value)
        for name, value in vars(options).items()
        if name != "as_json"
    }


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


# ---- from the options to a plan and an aim


def plan_of(options: Load) -> Plan:
    own_rate = options.arrivals == "cameras" or options.arrivals.startswith("trace:")
    if options.rate is None and not own_rate and options.concurrency is None:
        raise InvalidInput(
            "say how much traffic: --rate 100 for an open loop, --concurrency 8 for a closed one"
        )
    if options.concurrency is not None and (options.rate is not None or options.arrivals != "poisson"):
        raise InvalidInput("--concurrency is a closed loop: it cannot be given with --rate or --arrivals")
    slo = options.slo_ms
    return Plan(
        _closed(options) if options.concurrency is not None else _open(options),
        slo=None if slo is None else o.number("--slo-ms", slo, above=0, most=1e7) / 1e3,
        timeout=o.number("--timeout", options.timeout, above=0, most=3600),
        drain=o.number("--drain", options.drain, most=3600),
        batch=options.batch,
    )


def aim_of(options: Load) -> Aim:
    from carpool.lab.load.aim import Aim
    from carpool.lab.load.messages import LATEST, Filling, Mix, check_headers

    headers = tuple(_header(text) for text in options.headers or ())
    check_headers(headers)
    if options.latest:
        if not options.sources and options.arrivals in ("poisson", "bursty", "constant"):
            raise InvalidInput("--latest needs sources: give --source, or --arrivals cameras")
        headers += ((LATEST, "1"),)
    if options.images and (
        options.priorities or options.shapes or options.batch != 1 or options.data != "random"
    ):
        raise InvalidInput("--priority, --shape, --batch and --data go with tensors, not with --image")
    filling = Filling(
        options.data,
        dict(o.shape(text) for text in options.shapes or ()),
        options.seed,
        o.whole("--distinct", options.distinct, least=1, most=10_000),
    )
    deadline = options.deadline_ms
    return Aim(
        options.url,
        options.model,
        options.model_version,
        tuple(options.images or ()),
        o.whole("--batch", options.batch, least=1, most=o.MOST_IN_A_BATCH),
        filling,
        Mix(_sources(options), _priorities(options)),
        headers,
        None if deadline is None else o.number("--deadline-ms", deadline, above=0, most=1e8),
        _connections(options),
        options.shared_memory,
        o.trust(options.api_key_file, options.ca, options.insecure),
    )


def _connections(options: Load) -> int | None:
    """For each process; a closed loop has no use for more than its clients."""
    wanted = options.connections
    if wanted is None and not options.url.startswith(("grpc:", "grpcs:")):
        wanted = options.concurrency
    if wanted is None:
        return None
    o.whole("--connections", wanted, least=1, most=_MOST_CLIENTS)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    if wanted > allowed:
        raise InvalidInput(f"--connections {wanted}: this shell allows {allowed} at most, see ulimit -n")
    return wanted


# ---- traffic


def _closed(options: Load) -> Closed:
    seconds, requests = options.duration, options.requests
    if seconds is None and requests is None:
        seconds = _SECONDS
    return Closed(
        o.whole("--concurrency", options.concurrency or 0, least=1, most=_MOST_CLIENTS),
        seconds=None if seconds is None else o.number("--duration", seconds, above=0, most=_LONGEST),
        requests=None if requests is None else o.whole("--requests", requests, least=1, most=MOST_REQUESTS),
        think=o.number("--think-ms", options.think_ms, most=1e7) / 1e3,
        warmup=o.number("--warmup", options.warmup, most=_LONGEST),
    )


def _open(options: Load) -> Open:
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
    if options.rate is not None and ":" in options.rate:
        if options.duration is not None or isinstance(traffic, Recording | Cameras):
            raise InvalidInput("--rate with steps says it all: leave out --duration, cameras and traces")
        return tuple(_step(text) for text in options.rate.split(","))
    rate = traffic.own_rate if options.rate is None else _number("--rate", options.rate)
    assert rate is not None
    if options.duration is not None:
        return (Phase(rate, o.number("--duration", options.duration, above=0, most=_LONGEST)),)
    # A hair more than its span, so that the last arrival of a trace is played too.
    whole = (
        traffic.span * traffic.own_rate / rate * (1 + 1e-9) if isinstance(traffic, Recording) else _SECONDS
    )
    return (Phase(rate, whole),)


def _step(text: str) -> Phase:
    rate, _, seconds = text.partition(":")
    length = o.number("--rate", _number("--rate", seconds), above=0, most=_LONGEST)
    return Phase(_number("--rate", rate), length)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(
            f"{option} must be a number like 800, or steps like 800:20,2400:20, not {text!r}"
        ) from None


def _traffic(options: Load) -> Traffic:
    if options.arrivals == "cameras" and options.rate is not None:
        raise InvalidInput("--arrivals cameras has no --rate: that is --cameras times --fps")
    plain: dict[str, Traffic] = {"poisson": Poisson(), "constant": Constant()}
    return o.traffic(options, plain, partial(_recording, model=options.model), per_source=True)


def _recording(file: Path, model: str) -> Recording:
    """Of the model that is asked, if the trace tells models apart; else all of it."""
    try:
        return Recording.read(file, per_source=True)
    except InvalidInput:
        if not model:
            raise
        return Recording.read(file, per_source=True, model=model)


# ---- requests


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon:
        raise InvalidInput(f"--header must be like 'Name: value', not {text!r}")
    return name.strip(), value.strip()


def _sources(options: Load) -> tuple[tuple[str, float], ...]:
    from carpool.lab.load.messages import check_source

    found = tuple(_weighted("--source", text) for text in options.sources or ())
    for name, _ in found:
        check_source(name)
    return found


def _priorities(options: Load) -> tuple[tuple[int, float], ...]:
    found = []
    for text in options.priorities or ():
        name, weight = _weighted("--priority", text)
        if not name.isascii() or not name.isdigit() or len(name) > 9:
            raise InvalidInput(f"--priority must be a whole number from 0, not {name!r}")
        found.append((int(name), weight))
    return tuple(found)


def _weighted(option: str, text: str) -> tuple[str, float]:
    """What follows the last colon is the weight, if it is a number."""
    name, colon, weight = text.rpartition(":")
    try:
        value = float(weight) if colon else 1.0
    except ValueError:
        return text, 1.0
    if not colon:
        return text, 1.0
    return name, o.number(f"the weight of {option}", value, above=0)
