"""Names what caches count of each version, and of the server; and writes it down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from carpool.core.evidence import interval
from carpool.observe.columns import Column, by_word, histogram, single
from carpool.observe.counters import Cells

RESULTS = by_word("cache", "results")
HIT_SECONDS = single("cache", "hit_seconds")
MISS_SECONDS = single("cache", "miss_seconds")
AGE = histogram("cache", "age")
EVICTED = by_word("cache", "evicted")
AUDITS = by_word("cache", "audits")
ENTRIES = single("cache", "entries")
BYTES = single("cache", "bytes")
SOURCES_OFF = single("cache", "sources_off")
SHARED_UP = single("cache", "shared_up")
SHARED_TIMEOUTS = single("cache", "shared_timeouts")


def cache_counts(cells: Cells) -> dict[str, Any]:
    """Returns the counts of one model version's cache: what there is, and what happened. `wrong` is the
    audit's: between which shares the rate of similar hits lies that would have been answered otherwise, 99 %
    sure."""
    audits = _happened(cells, AUDITS)
    differ = audits.get("differs", 0)
    trials = audits.get("same", 0) + differ
    return {
        "entries": int(cells[ENTRIES]),
        "bytes": int(cells[BYTES]),
        "sources_off": int(cells[SOURCES_OFF]),
        "requests": _happened(cells, RESULTS),
        "evicted": _happened(cells, EVICTED),
        "audits": audits,
        "wrong": [round(end, 4) for end in interval(differ, trials)] if trials else None,
    }


def shared_cache_counts(cells: Cells) -> dict[str, Any]:
    """Returns the counts of all front ends: how many reach the server with which they share answers, and how
    many queries to it timed out."""
    return {"front_ends_up": int(cells[SHARED_UP]), "timeouts": int(cells[SHARED_TIMEOUTS])}


def _happened(cells: Cells, words: Mapping[str, Column]) -> dict[str, int]:
    return {word: int(cells[column]) for word, column in words.items() if cells[column]}
