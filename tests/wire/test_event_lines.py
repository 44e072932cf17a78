"""Server-sent events in pieces of any length."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.wire.event_lines import EventReader, NoEvents

SENT = b': hello\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 4\ndata:b\ndata: c\n\ndata\n\n\ndata: [DONE]\n\n'
READ = [b'{"a": 1}', b"b\nc", b"[DONE]"]


@given(st.lists(st.integers(0, len(SENT)), max_size=8))
def test_wherever_it_is_cut(cuts: list[int]) -> None:
    reader, found = EventReader(), []
    edges = [0, *sorted(cuts), len(SENT)]
    for start, end in pairwise(edges):
        found += reader.feed(SENT[start:end])
    assert found == READ
    assert not reader.inside


def test_one_byte_at_a_time() -> None:
    reader = EventReader()
    assert [data for place in range(len(SENT)) for data in reader.feed(SENT[place : place + 1])] == READ


def test_what_was_cut_off_is_not_told() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\n\ndata: 2\n") == [b"1"]
    assert reader.inside


@pytest.mark.parametrize("piece", [b"data: " + b"a" * 200, b"data: aaaaaaa\n" * 20])
def test_an_event_without_an_end(piece: bytes) -> None:
    with pytest.raises(NoEvents):
        EventReader(100).feed(piece)
