"""Answers that may wait, in virtual time."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from carpool.core.constants import CONSTANTS
from carpool.core.pacing import PACED_BURST_S, PACED_SHARE, PACED_TOGETHER, Pacer

ONE, OTHER = ("m", "one"), ("m", "other")
COST = 1e-4
LOOK = 0.002
WAIT = 0.04


class Clients:
    """So many of each, who ask again as soon as they are told no."""

    def __init__(self, counts: dict[tuple[str, str], int], *, wait: float, strict: bool) -> None:
        self.pacer: Pacer[tuple[str, str]] = Pacer(0.0)
        self.told: Counter[tuple[str, str]] = Counter()
        self._wait, self._strict = wait, strict
        self._asking = [key for key, count in counts.items() for _ in range(count)]

    def play(self, seconds: float) -> None:
        for step in range(int(seconds / LOOK)):
            now = step * LOOK
            asking, self._asking = self._asking + self.pacer.due(now), []
            self.told.update(asking)
            for key in asking:
                if self.pacer.is_free(key, now):
                    self.pacer.spend(key, COST, now)
                    self._asking.append(key)
                else:
                    self.pacer.hold(key, key, COST, now, self._wait, strict=self._strict)


def test_who_asks_seldom_is_told_at_once() -> None:
    pacer: Pacer[int] = Pacer(0.0)
    for step in range(500):
        assert pacer.is_free(ONE, step * 0.002)
        pacer.spend(ONE, COST, step * 0.002)


def test_forty_clients_that_ask_again_at_once_take_no_more_than_their_part() -> None:
    clients = Clients({ONE: 40}, wait=10.0, strict=False)
    clients.play(10.0)
    spent = clients.told[ONE] * COST / 10.0
    assert 0.9 * PACED_SHARE <= spent <= 1.1 * PACED_SHARE


def test_nobody_is_told_later_than_said_unless_it_makes_others_late() -> None:
    crowd = {ONE: 400}
    clients = Clients(crowd, wait=WAIT, strict=False)
    clients.play(4.0)
    assert clients.told[ONE] >= 4.0 / (WAIT + 2 * LOOK) * 400
    clients = Clients(crowd, wait=WAIT, strict=True)
    clients.play(4.0)
    at_once = PACED_BURST_S + 400 * COST  # what was saved up, and who asked first
    assert clients.told[ONE] * COST <= 1.1 * PACED_SHARE * 4.0 + at_once


def test_many_who_flood_share_a_fifth_and_one_who_does_not_is_told_soon() -> None:
    flood = {("m", f"flood-{number}"): 50 for number in range(10)}
    clients = Clients({**flood, OTHER: 1}, wait=10.0, strict=True)
    clients.play(10.0)
    assert sum(clients.told.values()) * COST <= 1.1 * PACED_TOGETHER * 10.0
    told = [clients.told[key] for key in flood]
    assert max(told) <= 1.1 * min(told)
    assert clients.told[OTHER] >= 0.9 * min(told)


def test_the_next_to_have_waited_for_long_enough_is_known() -> None:
    pacer: Pacer[int] = Pacer(0.0)
    assert pacer.soonest(1.0) == 0.0
    for key, wait in ((ONE, 0.5), (OTHER, 0.25), (ONE, 0.125)):  # of one lane, the first comes first
        pacer.hold(key, 1, COST, 1.0, wait, strict=False)
    assert pacer.soonest(1.125) == 0.125


def test_strictness_ends_when_nothing_waits() -> None:
    pacer: Pacer[int] = Pacer(0.0)
    pacer.spend(ONE, 1.0, 0.0)
    pacer.hold(ONE, 1, COST, 0.0, WAIT, strict=True)
    pacer.hold(ONE, 2, COST, 0.0, WAIT, strict=False)
    assert pacer.due(WAIT) == []
    assert pacer.due(CONSTANTS.paced_longest_s) == [1, 2]
    now = CONSTANTS.paced_longest_s
    pacer.spend(ONE, 1.0, now)
    pacer.hold(ONE, 3, COST, now, WAIT, strict=False)
    assert pacer.due(now + WAIT) == [3]


@given(
    st.lists(
        st.tuples(st.floats(0, 0.1), st.sampled_from("abc"), st.floats(0, 0.01), st.booleans()), max_size=80
    )
)
def test_everything_held_comes_out_once_in_order_and_in_time(
    story: list[tuple[float, str, float, bool]],
) -> None:
    pacer: Pacer[tuple[str, int]] = Pacer(0.0)
    now, held, out = 0.0, [], []
    for number, (passed, name, cost, strict) in enumerate(story):
        now += passed
        pacer.spend(("m", name), cost, now)
        if not pacer.is_free(("m", name), now):
            pacer.hold(("m", name), (name, number), cost, now, WAIT, strict=strict)
            held.append((name, number))
        out += pacer.due(now)
    out += pacer.due(now + CONSTANTS.paced_longest_s)
    assert sorted(out) == sorted(held)
    assert pacer.waiting == 0
    for name in "abc":
        mine = [number for whose, number in out if whose == name]
        assert mine == sorted(mine)
    pacer.hold(ONE, ("", 0), COST, now + 60.0, WAIT, strict=False)
    pacer.due(now + 61.0)
    assert len(pacer) <= 1
