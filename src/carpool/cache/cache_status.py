"""Writes what an answer says about the cache."""

from __future__ import annotations

from collections.abc import Sequence


class CacheStatus:
    """Names the status in our own words, and in those of RFC 9211; and the header fields of both."""

    __slots__ = ("fields", "found", "kind", "status", "words")

    def __init__(self, words: str, status: str, kind: str) -> None:
        self.words = words
        self.status = status
        self.kind = kind  # as it is counted
        self.found = kind not in ("miss", "bypass")  # without the engine
        self.fields = f"X-Carpool-Cache: {words}\r\nCache-Status: carpool; {status}\r\n".encode()


MISS = CacheStatus("miss", "fwd=miss", "miss")
STORED = CacheStatus("miss", "fwd=miss; stored", "miss")
JOINED = CacheStatus("joined", "fwd=miss; collapsed", "joined")
OFF = CacheStatus("off", "fwd=bypass", "bypass")
SHARED = CacheStatus("hit; kind=shared", "hit; detail=shared", "shared")


def hit(kind: str, age: float, ttl: float, more: str = "") -> CacheStatus:
    counted = {"exact": "hit"}.get(kind, kind)
    return CacheStatus(f"hit; kind={kind}{more}; age={age:.1f}", f"hit; ttl={ttl - age:.0f}", counted)


def fields_of_all(each: Sequence[CacheStatus | None]) -> bytes:
    """Returns those of the pictures of one request, in their order; an error says nothing here."""
    if len(each) == 1:
        return b"" if each[0] is None else each[0].fields
    known = [one for one in each if one is not None]
    if not known:
        return b""
    worst = next((one for one in known if not one.status.startswith("hit")), known[0])
    return CacheStatus(", ".join(one.words for one in known), worst.status, "").fields
