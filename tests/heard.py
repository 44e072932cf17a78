"""An asker for tests of doors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from carpool.link.engine_client import Answer


@dataclass(eq=False)
class Heard:
    """Implements `Hears`: `answers` and `parts` are what it heard."""

    on_done: Callable[[Answer], None] | None = None
    on_admitted: Callable[[], None] | None = None
    answers: list[Answer] = field(default_factory=list)
    parts: list[Answer] = field(default_factory=list)

    def admitted(self) -> None:
        if self.on_admitted is not None:
            self.on_admitted()

    def part(self, answer: Answer) -> None:
        self.parts.append(answer)

    def done(self, answer: Answer) -> None:
        self.answers.append(answer)
        if self.on_done is not None:
            self.on_done(answer)
