"""Writes what an answer says about the cache."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.frontend.calls.reused_answer import AnswerNote


class CacheStatus(AnswerNote):
    """Names the status in our own words, and in those of RFC 9211."""

    __slots__ = ("kind", "status")

    def __init__(self, words: str, status: str, kind: str) -> None:
        reused = kind not in ("miss", "bypass")  # without the engine
        super().__init__("X-Carpool-Cache", words, ("Cache-Status", f"carpool; {status}"), reused=reused)
        self.status = status
        self.kind = kind  # as it is counted

    def fields_of_all(self, notes: Sequence[AnswerNote | None]) -> bytes:
        """Returns those of the pictures of one request, in their order; an error says nothing here."""
        known = [one for one in notes if isinstance(one, CacheStatus)]
        worst = next((one for one in known if not one.status.startswith("hit")), known[0])
        return CacheStatus(", ".join(one.said for one in known), worst.status, "").fields


MISS = CacheStatus("miss", "fwd=miss", "miss")
STORED = CacheStatus("miss", "fwd=miss; stored", "miss")
JOINED = CacheStatus("joined", "fwd=miss; collapsed", "joined")
OFF = CacheStatus("off", "fwd=bypass", "bypass")
SHARED = CacheStatus("hit; kind=shared", "hit; detail=shared", "shared")


def hit(kind: str, age: float, ttl: float, more: str = "") -> CacheStatus:
    counted = {"exact": "hit"}.get(kind, kind)
    return CacheStatus(f"hit; kind={kind}{more}; age={age:.1f}", f"hit; ttl={ttl - age:.0f}", counted)
