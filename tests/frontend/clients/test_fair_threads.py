"""Threads for what clients make us decode: whose turn it is, and who rests."""

from __future__ import annotations

import asyncio
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep
from typing import Any

import pytest

from carpool.errors import Cancelled
from carpool.frontend.clients.accounts import DECODING_BURST_S, Accounts
from carpool.frontend.clients.fair_queue import EVEN_S
from carpool.frontend.clients.fair_threads import Between, FairThreads

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


@pytest.mark.parametrize("most", [1, 2])
def test_one_of_a_clients_is_half_done_at_a_time(most: int) -> None:
    async def main() -> list[int]:
        turns: list[int] = []
        with ThreadPoolExecutor(most) as pool:
            threads = FairThreads(Accounts(9), pool, most)

            async def body(number: int) -> None:
                for _ in range(4):
                    await threads.submit("a", partial(turns.append, number), float(number))

            await asyncio.wait_for(asyncio.gather(*map(body, range(6))), PATIENCE_S)
        return turns

    turns = asyncio.run(main())
    assert len(turns) == 24
    for at in range(len(turns)):
        begun, to_come = set(turns[:at]), set(turns[at:])
        assert len(begun & to_come) <= 1


def test_one_of_a_clients_runs_at_a_time_and_beside_it_anothers() -> None:
    async def main() -> tuple[list[str], list[str]]:
        order: list[str] = []
        other, ended = threading.Event(), threading.Event()
        with ThreadPoolExecutor(3) as pool:
            threads = FairThreads(Accounts(9), pool, 3)

            def first() -> None:
                assert other.wait(PATIENCE_S)
                order.append("first")
                ended.set()

            def second() -> None:
                order.append("second" if ended.is_set() else "too early")

            works = [threads.submit("a", first), threads.submit("a", second), threads.submit("b", other.set)]
            await asyncio.wait_for(asyncio.gather(*works), PATIENCE_S)
        return order, ["first", "second"]

    found, wanted = asyncio.run(main())
    assert found == wanted


def test_what_is_cancelled_is_forgotten_at_once_though_others_are_before_it() -> None:
    class Body:
        def inflate(self) -> None:
            raise AssertionError("nobody wants it")

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            threads, go_on = FairThreads(Accounts(9), pool, 1), threading.Event()
            begun = threads.submit("a", lambda: go_on.wait(PATIENCE_S) and None)
            waits = threads.submit("a", lambda: None, 1.0)
            body = Body()
            alive, left = weakref.ref(body), threads.submit("a", body.inflate, 2.0)
            del body
            assert alive() is not None
            left.cancel()
            await asyncio.sleep(0)  # the one turn of the loop in which it is forgotten
            assert alive() is None
            go_on.set()
            await asyncio.wait_for(asyncio.gather(begun, waits), PATIENCE_S)

    asyncio.run(main())


def test_one_timer_wakes_a_client_that_rests_however_much_of_its_waits() -> None:
    async def main() -> int:
        loop, timers = asyncio.get_running_loop(), list[asyncio.TimerHandle]()
        call_later = loop.call_later

        def counted(*given: Any) -> asyncio.TimerHandle:
            timers.append(call_later(*given))
            return timers[-1]

        with ThreadPoolExecutor(1) as pool:
            accounts = Accounts(9)
            threads, now = FairThreads(accounts, pool, 1), monotonic()
            accounts.account("other", now)
            accounts.spend(accounts.account("busy", now), 2 * DECODING_BURST_S, now)
            loop.call_later = counted  # type: ignore[method-assign, assignment]
            works = [threads.submit("busy", lambda: None) for _ in range(50)]
            loop.call_later = call_later  # type: ignore[method-assign]
            waiting = sum(not timer.cancelled() for timer in timers)
            await asyncio.wait_for(asyncio.gather(*works), PATIENCE_S)
        return waiting

    assert asyncio.run(main()) == 1


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


def test_work_is_charged_to_its_client_also_where_it_fails() -> None:
    async def main() -> float:
        with ThreadPoolExecutor(1) as pool:
            accounts, times = Accounts(9), iter((1.0, 4.0))
            threads = FairThreads(accounts, pool, 1, clock=lambda: next(times))
            accounts.account("other", monotonic())
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(threads.begin("busy", lambda _: 1 // 0).done, PATIENCE_S)
            return accounts.rest_s("busy", monotonic())

    assert asyncio.run(main()) > 1.0


def test_what_nobody_waits_for_any_more_ends_between_two_of_its_steps() -> None:
    steps, begun, left = list[int](), threading.Event(), threading.Event()

    def count(between: Between) -> None:
        for number in range(9):
            steps.append(number)
            begun.set()
            assert left.wait(PATIENCE_S)
            between()

    async def main() -> None:
        with ThreadPoolExecutor(1) as pool:
            threads = FairThreads(Accounts(9), pool, 1)
            work, waiting = threads.begin("a", count), threads.begin("a", count)
            await asyncio.to_thread(begun.wait, PATIENCE_S)
            waiting.stop()
            work.stop()
            assert waiting.done.cancelled()
            assert not work.done.done(), "a thread has it still"
            left.set()
            with pytest.raises(Cancelled):
                await asyncio.wait_for(work.done, PATIENCE_S)

    asyncio.run(main())
    assert steps == [0]


def test_where_the_threads_have_ended_what_waits_is_cancelled() -> None:
    async def main() -> bool:
        pool = ThreadPoolExecutor(1)
        threads, go_on = FairThreads(Accounts(9), pool, 1), threading.Event()
        running, waiting = (threads.begin(name, lambda _: go_on.wait(PATIENCE_S)) for name in "ab")
        pool.shutdown(wait=False, cancel_futures=True)
        go_on.set()
        assert await asyncio.wait_for(running.done, PATIENCE_S)
        await asyncio.wait([waiting.done], timeout=PATIENCE_S)
        return waiting.done.cancelled()

    assert asyncio.run(main())
