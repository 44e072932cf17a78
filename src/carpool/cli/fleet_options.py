"""Options of `carpool simulate` about several replicas behind a balancer, and what is said of the outcome."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.sim.fleet_simulation import Autoscale, FleetOutcome, FleetScenario
    from carpool.sim.simulation import Scenario

FLEET = "Several replicas"
_SLOW = re.compile(r"(\d{1,4}):(\d{1,4}(?:\.\d{1,4})?)")
_AUTOSCALE = re.compile(r"(load|saturation):(0?\.\d{1,4}|1(?:\.0*)?)")
MOST_REPLICAS = 32
"""That are simulated one by one. Larger fleets are cells of so many: what one does, all do."""
Kind = StrEnum("Kind", ["rr", "least", "p2c", "weighted"])


@dataclass(frozen=True, kw_only=True)
class HasFleet:
    """Defines a verb that may be about several servers."""

    replicas: int | None = o.option(
        None, "Number of servers behind a balancer, each with its own queue and --instances.", FLEET
    )
    balancer: Kind = o.option(
        Kind.rr,
        "The balancer's choice: the next replica, the one with fewest requests, the better of two, or by "
        "reported capacity (ORCA).",
        FLEET,
    )
    retries: int = o.option(0, "Number of retries of a rejection at other replicas.", FLEET)
    slow: str = o.option("", "Slower replicas: with 1:2.0 the first takes twice as long.", FLEET)
    lose: float | None = o.option(
        None, "Second at which a replica fails. It is replaced after a cold start.", FLEET
    )
    autoscale: str = o.option(
        "",
        "Target of the autoscaler: load:0.75 (offered over capacity) or saturation:0.6.",
        FLEET,
    )
    max_replicas: int = o.option(MOST_REPLICAS, "autoscale: largest number of replicas.", FLEET)
    cold_start: float = o.option(20.0, "Time until a new replica answers, in seconds.", FLEET)
    hpa_period: float = o.option(15.0, "autoscale: time between two decisions, in seconds.", FLEET)

    def fleet(self, one: Scenario) -> FleetScenario:
        """Each replica is this one, and its traffic that of all of them."""
        from carpool.sim.fleet_simulation import FleetScenario

        count = o.whole("--replicas", self.replicas or 0, least=1, most=MOST_REPLICAS)
        return FleetScenario(
            one,
            count,
            balancer=self.balancer.value,
            retries=o.whole("--retries", self.retries, least=0, most=8),
            slow=_slow(self.slow, count),
            lose=None if self.lose is None else o.number("--lose", self.lose, above=0, most=1e6),
            cold_start=o.number("--cold-start", self.cold_start, most=1e5),
            autoscale=self._autoscale(count),
        )

    def _autoscale(self, least: int) -> Autoscale | None:
        from carpool.sim.fleet_simulation import Autoscale

        if not self.autoscale:
            return None
        by, target = self.read_autoscale()
        most = o.whole("--max-replicas", self.max_replicas, least=least, most=MOST_REPLICAS)
        period = o.number("--hpa-period", self.hpa_period, least=1, most=3600)
        return Autoscale(by, target, least, most, period)

    def read_autoscale(self) -> tuple[str, float]:
        found = _AUTOSCALE.fullmatch(self.autoscale)
        if found is None or not float(found[2]):
            raise InvalidInput(
                f"--autoscale must be like load:0.75 or saturation:0.6, above 0 and up to 1, not "
                f"{self.autoscale!r}"
            )
        return found[1], float(found[2])

    def check_fleet(self, **others: object) -> None:
        """Checks options that are only about several replicas, and `others` that are only about one
        server."""
        if self.replicas is None:
            for one in fields(HasFleet):
                if getattr(self, one.name) != one.default:
                    name = one.name.replace("_", "-")
                    raise InvalidInput(f"--{name} is for several servers: give --replicas")
            return
        for name, given in others.items():
            if given:
                raise InvalidInput(f"--{name.replace('_', '-')} is for one server: leave out --replicas")


def _slow(text: str, replicas: int) -> dict[int, float]:
    found = {}
    for part in text.split(",") if text else ():
        match = _SLOW.fullmatch(part)
        if match is None:
            raise InvalidInput(f"--slow must be like 1:2.0, or 1:2.0,3:1.5, not {text!r}")
        number = o.whole("--slow", int(match[1]), least=1, most=replicas)
        found[number] = o.number("--slow", float(match[2]), least=0.1, most=1000)
    return found


def simulate_fleet(options: HasFleet, one: Scenario, settings: dict[str, object], *, as_json: bool) -> None:
    from carpool.sim.fleet_simulation import measure_fleet

    fleet = options.fleet(one)
    with show.steps("simulating", one.seeds) as step:
        outcome = measure_fleet(fleet, step)
    if as_json:
        used = {field.name: getattr(options, field.name) for field in fields(HasFleet)}
        used["load"] = one.rate / fleet.capacity if fleet.capacity else None
        print(json.dumps({"mode": "fleet", **outcome.as_json(), "settings": settings | used}, indent=2))
        return
    _print(fleet, outcome)


def _print(fleet: FleetScenario, outcome: FleetOutcome) -> None:
    one = fleet.one
    again = f", {fleet.retries} retry" if fleet.retries == 1 else f", {fleet.retries} retries"
    load = f" ({one.rate / fleet.capacity:.3g}×)" if fleet.capacity else ""
    balancer = f"{fleet.balancer}{again if fleet.retries else ''}"
    show.paragraph(
        f"{show.count(fleet.replicas, 'replica')} behind a balancer ({balancer}): "
        f"capacity {one.capacity:,.0f}/s each, {outcome.capacity_rps:,.0f}/s in all."
    )
    show.paragraph(f"Arrivals: {one.traffic.name}, {one.rate:,.6g}/s{load}, {one.seconds:.4g} s.")
    rows = {
        "offered": f"{outcome.offered_rps:,.1f} /s",
        "within the SLO (goodput)": f"{outcome.goodput_rps:,.1f} /s",
        "… of offered (attainment)": show.percent(outcome.attainment),
        "p50 of answered": f"{outcome.p50_ms:,.1f} ms",
        "p99 of answered": f"{outcome.p99_ms:,.1f} ms",
        "mean batch": f"{outcome.mean_batch:.1f}",
        "attempts per request": f"{outcome.hops:.2f}",
        "devices busy": show.percent(outcome.busy_fraction),
    }
    if fleet.lose is not None:
        rows["lost with the failed replica"] = f"{outcome.failed:,.0f}"
    if fleet.autoscale is not None:
        rows["most replicas"] = f"{outcome.most_replicas}"
        rows["replica-hours"] = f"{outcome.replica_seconds / 3600:,.2f}"
    show.table(("", "fleet"), rows.items(), left=("",))
