"""What a benchmark takes for other people's work: not its own servers, generators, or their traffic."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load import disturbance, processes
from load.disturbance import Disturbance, is_quiet, others_took
from load.processes import MachineCpu

seconds = st.floats(0.0, 1e4)


def spent(worked: float, interrupts: float, steal: float = 0.0) -> tuple[MachineCpu, MachineCpu]:
    """The machine before and after this was spent."""
    before = MachineCpu(1000.0, 10.0, 30.0)
    after = MachineCpu(before.busy + worked + interrupts, 10.0 + steal, 30.0 + interrupts)
    return before, after


def test_interrupts_of_our_own_traffic_are_ours() -> None:
    assert others_took(*spent(worked=10.0, interrupts=2.0), ours=10.0) == 0.0


def test_interrupts_that_a_process_was_charged_for_are_not_counted_twice() -> None:
    assert others_took(*spent(worked=10.0, interrupts=2.0), ours=12.0) == 0.0


def test_others_are_seen_with_their_part_of_the_interrupts() -> None:
    assert others_took(*spent(worked=10.0, interrupts=2.0), ours=5.0) == pytest.approx(6.0)


def test_what_the_host_took_is_others() -> None:
    assert others_took(*spent(worked=10.0, interrupts=0.0, steal=3.0), ours=10.0) == pytest.approx(3.0)


@given(seconds, seconds, seconds, seconds)
def test_others_took_no_more_than_there_was(
    worked: float, interrupts: float, steal: float, ours: float
) -> None:
    before, after = spent(worked, interrupts, steal)
    taken = others_took(before, after, ours)
    assert 0.0 <= taken <= (after.busy - before.busy + after.steal - before.steal) * (1 + 1e-6) + 1e-6


def fake_process(proc: Path, pid: int, parent: int, own: int, reaped: int) -> None:
    """Ticks of its own, and of ended children."""
    (proc / str(pid)).mkdir(exist_ok=True)
    fields = ["S", str(parent), *["0"] * 9, str(own), "0", str(reaped), "0", *["0"] * 30]
    (proc / str(pid) / "stat").write_text(f"{pid} (a b) c) {' '.join(fields)}")


def machine_file(proc: Path, user: int, system: int, softirq: int) -> None:
    (proc / "stat").write_text(f"cpu  {user} 0 {system} 0 0 0 {softirq} 0 0 0\n")


def test_generators_that_have_ended_and_who_started_them_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server, and a fork server with a generator that lives for less than the load, all below this one."""
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    monkeypatch.setattr(processes, "_TICK", 100)
    clock = [0.0]
    monkeypatch.setattr(disturbance.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(disturbance.os, "cpu_count", lambda: 2)
    me, server, forks = os.getpid(), 900001, 900002
    fake_process(tmp_path, me, 1, 100, 0)
    fake_process(tmp_path, server, me, 500, 0)
    fake_process(tmp_path, forks, me, 50, 40)
    machine_file(tmp_path, 5000, 2000, 100)
    watched = Disturbance(lambda: processes.tree_cpu(server))
    clock[0] = 10.0
    fake_process(tmp_path, me, 1, 110, 0)  # + 0.1 s
    fake_process(tmp_path, server, me, 700, 0)  # + 2 s
    fake_process(tmp_path, forks, me, 60, 240)  # + 0.1 s, and a generator of 2 s that has ended
    machine_file(tmp_path, 5320, 2100, 150)  # 4.2 s, and 0.5 s for the traffic
    served, load, others = watched.read()
    assert (served, load, others) == pytest.approx((0.1, 0.11, 0.0))
    assert is_quiet(others)
    machine_file(tmp_path, 5620, 2100, 150)  # and 3 s that are nobody's here
    assert not is_quiet(watched.read()[2])


def test_to_look_through_all_processes_is_nobodys_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look takes a second of a core, on a machine with nothing else to do."""
    spent = [0.0]

    def look(*_: object) -> float:
        spent[0] += 1.0
        return spent[0]

    monkeypatch.setattr(Disturbance, "_all_ours", look)
    monkeypatch.setattr(processes, "machine", lambda: MachineCpu(spent[0], 0.0))
    assert Disturbance(dict).read()[2] == 0.0


def test_a_child_that_has_ended_stays_on_the_account() -> None:
    before = processes.tree_total(os.getpid())
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert processes.tree_total(os.getpid()) - before >= 0.25
