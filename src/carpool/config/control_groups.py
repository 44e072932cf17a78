"""Finds the control groups that this process is in, and the limit of memory that they set. What holds for a
group holds for those within."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_SHARE = 4
"""Of a limit of memory: one budget takes a quarter of it at most. Models and the rest need room, too."""
_NO_LIMIT = 1 << 60  # version 1 writes the largest number of pages


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns bytes that the processes of this container may have together; None without a limit."""
    limits = [_limit(folder) for folder in groups("memory", root)]
    return min((limit for limit in limits if limit is not None), default=None)


def free_in_groups(root: Path = ROOT) -> int | None:
    """Returns bytes that could be taken now, as far as groups limit them; None where none does."""
    free = []
    for folder in groups("memory", root):
        limit = _limit(folder)
        used = "".join(lines_of(folder / "memory.current") or lines_of(folder / "memory.usage_in_bytes"))
        if limit is not None and used.strip().isdigit():
            free.append(max(0, limit - int(used)))
    return min(free, default=None)


@cache
def within_limit(most: int) -> int:
    """Returns a budget in bytes: `most`, or a quarter of the limit of memory where that is less."""
    limit = memory_limit()
    return most if limit is None else min(most, limit // _SHARE)


def _limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = "".join(lines_of(folder / name)).strip()
        if text.isdigit() and 0 < int(text) < _NO_LIMIT:
            return int(text)
    return None


def groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """Yields the folders of this process's group and of those around it, of both versions."""
    for mount, group in _places(controller, root):
        for folder in (group, *group.parents):
            yield folder
            if folder == mount:
                break


def _places(controller: str, root: Path) -> Iterator[tuple[Path, Path]]:
    """Yields where groups are mounted that have this controller, and this process's own group there."""
    own: dict[str, str] = {}  # by kind of mount
    for line in lines_of(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            own["cgroup2"] = path
        elif controller in controllers.split(","):
            own["cgroup"] = path
    for line in lines_of(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), [*after.split(" "), "", "", ""][:3]
        if len(place) < 5 or kind[0] not in own:
            continue
        if kind[0] == "cgroup" and controller not in kind[2].split(","):
            continue
        mount = root / place[4].lstrip("/")
        yield mount, mount / _within(own[kind[0]], place[3])


def _within(path: str, shown: str) -> PurePosixPath:
    """Returns a group's path below the one that the mount shows, which in a container is often the group
    itself."""
    group = PurePosixPath(path)
    if ".." in group.parts or not group.is_relative_to(shown):
        return PurePosixPath()
    return group.relative_to(shown)


def lines_of(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
