"""Replies of other servers: the same in any pieces, at a cost that is bounded by their bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.wire.http_reply import FEW_CHUNKS, NotHttp, ReplyReader

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(parts: list[bytes]) -> bytes:
    return _HEAD + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20), st.lists(st.integers(1, 30), max_size=60))
def test_a_chunked_body_is_the_same_in_any_pieces(parts: list[bytes], cuts: list[int]) -> None:
    sent, reader, body = chunked(parts) + b"more", ReplyReader(1 << 20, FEW_CHUNKS), b""
    for cut in [*cuts, len(sent)]:
        body += reader.feed(sent[:cut])
        sent = sent[cut:]
        if reader.over:
            break
    assert reader.over
    assert body == b"".join(parts)
    assert not reader.keep or not reader.extra


def test_the_rest_of_a_read_is_not_copied_for_each_chunk() -> None:
    reader, parts = ReplyReader(1 << 20), [b"x"] * 40_000
    reader.feed(_HEAD)
    data = chunked(parts)[len(_HEAD) :]
    assert reader.feed(data) == b"".join(parts)
    assert reader.over
    assert reader._buffer is data


def test_short_chunks_are_bounded_where_a_whole_body_is_wanted() -> None:
    few = ReplyReader(1 << 20, FEW_CHUNKS)
    assert few.feed(chunked([b"x"] * FEW_CHUNKS)) == b"x" * FEW_CHUNKS
    with pytest.raises(NotHttp, match="short chunks"):
        ReplyReader(1 << 20, FEW_CHUNKS).feed(chunked([b"x"] * (FEW_CHUNKS + 2)))
    long = ReplyReader(1 << 22, FEW_CHUNKS)
    assert len(long.feed(chunked([bytes(1024)] * 4 * FEW_CHUNKS))) == 4096 * FEW_CHUNKS
