"""Cores for the server and for the generator of the GPU benchmark, and how busy they were."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from chip.cores import Cores, CoreUse, divide, first_siblings, placed, shares, written
from load.processes import MachineCpu, each_core, machine


def test_ten_of_sixteen_are_the_servers() -> None:
    cores = divide(range(16), "auto")
    assert cores.server == set(range(10))
    assert cores.generator == set(range(10, 16))
    assert cores.divided
    assert cores.said() == "server on cores 0-9, generator on cores 10-15"


@pytest.mark.parametrize(("count", "server"), [(1, 0), (2, 0), (7, 0), (8, 4), (10, 6), (12, 6), (64, 40)])
def test_few_cores_are_left_to_the_kernel(count: int, server: int) -> None:
    cores = divide(range(count), "auto")
    assert cores.divided == bool(server)
    assert len(cores.server) == (server or count)
    assert cores.everything == set(range(count))


def test_none_of_its_own_leaves_everything_to_both() -> None:
    cores = divide(range(16), "0")
    assert cores.server == cores.generator == set(range(16))
    assert "share 16 cores" in cores.said()


def test_threads_of_one_core_stay_on_one_side() -> None:
    siblings = {core: core % 4 for core in range(8)}  # 0 and 4 are one core, 1 and 5 another
    cores = divide(range(8), "4", siblings)
    assert cores.server == {0, 4, 1, 5}
    assert written(cores.server) == "0-1,4-5"


@pytest.mark.parametrize("asked", ["16", "-1", "many"])
def test_somebody_must_be_left_to_generate(asked: str) -> None:
    with pytest.raises(ValueError, match=r"16|many"):
        divide(range(16), asked)


def test_what_is_started_runs_where_it_was_placed_and_we_are_back() -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    ask = [sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"]
    with suppress(RuntimeError), placed({one}):
        assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() == f"[{one}]"
        raise RuntimeError("a server did not come up")
    assert os.sched_getaffinity(0) == before


def test_siblings_are_those_of_this_machine_or_unknown() -> None:
    mine = os.sched_getaffinity(0)
    assert set(first_siblings(mine)) <= mine
    assert first_siblings([123_456]) == {}


def test_shares_are_of_all_cores_and_of_each_side() -> None:
    before = {core: MachineCpu(busy=10.0, steal=1.0) for core in range(4)}
    after = {
        0: MachineCpu(14.0, 1.0),
        1: MachineCpu(14.0, 1.0),
        2: MachineCpu(10.0, 2.0),
        3: MachineCpu(11.0, 1.0),
    }
    divided = Cores(frozenset({0, 1}), frozenset({2, 3}))
    found = shares(before, after, 4.0, divided)
    assert found == {
        "busy": 0.562,
        "steal": 0.062,
        "server_busy": 1.0,
        "server_steal": 0.0,
        "generator_busy": 0.125,
        "generator_steal": 0.125,
    }
    everything = frozenset(range(4))
    assert set(shares(before, after, 4.0, Cores(everything, everything))) == {"busy", "steal"}
    assert shares({}, {}, 4.0, divided) == {}


def test_the_kernel_is_read_core_by_core() -> None:
    cores = each_core()
    assert len(cores) >= len(os.sched_getaffinity(0))
    assert sum(core.busy for core in cores.values()) == pytest.approx(machine().busy, rel=0.05, abs=1.0)
    assert set(CoreUse(divide(cores, "0")).read()) == {"busy", "steal"}
