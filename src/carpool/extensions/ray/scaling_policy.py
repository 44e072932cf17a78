"""Answers Ray Serve's question of how many replicas there should be, by core/scaling.py.

Ray sends this file to its controller as it is, which calls `FleetPolicy` ten times a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from carpool.core.scaling import Arrivals, Autoscaler, ScalingRule

OFFERED, CAPACITY = "offered ", "capacity "
"""What a replica reports begins with one of these, and ends with a model and its version."""
REPORT_S, LOOK_BACK_S = 1.0, 6.0
_LAG_S = 2.5  # by then every replica's report is there
_LOOK_S = 0.5
_MOST_KNOWN = 10_000


class FleetPolicy:
    def __init__(self, least: int, most: int, target: float, cold_start: float, patience: float) -> None:
        self._rule = rule = ScalingRule(least, most, target, cold_start=cold_start, patience=patience)
        self._scaler = Autoscaler(rule)
        self._images, self._load = Arrivals(rule.windows[-1]), Arrivals(rule.windows[-1])
        self._counted: dict[tuple[str, Any], float] = {}  # by model and replica
        self._began: float | None = None
        self._looked = float("-inf")
        self._at_first = self._wanted = least

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """`context` is Serve's AutoscalingContext. The state is kept here, not in what Serve would keep."""
        now = float(context.current_time)
        if self._began is None:
            self._began = now
            self._at_first = self._wanted = int(context.target_num_replicas)
        if not 0.0 <= now - self._looked < _LOOK_S:  # also when a clock was set back
            self._looked = now
            self._look(context.raw_metrics or {}, now)
            # A controller that was restarted knows nothing of the past: what was wanted then is wanted for as
            # long as it would have been.
            if now < self._began + self._rule.patience:
                self._wanted = max(self._wanted, self._at_first)
        return self._wanted, {}

    def _look(self, reports: Mapping[str, Mapping[Any, Sequence[Any]]], now: float) -> None:
        at = now - _LAG_S
        images = load = 0.0
        known = False
        for key, counts in reports.items():
            capacity = _average(reports.get(CAPACITY + key.removeprefix(OFFERED), {}))
            if key.startswith(OFFERED) and capacity > 0.0:
                known = True
                more = self._more(key, counts, at)
                images += more
                load += more / capacity
        if not known:
            return  # no replica reports: the number of replicas stays as it is
        self._scaler.asked(images, at)
        self._images.add(images, at)
        self._load.add(load, at)
        self._wanted = self._scaler.wanted(self._capacity(at), at)

    def _more(self, key: str, counts: Mapping[Any, Sequence[Any]], at: float) -> float:
        """Returns the growth up to one time for all replicas, which report at times of their own: two reports
        of one within a second would look like a step. What one counted before its oldest report says nothing
        about now."""
        more = 0.0
        for replica, points in counts.items():
            if points:
                count = _value_at(points, at)
                before = max(self._counted.get((key, replica), 0.0), float(points[0].value))
                more += max(0.0, count - before)
                self._counted[key, replica] = count
        while len(self._counted) > _MOST_KNOWN:  # the oldest; one that was silent for a while is still known
            del self._counted[next(iter(self._counted))]
        return more

    def _capacity(self, at: float) -> float:
        """Returns that of one replica, in images per second of what is asked for lately: models share it."""
        window = self._rule.windows[-1]
        images, load = self._images.rate(window, at), self._load.rate(window, at)
        return images / load if load > 0.0 else 1.0  # of nothing


def _average(capacities: Mapping[Any, Sequence[Any]]) -> float:
    known = [float(points[-1].value) for points in capacities.values() if points and points[-1].value > 0.0]
    return sum(known) / len(known) if known else 0.0


def _value_at(points: Sequence[Any], at: float) -> float:
    """Returns the value of a count that grows, between its reports."""
    if at <= points[0].timestamp:
        return float(points[0].value)
    for before, after in pairwise(points):
        if at <= after.timestamp:
            part = (at - before.timestamp) / max(1e-9, after.timestamp - before.timestamp)
            return float(before.value + part * (after.value - before.value))
    return float(points[-1].value)
