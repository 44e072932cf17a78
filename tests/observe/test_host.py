"""Processor and memory figures from a /proc that the test writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.observe.host_reading import Host

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"


class Machine:
    def __init__(self, proc: Path) -> None:
        self.proc = proc
        (proc / "meminfo").write_text(MEMINFO)
        self.ticks(0, 0, 0)

    def ticks(self, user: int, idle: int, iowait: int) -> None:
        line = f"cpu  {user} 0 0 {idle} {iowait} 0 0 0 {user} 0\ncpu0 1 1 1 1\n"
        (self.proc / "stat").write_text(line)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_memory(machine: Machine) -> None:
    reading = Host(machine.proc).read()
    assert (reading.memory_total_bytes, reading.memory_used_bytes) == (1000 * 1024, 600 * 1024)


def test_utilization_is_since_the_last_reading(machine: Machine) -> None:
    host = Host(machine.proc)
    machine.ticks(user=30, idle=60, iowait=10)
    assert host.read().cpu_utilization == pytest.approx(0.3)
    machine.ticks(user=120, idle=70, iowait=10)
    assert host.read().cpu_utilization == pytest.approx(0.9)
    assert host.read().cpu_utilization == pytest.approx(0.9)  # no tick has passed


def test_it_stays_within_its_bounds_when_idle_time_runs_backwards(machine: Machine) -> None:
    machine.ticks(user=0, idle=100, iowait=100)
    host = Host(machine.proc)
    machine.ticks(user=50, idle=110, iowait=50)
    assert 0.0 <= host.read().cpu_utilization <= 1.0
    machine.ticks(user=100, idle=110, iowait=50)
    assert host.read().cpu_utilization == 1.0


def test_the_real_one() -> None:
    reading = Host().read()
    assert 0.0 <= reading.cpu_utilization <= 1.0
    assert 0 < reading.memory_used_bytes < reading.memory_total_bytes
