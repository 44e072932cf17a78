from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import carpool
from carpool.errors import DeadlineExceeded, ModelError, Refused
from waiting import until_in_loop


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

    with pytest.raises(ModelError, match="got 1 items and returned 0"):
        loses(1).result(30)


def test_what_cannot_be_answered_in_time_is_refused() -> None:
    begun, release = threading.Event(), threading.Event()

    @carpool.batched(slo_ms=1000, max_batch=1, curve="600+1")
    def slow(items: list[int]) -> list[int]:
        begun.set()
        release.wait(30)
        return items

    async def one_asked() -> asyncio.Future[object]:
        """Returns once it runs, or is rejected: if the machine stands still before, it is too late itself."""
        first = asyncio.ensure_future(_wait(slow(0)))
        await until_in_loop(lambda: begun.is_set() or first.done())
        return first

    async def story() -> list[int | BaseException]:
        first = await one_asked()
        while not begun.is_set():
            first = await one_asked()
        others = await asyncio.gather(*(slow(n) for n in range(1, 6)), return_exceptions=True)
        release.set()
        assert await first == 0
        return others

    answers = asyncio.run(story())
    assert all(isinstance(answer, Refused | DeadlineExceeded) for answer in answers)


async def _wait(pending: object) -> object:
    return await pending  # type: ignore[misc]


def test_mistakes_are_told_at_decoration() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        carpool.batched(slo_ms=50, max_delay_ms=5)
    with pytest.raises(TypeError, match="async"):

        @carpool.batched()
        async def wrong(items: list[int]) -> list[int]:
            return items


def test_who_is_cancelled_while_the_others_are_answered_costs_them_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A future can be cancelled from another thread at any time, also right before its result is set."""
    from concurrent.futures import Future

    plain = Future.set_running_or_notify_cancel
    cancelled: list[Future[int]] = []

    def cancelled_just_before(self: Future[int]) -> bool:
        if not cancelled:
            cancelled.append(self)
            self.cancel()
        return plain(self)

    @carpool.batched(max_batch=4, max_delay_ms=100)
    def double(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    assert double(1).result(30) == 2
    monkeypatch.setattr(Future, "set_running_or_notify_cancel", cancelled_just_before)
    answers = [double(n) for n in range(4)]
    told: list[object] = []
    for answer in answers:
        try:
            told.append(answer.result(30))
        except BaseException as error:
            told.append(type(error).__name__)
    assert sorted(map(str, told)) == ["2", "4", "6", "CancelledError"]  # 0's caller left


def test_calls_before_the_first_measurement_share_one_thread() -> None:
    gate = threading.Event()

    @carpool.batched(slo_ms=5000, max_batch=4)
    def slow(items: list[int]) -> list[int]:
        gate.wait(30)
        return items

    before = threading.active_count()
    answers = [slow(n) for n in range(100)]
    assert threading.active_count() <= before + 2
    gate.set()
    assert [answer.result(30) for answer in answers] == list(range(100))


def test_a_first_call_that_fails_is_told_to_all_who_wait_for_it() -> None:
    calls = []
    gate = threading.Event()

    @carpool.batched(slo_ms=5000, max_batch=1)
    def moody(items: list[int]) -> list[int]:
        calls.append(items)
        gate.wait(30)
        if len(calls) == 1:
            raise SystemExit("not yet")
        return items

    answers = [moody(n) for n in range(3)]
    gate.set()
    for answer in answers:
        with pytest.raises(ModelError, match="not yet"):
            answer.result(30)
    assert moody(7).result(30) == 7
