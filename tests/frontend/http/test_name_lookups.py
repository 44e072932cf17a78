"""Names of hosts: one that is never answered holds neither the others nor more than one thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Sequence

import pytest

from carpool.frontend.http.name_lookups import _SILENT_S, NameLookups, NotFoundNow, addresses_of


class Resolver:
    """Answers for any name, but for "silent.example", which waits, and "unknown.example"."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked: Counter[str] = Counter()

    def __call__(self, host: str, _port: int) -> Sequence[str]:
        self.asked[host] += 1
        if host == "silent.example":
            self.answers.wait()
        if host == "unknown.example":
            raise socket.gaierror(-2, "Name or service not known")
        return [f"address of {host}"]


def test_a_silent_name_holds_one_thread_and_no_other_name() -> None:
    resolver, now = Resolver(), 0.0
    lookups = NameLookups(resolver, lambda: now)

    async def looked_up() -> None:
        nonlocal now
        waiting = [asyncio.ensure_future(lookups.addresses("silent.example", 80)) for _ in range(100)]
        for number in range(20):
            name = f"{number}.example"
            assert await lookups.addresses(name, 80) == [f"address of {name}"]
        waiting.pop().cancel()
        now = _SILENT_S + 0.1
        with pytest.raises(NotFoundNow):
            await lookups.addresses("silent.example", 80)
        resolver.answers.set()
        assert await asyncio.gather(*waiting) == [["address of silent.example"]] * 99
        assert resolver.asked["silent.example"] == 1
        assert await lookups.addresses("silent.example", 80)
        assert resolver.asked["silent.example"] == 2

    asyncio.run(looked_up())


def test_a_failure_is_remembered_for_a_moment() -> None:
    resolver, now = Resolver(), 0.0
    lookups = NameLookups(resolver, lambda: now)

    async def looked_up() -> None:
        nonlocal now
        for _ in range(5):
            with pytest.raises(OSError, match=r"unknown|not known"):
                await lookups.addresses("unknown.example", 80)
        assert resolver.asked["unknown.example"] == 1
        now = 1.1
        with pytest.raises(socket.gaierror):
            await lookups.addresses("unknown.example", 80)
        assert resolver.asked["unknown.example"] == 2

    asyncio.run(looked_up())


def test_addresses_are_those_of_the_machines_resolver() -> None:
    assert addresses_of("127.0.0.1", 80) == ["127.0.0.1"]
