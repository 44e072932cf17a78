"""From the options of `carpool simulate` to a scenario."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from carpool.cli import checks
from carpool.cli.simulate_command import Simulate
from carpool.core.curve import BatchCurve
from carpool.core.policy import Knobs, Promise, QueueLimits, TimeoutAction
from carpool.errors import InvalidInput
from carpool.sim.arrivals import Bursty, Cameras, Poisson, Recording, Traffic
from carpool.sim.scenario import Scenario

_SECONDS = 60.0


def scenario(given: Simulate) -> Scenario:
    """In promise mode; the knobs are for `contenders`."""
    curve = checks.batch_curve(given.curve, given.max_batch, given.buckets)
    slo = checks.slo(given.slo_ms, curve)
    traffic = _traffic(given)
    found = Scenario(
        curve,
        slo,
        Promise(slo, curve.max_batch),
        rate=1.0,
        traffic=traffic,
        instances=checks.whole("--instances", given.instances, least=1, most=256),
        seconds=_seconds(given, traffic),
        seed=given.seed,
        seeds=checks.whole("--seeds", given.seeds, least=1, most=100),
        noise=checks.number("--noise", given.noise, most=2),
        stall_share=checks.number("--stall-share", given.stall_share, most=1),
        stall_factor=checks.number("--stall-factor", given.stall_factor, least=1, most=1000),
        profile_error=checks.number("--profile-error", given.profile_error, least=0.1, most=10),
        latest=given.latest,
    )
    found = replace(found, rate=_mean_rate(given, found))
    checks.affordable(found.rate, found.seconds)
    return found


def knobs(given: Simulate, curve: BatchCurve) -> Knobs:
    limits = QueueLimits(
        max_size=checks.whole("--max-queue", given.max_queue, least=0, most=10**6),
        timeout=checks.number("--queue-timeout-ms", given.queue_timeout_ms, most=1e7) / 1e3,
        action=TimeoutAction(given.timeout_action.value),
    )
    return Knobs(
        curve.max_batch,
        preferred=checks.sizes("--preferred", given.preferred, most=curve.max_batch),
        max_delay=checks.number("--max-delay-ms", given.max_delay_ms, most=1e7) / 1e3,
        limits=limits,
    )


def _seconds(given: Simulate, traffic: Traffic) -> float:
    if given.seconds is not None:
        return checks.number("--seconds", given.seconds, above=0, most=1e6)
    # A hair more than its span, so that the last arrival of a trace is played too.
    return traffic.span * (1 + 1e-9) if isinstance(traffic, Recording) else _SECONDS


def _mean_rate(given: Simulate, found: Scenario) -> float:
    if found.traffic.own_rate is not None:
        for option, value in (("--load", given.load), ("--rate", given.rate)):
            if value is not None:
                raise InvalidInput(f"{option} cannot be given with {given.arrivals}: its rate is its own")
        return found.traffic.own_rate
    if given.rate is None:
        return _load(given, found) * found.capacity
    if given.load is not None:
        raise InvalidInput("--load and --rate both say how much traffic there is: give one of them")
    return checks.number("--rate", given.rate, above=0)


def _load(given: Simulate, found: Scenario) -> float:
    if not found.capacity:
        raise InvalidInput(
            f"--load needs a capacity to multiply, and nothing can be promised within {given.slo_ms:g} ms: "
            f"give --slo-ms {2e3 * found.curve.times[1]:g} or more, or give --rate instead"
        )
    return checks.number("--load", 1.0 if given.load is None else given.load, above=0, most=1000)


def _traffic(given: Simulate) -> Traffic:
    if given.latest and given.arrivals in ("poisson", "bursty"):
        raise InvalidInput("--latest needs sources: give --arrivals cameras or a trace that names them")
    if given.model and not given.arrivals.startswith("trace:"):
        raise InvalidInput("--model chooses among the models of a trace: give --arrivals trace:FILE")
    if given.arrivals == "poisson":
        return Poisson()
    if given.arrivals == "bursty":
        return _bursty(given)
    if given.arrivals == "cameras":
        return _cameras(given)
    if given.arrivals.startswith("trace:"):
        try:
            file = Path(given.arrivals.removeprefix("trace:"))
            per_source = given.per_source or given.latest
            return Recording.read(file, per_source=per_source, model=given.model)
        except InvalidInput as error:
            raise InvalidInput(f"--arrivals: {error.message}") from None
    raise InvalidInput(f"--arrivals must be poisson, bursty, cameras or trace:FILE, not {given.arrivals!r}")


def _bursty(given: Simulate) -> Bursty:
    period = checks.number("--burst-period", given.burst_period, least=0.01, most=1e6)
    return Bursty(
        factor=checks.number("--burst-factor", given.burst_factor, least=1, most=1000),
        length=checks.number("--burst-seconds", given.burst_seconds, above=0, most=period),
        period=period,
    )


def _cameras(given: Simulate) -> Cameras:
    if given.cameras is None:
        raise InvalidInput("--cameras is needed with --arrivals cameras: say how many, like --cameras 100")
    return Cameras(
        count=checks.whole("--cameras", given.cameras, least=1, most=10**6),
        fps=checks.number("--fps", 10.0 if given.fps is None else given.fps, above=0, most=10_000),
        aligned=given.aligned,
        per_source=given.per_source or given.latest,
    )
