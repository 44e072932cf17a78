"""Turns of cameras before a server that answers fewer than all of them, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

import pytest

from carpool.extensions.cameras.watching import Turns

FPS = 5.0
AT_ONCE = 3


class Server:
    """Answers one after the other, each in `takes` seconds; refuses at once what would be later than that."""

    def __init__(self, takes: float, promise: float) -> None:
        self._takes = takes
        self._promise = promise
        self._free_at = 0.0

    def offer(self, now: float) -> float | None:
        """When it is answered."""
        ends = max(now, self._free_at) + self._takes
        if ends > now + self._promise:
            return None
        self._free_at = ends
        return ends


def watch(
    cameras: int, server: Server, seconds: float, seed: int
) -> tuple[Counter[int], Counter[str], Turns]:
    """Answers by camera, what became of all that was sent, and the turns."""
    turns, chance = Turns(cameras * AT_ONCE), Random(seed)
    answers: Counter[int] = Counter(dict.fromkeys(range(cameras), 0))
    became: Counter[str] = Counter()
    events: list[tuple[float, int, str, int, float]] = []
    order = count()
    waiting: dict[int, bool] = {}
    under_way: Counter[int] = Counter()
    now = 0.0

    def sender(camera: int) -> bool:
        if under_way[camera] >= AT_ONCE or not waiting.pop(camera, False):
            return False
        under_way[camera] += 1
        ends = server.offer(now)
        what = "refused" if ends is None else "answered"
        on_its_way = chance.uniform(0.001, 0.003)
        heappush(events, ((ends or now) + on_its_way, next(order), what, camera, now))
        return True

    sends = {camera: (lambda camera=camera: sender(camera)) for camera in range(cameras)}
    for camera in range(cameras):
        heappush(events, (camera / FPS / cameras, next(order), "frame", camera, 0.0))
    while events and events[0][0] < seconds:
        now, _, what, camera, sent_at = heappop(events)
        if what == "frame":
            waiting[camera] = True
            heappush(events, (now + 1 / FPS, next(order), "frame", camera, 0.0))
        else:
            under_way[camera] -= 1
            became[what] += 1
            answers[camera] += what == "answered"
            turns.over(sends[camera], sent_at, now, what)
        turns.want(sends[camera])
    return answers, became, turns


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("takes", [0.3, 0.1, 0.04])
def test_far_over_capacity_all_get_the_same(takes: float, seed: int) -> None:
    """20 cameras send 100 frames a second to a server that answers 3, 10 or 25."""
    answers, became, _ = watch(20, Server(takes, 0.5), 60.0, seed)
    possible = 60.0 / takes
    assert sum(answers.values()) >= 0.9 * possible, "and no answer is given up for it"
    assert max(answers.values()) - min(answers.values()) <= 0.2 * possible / 20 + 2
    assert became["refused"] <= 1.1 * became["answered"], "most of what is sent is sent for something"


def test_where_nothing_is_refused_nobody_waits() -> None:
    answers, became, turns = watch(20, Server(0.001, 0.5), 10.0, 1)
    assert became["refused"] == 0
    assert turns.places == 20 * AT_ONCE
    assert min(answers.values()) >= 49


def test_a_server_that_recovers_is_asked_by_all_again() -> None:
    turns = Turns(60)
    now = 0.0
    sent: list[float] = []

    def send() -> bool:
        sent.append(now)
        return True

    turns.want(send)
    assert len(sent) == 60
    for _ in range(60):
        turns.over(send, 0.0, 1.0, "refused")
    assert turns.places == 42, "all of them are one refusal"
    for second in range(2, 12):
        now = float(second)
        turns.over(send, now, now, "refused")
    assert turns.places == 2
    for _ in range(2000):
        turns.over(send, now, now, "answered")
    assert turns.places == 60


def test_one_that_is_always_refused_keeps_nobody_from_his_turn() -> None:
    turns = Turns(2)
    tries: Counter[str] = Counter()

    def camera(name: str) -> Callable[[], bool]:
        def send() -> bool:
            tries[name] += 1
            under_way.append(name)
            return True

        return send

    under_way: list[str] = []
    sends = {name: camera(name) for name in ("large", "small")}
    for name in sends:
        turns.want(sends[name])
    for now in range(600):
        name = under_way.pop(0)
        turns.over(sends[name], float(now), float(now), "refused" if name == "large" else "answered")
    assert tries["small"] >= 100
    assert tries["large"] >= 100
