"""Prometheus is lost for ten minutes in a surge: the fleet, as KEDA and the HPA would have it by the rendered
manifest, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from math import ceil
from typing import Any

import pytest
import yaml

from carpool.extensions.deploy.kubernetes_overlay import Deployment, overlay
from extensions.deploy.manifests import DEPLOY, documents

SYNC_S = 15  # the HPA looks so often
TOLERANCE = 0.1  # and leaves a fleet alone that is so near
LOST = range(300, 900)
Answer = float | None  # what the query says: None is no series
QUIET, SURGE = 2.0, 7.0


class Lost(Exception):
    """Nobody answers."""


def scaled_object() -> dict[str, Any]:
    """The component, with what the overlay says of it: patches replace lists."""
    component = DEPLOY / "kubernetes" / "components" / "keda" / "scaledobject.yaml"
    spec: dict[str, Any] = documents(component.read_text())[0]["spec"]
    wanted = Deployment(rate=1000.0, slo_ms=50.0, capacity=840.0, planned=2, surge=5.0)
    spec.update(yaml.safe_load(overlay(wanted)["autoscaler.yaml"])["spec"])
    return spec


class Fleet:
    """As KEDA 2.17 answers the HPA, and the HPA of autoscaling/v2 decides."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.replicas = int(spec["minReplicaCount"])
        self._failures = 0
        self._recommended: list[tuple[int, int]] = []
        self._changes: list[tuple[int, int]] = []  # when, and from how many

    def poll(self, ask: Callable[[], Answer]) -> float | None:
        """What KEDA says is wanted; None: the HPA hears of an error."""
        try:
            found = ask()
            if found is None and self.spec["triggers"][0]["metadata"].get("ignoreNullValues") == "false":
                raise Lost
            self._failures = 0
            return found or 0.0
        except Lost:
            self._failures += 1
        fallback = self.spec["fallback"]
        if self._failures < fallback["failureThreshold"]:
            return None
        kept = self.replicas if fallback.get("behavior") == "currentReplicasIfHigher" else 0
        return float(max(kept, fallback["replicas"]))

    def sync(self, now: int, wanted: float | None) -> None:
        if wanted is None:
            return
        behavior = self.spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
        ratio = wanted / self.replicas
        count = self.replicas if abs(ratio - 1) <= TOLERANCE else ceil(wanted)
        count = min(max(count, self.spec["minReplicaCount"]), self.spec["maxReplicaCount"])
        self._recommended.append((now, count))
        window = behavior["scaleDown"]["stabilizationWindowSeconds"]
        count = max(count, *(each for at, each in self._recommended if at > now - window))
        (up,), (down,) = behavior["scaleUp"]["policies"], behavior["scaleDown"]["policies"]
        most = self._before(now, up["periodSeconds"]) * (100 + up["value"]) / 100
        least = self._before(now, down["periodSeconds"]) * (100 - down["value"]) / 100
        count = min(max(count, ceil(least)), ceil(most))
        if count != self.replicas:
            self._changes.append((now, self.replicas))
            self.replicas = count

    def _before(self, now: int, period: int) -> int:
        return next((before for at, before in self._changes if at > now - period), self.replicas)


def replicas_over_time(spec: dict[str, Any], lost: Callable[[], Answer]) -> list[int]:
    """A surge from 120 s on, in which Prometheus is lost; every second of half an hour."""
    fleet, wanted, seen = Fleet(spec), None, []
    for now in range(1800):
        if now % spec["pollingInterval"] == 0:
            rate = SURGE if now >= 120 else QUIET
            wanted = fleet.poll(lost if now in LOST else lambda rate=rate: rate)  # type: ignore[misc]
        if now % SYNC_S == 0:
            fleet.sync(now, wanted)
        seen.append(fleet.replicas)
    return seen


def gone() -> Answer:
    raise Lost


def empty() -> Answer:
    return None


@pytest.mark.parametrize("lost", [gone, empty], ids=["Prometheus is gone", "it has no series"])
def test_replicas_never_fall_while_prometheus_is_lost(lost: Callable[[], Answer]) -> None:
    seen = replicas_over_time(scaled_object(), lost)
    assert seen[LOST.start] == ceil(SURGE)
    falls = [now for now in range(1, len(seen)) if seen[now] < seen[now - 1]]
    assert falls == []


def test_a_fixed_number_and_an_empty_answer_would_take_replicas_away() -> None:
    fixed = deepcopy(scaled_object())
    del fixed["fallback"]["behavior"]
    assert min(replicas_over_time(fixed, gone)[LOST.start :]) < ceil(SURGE)
    believed = deepcopy(scaled_object())
    del believed["triggers"][0]["metadata"]["ignoreNullValues"]
    assert min(replicas_over_time(believed, empty)[LOST.start :]) < ceil(SURGE)
