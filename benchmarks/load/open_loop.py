"""Carpool's own load generator, in a process of its own for each server: what became of every request."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

import uvloop

from carpool.errors import CarpoolError
from carpool.lab.load.aim import Aim, take_aim
from carpool.lab.load.generator import collect_rarely, run
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.tally import Answer, Kind, Ticket
from carpool.sim.simulation import percentile
from load.burst import LoadError

_MORE_S = 120.0  # than the load itself takes, for a process to start and to tell


@dataclass(frozen=True)
class Shower:
    """Poisson requests for one server, in steps of (requests per second, seconds), from one source."""

    url: str
    steps: tuple[tuple[float, float], ...]
    slo: float
    timeout: float  # after which a client gives up, and closes its connection
    seed: int = 1
    model: str = ""
    connections: int = 256
    source: str = ""
    clients: int = 0  # instead of steps' rates: so many who each ask again as soon as they are answered

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.steps)


class Drop(NamedTuple):
    """One request: when it was to be sent, and after how long it was answered, if it was."""

    at: float
    latency: float | None


@dataclass
class Fallen:
    """All of a shower, in the order of their times."""

    drops: list[Drop] = field(default_factory=list)
    late_because: tuple[str, ...] = ()
    generator_core_share: float = 0.0

    def between(self, start: float, end: float) -> list[Drop]:
        return [drop for drop in self.drops if start <= drop.at < end]


def in_time(drops: Sequence[Drop], slo: float) -> int:
    return sum(drop.latency is not None and drop.latency <= slo for drop in drops)


def latency(drops: Sequence[Drop], share: float) -> float:
    """This percentile of what was answered, in seconds."""
    return percentile(sorted(drop.latency for drop in drops if drop.latency is not None), share)


def pour(showers: Sequence[Shower]) -> list[Fallen]:
    """All at the same time."""
    forks = multiprocessing.get_context("forkserver")  # of a process that has imported everything once
    forks.set_forkserver_preload(["__main__", __name__])
    running = []
    for shower in showers:
        ours, theirs = forks.Pipe()
        process = forks.Process(target=_generate, args=(theirs, shower), daemon=True)
        process.start()
        theirs.close()
        running.append((process, ours, shower))
    try:
        return [_receive(pipe, shower) for _, pipe, shower in running]
    finally:
        for process, _, _ in running:
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _receive(pipe: Connection, shower: Shower) -> Fallen:
    if not pipe.poll(shower.seconds + _MORE_S):
        raise LoadError(f"the load on {shower.url} did not end")
    try:
        found: Fallen | str = pipe.recv()
    except EOFError:
        raise LoadError(f"the process that loads {shower.url} died") from None
    if isinstance(found, str):
        raise LoadError(found)
    return found


def _generate(pipe: Connection, shower: Shower) -> None:
    try:
        pipe.send(uvloop.run(_fall(shower)))
    except CarpoolError as error:
        pipe.send(error.message)


async def _fall(shower: Shower) -> Fallen:
    found = Fallen()

    def record(ticket: Ticket, now: float, answer: Answer) -> None:
        answered = answer.kind is Kind.ANSWERED
        found.drops.append(Drop(ticket.intended, now - ticket.intended if answered else None))

    phases = tuple(Phase(rate, seconds) for rate, seconds in shower.steps)
    loop = (
        Closed(shower.clients, seconds=shower.seconds) if shower.clients else Open(phases, seed=shower.seed)
    )
    plan = Plan(loop, shower.slo, shower.timeout, drain=shower.timeout)
    headers = (("X-Carpool-Source", shower.source),) if shower.source else ()
    aim = Aim(shower.url, shower.model, connections=shower.connections, headers=headers)
    target = take_aim(aim)
    collect_rarely()
    report = await run(plan, target, record=record)
    found.drops.sort(key=lambda drop: drop.at)
    found.late_because = report.late_because
    found.generator_core_share = report.generator.busiest_core_share
    return found
