"""Whether the numbers are the server's, or those of a generator that could not keep its own schedule."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.spread import Spread

LATE_MS = 5.0  # the 99th percentile of the lag may be this, or a tenth of the SLO if that is more
_WORKING = 0.5  # of a core: one that is late with less is kept from running
BUSY = 0.9  # of a core: a loop that is so busy answers itself late


@dataclass(frozen=True, slots=True)
class Generator:
    """What the generating side did and cost. Lags are from the intended time."""

    processes: int
    processor_seconds: float
    busiest_core_share: float
    processor_us_per_request: float
    start_lag_ms: Spread  # until the generator got to a request
    send_lag_ms: Spread  # until it was on a connection
    loop_lag_ms: Spread
    connections: int  # at most at once, over all processes
    connection_limit: int
    reconnects: int
    resent: int


def bound_ms(slo: float | None) -> float:
    return max(LATE_MS, (slo or 0.0) * 100)


def judge(generator: Generator, plan: Plan) -> list[str]:
    """Sentences, each a reason to doubt the numbers; none if there is none."""
    found = []
    bound = bound_ms(plan.slo)
    g = generator
    if g.start_lag_ms.p99 > bound:
        busy = g.busiest_core_share > _WORKING
        found.append(
            f"the generator got to its requests late: p99 {g.start_lag_ms.p99:.1f} ms after their time, with "
            f"{bound:g} ms allowed, at {100 * g.busiest_core_share:.0f} % of a core. "
            + (
                "Give it more --processes"
                if busy
                else "Others keep it from running: give it a core of its own"
            )
        )
    elif g.busiest_core_share > BUSY:
        found.append(
            f"the generator used {100 * g.busiest_core_share:.0f} % of a core, so that it read answers late: "
            "give it more --processes"
        )
    waited = g.send_lag_ms.p99 - g.start_lag_ms.p99
    if waited > bound and not isinstance(plan.load, Closed):
        found.append(
            f"requests waited for a connection: p99 {waited:.1f} ms, with {g.connections} of them. "
            + (
                "Give more --connections"
                if g.connections >= g.connection_limit
                else "Opening more took so long"
            )
            + ": the wait is in the response time, but the server did not see these requests in time"
        )
    return found
