from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import carpool
from carpool.errors import DeadlineExceeded, ModelError, Refused


def test_awaited_in_asyncio() -> None:
    sizes: list[int] = []

    @carpool.batched(max_batch=8, max_delay_ms=100)
    def double(items: list[int]) -> list[int]:
        sizes.append(len(items))
        return [item * 2 for item in items]

    async def story() -> list[int]:
        return await asyncio.gather(*(double(n) for n in range(8)))

    assert asyncio.run(story()) == [n * 2 for n in range(8)]
    assert max(sizes) > 1


def test_called_from_plain_threads() -> None:
    @carpool.batched(slo_ms=5000, curve="1+1")
    def shout(items: list[str]) -> list[str]:
        return [item.upper() for item in items]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda word: shout(word).result(30), ["a", "b", "c"])) == ["A", "B", "C"]


def test_a_promise_measures_the_function_with_its_first_item() -> None:
    seen: list[list[str]] = []

    @carpool.batched(slo_ms=5000, max_batch=4)
    def echo(items: list[str]) -> list[str]:
        seen.append(items)
        return items

    assert echo("first").result(30) == "first"
    assert [len(items) for items in seen] == [1, 1, 2, 2, 4, 4, 1]


def test_the_functions_own_exception_reaches_only_its_caller() -> None:
    @carpool.batched(max_batch=8, max_delay_ms=50)
    def fragile(items: list[int]) -> list[int]:
        if 13 in items:
            raise KeyError("thirteen")
        return items

    async def story() -> list[int | BaseException]:
        return await asyncio.gather(*(fragile(n) for n in (1, 13, 2)), return_exceptions=True)

    good, bad, fine = asyncio.run(story())
    assert (good, fine) == (1, 2)
    assert isinstance(bad, KeyError)


def test_results_of_any_shape_pass_through() -> None:
    @carpool.batched(max_batch=4)
    def nest(items: list[object]) -> list[object]:
        return [[item, [item]] for item in items]

    assert nest((1, 2)).result(30) == [(1, 2), [(1, 2)]]


def test_a_wrong_number_of_results_is_an_error() -> None:
    @carpool.batched(max_batch=4)
    def loses(items: list[int]) -> list[int]:
        return []

    with pytest.raises(ModelError, match="got 1 items and answered 0"):
        loses(1).result(30)


def test_what_cannot_be_answered_in_time_is_refused() -> None:
    release = threading.Event()

    @carpool.batched(slo_ms=30, max_batch=1, curve="20+1")
    def slow(items: list[int]) -> list[int]:
        release.wait(30)
        return items

    async def story() -> list[int | BaseException]:
        first = asyncio.ensure_future(_wait(slow(0)))
        others = await asyncio.gather(*(slow(n) for n in range(1, 6)), return_exceptions=True)
        release.set()
        await first
        return others

    answers = asyncio.run(story())
    assert all(isinstance(answer, Refused | DeadlineExceeded) for answer in answers)


async def _wait(pending: object) -> object:
    return await pending  # type: ignore[misc]


def test_mistakes_are_told_at_decoration() -> None:
    with pytest.raises(ValueError, match="choose"):
        carpool.batched(slo_ms=50, max_delay_ms=5)
    with pytest.raises(TypeError, match="async"):

        @carpool.batched()
        async def wrong(items: list[int]) -> list[int]:
            return items
