"""The protocol of models that write their answers token by token, in slots. core/steps.py decides when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from carpool.types import Array


class Stepper(Protocol):
    """One instance. Everything is called from one thread at a time.

    A slot belongs to one answer from `admit` until the next `admit` into it; there is nothing to do when an
    answer ends. Slots are independent: what is in one changes no token of another.
    """

    slots: int  # shapes never change
    longest: int  # tokens of an answer, and of what it begins with

    def encode(self, parts: Sequence[Mapping[str, Any]], images: Sequence[int]) -> Sequence[Any]:
        """Each picture of requests that stand one behind the other, as something that stays where it is until
        `admit`. Takes e(B)."""

    def admit(self, slot: int, encoded: Any, prompt: Sequence[int] = (), limit: int = 0) -> None:
        """A new answer begins in this slot, after `prompt` if the model has one, with at most `limit` tokens:
        0 is as many as there can be. Whoever had the slot is gone without a trace."""

    def step(self, width: int) -> Array:
        """One token for each of slots 0 to `width` - 1, int64 [width]; those of slots that nobody has mean
        nothing. Takes s(width)."""

    @property
    def end(self) -> int:
        """The token after which nothing comes."""

    def text(self, tokens: Sequence[int]) -> str:
        """What they say, up to the end of the text."""
