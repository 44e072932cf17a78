"""Measures the requests of `elements`, each beside honest clients of the protocols that it may disturb."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from attacks import elements, honest
from attacks.attacker import Ports
from load.burst import LoadError
from load.processes import tree_cpu

RATE, SECONDS, QUIET_S = 20.0, 8.0, 1.0
PICTURES_S = 5.0
SLO_S = {"http": 0.2, "grpc": 0.2, "pictures": 1.0}
BACK_WITHIN_S = 60.0
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
        found = [f"late over {name}" for name, late in self.late.items() if late > self.most_late]
        if self.died:
            found.append("killed")
        if self.most_mb - self.before_mb > self.most_growth_mb:
            found.append("memory")
        if self.after_mb - self.before_mb > MOST_KEPT_MB:
            found.append("kept")
        if self.kept_share is not None and self.kept_share < LEAST_OF_FEW:
            found.append("throughput")
        return found

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

    def __init__(self, name: str, clients: int, ports: Ports) -> None:
        processes = multiprocessing.get_context("forkserver")
        armed, self._go = processes.Event(), processes.Event()
        self._answered = processes.Value("l", 0)
        self._process = processes.Process(
            target=elements.run, args=(name, clients, ports, armed, self._go, self._answered), daemon=True
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
    kind = elements.KINDS[name]
    few = _throughput(name, kind.few, ports, seconds) if kind.few else None
    before, processes = held_mb(pid), set(tree_cpu(pid))
    attacker = Attacker(name, kind.clients, ports)
    lasting = {one: PICTURES_S if one == "pictures" else seconds for one in kind.honest}
    running = {
        one: honest.Running(honest.Load(one, ports, lasts, keyed=False, seed=3, rate=RATE))
        for one, lasts in lasting.items()
    }
    most, end = before, time.monotonic() + max(lasting.values()) + QUIET_S
    time.sleep(QUIET_S)
    attacker.begin()
    while time.monotonic() < end:
        most = max(most, held_mb(pid))
        time.sleep(0.2)
    answers = {one: client.result() for one, client in running.items()}
    answered = attacker.end()
    after = _least(pid, before + MOST_KEPT_MB / 2)
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


def _throughput(name: str, clients: int, ports: Ports, seconds: float) -> int:
    """How many requests so many clients have answered in the same time, with nothing beside them."""
    attacker = Attacker(name, clients, ports)
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


def _least(pid: int, enough: float) -> float:
    found, until = held_mb(pid), time.monotonic() + BACK_WITHIN_S
    while time.monotonic() < until and found > enough:
        time.sleep(0.5)
        found = min(found, held_mb(pid))
    return found


def names(only: str, quick: Sequence[str] = ()) -> list[str]:
    return [name for name in quick or elements.KINDS if only.lower() in name.lower()]


def measure_all(
    pid: int, ports: Ports, chosen: Sequence[str], seconds: float, tell: Callable[[str], None]
) -> list[Row]:
    rows = []
    for name in chosen:
        rows.append(measure(pid, ports, name, seconds))
        tell(str(rows[-1]))
    return rows


def as_text(rows: Sequence[Row]) -> str:
    return "\n".join(map(str, rows))
