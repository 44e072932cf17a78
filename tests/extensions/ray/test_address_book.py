"""Who is in the book, for how long, and what a balancer makes of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from carpool.extensions.ray.address_book import BEAT_S, LEASE_S, AddressBook, Page, Place, merged

A, B = Place("10.0.0.1", 31000), Place("10.0.0.2", 31000, 31001)


def test_a_replica_is_there_while_it_says_so() -> None:
    book = AddressBook(0.0)
    book.beat("a", A, 1.0)
    book.beat("b", B, 1.0)
    for second in range(2, 20):
        book.beat("a", A, float(second))
    page = book.page(19.0)
    assert page.replicas == {"a": A}
    assert book.page(19.0 + LEASE_S).replicas == {"a": A}, "to the end of its lease"
    assert book.page(19.1 + LEASE_S).replicas == {}
    assert LEASE_S >= 3 * BEAT_S, "a beat or two may be lost"


def test_the_version_changes_with_what_is_in_it() -> None:
    book = AddressBook(0.0)
    seen = [book.page(10.0).version]
    book.beat("a", A, 10.0)
    seen.append(book.page(10.0).version)
    book.beat("a", A, 11.0)
    assert book.page(11.0).version == seen[-1], "a beat alone is no news"
    book.beat("a", B, 11.0)
    seen.append(book.page(11.0).version)
    book.leave("a", 12.0)
    seen.append(book.page(12.0).version)
    book.leave("a", 12.0)
    assert book.page(12.0).version == seen[-1]
    book.beat("b", B, 13.0)
    seen.append(book.page(13.0).version)
    seen.append(book.page(30.0).version)
    assert len(set(seen)) == len(seen)


def test_a_book_that_began_again_takes_nobody_out() -> None:
    had = {"a": A, "b": B}
    book = AddressBook(100.0)
    page = book.page(100.0)
    assert merged(had, page) == had
    book.beat("a", A, 101.0)
    assert merged({}, book.page(101.0)) == {"a": A}, "but who is in it is there"
    assert merged(had, book.page(101.0)) == had
    whole = book.page(100.0 + LEASE_S)
    assert whole.whole
    assert whole.version != page.version, "which a reader is told"
    assert merged(had, whole) == {"a": A}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 4.0), st.booleans()), max_size=40))
def test_equal_versions_mean_equal_pages(happened: list[tuple[str, float, bool]]) -> None:
    book, now = AddressBook(0.0), 0.0
    pages: dict[int, Page] = {}
    for name, later, leaves in happened:
        now += later
        if leaves:
            book.leave(name, now)
        else:
            book.beat(name, A, now)
        page = book.page(now)
        assert pages.setdefault(page.version, page) == page
