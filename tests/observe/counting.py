"""What a child process does in the tests: spawned processes import it by this name."""

from __future__ import annotations

import mmap
from pathlib import Path

from carpool.observe.columns import REQUEST_SECONDS
from carpool.observe.counters import Table, table_bytes


def shared(path: Path) -> Table:
    with path.open("r+b") as file:
        return Table(mmap.mmap(file.fileno(), table_bytes(4)))


def count_in_child(path: Path, block: int, times: int) -> None:
    table = shared(path)
    slot = table.directory.find("m", "1")
    assert slot is not None
    row = table.block(block).row(slot)
    for _ in range(times):
        row.observe(REQUEST_SECONDS, 0.25)
