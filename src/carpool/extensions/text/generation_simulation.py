"""Models that write text, under a virtual clock: slots and steps, beside batches that wait for their slowest.

Both get the same requests, whose answers have the same lengths, on a device as fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from math import exp, inf
from random import Random
from statistics import fmean
from typing import Any

from carpool.core.curve import BatchCurve
from carpool.errors import InvalidInput
from carpool.extensions.text.text_job import DecodeStep, Encode, TextJob, TextPromise
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.sim.arrivals import Arrival, Poisson, Traffic
from carpool.sim.simulation import Device, percentile

_SATURATED = 3.0  # times what slots full all the time could carry
_SATURATED_ANSWERS = 60  # for each slot
_EXAMPLE = "write lognormal:22,0.5 (mean and sigma), geometric:22 (mean) or fixed:22"


@dataclass(frozen=True, slots=True)
class TokenLengths:
    """Describes how many tokens answers have, on average over all."""

    kind: str
    mean: float
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> TokenLengths:
        kind, _, numbers = text.partition(":")
        try:
            values = [float(part) for part in numbers.split(",")]
        except ValueError:
            raise InvalidInput(f"cannot read {text!r}: {_EXAMPLE}") from None
        wanted = {"lognormal": 2, "geometric": 1, "fixed": 1}.get(kind)
        if len(values) != wanted:
            raise InvalidInput(f"cannot read {text!r}: {_EXAMPLE}")
        if not 1 <= values[0] <= 1e5 or not all(0 <= value <= 3 for value in values[1:]):
            raise InvalidInput(f"{text!r}: a mean from 1 to 100000 tokens, a sigma from 0 to 3")
        return cls(kind, *values)

    def draw(self, random: Random) -> int:
        if self.kind == "lognormal":
            factor = exp(random.gauss(0.0, self.sigma) - self.sigma**2 / 2)
            return max(1, round(self.mean * factor))
        if self.kind == "geometric":
            return 1 + int(random.expovariate(1.0) * (self.mean - 1)) if self.mean > 1 else 1
        return max(1, round(self.mean))


@dataclass(slots=True)
class TextRide:
    """Describes what became of one request. Times are from its arrival; None: that did not happen."""

    arrival: Arrival
    length: int
    first: float | None = None
    whole: float | None = None
    tokens: int = 0
    refused: bool = False
    given_up: bool = False
    last: float = 0.0  # when its last token so far came
    longest: float = 0.0  # between two of its tokens

    def token(self, now: float) -> None:
        self.tokens += 1
        if self.first is None:
            self.first = now - self.arrival.at
        else:
            self.longest = max(self.longest, now - self.last)
        self.last = now

    @property
    def interval(self) -> float:
        """Returns the seconds from token to token, on average."""
        if self.first is None or self.tokens < 2:
            return 0.0
        return (self.last - self.arrival.at - self.first) / (self.tokens - 1)

    def keeps(self, promise: TextPromise) -> bool:
        return (
            self.whole is not None
            and self.first is not None
            and self.first <= promise.ttft
            and self.interval <= promise.per_token
            and self.whole <= promise.slo
        )


@dataclass(slots=True)
class TextRun:
    rides: list[TextRide] = field(default_factory=list)
    seconds: float = 0.0  # over which requests came
    ended: float = 0.0
    encodes: list[int] = field(default_factory=list)  # how many were encoded together
    steps: list[tuple[int, int]] = field(default_factory=list)  # slots that were run, and those in use


@dataclass(frozen=True, slots=True)
class TextScenario:
    """Times are in seconds."""

    encoder: BatchCurve
    step: BatchCurve
    lengths: TokenLengths
    promise: TextPromise
    rate: float = 1.0
    traffic: Traffic = field(default_factory=Poisson)
    seconds: float = 10.0
    seed: int = 1
    seeds: int = 1
    noise: float = 0.05
    stall_share: float = 0.002
    stall_factor: float = 2.0

    def requests(self, seed: int) -> list[TextRide]:
        random = Random(seed)
        arrivals = self.traffic.arrivals(self.rate, self.seconds, random)
        most = self.promise.max_tokens
        return [TextRide(arrival, min(most, self.lengths.draw(random))) for arrival in arrivals]

    def device(self, curve: BatchCurve) -> Device:
        return Device(curve, self.noise, self.stall_share, self.stall_factor)


class GenerationSimulation:
    """Feeds requests to a step scheduler and plays encoders and decoders, on one device or on their own."""

    def __init__(self, scenario: TextScenario, seed: int) -> None:
        self.scheduler = TextScheduler(scenario.encoder, scenario.step, scenario.promise)
        self._encoder, self._decoder = scenario.device(scenario.encoder), scenario.device(scenario.step)
        self._random = Random(f"device {seed}")
        self._running: list[tuple[float, Encode | DecodeStep]] = []
        self.run = TextRun()

    def play(self, rides: Sequence[TextRide]) -> TextRun:
        look_again: float | None = None
        for ride in rides:
            look_again = self._advance(ride.arrival.at, look_again)
            self._offer(ride)
            look_again = self._act(ride.arrival.at)
        self.run.seconds = rides[-1].arrival.at if rides else 0.0
        self._advance(inf, look_again)
        return self.run

    def _offer(self, ride: TextRide) -> None:
        self.run.rides.append(ride)
        job = TextJob(ride.arrival.at, payload=ride)
        ride.refused = self.scheduler.offer(job, ride.arrival.at) is not None

    def _advance(self, until: float, look_again: float | None) -> float | None:
        while True:
            at, work = min(self._running, key=lambda entry: entry[0], default=(inf, None))
            if look_again is not None and look_again < at:
                at, work = look_again, None
            if at >= until or at == inf:
                return look_again
            if work is not None:
                self._running.remove((at, work))
                self._ended(work, at)
            look_again = self._act(at)

    def _act(self, now: float) -> float | None:
        while True:
            decision = self.scheduler.decide(now)
            for job, *_ in decision.given_up:
                job.payload.given_up = True
            work = decision.work
            if work is None:
                again = decision.look_again
                return None if again is None or again <= now else again
            if isinstance(work, Encode):
                self.run.encodes.append(len(work.jobs))
                takes = self._encoder.seconds(len(work.jobs), work.encoder, now, self._random)
            else:
                self.run.steps.append((work.width, len(work.jobs)))
                takes = self._decoder.seconds(work.width, work.decoder, now, self._random)
            self._running.append((now + takes, work))

    def _ended(self, work: Encode | DecodeStep, now: float) -> None:
        self.run.ended = now
        if isinstance(work, Encode):
            self.scheduler.encoded(work, now, now - work.started)
            return
        ended = {job for job in work.jobs if job.tokens + 1 == job.payload.length}
        for job in work.jobs:
            job.payload.token(now)
        boundary = self.scheduler.stepped(work, now, ended, now - work.started)
        for job in boundary.done:
            job.payload.whole = now - job.arrived
        for job, *_ in boundary.given_up:
            job.payload.given_up = True


def play_static(scenario: TextScenario, seed: int) -> TextRun:
    """Simulates what servers without slots do: as many as wait, up to as many as there are slots, are encoded
    together and stepped until the last of them has ended; then come the next. No request is rejected."""
    encoder, decoder = scenario.device(scenario.encoder), scenario.device(scenario.step)
    random = Random(f"device {seed}")
    run = TextRun(scenario.requests(seed))
    queue = deque(run.rides)
    run.seconds = queue[-1].arrival.at if queue else 0.0
    now, slots = 0.0, scenario.promise.slots
    while queue:
        now = max(now, queue[0].arrival.at)
        batch: list[TextRide] = []
        while queue and len(batch) < slots and queue[0].arrival.at <= now:
            batch.append(queue.popleft())
        for start in range(0, len(batch), scenario.encoder.max_batch):
            size = min(scenario.encoder.max_batch, len(batch) - start)
            now += encoder.seconds(size, 0, now, random)
            run.encodes.append(size)
        while any(ride.whole is None for ride in batch):
            now += decoder.seconds(len(batch), 0, now, random)
            run.steps.append((len(batch), sum(ride.whole is None for ride in batch)))
            for ride in batch:
                if ride.whole is None:
                    ride.token(now)
                    if ride.tokens == ride.length:
                        ride.whole = now - ride.arrival.at
    run.ended = now
    return run


@dataclass(frozen=True, slots=True)
class TextReport:
    """Holds a run in numbers, over requests offered between the warm-up and the end."""

    offered_rps: float
    goodput_rps: float  # whole, and within the promise
    attainment: float
    answered_rps: float
    first_p50_ms: float
    first_p99_ms: float
    interval_p50_ms: float
    interval_p99_ms: float  # of the answers' mean intervals
    gap_p99_ms: float  # of the answers' longest
    done_p50_ms: float
    done_p99_ms: float
    tokens_per_s: float
    encode_batch: float
    step_width: float
    width_used: float

    def as_json(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def text_report(run: TextRun, promise: TextPromise) -> TextReport:
    begin = run.seconds / 10
    rides = [ride for ride in run.rides if ride.arrival.at >= begin]
    window = max(run.seconds - begin, 1e-9)
    answered = [ride for ride in rides if ride.whole is not None]
    good = sum(ride.keeps(promise) for ride in answered)

    def p(share: float, values: Sequence[float | None]) -> float:
        return 1e3 * percentile(sorted(value for value in values if value is not None), share)

    intervals = [ride.interval for ride in answered if ride.tokens > 1]
    return TextReport(
        offered_rps=len(rides) / window,
        goodput_rps=good / window,
        attainment=good / len(rides) if rides else 1.0,
        answered_rps=len(answered) / window,
        first_p50_ms=p(0.5, [ride.first for ride in answered]),
        first_p99_ms=p(0.99, [ride.first for ride in answered]),
        interval_p50_ms=p(0.5, intervals),
        interval_p99_ms=p(0.99, intervals),
        gap_p99_ms=p(0.99, [ride.longest for ride in answered if ride.tokens > 1]),
        done_p50_ms=p(0.5, [ride.whole for ride in answered]),
        done_p99_ms=p(0.99, [ride.whole for ride in answered]),
        tokens_per_s=sum(ride.tokens for ride in run.rides) / max(run.ended, 1e-9),
        encode_batch=fmean(run.encodes) if run.encodes else 0.0,
        step_width=fmean(width for width, _ in run.steps) if run.steps else 0.0,
        width_used=sum(used for _, used in run.steps) / max(1, sum(width for width, _ in run.steps)),
    )


def most_carried(scenario: TextScenario) -> float:
    """Answers per second if all slots were always in use, and encoding took no more than it has to."""
    promise = scenario.promise
    slots = min(promise.slots, scenario.step.max_batch)
    best = scenario.encoder.efficient[min(slots, scenario.encoder.max_batch)]
    encode = scenario.encoder.times[best] / best
    steps = scenario.lengths.mean * scenario.step.times[slots] / slots
    if not promise.apart:
        return 1.0 / (encode + steps)
    return min(promise.encoders / encode, promise.decoders / steps)


def saturated(scenario: TextScenario, *, static: bool = False) -> float:
    """Answers per second when more is asked than can be answered, and nothing is promised."""
    promise = replace(
        scenario.promise,
        ttft=inf,
        per_token=inf,
        slo=inf,
        max_queue=4 * scenario.promise.slots * scenario.promise.decoders,
    )
    rate = _SATURATED * most_carried(scenario)
    answers = _SATURATED_ANSWERS * scenario.promise.slots * scenario.promise.decoders * _SATURATED
    flood = replace(scenario, promise=promise, rate=rate, seconds=answers / rate)
    carried = []
    for seed in range(scenario.seed, scenario.seed + scenario.seeds):
        run = (
            play_static(flood, seed)
            if static
            else GenerationSimulation(flood, seed).play(flood.requests(seed))
        )
        # Static batches answer every request in the end; with slots, the full queue refuses. Of both, from
        # when all slots have been through their first answers.
        ends = sorted(ride.arrival.at + ride.whole for ride in run.rides if ride.whole is not None)
        tail = len(ends) // 5
        carried.append((len(ends) - 2 * tail) / (ends[-tail - 1] - ends[tail]))
    return fmean(carried)


def measure_text(scenario: TextScenario, *, static: bool = False) -> TextReport:
    """Returns the mean over the seeds."""
    found = []
    for seed in range(scenario.seed, scenario.seed + scenario.seeds):
        if static:
            run = play_static(scenario, seed)
        else:
            run = GenerationSimulation(scenario, seed).play(scenario.requests(seed))
        found.append(asdict(text_report(run, scenario.promise)))
    means: dict[str, Any] = {name: fmean(one[name] for one in found) for name in found[0]}
    return TextReport(**means)
