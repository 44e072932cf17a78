"""Who asks and how urgently: names and priorities drawn by weight, the same again for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from carpool.lab.load.ticket import Ticket

_DRAWN = 4093  # a prime, so that names and bodies, which go round too, meet in every combination

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Mix:
    """Sources and priorities with their weights; nothing given is nobody named, and the model's default."""

    sources: tuple[tuple[str, float], ...] = ()
    priorities: tuple[tuple[int, float], ...] = ()


class Draw:
    """A mix, dealt out over the numbers of requests."""

    def __init__(self, mix: Mix, seed: int) -> None:
        random = Random(seed)
        self._sources = self._draw(random, mix.sources, "")
        self._priorities = self._draw(random, mix.priorities, 0)

    @staticmethod
    def _draw(random: Random, weighted: Sequence[tuple[Value, float]], default: Value) -> list[Value]:
        if len(weighted) < 2:
            return [weighted[0][0] if weighted else default]
        values, weights = zip(*weighted, strict=True)
        return random.choices(values, weights, k=_DRAWN)

    def source(self, ticket: Ticket) -> str:
        """That of the trace or the camera, if it has one; the ticket is told."""
        if not ticket.source:
            ticket.source = self._sources[ticket.number % len(self._sources)]
        return ticket.source

    def priority(self, ticket: Ticket) -> int:
        return self._priorities[ticket.number % len(self._priorities)]
