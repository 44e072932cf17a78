"""Every single request of a run in a file, for questions that a histogram cannot answer."""

from __future__ import annotations

import csv
from pathlib import Path
from types import TracebackType
from typing import IO

import orjson

from carpool.errors import InvalidInput
from carpool.lab.load.ticket import Answer, Ticket, Timing

COLUMNS = (
    "number",
    "phase",
    "intended_s",
    "sent_s",
    "ended_s",
    "outcome",
    "reason",
    "source",
    "images",
    "queue_ms",
    "infer_ms",
    "batch",
)
SUFFIXES = (".jsonl", ".csv")


class Recorder:
    """JSON lines or CSV, by the name of the file. To be called with every request that ends."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in SUFFIXES:
            raise InvalidInput(f"--save must name a .jsonl or .csv file, not {path}", field="--save")
        try:
            self._file: IO[str] = path.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise InvalidInput(
                f"--save: cannot write {path}: {error.strerror or error}", field="--save"
            ) from None
        self._csv = csv.writer(self._file) if path.suffix == ".csv" else None
        if self._csv is not None:
            self._csv.writerow(COLUMNS)

    def __call__(self, ticket: Ticket, now: float, answer: Answer) -> None:
        timing = answer.timing
        row = (
            ticket.number,
            ticket.phase,
            round(ticket.intended, 6),
            None if ticket.sent is None else round(ticket.sent, 6),
            round(now, 6),
            answer.kind.value,
            answer.reason,
            ticket.source,
            ticket.images,
            *((None, None, None) if timing is None else _milliseconds(timing)),
        )
        if self._csv is not None:
            self._csv.writerow(row)
        else:
            self._file.write(orjson.dumps(dict(zip(COLUMNS, row, strict=True))).decode() + "\n")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _milliseconds(timing: Timing) -> tuple[float, float, int]:
    return round(timing.queue * 1e3, 3), round(timing.infer * 1e3, 3), timing.batch
