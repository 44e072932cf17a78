"""Whose frame goes next, where a server says no to many: it is asked for little more than it answers.

A server that is far over its capacity takes whoever comes at the right moment. Cameras send at fixed times,
so that some always come right and others never: of twenty, four had all answers. So those of one command
share as many places as the server has lately had answers for: one more for each round that is answered, a
third fewer when it refuses, and then nobody asks before there is an answer. Who had no turn for the longest
goes first. While nothing is refused, there are places for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

_FEWEST = 2  # so that one is on its way while another is computed
_LESS = 0.7
_IN_VAIN = 5  # refusals in a row: then it is the turn of the others, who may be asked less of

Send = Callable[[], bool]
"""Sends the newest frame of a camera; False if there is none, or enough of its frames are under way."""


class Turns:
    """It is told the time."""

    def __init__(self, most: int) -> None:
        self._most = max(_FEWEST, most)
        self._places = float(self._most)
        self._under_way = 0
        self._is_held = False
        self._cut_at = float("-inf")
        self._waiting: dict[Send, None] = {}
        self._turns: dict[Send, int] = {}  # when each had its last one
        self._turn = 0
        self._in_vain: Counter[Send] = Counter()

    @property
    def places(self) -> int:
        return int(self._places)

    def want(self, send: Send) -> None:
        """A camera has a frame, or can send one more."""
        self._waiting[send] = None
        self._go_on()

    def over(self, send: Send, sent_at: float, now: float, became: str) -> None:
        """One that was sent is answered, refused or something else. What was under way when there were more
        places says nothing about those now."""
        self._under_way -= 1
        if became == "answered":
            self._places = min(self._most, self._places + 1.0 / self._places)
            self._is_held = False
        elif became == "refused":
            self._is_held = True
            self._in_vain[send] += 1
            if sent_at > self._cut_at:
                used = min(self._places, self._under_way + 1.0)  # places that nobody uses say nothing, either
                self._places = max(_FEWEST, _LESS * used)
                self._cut_at = now
        if became != "refused" or self._in_vain[send] == _IN_VAIN:
            del self._in_vain[send]
        else:
            self._turns[send] = 0  # it has not had it yet
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._under_way < self.places and not (self._is_held and self._under_way):
            send = min(self._waiting, key=lambda one: self._turns.get(one, 0))
            del self._waiting[send]
            if send():
                self._under_way += 1
                self._turn += 1
                self._turns[send] = self._turn
                self._waiting[send] = None  # it may have another
