"""Short slices of load, the servers in turn, so that whatever else the machine does meets all of them.

A turn is one slice per server, all asked in the same way at one concurrency, in random order, a few seconds
apart: the unit within which servers are compared. A slice that other work on the machine disturbed is
repeated a few times; a turn counts as quiet only when each of its slices is.
"""

import os
import random
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

from load import processes
from load.burst import Burst, LoadError

MAX_OTHER = 0.05  # share of the machine that other processes may take during a quiet slice
MAX_STEAL = 0.02  # share that the host may take away
QUIET_PROBE_S = 0.5
SLICE_EXTRA_S = 0.4  # starting and ending the load generator


class Served(Protocol):
    """What a slice needs of a server; what is in the same group is compared."""

    @property
    def name(self) -> str: ...

    @property
    def group(self) -> str: ...

    def fire(self, concurrency: int, seconds: float, /) -> Burst: ...

    def cpu(self) -> dict[int, float]: ...


@dataclass(frozen=True, slots=True)
class Slice:
    """A few seconds of one server."""

    rps: float
    p50_ms: float
    p99_ms: float
    cpu_us: float
    other: float
    steal: float

    @property
    def quiet(self) -> bool:
        return self.other <= MAX_OTHER and self.steal <= MAX_STEAL


@dataclass(frozen=True, slots=True)
class Turn:
    """One slice of each server of a group at one concurrency, close together in time."""

    group: str
    concurrency: int
    slices: Mapping[str, Slice]

    @property
    def quiet(self) -> bool:
        return all(one.quiet for one in self.slices.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: `rounds` quiet turns per group and concurrency, within bounds.

    Before each turn, and before a disturbed slice is taken again (`repeats` times at most), it waits up to
    `patience_s` for a quiet moment. After `max_rounds` it stops with what there is, and so that the whole
    program ends within `limit_s`.
    """

    concurrencies: Sequence[int]
    rounds: int
    max_rounds: int
    seconds: float
    repeats: int
    patience_s: float
    limit_s: float


def measure(servers: Sequence[Served], plan: Plan, end: float, tell: Callable[[str], None]) -> Iterator[Turn]:
    """Rounds over the groups and concurrencies that lack quiet turns, until none does, `end`, or Ctrl-C."""
    turns: list[Turn] = []
    groups = {one.group: [other for other in servers if other.group == one.group] for one in servers}
    try:
        for number, group, concurrency in product(range(1, plan.max_rounds + 1), groups, plan.concurrencies):
            here = [turn for turn in turns if (turn.group, turn.concurrency) == (group, concurrency)]
            done = sum(turn.quiet for turn in here)
            if done < plan.rounds and (_room(groups[group], plan, end) or not here):
                wait_for_quiet(plan.patience_s)
                turns.append(_take_turn(groups[group], concurrency, plan, end))
                tell(f"round {number}, {_describe(turns[-1])}")
                yield turns[-1]
    except KeyboardInterrupt:
        tell("interrupted: these are the turns so far")


def run_slice(server: Served, concurrency: int, seconds: float) -> Slice:
    """Load one server for a moment and see what it, the generator and everybody else spent."""
    cpu, machine, start, own = server.cpu(), processes.machine(), time.monotonic(), own_cpu()
    burst = server.fire(concurrency, seconds)
    elapsed, ended, own_spent = time.monotonic() - start, processes.machine(), own_cpu() - own
    spent = processes.spent(cpu, server.cpu())
    if burst.failures or not burst.requests:
        raise LoadError(
            f"{server.name}, {server.group}, concurrency {concurrency}: not every answer was a good one: "
            f"{burst.failures or 'no answers'} of {burst.requests} requests"
        )
    capacity = elapsed * (os.cpu_count() or 1)
    others = ended.busy - machine.busy - spent - burst.cpu_seconds - own_spent
    return Slice(
        rps=burst.rps,
        p50_ms=burst.p50_ms,
        p99_ms=burst.p99_ms,
        cpu_us=1e6 * spent / burst.requests,
        other=max(0.0, others) / capacity,
        steal=(ended.steal - machine.steal) / capacity,
    )


def _take_turn(servers: Sequence[Served], concurrency: int, plan: Plan, end: float) -> Turn:
    slices = {}
    order = random.sample(servers, len(servers))
    for position, server in enumerate(order):
        one = run_slice(server, concurrency, plan.seconds)
        for _ in range(plan.repeats):
            if one.quiet or not _room(order[position:], plan, end):
                break
            wait_for_quiet(plan.patience_s)
            one = run_slice(server, concurrency, plan.seconds)
        slices[server.name] = one
    return Turn(servers[0].group, concurrency, slices)


def _room(servers: Sequence[Served], plan: Plan, end: float) -> bool:
    """Whether a slice of each of these servers, after one more wait, can still end in time."""
    return time.monotonic() + plan.patience_s + len(servers) * (plan.seconds + SLICE_EXTRA_S) < end


def wait_for_quiet(patience_s: float) -> None:
    """Return when the machine has been idle for a moment, or when patience is over."""
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        before = processes.machine()
        time.sleep(QUIET_PROBE_S)
        if processes.machine().busy - before.busy <= MAX_OTHER * QUIET_PROBE_S * (os.cpu_count() or 1):
            return


def _describe(turn: Turn) -> str:
    cells = (
        f"{name} {one.rps:.0f}/s {one.cpu_us:.0f} µs{'' if one.quiet else ' disturbed'}"
        f" (others {one.other:.1%}, steal {one.steal:.1%})"
        for name, one in turn.slices.items()
    )
    return f"{turn.group}, concurrency {turn.concurrency}: " + "; ".join(cells)


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
