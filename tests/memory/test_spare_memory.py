"""Freed memory is given back after much of it, and not for every message."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from carpool.memory import spare_memory
from carpool.memory.spare_memory import SpareMemory


def test_it_is_given_back_once_for_many_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spare_memory, "_AFTER_S", 0.0)
    asked: list[int] = []

    async def main() -> None:
        with ThreadPoolExecutor(1) as threads:
            spare = SpareMemory(threads)
            spare._trim = asked.append
            for _ in range(1000):
                spare.freed(1000)  # small ones are used again
            spare.freed(15 << 20)
            await asyncio.sleep(0.01)
            assert not asked
            for _ in range(5):
                spare.freed(15 << 20)
            while not asked:
                await asyncio.sleep(0.01)
            spare.close()
        assert asked == [0]

    asyncio.run(main())
