"""Serve's question, answered from what replicas report at times of their own."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.extensions.ray.scaling_policy import CAPACITY, LOOK_BACK_S, OFFERED, FleetPolicy


class Fleet:
    """Replicas that count what comes, report each second and are looked at ten times a second."""

    def __init__(self, policy: FleetPolicy, rate: Callable[[float], float], capacity: float = 40.0) -> None:
        self.policy, self._rate, self._capacity = policy, rate, capacity
        self.replicas = self.most = self.target = 2
        self.now = 1_000.0
        self._counts: dict[int, float] = {}
        self._series: dict[int, list[Any]] = {}

    def run(self, seconds: float) -> int:
        steps = round(10 * seconds)
        for _ in range(steps):
            self.now += 0.1
            for replica in range(self.replicas):
                more = 0.1 * self._rate(self.now) / self.replicas
                self._counts[replica] = self._counts.get(replica, 0.0) + more
                phase = (0.37 * replica) % 1.0  # each at a time of its own
                if int(self.now - phase) != int(self.now - 0.1 - phase):
                    self._report(replica)
            self.target, _ = self.policy(self.context())
            self.most = max(self.most, self.target)
        return self.target

    def _report(self, replica: int) -> None:
        point = SimpleNamespace(timestamp=self.now, value=self._counts[replica])
        series = self._series.get(replica, [])
        kept = [one for one in series if one.timestamp > self.now - LOOK_BACK_S]
        self._series[replica] = [*kept, point]

    def context(self) -> Any:
        capacity = [SimpleNamespace(timestamp=self.now, value=self._capacity)]
        metrics = {OFFERED + "m/1": self._series, CAPACITY + "m/1": dict.fromkeys(self._series, capacity)}
        return SimpleNamespace(
            current_time=self.now,
            target_num_replicas=self.target,
            raw_metrics=metrics if self._series else None,
        )


def policy(**given: Any) -> FleetPolicy:
    usual: dict[str, Any] = {"least": 2, "most": 8, "target": 0.75, "cold_start": 10.0, "patience": 20.0}
    return FleetPolicy(**usual | given)


def test_a_steady_load_is_carried_and_nothing_more() -> None:
    """Two reports within one second look like twice the rate to who adds them up as they come."""
    fleet = Fleet(policy(), lambda _now: 45.0)  # 45 / (0.75 × 40) = 1.5
    assert fleet.run(120.0) == 2
    assert fleet.most == 2


def test_a_step_is_followed_in_seconds_and_taken_back_with_patience() -> None:
    fleet = Fleet(policy(), lambda now: 50.0 if now < 1_060.0 or now > 1_120.0 else 110.0)
    assert fleet.run(60.0) == 2
    assert fleet.run(6.0) >= 4, "110 / 30 = 3.7"
    fleet.replicas = 4
    assert fleet.run(40.0) >= 4
    assert fleet.most <= 5, "a step looks like growth for a moment"
    fleet.run(14.0)  # to the end of the step
    assert fleet.run(15.0) >= 4, "patience"
    assert fleet.run(60.0) == 2


def test_nothing_is_asked_for_any_more() -> None:
    fleet = Fleet(policy(), lambda now: 110.0 if now < 1_060.0 else 0.0)
    assert fleet.run(60.0) >= 4
    assert fleet.run(90.0) == 2


def test_loads_of_models_are_added_up() -> None:
    """Two models that each would take one and a half replicas share three."""
    asked = policy(least=1)
    for tenth in range(600):
        now = 1_000.0 + 0.1 * tenth
        points = [
            SimpleNamespace(timestamp=now - 3.0 + n, value=max(0.0, now - 1_003.0 + n)) for n in range(4)
        ]

        def counts(rate: float, points: list[Any] = points) -> dict[str, list[Any]]:
            return {"r": [SimpleNamespace(timestamp=p.timestamp, value=rate * p.value) for p in points]}

        metrics = {
            OFFERED + "fast/1": counts(1125.0),
            CAPACITY + "fast/1": {"r": [SimpleNamespace(timestamp=now, value=1000.0)]},
            OFFERED + "slow/1": counts(11.25),
            CAPACITY + "slow/1": {"r": [SimpleNamespace(timestamp=now, value=10.0)]},
            OFFERED + "unpromised/1": counts(1e6),
            CAPACITY + "unpromised/1": {"r": [SimpleNamespace(timestamp=now, value=0.0)]},
        }
        wanted, _ = asked(SimpleNamespace(current_time=now, target_num_replicas=1, raw_metrics=metrics))
    assert wanted == 3


def test_a_controller_that_began_again_takes_nothing_away_at_once() -> None:
    fleet = Fleet(policy(), lambda _now: 110.0)
    fleet.target = fleet.replicas = 6
    fleet._counts = dict.fromkeys(range(6), 1e6)  # from long before
    assert fleet.run(15.0) == 6
    assert fleet.run(40.0) in (4, 5)
    assert fleet.most == 6


@pytest.mark.parametrize("metrics", [None, {}, {OFFERED + "m/1": {}}, {OFFERED + "m/1": {"r": []}}])
def test_without_reports_it_stays_as_it_is(metrics: Any) -> None:
    asked = policy()
    for second in range(100):
        context = SimpleNamespace(current_time=float(second), target_num_replicas=3, raw_metrics=metrics)
        wanted, _ = asked(context)
        assert wanted == 3


def test_a_replica_that_was_silent_for_a_minute_is_no_step() -> None:
    fleet = Fleet(policy(), lambda _now: 45.0)
    fleet.run(60.0)
    silent = dict(fleet._series)
    for _ in range(60):
        fleet.run(1.0)
        fleet._series[0] = silent[0]
    assert fleet.run(30.0) == 2
    assert fleet.most <= 4


def test_a_clock_that_is_set_back_changes_nothing() -> None:
    fleet = Fleet(policy(), lambda _now: 110.0)
    assert fleet.run(60.0) >= 4
    fleet.now -= 3600.0
    assert fleet.run(10.0) >= 4
