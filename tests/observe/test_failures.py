"""Each way to fail is counted once under Triton's words, and sheds under ours as well."""

from __future__ import annotations

import asyncio

import pytest

from carpool import errors
from carpool.core.job import Reason
from carpool.observe.columns import FAILURE_SECONDS, FAILURES, SHED
from carpool.observe.counters import Table, count_failure, table_bytes

SHEDDING = [
    (errors.Refused, Reason.CANNOT_FINISH),
    (errors.Refused, Reason.OVERLOAD),
    (errors.Refused, Reason.OVER_SHARE),
    (errors.Refused, Reason.GIVEN_UP),
    (errors.DeadlineExceeded, Reason.DEADLINE),
    (errors.Unavailable, Reason.QUEUE_FULL),
    (errors.Unavailable, Reason.TIMEOUT),
    (errors.Unavailable, Reason.RESTARTING),
]


def counted(error: BaseException) -> tuple[set[str], set[str]]:
    """The failure and the shed words that one error counts under."""
    table = Table(bytearray(table_bytes(1)))
    slot = table.directory.assign("m", "1")
    count_failure(table.block(0).row(slot), error, 0.5)
    cells = table.cells(slot)
    assert cells[FAILURE_SECONDS] == 0.5
    failures = {word for word, column in FAILURES.items() if cells[column]}
    return failures, {word for word, column in SHED.items() if cells[column]}


@pytest.mark.parametrize(("kind", "reason"), SHEDDING)
def test_what_the_scheduler_refuses(kind: type[errors.CarpoolError], reason: Reason) -> None:
    assert counted(kind("no", reason=reason.value)) == ({"REJECTED"}, {reason.value})


@pytest.mark.parametrize(
    ("error", "failure", "shed"),
    [
        (errors.Replaced("a newer frame came"), "CANCELED", {"replaced"}),
        (asyncio.CancelledError(), "CANCELED", set()),
        (errors.ModelError("it raised"), "BACKEND", set()),
        (errors.DeadlineExceeded("it hung", reason="execution-timeout"), "BACKEND", set()),
        (errors.Refused("no", reason="a-new-word"), "REJECTED", set()),
        (errors.Unavailable("loading"), "OTHER", set()),
        (errors.TooLarge("a body of a gigabyte"), "OTHER", set()),
        (errors.InvalidInput("wrong shape"), "OTHER", set()),
        (RuntimeError("a bug"), "OTHER", set()),
    ],
)
def test_everything_else(error: BaseException, failure: str, shed: set[str]) -> None:
    assert counted(error) == ({failure}, shed)


def test_every_word_of_the_scheduler_has_a_column() -> None:
    assert set(SHED) == {reason.value for reason in Reason} | {"replaced"}
