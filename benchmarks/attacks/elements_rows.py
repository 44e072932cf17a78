"""Measures the requests of `elements`, each beside honest clients of the protocols that it may disturb."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from attacks import elements, fetches, honest
from attacks.attacker import Ports
from load.burst import LoadError
from load.processes import tree_cpu

RATE, SECONDS, QUIET_S = 20.0, 8.0, 1.0
PICTURES_S = 5.0
FETCHES = 20
AFTERWARDS = "fetches afterwards"
SLO_S = {"http": 0.2, "grpc": 0.2, "pictures": 1.0, honest.FETCHED: 1.0, AFTERWARDS: 1.0}
LATE_FETCHES = 0.1
KINDS = {**elements.KINDS, **fetches.KINDS}
BACK_WITHIN_S, SETTLED_S = 60.0, 3.0
MOST_KEPT_MB = 60.0
LEAST_OF_FEW = 0.8  # of the throughput that two of the clients have
_ARMED_WITHIN_S = 180.0  # a message of 30,000,000 elements takes its time to make


@dataclass(frozen=True)
class Row:
    attack: str
    late: dict[str, int]  # of each protocol's honest client
    sent: dict[str, int]
    before_mb: float
    most_mb: float
    after_mb: float
    died: int  # processes of the server
    answered: int  # the attacker's requests
    kept_share: float | None  # its throughput, in that of a few of its clients
    most_late: int
    most_growth_mb: float

    @property
    def failures(self) -> list[str]:
        found = [f"late over {name}" for name, late in self.late.items() if late > self._most_late(name)]
        if self.died:
            found.append("killed")
        if self.most_mb - self.before_mb > self.most_growth_mb:
            found.append("memory")
        if self.after_mb - self.before_mb > MOST_KEPT_MB:
            found.append("kept")
        if self.kept_share is not None and self.kept_share < LEAST_OF_FEW:
            found.append("throughput")
        return found

    def _most_late(self, name: str) -> float:
        return LATE_FETCHES * self.sent[name] if name in (honest.FETCHED, AFTERWARDS) else self.most_late

    def __str__(self) -> str:
        late = "  ".join(f"{name} {late:3d} of {self.sent[name]}" for name, late in self.late.items())
        share = "" if self.kept_share is None else f"  throughput {self.kept_share:.2f}"
        verdict = "pass" if not self.failures else "FAIL: " + ", ".join(self.failures)
        return (
            f"{self.attack:46} late: {late:34}  MB {self.before_mb:5.0f}"
            f" {self.most_mb - self.before_mb:+6.0f} then {self.after_mb - self.before_mb:+5.0f}"
            f"  died {self.died}  attacker {self.answered:4d}{share}  {verdict}"
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self) | {"failures": self.failures}


class Attacker:
    """A process that is about to begin; it is not one of the server's."""

    def __init__(self, kind: elements.Kind, clients: int, ports: Ports) -> None:
        processes = multiprocessing.get_context("forkserver")
        armed, self._go = processes.Event(), processes.Event()
        self._answered = processes.Value("l", 0)
        self._process = processes.Process(
            target=elements.run, args=(kind, clients, ports, armed, self._go, self._answered), daemon=True
        )
        self._process.start()
        if not armed.wait(_ARMED_WITHIN_S):
            self.end()
            raise LoadError("the attacker does not begin")

    def begin(self) -> None:
        self._go.set()

    def end(self) -> int:
        """Return how many of its requests were answered."""
        self._process.kill()
        self._process.join()
        return int(self._answered.value)


def measure(pid: int, ports: Ports, name: str, seconds: float = SECONDS) -> Row:
    kind = KINDS[name]
    few = _throughput(kind, ports, seconds) if kind.few else None
    before, processes = held_mb(pid), set(tree_cpu(pid))
    loads = {one: _load(one, ports, seconds) for one in kind.honest}
    if honest.FETCHED in kind.honest:
        loads[AFTERWARDS] = replace(
            loads[honest.FETCHED], seconds=seconds / 2, rate=2 * FETCHES / seconds, waits=True
        )
    attacker = Attacker(kind, kind.clients, ports)
    running = {one: honest.Running(load) for one, load in loads.items()}
    try:
        most, end = before, time.monotonic() + max(load.seconds for load in loads.values()) + QUIET_S
        time.sleep(QUIET_S)
        attacker.begin()
        while time.monotonic() < end:
            most = max(most, held_mb(pid))
            time.sleep(0.2)
        answers = {one: running[one].result() for one in kind.honest}
    finally:
        answered = attacker.end()
        for one in running.keys() & kind.honest:
            running[one].end()
    if AFTERWARDS in running:
        running[AFTERWARDS].begin()
        answers[AFTERWARDS] = running[AFTERWARDS].result()
    after = _least(pid, before)
    return Row(
        name,
        {one: found.late(SLO_S[one]) for one, found in answers.items()},
        {one: len(found.latencies) for one, found in answers.items()},
        round(before, 1),
        round(most, 1),
        round(after, 1),
        len(processes - set(tree_cpu(pid))),
        answered,
        None if few is None else round(answered / max(1, few), 2),
        kind.most_late,
        kind.most_mb,
    )


def _load(protocol: str, ports: Ports, seconds: float) -> honest.Load:
    """What the honest client of a protocol sends."""
    lasts = PICTURES_S if protocol == "pictures" else seconds
    rate = FETCHES / seconds if protocol == honest.FETCHED else RATE
    return honest.Load(protocol, ports, lasts, keyed=False, seed=3, rate=rate)


def _throughput(kind: elements.Kind, ports: Ports, seconds: float) -> int:
    """How many requests a few of its clients have answered in the same time, with nothing beside them."""
    attacker = Attacker(kind, kind.few, ports)
    attacker.begin()
    time.sleep(seconds)
    return attacker.end()


def held_mb(pid: int) -> float:
    """Memory of a process and of all below it; a page that several share counts once."""
    return sum(map(_proportional, tree_cpu(pid))) / 1e3


def _proportional(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _least(pid: int, before: float) -> float:
    """Waits while too much is held, and for a moment where it is little, which may still become less."""
    found, began = held_mb(pid), time.monotonic()
    while found > before + MOST_KEPT_MB / 2:
        waited = time.monotonic() - began
        if waited > (BACK_WITHIN_S if found > before + MOST_KEPT_MB else SETTLED_S):
            break
        time.sleep(0.5)
        found = min(found, held_mb(pid))
    return found


def names(only: str, quick: Sequence[str] = ()) -> list[str]:
    return [name for name in quick or KINDS if only.lower() in name.lower()]


def measure_all(
    pid: int, ports: Ports, chosen: Sequence[str], seconds: float, tell: Callable[[str], None]
) -> list[dict[str, object]]:
    """Returns each row as JSON has it. One that cannot be measured says why, and the others go on."""
    rows: list[dict[str, object]] = []
    for name in chosen:
        try:
            row = measure(pid, ports, name, seconds)
        except LoadError as error:
            rows.append({"attack": name, "skipped": str(error)})
            tell(f"{name:46} skipped: {error}")
        else:
            rows.append(row.as_json())
            tell(str(row))
    return rows


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """Returns what `Row.as_json` gave, or why there is none, as a table."""
    return "\n".join(map(_line, rows))


def _line(row: dict[str, Any]) -> str:
    return f"{row['attack']:46} skipped: {row['skipped']}" if "skipped" in row else str(_row(row))


def _row(found: dict[str, Any]) -> Row:
    return Row(**{one.name: found[one.name] for one in fields(Row)})
