"""The zygote imports what processes have imported since their forks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

from carpool.link.forked_child import Zygote
from carpool.process.standby import Standby


@dataclass
class Brings:
    """Stands for a zygote."""

    usable: bool = True
    brought: list[list[str]] = field(default_factory=list)

    def bring(self, names: Sequence[str], *, aside: bool = True) -> None:
        assert aside
        self.brought.append(list(names))


def standby_with(zygote: Brings) -> Standby:
    standby = Standby()
    standby._zygote = cast(Zygote, zygote)
    return standby


def test_each_module_of_the_package_is_brought_once() -> None:
    zygote = Brings()
    standby = standby_with(zygote)
    standby.bring(["carpool.extensions.cache.front", "redis", "carpoolish"])
    standby.bring(["carpool.extensions.cache.front", "carpool.extensions.drift.front"])
    standby.bring(["carpool.extensions.drift.front"])
    assert zygote.brought == [["carpool.extensions.cache.front"], ["carpool.extensions.drift.front"]]


def test_the_next_zygote_brings_what_this_one_could_not() -> None:
    zygote = Brings(usable=False)
    standby = standby_with(zygote)
    standby.bring(["carpool.extensions.cache.front"])
    assert not zygote.brought
    assert list(standby._names) == ["carpool.extensions.cache.front"]
