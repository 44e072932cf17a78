"""A server with models that take pictures, counters that a test can move, and answers that it makes up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from carpool.observe import columns
from carpool.observe.counters import Block
from carpool.observe.directory import Slot
from carpool.servers.door import IndexEntry
from carpool.types import Datatype
from servers.fake_door import echo
from servers.http.front_end import FrontEnd, front_end
from servers.picture_models import classifier, detector, embedder, segmenter

TASKS: Mapping[str, str | None] = {
    "detector": "detect",
    "classifier": "classify",
    "segmenter": "segment",
    "embedder": "embed",
    "tensors": None,
}
EVIL = '<img src=x onerror="document.title=1">'


@dataclass
class Stage:
    front: FrontEnd
    block: Block

    @property
    def url(self) -> str:
        return f"http://{self.front.url}"

    def count(self, model: str, answers: int = 1, seconds: float = 0.02, **sheds: int) -> None:
        """As if so many requests had been answered in this time, in batches of 4, and some refused."""
        row = self.block.row(Slot(*self.front.door.catalog.newest[model].row))

        def write() -> None:
            row.observe_repeated(columns.REQUEST_SECONDS, seconds, answers)
            for _ in range(answers // 4):
                row.add_batch(
                    4, [seconds / 4] * 4, input_s=0.0, infer_s=seconds / 2, output_s=0.0, ended_ms=1.0
                )
            for reason, times in sheds.items():
                row.add(columns.SHED[reason.replace("_", "-")], times)

        self.front.run(write)

    def gauge(self, model: str, pending: int, saturation: float) -> None:
        row = self.block.row(Slot(*self.front.door.catalog.newest[model].row))
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
def stage() -> Iterator[Stage]:
    models = [
        detector("detector", mode="promise", max_batch=16),
        classifier("classifier", mode="promise", max_batch=16),
        segmenter("segmenter", mode="promise", max_batch=16),
        embedder("embedder", mode="promise", max_batch=16),
        echo("tensors", Datatype.FP32, mode="eager", max_batch=16),
    ]
    with front_end(*models) as front:
        _with_others(front)
        yield Stage(front, front.door.table.block(0))
