"""Threads for what clients make us decode: whose turn it is, and who rests."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep

import pytest

from carpool.frontend.clients.accounts import DECODING_BURST_S, Accounts
from carpool.frontend.clients.fair_queue import EVEN_S
from carpool.frontend.clients.fair_threads import FairThreads

PATIENCE_S = 30.0


def test_the_work_of_one_client_does_not_wait_for_all_of_another() -> None:
    async def main() -> list[str]:
        order: list[str] = []
        with ThreadPoolExecutor(1) as pool:
            threads = FairThreads(Accounts(9), pool, 1)
            begun = threads.submit("much", partial(sleep, 2 * EVEN_S))
            rest = [threads.submit("much", partial(order.append, "much")) for _ in range(5)]
            rest.append(threads.submit("little", partial(order.append, "little")))
            await asyncio.wait_for(asyncio.gather(begun, *rest), PATIENCE_S)
        return order

    order = asyncio.run(main())
    assert sorted(order) == ["little"] + ["much"] * 5
    assert order[0] == "little"


def test_a_client_that_had_its_part_rests_while_there_are_others() -> None:
    async def main() -> tuple[float, float]:
        with ThreadPoolExecutor(1) as pool:
            accounts = Accounts(9)
            threads, now = FairThreads(accounts, pool, 1), monotonic()
            accounts.account("other", now)
            accounts.spend(accounts.account("busy", now), 2 * DECODING_BURST_S, now)
            rest_s = accounts.rest_s("busy", now)
            await asyncio.wait_for(threads.submit("busy", lambda: None), PATIENCE_S)
            return rest_s, monotonic() - now

    rest_s, waited = asyncio.run(main())
    assert 0.0 < rest_s <= waited + 0.01


def test_few_of_one_clients_are_half_done_at_a_time() -> None:
    async def main() -> list[int]:
        turns: list[int] = []
        with ThreadPoolExecutor(1) as pool:
            threads = FairThreads(Accounts(9), pool, 1)

            async def body(number: int) -> None:
                for _ in range(4):
                    await threads.submit("a", partial(turns.append, number), float(number))

            await asyncio.wait_for(asyncio.gather(*map(body, range(6))), PATIENCE_S)
        return turns

    turns = asyncio.run(main())
    assert len(turns) == 24
    for at in range(len(turns)):
        begun, to_come = set(turns[:at]), set(turns[at:])
        assert len(begun & to_come) <= 2


def test_what_goes_wrong_is_told_and_what_is_cancelled_is_not_run() -> None:
    async def main() -> list[str]:
        run: list[str] = []
        go = threading.Event()

        def broken() -> None:
            raise ValueError("no")

        with ThreadPoolExecutor(1) as pool:
            threads = FairThreads(Accounts(9), pool, 1)
            wrong = threads.submit("a", broken)
            with pytest.raises(ValueError, match="no"):
                await asyncio.wait_for(wrong, PATIENCE_S)
            first = threads.submit("a", lambda: go.wait(PATIENCE_S) and None)
            threads.submit("a", partial(run.append, "cancelled")).cancel()
            last = threads.submit("a", partial(run.append, "last"))
            go.set()
            await asyncio.wait_for(asyncio.gather(first, last), PATIENCE_S)
        return run

    assert asyncio.run(main()) == ["last"]
