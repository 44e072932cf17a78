"""What one offered request costs the scheduler, in process time, beside a loop that tells machines apart.

Each case is played once by the simulator, to record which calls a server would make and when: offer, decide,
finished. Then only those calls are repeated and timed, on a fresh scheduler that decides the same again.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from random import Random
from statistics import median
from time import process_time

from carpool.core.curve import BatchCurve
from carpool.core.instance import Batch
from carpool.core.job import Job
from carpool.core.objectives import FixedBatching, Promise, QueueLimits
from carpool.core.scheduler import Scheduler
from carpool.sim.arrivals import Arrival, poisson
from carpool.sim.simulation import Device, Simulation

CURVE = BatchCurve.parse("4+1")
SLO = 0.05
CAPACITY = 840.0
TARGET_US = 20.0
OFFER, DECIDE, FINISHED = range(3)

Call = tuple[int, float, int]  # what, when, and which arrival or batch
Case = tuple[Callable[[], Scheduler], list[Arrival], list[Call]]


@dataclass(frozen=True)
class Row:
    case: str
    value: float
    unit: str
    fastest: float
    target: str
    loops: float | None = None  # as so many turns of the calibration loop


class Recorder:
    """A scheduler that writes down when it was asked what."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._batches: list[Batch] = []
        self._offered = 0
        self.calls: list[Call] = []

    def offer(self, job: Job, now: float, *, ready: bool = True) -> object:
        self.calls.append((OFFER, now, self._offered))
        self._offered += 1
        return self._scheduler.offer(job, now, ready=ready)

    def decide(self, now: float) -> object:
        self.calls.append((DECIDE, now, 0))
        decision = self._scheduler.decide(now)
        if decision.batch is not None:
            self._batches.append(decision.batch)
        return decision

    def finished(self, batch: Batch, now: float, seconds: float) -> object:
        self.calls.append((FINISHED, now, self._batches.index(batch, max(0, len(self._batches) - 8))))
        return self._scheduler.finished(batch, now, seconds)


def record(make: Callable[[], Scheduler], arrivals: list[Arrival]) -> Case:
    recorder = Recorder(make())
    Simulation(recorder, Device(CURVE), slo=SLO, seed=1).play(arrivals)  # type: ignore[arg-type]
    return make, arrivals, recorder.calls


def replay(case: Case) -> float:
    """Microseconds per offered request."""
    make, arrivals, calls = case
    scheduler = make()
    jobs = [Job(a.at, images=a.images, source=a.source, priority=a.priority) for a in arrivals]
    batches: list[Batch] = []
    offer, decide, finished = scheduler.offer, scheduler.decide, scheduler.finished
    begin = process_time()
    for what, now, which in calls:
        if what == OFFER:
            offer(jobs[which], now)
        elif what == DECIDE:
            batch = decide(now).batch
            if batch is not None:
                batches.append(batch)
        else:
            batch = batches[which]
            finished(batch, now, now - batch.started)
    return (process_time() - begin) * 1e6 / len(arrivals)


def promise_at_3x(seconds: float) -> Case:
    return record(lambda: Scheduler(CURVE, Promise(SLO, 64)), poisson(3 * CAPACITY, seconds, Random(1)))


def promise_with_lanes(seconds: float) -> Case:
    random = Random(1)
    shares = (("a", 0.4, 0), ("b", 2.3, 0), ("b", 0.3, 1))
    arrivals = [
        Arrival(arrival.at, source=source, priority=priority)
        for source, share, priority in shares
        for arrival in poisson(share * CAPACITY, seconds, random)
    ]
    arrivals.sort(key=lambda arrival: arrival.at)
    return record(lambda: Scheduler(CURVE, Promise(SLO, 64)), arrivals)


def fixed_with_a_queue(seconds: float, limits: QueueLimits | None = None) -> Case:
    """As many arrive while a batch of 32 runs as it holds, behind 300 that were there before."""
    queued, batch = 300, 32
    takes = CURVE.times[batch]
    arrivals = [Arrival(0.0) for _ in range(queued + batch)]
    arrivals += [Arrival(number * takes / batch) for number in range(1, int(seconds * batch / takes))]
    fixed = FixedBatching(batch, preferred=(8, 16, 32), max_delay=0.005, limits=limits or QueueLimits())
    return record(lambda: Scheduler(CURVE, fixed), arrivals)


def fixed_with_a_timeout(seconds: float) -> Case:
    """Triton does not form batches ahead of time when the queue has limits; nor does Carpool."""
    return fixed_with_a_queue(seconds, QueueLimits(timeout=30.0))


def simulated_minute() -> float:
    """Seconds for 60 s at 2,500 requests/s, simulator included."""
    begin = process_time()
    arrivals = poisson(2500, 60.0, Random(1))
    Simulation(Scheduler(CURVE, Promise(SLO, 64)), Device(CURVE), slo=SLO, seed=1).play(arrivals)
    return process_time() - begin


class _Counter:
    def __init__(self) -> None:
        self.count = 0


def calibration() -> float:
    """Nanoseconds per turn of a loop of a million dictionary and attribute operations."""
    counter, table = _Counter(), {key: key for key in range(64)}
    begin = process_time()
    for turn in range(1_000_000):
        counter.count += table[turn & 63]
    return (process_time() - begin) * 1e9 / 1_000_000


def measure(quick: bool) -> list[Row]:
    seconds, repeats = (4.0, 3) if quick else (20.0, 7)
    loops = [calibration() for _ in range(repeats)]
    turn_us = median(loops) / 1e3
    rows = [Row("calibration: one dict + attribute turn", median(loops), "ns", min(loops), "")]
    cases = {
        "promise at 3× load": (promise_at_3x, f"≤ {TARGET_US:g} µs"),
        "knobs, 300 queued, batches of 32": (fixed_with_a_queue, f"≤ {TARGET_US:g} µs"),
        "… and a queue timeout": (fixed_with_a_timeout, ""),
        "promise at 3×, 2 sources + priority": (promise_with_lanes, ""),
    }
    for name, (make, target) in cases.items():
        case = make(seconds)
        costs = [replay(case) for _ in range(repeats)]
        rows.append(Row(name, median(costs), "µs/request", min(costs), target, median(costs) / turn_us))
    minutes = [simulated_minute() for _ in range(1 if quick else 3)]
    rows.append(Row("simulate 60 s at 2,500/s", median(minutes), "s", min(minutes), "well under 60 s"))
    return rows


def show(rows: list[Row]) -> None:
    print(f"Python {platform.python_version()}, process time, median and fastest run")
    print(f"{'case':40} {'median':>8} {'fastest':>8} {'unit':12} {'in loop turns':>13}  target")
    for row in rows:
        turns = "" if row.loops is None else f"{row.loops:,.0f}"
        print(f"{row.case:40} {row.value:8.2f} {row.fastest:8.2f} {row.unit:12} {turns:>13}  {row.target}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less than a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    rows = measure(given.quick)
    if given.json:
        print(
            json.dumps({"python": platform.python_version(), "rows": [asdict(row) for row in rows]}, indent=2)
        )
    else:
        show(rows)


if __name__ == "__main__":
    main()
