"""Which requests a front end compares, whatever their rate, and what it keeps of those that differ."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.extensions.rollout import mirror as mirrors
from carpool.extensions.rollout.mirror import Mirror
from carpool.extensions.rollout.routing import Split, Usual
from carpool.extensions.rollout.split import RolloutSplit
from carpool.link.catalog import Batching, ModelEntry
from carpool.types import Signature
from carpool.vision.likeness import Difference


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def own_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(mirrors, "monotonic", clock)
    return clock


@pytest.fixture(name="mirror")
def made_mirror() -> Mirror:
    row: Any = SimpleNamespace(add=lambda *_: None)
    server: Any = SimpleNamespace(row=lambda _entry: row)
    made = Mirror(server)
    made._flushing = SimpleNamespace(cancel=lambda: None)  # type: ignore[assignment]
    return made


def split(**more: Any) -> Split:
    entries = [
        ModelEntry(key, "m", str(key), Signature("m", (), ()), Batching("promise", 1.0)) for key in (1, 2)
    ]
    return Split(RolloutSplit("1", "2", 0.5, **more), *entries)


@pytest.mark.parametrize("rate", [1, 5, 9, 11, 20, 117, 235, 1000, 5000])
@pytest.mark.parametrize("even", [True, False])
def test_there_are_comparisons_at_every_rate(mirror: Mirror, clock: Clock, rate: int, even: bool) -> None:
    """Ten a second, or all of them where fewer come."""
    one, random, wanted, end = split(compared=True), Random(1), 0, clock.now + 30.0
    came = 0
    while clock.now < end:
        clock.now += 1.0 / rate if even else random.expovariate(rate)
        came += 1
        wanted += mirror.wants(one, one.candidate, "", clock.now)
    most = min(came, 10 * 30 + 10)
    assert 0.75 * most <= wanted <= most + 1


def test_slow_answers_are_counted_against_what_stable_usually_takes(mirror: Mirror, clock: Clock) -> None:
    one = split(slower=2.0)

    def answers(entry: ModelEntry, count: int, took: float) -> None:
        for _ in range(count):
            mirror.count_answer(one, entry, took, "")

    answers(one.candidate, 5, 9.0)  # nobody knows yet what stable takes
    answers(one.stable, 99, 0.1)
    answers(one.stable, 9, 5.0)  # which happens
    answers(one.candidate, 30, 0.15)
    answers(one.candidate, 20, 0.25)
    (report,) = mirror._reports.values()
    assert (report["candidate"]["timed"], report["candidate"]["slow"]) == (50, 20)
    assert report["candidate"]["answers"] == 55


def test_the_middle_of_the_last_times() -> None:
    usual = Usual()
    for number in range(49):
        usual.learn(number)
    assert usual.median is None
    for number in range(2000):
        usual.learn(number % 7)
    assert usual.median == 3


def test_all_that_differ_are_kept_and_pictures_as_far_as_there_is_room(mirror: Mirror, clock: Clock) -> None:
    one, difference = split(compared=True, keeps=True), Difference(True, 1.0, "other", {})
    for _ in range(53):
        mirror.compared(one, "", difference, None, None, b"x" * 1000)
    (report,) = mirror._reports.values()
    assert [bool(line["picture"]) for line in report["differences"]] == [True] * 53
    for _ in range(20):
        mirror.compared(one, "", difference, None, None, bytes(3 << 20))
    kept = [bool(line["picture"]) for line in report["differences"][53:]]
    assert (len(kept), sum(kept)) == (20, 10)
    clock.now += 1.0
    mirror.compared(one, "", difference, None, None, bytes(3 << 20))
    assert report["differences"][-1]["picture"]
