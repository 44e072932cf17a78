"""Cores of a process: those that it may run on, and its control groups' limits, of both versions, nested."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from carpool.config.usable_cores import usable_cores

V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw\n"
V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def v2(path: str, shown: str = "/", **limits: str) -> dict[str, str]:
    files = {"proc/self/cgroup": f"0::{path}\n", "proc/self/mountinfo": V2_MOUNT.format(root=shown)}
    return files | {f"sys/fs/cgroup{place}/cpu.max": limit for place, limit in limits.items()}


def v1(path: str, shown: str = "/", **limits: str) -> dict[str, str]:
    cgroup = f"12:memory:/elsewhere\n4:cpu,cpuacct:{path}\n0::/\n"
    files = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": V1_MOUNT.format(root=shown)}
    for place, limit in limits.items():
        quota, period = limit.split()
        folder = f"sys/fs/cgroup/cpu,cpuacct{place}"
        files |= {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": period}
    return files


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        (v2("/", **{"": "max 100000\n"}), 8),
        (v2("/", **{"": "200000 100000\n"}), 2),
        (v2("/", **{"": "250000 100000\n"}), 2),
        (v2("/", **{"": "50000 100000\n"}), 1),
        (v2("/", **{"": "1600000 100000\n"}), 8),
        (v2("/pod/carpool", **{"/pod": "300000 100000\n", "/pod/carpool": "max 100000\n"}), 3),
        (v2("/pod/carpool", **{"/pod": "300000 100000\n", "/pod/carpool": "100000 100000\n"}), 1),
        (v2("/pod/carpool", **{"": "400000 100000\n"}), 4),
        (v2("/kubepods/pod/c", "/kubepods/pod", **{"/c": "200000 100000\n"}), 2),
        (v2("/outside", "/kubepods/pod", **{"": "200000 100000\n"}), 2),
        (v2("/../..", **{"": "200000 100000\n"}), 2),
        (v2("/", **{"": "nonsense\n"}), 8),
        (v2("/", **{"": "100000 0\n"}), 8),
        (v1("/", **{"": "-1 100000"}), 8),
        (v1("/", **{"": "300000 100000"}), 3),
        (v1("/docker/a", "/docker/a", **{"": "200000 100000"}), 2),
        (v1("/pod/a", **{"/pod": "200000 100000", "/pod/a": "-1 100000"}), 2),
        ({"proc/self/cgroup": "::\n\n7\n", "proc/self/mountinfo": "- \n\nx - cgroup2\n"}, 8),
    ],
)
def test_cores(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    assert usable_cores(machine(tmp_path, files)) == cores


def test_the_affinity_is_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3})
    assert usable_cores(machine(tmp_path, v2("/", **{"": "400000 100000\n"}))) == 1


def test_this_machine() -> None:
    assert usable_cores() >= 1
