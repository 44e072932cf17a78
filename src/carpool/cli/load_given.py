"""From the options of `carpool load` to a plan and an aim."""

from __future__ import annotations

import resource
from pathlib import Path

from carpool.cli import checks
from carpool.cli.load_command import Load
from carpool.cli.running_server import trust
from carpool.errors import InvalidInput
from carpool.lab.load.aim import Aim
from carpool.lab.load.load_plan import MOST_REQUESTS, Closed, Open, Phase, Plan, check_length
from carpool.lab.load.messages import LATEST, Header, check_headers, check_source
from carpool.lab.load.request_data import Filling, Mix
from carpool.sim.arrivals import Bursty, Cameras, Constant, Poisson, Recording, Traffic

_SECONDS = 10.0
_FASTEST = 100_000.0  # requests per second
_LONGEST = 86_400.0
_MOST_CLIENTS = 4096
_OTHER_FILES = 64  # beside the connections


def plan(given: Load) -> Plan:
    if given.rate is None and not _own_rate(given) and given.concurrency is None:
        raise InvalidInput(
            "say how much traffic: --rate 100 for an open loop, --concurrency 8 for a closed one"
        )
    if given.concurrency is not None and (given.rate is not None or given.arrivals != "poisson"):
        raise InvalidInput("--concurrency is a closed loop: it cannot be given with --rate or --arrivals")
    slo = given.slo_ms
    return Plan(
        _closed(given) if given.concurrency is not None else _open(given),
        slo=None if slo is None else checks.number("--slo-ms", slo, above=0, most=1e7) / 1e3,
        timeout=checks.number("--timeout", given.timeout, above=0, most=3600),
        drain=checks.number("--drain", given.drain, most=3600),
        batch=given.batch,
    )


def aim(given: Load) -> Aim:
    headers = tuple(_header(text) for text in given.headers or ())
    check_headers(headers)
    if given.latest:
        if not given.sources and given.arrivals in ("poisson", "bursty", "constant"):
            raise InvalidInput(
                "--latest needs sources: give --source, or --arrivals cameras", field="--latest"
            )
        headers += ((LATEST, "1"),)
    if given.images and (given.priorities or given.shapes or given.batch != 1 or given.data != "random"):
        raise InvalidInput("--priority, --shape, --batch and --data go with tensors, not with --image")
    filling = Filling(
        given.data,
        dict(read_shape(text) for text in given.shapes or ()),
        given.seed,
        checks.whole("--distinct", given.distinct, least=1, most=10_000),
    )
    deadline = given.deadline_ms
    return Aim(
        given.url,
        given.model,
        given.model_version,
        tuple(given.images or ()),
        checks.whole("--batch", given.batch, least=1, most=checks.MOST_IN_A_BATCH),
        filling,
        Mix(_sources(given), _priorities(given)),
        headers,
        None if deadline is None else checks.number("--deadline-ms", deadline, above=0, most=1e8),
        connections(given),
        given.shared_memory,
        trust(given.api_key_file, given.ca, given.insecure),
    )


def connections(given: Load) -> int | None:
    """For each process; a closed loop has no use for more than its clients."""
    wanted = given.connections
    if wanted is None and not given.url.startswith(("grpc:", "grpcs:")):
        wanted = given.concurrency
    if wanted is None:
        return None
    checks.whole("--connections", wanted, least=1, most=_MOST_CLIENTS)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES
    if wanted > allowed:
        raise InvalidInput(
            f"--connections {wanted}: this shell allows {allowed} at most, see ulimit -n",
            field="--connections",
        )
    return wanted


# ---- traffic


def _own_rate(given: Load) -> bool:
    return given.arrivals == "cameras" or given.arrivals.startswith("trace:")


def _closed(given: Load) -> Closed:
    seconds, requests = given.duration, given.requests
    if seconds is None and requests is None:
        seconds = _SECONDS
    return Closed(
        checks.whole("--concurrency", given.concurrency or 0, least=1, most=_MOST_CLIENTS),
        seconds=None if seconds is None else checks.number("--duration", seconds, above=0, most=_LONGEST),
        requests=None
        if requests is None
        else checks.whole("--requests", requests, least=1, most=MOST_REQUESTS),
        think=checks.number("--think-ms", given.think_ms, most=1e7) / 1e3,
        warmup=checks.number("--warmup", given.warmup, most=_LONGEST),
    )


def _open(given: Load) -> Open:
    for option, value in (("--requests", given.requests), ("--think-ms", given.think_ms or None)):
        if value is not None:
            raise InvalidInput(f"{option} goes with --concurrency, a closed loop", field=option)
    traffic = _traffic(given)
    phases = _phases(given, traffic)
    warmup = checks.number("--warmup", given.warmup, most=_LONGEST)
    if warmup:
        phases = (Phase(phases[0].rate, warmup, warmup=True), *phases)
    for phase in phases:
        checks.number("--rate", phase.rate, above=0, most=_FASTEST)
    check_length(phases)
    return Open(phases, traffic, given.seed)


def _phases(given: Load, traffic: Traffic) -> tuple[Phase, ...]:
    if given.rate is not None and ":" in given.rate:
        if given.duration is not None or isinstance(traffic, Recording | Cameras):
            raise InvalidInput("--rate with steps says it all: leave out --duration, cameras and traces")
        return tuple(_step(text) for text in given.rate.split(","))
    rate = traffic.own_rate if given.rate is None else _number("--rate", given.rate)
    assert rate is not None
    if given.duration is not None:
        return (Phase(rate, checks.number("--duration", given.duration, above=0, most=_LONGEST)),)
    # A hair more than its span, so that the last arrival of a trace is played too.
    whole = (
        traffic.span * traffic.own_rate / rate * (1 + 1e-9) if isinstance(traffic, Recording) else _SECONDS
    )
    return (Phase(rate, whole),)


def _step(text: str) -> Phase:
    rate, _, seconds = text.partition(":")
    length = checks.number("--rate", _number("--rate", seconds), above=0, most=_LONGEST)
    return Phase(_number("--rate", rate), length)


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(
            f"{option} must be a number like 800, or steps like 800:20,2400:20, not {text!r}", field=option
        ) from None


def _traffic(given: Load) -> Traffic:
    simple: dict[str, Traffic] = {"poisson": Poisson(), "constant": Constant()}
    if given.arrivals in simple:
        return simple[given.arrivals]
    if given.arrivals == "bursty":
        period = checks.number("--burst-period", given.burst_period, least=0.01, most=1e6)
        return Bursty(
            factor=checks.number("--burst-factor", given.burst_factor, least=1, most=1000),
            length=checks.number("--burst-seconds", given.burst_seconds, above=0, most=period),
            period=period,
        )
    if given.arrivals == "cameras":
        if given.cameras is None or given.rate is not None:
            raise InvalidInput("--arrivals cameras needs --cameras, like --cameras 100, and has no --rate")
        count = checks.whole("--cameras", given.cameras, least=1, most=100_000)
        fps = checks.number("--fps", 10.0 if given.fps is None else given.fps, above=0, most=10_000)
        return Cameras(count, fps, given.aligned, per_source=True)
    if given.arrivals.startswith("trace:"):
        try:
            return _recording(Path(given.arrivals.removeprefix("trace:")), given.model)
        except InvalidInput as error:
            raise InvalidInput(f"--arrivals: {error.message}") from None
    raise InvalidInput(
        f"--arrivals must be poisson, constant, bursty, cameras or trace:FILE, not {given.arrivals!r}"
    )


def _recording(file: Path, model: str) -> Recording:
    """Of the model that is asked, if the trace tells models apart; else all of it."""
    try:
        return Recording.read(file, per_source=True)
    except InvalidInput:
        if not model:
            raise
        return Recording.read(file, per_source=True, model=model)


# ---- requests


def _header(text: str) -> Header:
    name, colon, value = text.partition(":")
    if not colon:
        raise InvalidInput(f"--header must be like 'Name: value', not {text!r}", field="--header")
    return name.strip(), value.strip()


def read_shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, lengths = text.rpartition(":")
    try:
        shape = tuple(int(length) for length in lengths.split(","))
    except ValueError:
        shape = ()
    if not name or not shape or any(not 1 <= length <= 1 << 31 for length in shape):
        raise InvalidInput(f"--shape must be like image:1,3,224,224, not {text!r}", field="--shape")
    return name, shape


def _sources(given: Load) -> tuple[tuple[str, float], ...]:
    found = tuple(_weighted("--source", text) for text in given.sources or ())
    for name, _ in found:
        check_source(name)
    return found


def _priorities(given: Load) -> tuple[tuple[int, float], ...]:
    found = []
    for text in given.priorities or ():
        name, weight = _weighted("--priority", text)
        if not name.isascii() or not name.isdigit() or len(name) > 9:
            raise InvalidInput(f"--priority must be a whole number from 0, not {name!r}", field="--priority")
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
    return name, checks.number(f"the weight of {option}", value, above=0)
