"""This defines the options of `carpool simulate` about a day of a fleet, in rates instead of requests."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.fleet_options import FLEET, HasFleet
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.core.scaling import ScalingRule
    from carpool.lab.fleet_day import DayReport, Trouble
    from carpool.sim.simulation import Scenario

_TROUBLE = re.compile(r"(\w+):(\d{1,3}(?:\.\d{1,4})?)@([01]\d|2[0-3]):([0-5]\d)\+(\d{1,4})")
_MOST_TROUBLES = 8
_MOST = 1_000_000
_CALM = "a day without"


@dataclass(frozen=True, kw_only=True)
class HasDay(HasFleet):
    """This adds the options about a day of cameras to a verb."""

    day: list[str] | None = o.option(
        None,
        "Trouble on a day of cameras whose noon is --rate; once for each. surge:1.3@12:00+20: 1.3 × the "
        "traffic for 20 minutes; lose:0.33@…: replicas gone; rollout:0.1@…: a broken candidate's share.",
        FLEET,
        metavar="WHAT:SIZE@HH:MM+MINUTES",
    )

    def simulate_day(self, one: Scenario, *, as_json: bool) -> None:
        """Simulates each trouble alone, and all of them at once."""
        from carpool.lab.fleet_day import camera_day, fluid_day

        troubles = [_trouble(text) for text in self.day or ()]
        if len(troubles) > _MOST_TROUBLES:
            raise InvalidInput(f"--day: {_MOST_TROUBLES} at most, not {len(troubles)}")
        if not one.capacity:
            raise InvalidInput("--day needs a capacity: no batch ends within --slo-ms")
        rule, rates = self._rule(), camera_day(one.rate)
        cases: dict[str, list[Trouble]] = {_CALM: []}
        cases |= {text: [trouble] for text, trouble in zip(self.day or (), troubles, strict=True)}
        cases |= {"all of these": troubles} if len(troubles) > 1 else {}
        period = o.number("--hpa-period", self.hpa_period, least=1, most=3600)
        with show.steps("simulating", len(cases)) as step:
            found = {}
            for name, happens in cases.items():
                found[name] = fluid_day(rates, one.capacity, rule, period=period, troubles=happens)
                step()
        _print(found, as_json=as_json)

    def _rule(self) -> ScalingRule:
        from carpool.core.scaling import ScalingRule

        least = o.whole("--replicas", self.replicas or 0, least=1, most=_MOST)
        cold = o.number("--cold-start", self.cold_start, most=1e5)
        if not self.autoscale:
            return ScalingRule(least, least, cold_start=cold)
        by, target = self.read_autoscale()
        if by != "load":
            raise InvalidInput("--day scales by load: give --autoscale load:0.75")
        most = o.whole("--max-replicas", self.max_replicas, least=least, most=_MOST)
        return ScalingRule(least, most, target, cold_start=cold)


def _trouble(text: str) -> Trouble:
    from carpool.lab.fleet_day import TROUBLES, Trouble

    found = _TROUBLE.fullmatch(text)
    if found is None or found[1] not in TROUBLES:
        raise InvalidInput(
            f"--day must be like surge:1.3@12:00+20, with {', '.join(TROUBLES)}, not {text[:80]!r}"
        )
    most = 100.0 if found[1] == "surge" else 1.0
    size = o.number(f"--day {found[1]}", float(found[2]), above=0, most=most)
    return Trouble(found[1], size, 3600.0 * int(found[3]) + 60.0 * int(found[4]), 60.0 * int(found[5]))


def _print(found: dict[str, DayReport], *, as_json: bool) -> None:
    if as_json:
        days = {
            name: {
                "offered": day.offered,
                "lost": day.lost,
                "answered": day.answered,
                "short_s": day.short_s,
                "peak_replicas": day.peak_replicas,
                "replica_hours": day.replica_hours,
            }
            for name, day in found.items()
        }
        print(json.dumps({"mode": "day", "days": days}, indent=2))
        return
    rows = [
        (
            name,
            f"{day.lost:,.0f}",
            f"{100 * (1 - day.answered):.3f} %",
            f"{day.short_s:,.0f} s",
            f"{day.peak_replicas:,}",
        )
        for name, day in found.items()
    ]
    head = ("", "images lost", "of all", "too few for", "replicas")
    show.table(head, rows, left=("",))
