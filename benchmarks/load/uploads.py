"""JPEGs sent to a picture route by Carpool's own load generator: what came back, and what everybody spent."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from carpool.lab.load.aim import Aim, take_aim
from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Open, Phase, Plan
from carpool.lab.load.load_report import Counts, LoadReport
from carpool.lab.load.tally import Answer, Ticket
from load import processes
from load.carpool_server import CarpoolServer
from load.disturbance import Disturbance, is_quiet
from load.neighbour import Neighbour

PATIENCE_S = 2.0  # then a client gives up
_CONNECTIONS = 1024
_PAGE_AGE_S = 0.5  # the metrics page may be as old as this
_DECODED = "carpool_decode_duration_seconds_count"
_ANSWERED = "nv_inference_request_success"


@dataclass(frozen=True, slots=True)
class Seen:
    """One run. CPU shares are of all cores and of the whole run, with its warm-up."""

    phases: tuple[Counts, ...]  # those that count
    decoded: float
    answered: float  # of those that were decoded
    server_cpu: float
    generator_cpu: float
    neighbour_cpu: float
    others_cpu: float
    late_because: tuple[str, ...]

    @property
    def quiet(self) -> bool:
        return is_quiet(self.others_cpu)

    @property
    def decoded_for_nothing(self) -> float:
        """The share of decoded pictures that were refused, or failed, afterwards."""
        return max(0.0, self.decoded - self.answered) / self.decoded if self.decoded else 0.0


class Uploads:
    """What is sent to one model of a server. `slo` in seconds."""

    def __init__(
        self, server: CarpoolServer, model: str, slo: float, pictures: Sequence[Path], neighbour: Neighbour
    ) -> None:
        self._server = server
        self._aim = Aim(server.url, model, pictures=tuple(pictures), connections=_CONNECTIONS)
        self._slo = slo
        self._neighbour = neighbour
        self._seed = 0

    def open_loop(
        self,
        rate: float,
        seconds: float,
        *,
        warmup: float,
        neighbour: tuple[float, float] | None = None,
        counted: bool = True,
    ) -> Seen:
        """At random. A neighbour comes and goes at its two times: three phases, else one. `counted`: the
        server is asked how much it decoded, which takes a second."""
        ends = (seconds,) if neighbour is None else (neighbour[0], neighbour[1], seconds)
        lengths = [end - start for start, end in zip((0.0, *ends), ends, strict=False)]
        phases = (Phase(rate, warmup, warmup=True), *(Phase(rate, length) for length in lengths))
        self._seed += 1
        plan = Plan(Open(phases, seed=self._seed), self._slo, PATIENCE_S, drain=PATIENCE_S + 1)
        switches = None if neighbour is None else [warmup + at for at in neighbour]
        return self._run(plan, switches, counted)

    def closed_loop(self, clients: int, seconds: float, *, warmup: float, counted: bool = True) -> Seen:
        """Clients that ask again at once, whatever they were told."""
        plan = Plan(
            Closed(clients, seconds=seconds, warmup=warmup), self._slo, PATIENCE_S, drain=PATIENCE_S + 1
        )
        return self._run(plan, None, counted)

    def _run(self, plan: Plan, switches: list[float] | None, counted: bool) -> Seen:
        decoded, answered = self._counted() if counted else (0.0, 0.0)
        beside = self._neighbour.cpu()
        watched = Disturbance(lambda: processes.tree_cpu(self._server.process.pid))
        began = time.monotonic()
        report = self._load(plan, switches)
        server, generator, others = watched.read()
        cores = (time.monotonic() - began) * processes.cores()
        neighbour = processes.spent(beside, self._neighbour.cpu()) / cores
        decoded_after, answered_after = self._counted() if counted else (0.0, 0.0)
        return Seen(
            phases=report.phases[1:],
            decoded=decoded_after - decoded,
            answered=answered_after - answered,
            server_cpu=server,
            generator_cpu=generator,
            neighbour_cpu=neighbour,
            others_cpu=max(0.0, others - neighbour),
            late_because=report.late_because,
        )

    def _load(self, plan: Plan, switches: list[float] | None) -> LoadReport:
        target = take_aim(self._aim)
        try:
            return uvloop.run(run(plan, target, record=self._switch(switches) if switches else None))
        finally:
            if switches:
                self._neighbour.rest()

    def _switch(self, times: list[float]) -> Callable[[Ticket, float, Answer], None]:
        """Called with every request that ended: often enough to be a clock, and it is the run's own."""
        left = list(zip(times, (self._neighbour.go, self._neighbour.rest), strict=True))

        def look(_ticket: Ticket, now: float, _answer: Answer) -> None:
            while left and now >= left[0][0]:
                left.pop(0)[1]()

        return look

    def _counted(self) -> tuple[float, float]:
        """Pictures decoded and requests answered so far, as the server counts."""
        time.sleep(_PAGE_AGE_S)
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        return _total(lines, _DECODED), _total(lines, _ANSWERED)


def _total(lines: Sequence[str], name: str) -> float:
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))
