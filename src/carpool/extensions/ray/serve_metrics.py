"""A server's own counts, in the metrics of Ray Serve: its requests do not pass through Serve, which would
count them. Ray's classes are arguments, so that this needs no Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_OF_MODEL = ("model", "version")


class Sample(NamedTuple):
    """This is one line of the metrics page."""

    metric: str
    labels: dict[str, str]
    value: float


COUNTED = {
    "nv_inference_request_success": "carpool_requests",
    "nv_inference_request_failure": "carpool_requests",
    "nv_inference_request_duration_us": "carpool_request_seconds",
    "carpool_offered_images_total": "carpool_offered_images",
}
GAUGED = {
    "carpool_load": "carpool_load",
    "carpool_capacity_images_per_second": "carpool_capacity_images_per_second",
}
_WORDS = {
    "carpool_requests": "Requests that the server ended, by result",
    "carpool_request_seconds": "Time of all requests that were answered well, in seconds",
    "carpool_offered_images": "Images asked for, answered or not",
    "carpool_load": "Images asked for over what the model can answer",
    "carpool_capacity_images_per_second": "What the model can answer within its SLO",
}


class ServeMetrics:
    """Serve adds the application, the deployment and the replica to each by itself."""

    def __init__(self, counter: Callable[..., Any], gauge: Callable[..., Any]) -> None:
        self._counters = {name: _made(counter, name) for name in set(COUNTED.values())}
        self._gauges = {name: _made(gauge, name) for name in GAUGED.values()}
        self._counted: dict[tuple[str, ...], float] = {}

    def show(self, samples: Iterable[Sample]) -> None:
        """Exports a whole page of samples; each counter is increased by what was added since the last one."""
        for metric, labels, value in samples:
            tags = {name: labels.get(name, "") for name in _OF_MODEL}
            if metric in GAUGED:
                self._gauges[GAUGED[metric]].set(value, tags=tags)
            elif metric in COUNTED:
                key = (metric, *tags.values(), reason := labels.get("reason", "success").lower())
                more = (value - self._counted.get(key, 0.0)) / (1e6 if metric.endswith("_us") else 1.0)
                self._counted[key] = value
                name = COUNTED[metric]
                tags |= {"result": reason} if name == "carpool_requests" else {}
                if more > 0.0:
                    self._counters[name].inc(more, tags=tags)


def _made(kind: Callable[..., Any], name: str) -> Any:
    tags = (*_OF_MODEL, "result") if name == "carpool_requests" else _OF_MODEL
    return kind(name, description=_WORDS[name], tag_keys=tags)
