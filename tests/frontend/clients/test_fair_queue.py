"""Whose work is done next: by client, and each client's in its order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.frontend.clients.fair_queue import EVEN_S, FairQueue


def queue() -> FairQueue[str]:
    return FairQueue(lambda _item: True)


def drained(waiting: FairQueue[str], each_s: float) -> list[str]:
    order = []
    while (found := waiting.pop()) is not None:
        order.append(found[1])
        waiting.ended(found[0], each_s)
    return order


def test_clients_that_ask_for_little_keep_the_order_of_their_deadlines() -> None:
    waiting = queue()
    for client, deadline, item in (("a", 3.0, "third"), ("b", 1.0, "first"), ("c", 2.0, "second")):
        waiting.push(client, deadline, item)
    assert drained(waiting, 0.001) == ["first", "second", "third"]


def test_a_client_with_much_to_do_does_not_keep_another_waiting() -> None:
    waiting = queue()
    for number in range(12):
        waiting.push("much", 0.0, f"long {number}")
    order = []
    for _ in range(3):
        found = waiting.pop()
        assert found is not None
        order.append(found[1])
        waiting.ended(found[0], 1.0)
    waiting.push("little", 9.0, "short")  # its deadline is later
    order += drained(waiting, 1.0)
    assert order.index("short") == 3


def test_who_was_away_saves_nothing_up() -> None:
    waiting = queue()
    for _ in range(10):
        waiting.push("busy", 0.0, "busy")
    for _ in range(10):
        waiting.pop()
        waiting.ended("busy", 1.0)
    for _ in range(6):
        waiting.push("busy", 0.0, "busy")
        waiting.push("back", 0.0, "back")
    assert Counter(drained(waiting, 1.0)[:8])["back"] <= 5


def test_what_may_not_begin_now_is_passed_over() -> None:
    waiting = queue()
    waiting.push("a", 0.0, "long")
    waiting.push("b", 1.0, "short")
    found = waiting.pop(lambda item: item != "long")
    assert found == ("b", "short")
    assert waiting.pop(lambda item: item != "long") is None
    assert waiting.pop() == ("a", "long")


def test_what_others_wait_for_behind_it_is_no_reason_to_wait() -> None:
    waiting = queue()
    for _ in range(12):
        waiting.push("much", 0.0, "x", weight=49.0)
    assert waiting.ahead("little", 1.0) == 1.0
    assert waiting.ahead("much", 49.0) == 12 * 49.0
    assert waiting.waiting("much") == 12
    waiting.left("much", 49.0)
    assert waiting.ahead("much", 49.0) == 11 * 49.0
    assert (waiting.ahead("little", 900.0), waiting.waiting("little")) == (11 * 49.0, 0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 1.0)), max_size=40))
def test_everything_comes_out_once_and_nobody_gets_far_ahead(pushed: list[tuple[str, float]]) -> None:
    waiting = queue()
    for number, (client, urgency) in enumerate(pushed):
        waiting.push(client, urgency, f"{client}{number}")
    left = Counter(client for client, _ in pushed)
    served: Counter[str] = Counter()
    while (found := waiting.pop()) is not None:
        client = found[0]
        others = [served[one] for one in left if one != client and left[one]]
        assert all(served[client] * 0.1 <= other * 0.1 + EVEN_S + 1e-9 for other in others)
        served[client] += 1
        left[client] -= 1
        waiting.ended(client, 0.1)
    assert not +left
