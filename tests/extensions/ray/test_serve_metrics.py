"""A server's counts, told to the metrics of Serve."""

from __future__ import annotations

from typing import Any

from carpool.extensions.ray.serve_metrics import ServeMetrics
from carpool.extensions.ray.server_child import LoadReports


class Metric:
    """As Ray's classes are: it keeps what it is told."""

    made: dict[str, Metric] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.tag_keys, self.values = tag_keys, dict[tuple[str, ...], float]()
        self.made[name] = self

    def inc(self, value: float, tags: dict[str, str]) -> None:
        self.set(self.values.get(self._key(tags), 0.0) + value, tags)

    def set(self, value: float, tags: dict[str, str]) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert set(tags) == set(self.tag_keys)
        return tuple(tags[name] for name in self.tag_keys)


def page(**counts: float) -> str:
    labels = 'model="a",version="1"'
    return (
        f"nv_inference_request_success{{{labels}}} {counts.get('good', 0)}\n"
        f'nv_inference_request_failure{{{labels},reason="REJECTED"}} {counts.get("rejected", 0)}\n'
        f"nv_inference_request_duration_us{{{labels}}} {counts.get('us', 0)}\n"
        f"carpool_offered_images_total{{{labels}}} {counts.get('offered', 0)}\n"
        f"carpool_load{{{labels}}} {counts.get('load', 0)}\n"
    )


def shown(*pages: str) -> dict[str, Any]:
    metrics, reports = ServeMetrics(Metric, Metric), LoadReports("127.0.0.1", 1)
    for each in pages:
        reports.read(each)
        metrics.show(reports.samples)
    return {name: metric.values for name, metric in Metric.made.items() if metric.values}


def test_counters_are_told_the_difference_and_gauges_the_value() -> None:
    found = shown(page(), page(good=3, rejected=1, us=2e6, offered=4, load=0.5), page(good=5, offered=6))
    assert found == {
        "carpool_requests": {("a", "1", "success"): 5.0, ("a", "1", "rejected"): 1.0},
        "carpool_request_seconds": {("a", "1"): 2.0},
        "carpool_offered_images": {("a", "1"): 6.0},
        "carpool_load": {("a", "1"): 0.0},
    }


def test_the_same_page_twice_counts_once() -> None:
    assert shown(page(good=3), page(good=3))["carpool_requests"] == {("a", "1", "success"): 3.0}
