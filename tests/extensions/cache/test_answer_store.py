"""Answers in memory: bounded by bytes, gone in time, and only for what is asked twice."""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import replace

from carpool.extensions.cache.answer_store import PLACES, AnswerStore, Doorkeeper, Entry, Room
from carpool.frontend.calls.reused_answer import EncodedAnswer


class Book:
    """An owner that notes what it is told."""

    def __init__(self) -> None:
        self.bytes = 0
        self.entries = 0
        self.why: Counter[str] = Counter()

    def entered(self, size: int) -> None:
        self.bytes += size
        self.entries += 1

    def left(self, size: int, why: str) -> None:
        self.bytes -= size
        self.entries -= 1
        self.why[why] += 1


def entry(book: Book, at: float = 0.0, ttl: float = 60.0, size: int = 100) -> Entry:
    return Entry(book, b"sure", EncodedAnswer(bytes(size)), at, at + ttl)


def test_what_is_kept_is_found_until_its_time_is_over() -> None:
    book, room = Book(), Room(10_000)
    store = AnswerStore(room)
    kept = entry(book)
    store.put(1, kept)
    assert store.get(1, 59.9) is kept
    assert store.get(2, 0.0) is None
    assert store.get(1, 60.0) is None
    assert (len(store), room.used, book.bytes, book.entries) == (0, 0, 0, 0)
    assert book.why == {"ttl": 1}


def test_the_least_recently_used_go_first() -> None:
    book = Book()
    size = entry(book).size
    room = Room(3 * size)
    store = AnswerStore(room)
    for name in (1, 2, 3):
        store.put(name, entry(book))
    store.get(1, 1.0)
    store.put(4, entry(book))
    assert [name for name in (1, 2, 3, 4) if store.get(name, 1.0)] == [1, 3, 4]
    assert room.used == book.bytes == 3 * size
    assert book.why == {"room": 1}


def test_what_never_fits_makes_nobody_leave() -> None:
    book = Book()
    room = Room(2000)
    store = AnswerStore(room)
    store.put(1, entry(book))
    store.put(2, entry(book, size=2000))
    assert store.get(1, 0.0) is not None
    assert store.get(2, 0.0) is None


def test_clearing_is_for_one_owner() -> None:
    mine, others, room = Book(), Book(), Room(100_000)
    store = AnswerStore(room)
    store.put(1, entry(mine))
    store.put(1, entry(mine))
    store.put(2, entry(others))
    store.clear(lambda owner: owner is mine, "cleared")
    assert (mine.entries, others.entries, len(store)) == (0, 1, 1)
    assert mine.why == {"replaced": 1, "cleared": 1}
    assert room.used == others.bytes


def test_the_doorkeeper_knows_what_it_saw() -> None:
    keeper = Doorkeeper()
    digest = secrets.randbits(64)
    assert not keeper.seen_before(digest)
    assert keeper.seen_before(digest)


def test_what_is_seen_once_is_forgotten_in_time() -> None:
    keeper = Doorkeeper()
    first = secrets.randbits(64)
    keeper.seen_before(first)
    seen = sum(keeper.seen_before(secrets.randbits(64)) for _ in range(8 * PLACES))
    assert seen == 0
    assert not keeper.seen_before(first)


def test_what_was_asked_is_kept_while_a_quarter_of_the_memory_is_enough() -> None:
    book, room = Book(), Room(100_000)
    store = AnswerStore(room)
    for number in range(10):
        asked = [b"said", bytes([number]) * 10_000]
        store.put(number, replace(entry(book), asked=asked))
    found = [store.get(number, 1.0) for number in range(10)]
    same = [one is not None and one.is_same(b"said", (bytes([n]) * 10_000,)) for n, one in enumerate(found)]
    assert same == [False] * 8 + [True] * 2
    last = store.get(9, 1.0)
    assert last is not None
    assert not last.is_same(b"other", (bytes([9]) * 10_000,))
    assert not last.is_same(b"said", (bytes([8]) * 10_000,))
    assert not last.is_same(b"said", (bytes([9]) * 5_000, bytes([9]) * 5_000))
    assert room.used == book.bytes + 2 * 10_004
    store.clear(lambda _: True, "cleared")
    assert (room.used, book.bytes) == (0, 0)
