"""Who is asked when a model is evaluated, and what happens where an SLO rejects a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from carpool.client.client import Client
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Unavailable
from carpool.lab.evaluate import subjects
from carpool.lab.evaluate.subjects import asked_server


class Busy(Client):
    """Says no a few times, then answers."""

    def __init__(self, *errors: CarpoolError) -> None:
        self.errors = list(errors)
        self.asked = 0

    def predict(self, *_: Any, **__: Any) -> Any:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return {"classes": []}


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(subjects, "sleep", slept.append)
    return slept


def ask(client: Client, options: Mapping[str, Any] | None = None) -> Any:
    with asked_server(client, "classify", "", "") as asked:
        return asked(Path("a.jpg"), options or {})


def test_what_the_slo_rejected_is_sent_again(naps: list[float]) -> None:
    given_up = Refused("no", reason="given-up", retry_after_s=0.25)
    late = DeadlineExceeded("the deadline of 50 ms passed in the queue")
    hopeless = Refused("no", reason="cannot-finish")  # names no time to come back
    client = Busy(given_up, late, hopeless, Unavailable("restarting"))
    assert ask(client) == {"classes": []}
    assert client.asked == 5
    assert naps == [0.25, 0.1, 0.1, 0.1]


def test_an_evaluation_beside_a_saturated_server_ends(naps: list[float]) -> None:
    given_up = Refused("no", reason="given-up", retry_after_s=1.0)
    client = Busy(*[given_up] * 700)
    with pytest.raises(subjects.Busy, match="less load"):
        ask(client)
    assert 600 <= sum(naps) <= 602


def test_what_is_wrong_is_not_sent_again() -> None:
    client = Busy(InvalidInput("no picture"))
    with pytest.raises(InvalidInput):
        ask(client)
    assert client.asked == 1


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 40))
    monkeypatch.setattr(subjects, "monotonic", lambda: next(clock))
    client = Busy(*[DeadlineExceeded("late")] * 50)
    with pytest.raises(DeadlineExceeded):
        ask(client)
    assert client.asked == 2
