"""Others on the machine while a model is measured: noticed, and taken off its times."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.engine.profile import hardware
from carpool.engine.profile.contention import CALM, contention
from carpool.engine.profile.hardware import CpuReading, CpuTaken, CpuWatch, taken_between
from carpool.engine.profile.measuring import Measuring
from engine.timed import SIGNATURE, Clock, Timed

shares = st.floats(0.0, 1.0)
takings = st.builds(CpuTaken, shares, shares, st.none() | shares)


@given(takings, st.lists(st.floats(0.0, 10.0), max_size=4), st.lists(st.floats(1e-6, 1e3), min_size=1))
def test_times_without_others_are_never_longer_than_the_shortest_run(
    taken: CpuTaken, spreads: list[float], times: list[float]
) -> None:
    found = contention(taken, spreads)
    assert 0.0 <= found.waited <= 0.75
    assert 0.0 < found.calm_seconds(times) <= min(times)
    assert bool(found.why) or found == CALM


@given(takings, takings)
def test_more_of_everything_is_never_calmer(one: CpuTaken, other: CpuTaken) -> None:
    if one.waited is None or other.waited is None:
        one, other = replace(one, waited=None), replace(other, waited=None)
        waited = None
    else:
        waited = max(one.waited, other.waited)
    more = CpuTaken(max(one.steal, other.steal), max(one.others, other.others), waited)
    if contention(one).why:
        assert contention(more).why
        assert contention(more).waited >= contention(one).waited


@pytest.mark.parametrize(
    ("taken", "spreads", "calm"),
    [
        (CpuTaken(), (), True),
        (CpuTaken(0.0, 0.05, 0.02), (0.1,), True),
        (CpuTaken(0.0, 0.9, 0.01), (0.1,), True),  # a model that sleeps beside busy loops
        (CpuTaken(0.0, 0.01, 0.4), (0.1,), True),  # our own threads in each other's way
        (CpuTaken(0.0, 0.5, 0.4), (0.1,), False),
        (CpuTaken(0.2, 0.0, 0.0), (0.1,), False),
        (CpuTaken(0.0, 0.5, None), (0.1,), False),
        (CpuTaken(), (0.1, 0.9, 1.2), False),  # nobody says who, but somebody was there
    ],
)
def test_who_disturbs(taken: CpuTaken, spreads: tuple[float, ...], calm: bool) -> None:
    assert (contention(taken, spreads).why == "") is calm


def test_a_thread_that_waited_half_of_its_time() -> None:
    before = CpuReading(100.0, 50.0, 1.0, 20.0, {1: (10.0, 3.0), 2: (0.0, 0.0)})
    after = CpuReading(120.0, 70.0, 1.0, 25.0, {1: (15.0, 8.0), 2: (0.0, 0.0)})
    assert taken_between(before, after, 10.0) == CpuTaken(0.0, 0.75, 0.5)


def test_two_threads_that_waited_half_of_theirs() -> None:
    """One of them began meanwhile."""
    before = CpuReading(100.0, 50.0, 1.0, 20.0, {1: (0.0, 0.0)})
    after = CpuReading(120.0, 70.0, 1.0, 30.0, {1: (5.0, 5.0), 2: (5.0, 5.0)})
    assert taken_between(before, after, 10.0) == CpuTaken(0.0, 0.5, 0.5)


@given(*[st.builds(CpuReading, *[st.floats(0.0, 1e6)] * 4)] * 2, st.floats(0.0, 1e3))
def test_whatever_the_counters_say_shares_are_shares(
    before: CpuReading, after: CpuReading, seconds: float
) -> None:
    taken = taken_between(before, after, seconds)
    assert all(0.0 <= share <= 1.0 for share in (taken.steal, taken.others, taken.waited or 0.0))


def machine(proc: Path, user: int, idle: int, steal: int, own: int, schedule: str) -> None:
    lines = [f"cpu{core} {user} 0 0 {idle} 0 0 0 {steal} 0 0" for core in range(4)]
    (proc / "stat").write_text("\n".join(["cpu  9 9 9 9 9 9 9 9 9 9", *lines, "intr 5"]))
    process = proc / str(os.getpid())
    (process / "task" / "7").mkdir(parents=True, exist_ok=True)
    fields = ["S", "1", *["0"] * 9, str(own), "0", "0", "0", *["0"] * 9]
    (process / "stat").write_text(f"7 (a) b) {' '.join(fields)}")
    (process / "task" / "7" / "schedstat").write_text(schedule)


def test_only_the_cores_that_we_may_use_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(hardware, "monotonic", lambda: clock[0])
    monkeypatch.setattr(hardware, "_TICK", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    machine(tmp_path, 100, 100, 0, 50, "1000000000 0 5")
    watched = CpuWatch(tmp_path)
    clock[0] = 1.0
    machine(tmp_path, 170, 120, 10, 90, "1400000000 300000000 9")  # 1 s on each core
    taken = watched.read()
    assert (taken.steal, taken.others, taken.waited) == pytest.approx((0.1, 0.5, 0.3))


@pytest.mark.parametrize("listed", [True, False])
def test_processes_below_ours_are_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    monkeypatch.setattr(hardware, "_TICK", 100)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1})
    ours = os.getpid()
    family = {ours: (1, "4101"), 4101: (ours, "4102 4103"), 4102: (4101, ""), 4103: (4101, ""), 9: (1, "")}

    def look(each: int) -> None:
        machine(tmp_path, 2 * 5 * each, 0, 0, 0, "0 0 0")
        for pid, (parent, children) in family.items():
            (tmp_path / f"{pid}/task/{pid}").mkdir(parents=True, exist_ok=True)
            fields = " ".join(["S", str(parent), *["0"] * 9, str(each), *["0"] * 12])
            (tmp_path / f"{pid}/stat").write_text(f"{pid} (a) {fields}")
            if listed:
                (tmp_path / f"{pid}/task/{pid}/children").write_text(children)

    look(0)
    watched = CpuWatch(tmp_path)
    look(100)
    assert watched.read().others == pytest.approx(0.6)  # four of ten shares are of ours


def test_a_machine_that_says_nothing_took_nothing(tmp_path: Path) -> None:
    assert CpuWatch(tmp_path / "nothing").read() == CpuTaken()
    (tmp_path / "stat").write_text("cpu  x y\n")
    assert CpuWatch(tmp_path).read() == CpuTaken()


class Told:
    def __init__(self, taken: CpuTaken) -> None:
        self._taken = taken

    def read(self) -> CpuTaken:
        return self._taken


def test_what_was_measured_among_others_is_provisional_and_without_the_waiting() -> None:
    clock = Clock()
    backend = Timed(clock, lambda images, _run: 2 * 0.010 * images)  # half of it is waiting
    busy = Measuring([backend], SIGNATURE, now=clock, watch=lambda: Told(CpuTaken(0.0, 0.6, 0.5)))
    measured = busy.points([1, 2])
    assert measured.provisional == "others took 60% of its cores meanwhile"
    assert [point.seconds for point in measured.points] == pytest.approx([0.010, 0.020])
    calm = Measuring([backend], SIGNATURE, now=clock, watch=lambda: Told(CpuTaken(0.0, 0.6, 0.01)))
    assert calm.points([1]).provisional == ""
