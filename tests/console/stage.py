"""A server with models that take pictures, counters that a test can move, and answers that it makes up."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from carpool.frontend.access.guard import Guard
from carpool.link.catalog import IndexEntry
from carpool.observe import columns
from carpool.observe.counters import Block, CounterRow
from carpool.observe.history import HistoryKeeper
from carpool.types import Datatype
from frontend.fake_door import echo
from frontend.http.front_end import FrontEnd, front_end
from frontend.picture_models import classifier, detector, embedder, segmenter

TASKS: Mapping[str, str | None] = {
    "detector": "detect",
    "classifier": "classify",
    "segmenter": "segment",
    "embedder": "embed",
    "tensors": None,
}
PROFILE: Mapping[str, Any] = {
    "mode": "promise",
    "max_batch": 16,
    "points": [{"size": size, "ms": 6.0 + 2 * size, "spread": 0.02, "runs": 9} for size in (1, 2, 4, 8, 16)],
    "measured_at": "2026-11-15T09:00:00+00:00",
    "instances": 1,
    "threads": 2,
    "fit": {
        "fixed_ms": 6.0,
        "per_image_ms": 2.0,
        "residuals": [],
        "knee": 8,
        "line_from": 1,
        "line_until": 16,
    },
    "curve": [[1, 8.0], [16, 38.0]],
    "believed": [[1, 8.0], [16, 38.0]],
    "speed": {"factor": 1.0, "told": 1.0, "relearned": False, "instances": [[1.0, 1.1]]},
    "promise": {"slo_ms": 50.0, "largest_batch": 16, "promised_batch": 9, "capacity_rps": 375.0},
    "knobs": None,
    "recent": {"seconds": 10, "batches": 0, "mean_batch": None, "mean_ms": None, "sizes": []},
    "choices": [],
}
"""What the engine says of a model: 6 ms and 2 ms for each image."""
KNOBS: Mapping[str, Any] = {
    "max_batch": 16,
    "preferred": [],
    "max_delay_ms": 0.0,
    "priority_levels": 0,
    "preserve_ordering": False,
    "max_queue_size": 0,
    "timeout_ms": 0.0,
}
EVIL = '<img src=x onerror="document.title=1">'


@dataclass
class Stage:
    front: FrontEnd
    block: Block
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)  # what differs from `PROFILE`

    def profile(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """As the engine would answer."""
        return {**PROFILE, **arguments, **self.profiles.get(arguments["name"], {})}

    def run(self, model: str, *sizes: tuple[int, int, float]) -> None:
        """As if it had lately run these: images, batches, ms of each."""
        batches = sum(times for _, times, _ in sizes)
        self.profiles.setdefault(model, {})["recent"] = {
            "seconds": 10,
            "batches": batches,
            "mean_batch": sum(images * times for images, times, _ in sizes) / batches,
            "mean_ms": sum(ms * times for _, times, ms in sizes) / batches,
            "sizes": [list(size) for size in sizes],
        }

    @property
    def url(self) -> str:
        return f"http://{self.front.url}"

    def count(self, model: str, answers: int = 1, seconds: float = 0.02, **sheds: int) -> None:
        """As if so many requests had been answered in this time, in batches of 4, and some refused."""
        row = self.block.row(CounterRow(*self.front.door.catalog.newest[model].row))

        def write() -> None:
            row.observe(columns.REQUEST_SECONDS, seconds, answers)
            for _ in range(answers // 4):
                row.add_batch(
                    4, [seconds / 4] * 4, input_s=0.0, infer_s=seconds / 2, output_s=0.0, ended_ms=1.0
                )
            for reason, times in sheds.items():
                row.add(columns.SHED[reason.replace("_", "-")], times)

        self.front.run(write)

    def gauge(self, model: str, pending: int, saturation: float) -> None:
        row = self.block.row(CounterRow(*self.front.door.catalog.newest[model].row))
        row.set(columns.PENDING, pending)
        row.set(columns.SATURATION, saturation)


def _with_others(front: FrontEnd) -> None:
    """Add two that do not serve."""
    index = [
        *front.door.catalog.index,
        IndexEntry("sleeper", "2", "LOADING"),
        IndexEntry(EVIL, "1", "UNAVAILABLE", f"the file is no model: {EVIL}"),
    ]
    front.run(lambda: front.door.renew(index=index))


@contextlib.contextmanager
def _remembered(front: FrontEnd) -> Iterator[None]:
    """As the supervisor does it, and four times as often."""
    keeper, over = HistoryKeeper(front.door.table), threading.Event()

    def keep() -> None:
        while not over.wait(0.25):
            keeper.look()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def stage(guard: Guard | None = None) -> Iterator[Stage]:
    models = [
        detector("detector", mode="promise", max_batch=16, cache={"exact": True, "similar": False}),
        classifier("classifier", mode="promise", max_batch=16),
        segmenter("segmenter", mode="promise", max_batch=16),
        embedder("embedder", mode="promise", max_batch=16),
        echo("tensors", Datatype.FP32, mode="eager", max_batch=16),
    ]
    with front_end(*models, guard=guard) as front:
        _with_others(front)
        running = Stage(front, front.door.table.block(0))
        running.profiles["tensors"] = {"mode": "eager", "promise": None, "knobs": dict(KNOBS), "points": []}
        front.door.answers["profile"] = running.profile
        with _remembered(front):
            yield running
