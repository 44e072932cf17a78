"""Limits of memory that containers have: of control groups of both versions, nested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from carpool.config import control_groups
from carpool.config.control_groups import free_in_groups, memory_limit, within_limit
from carpool.config.server import ServerSettings

V2 = {
    "proc/self/cgroup": "0::/pod/carpool\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup rw\n",
}
V1 = {
    "proc/self/cgroup": "12:memory:/docker/a\n4:cpu:/elsewhere\n",
    "proc/self/mountinfo": "32 31 0:29 /docker/a /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}
GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_smallest_limit_of_all_groups_counts(tmp_path: Path) -> None:
    groups, old = "sys/fs/cgroup", "sys/fs/cgroup/memory"
    cases: list[tuple[dict[str, str], int | None, int | None]] = [
        ({}, None, None),
        (V2 | {f"{groups}/pod/carpool/memory.max": "max\n"}, None, None),
        (
            V2 | {f"{groups}/pod/memory.max": f"{GIB}\n", f"{groups}/pod/memory.current": "1024\n"},
            GIB,
            GIB - 1024,
        ),
        (
            V2
            | {f"{groups}/pod/memory.max": f"{GIB}\n", f"{groups}/pod/carpool/memory.max": f"{GIB // 2}\n"}
            | {f"{groups}/pod/carpool/memory.current": f"{GIB}\n"},
            GIB // 2,
            0,
        ),
        (V1 | {f"{old}/memory.limit_in_bytes": "9223372036854771712\n"}, None, None),
        (
            V1 | {f"{old}/memory.limit_in_bytes": f"{GIB}\n", f"{old}/memory.usage_in_bytes": "4096\n"},
            GIB,
            GIB - 4096,
        ),
        (V2 | {f"{groups}/pod/memory.max": "nonsense\n"}, None, None),
    ]
    for number, (files, limit, free) in enumerate(cases):
        root = machine(tmp_path / str(number), files)
        assert (memory_limit(root), free_in_groups(root)) == (limit, free), files


def test_budgets_take_a_quarter_of_the_limit_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(frontends=1, grpc_frontends=1)
    for limit, clients, arena in (
        (None, 512 << 20, 256 << 20),
        (GIB, GIB // 4, GIB // 8),
        (4096, 1024, 1 << 20),
    ):
        monkeypatch.setattr(control_groups, "memory_limit", lambda limit=limit: limit)
        within_limit.cache_clear()
        assert within_limit(512 << 20) == clients
        assert settings.arena_bytes == arena
        assert replace(settings, slots=3).arena_bytes == min(arena, 3 << 20)
    monkeypatch.undo()
    within_limit.cache_clear()
