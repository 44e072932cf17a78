"""Header blocks are read as the hpack library reads them, also where they are found again by their bytes."""

from __future__ import annotations

import hpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.frontend.grpc.grpc_infer import read_metadata
from carpool.frontend.grpc.h2_frames import BlockReader, Breach, Code, field
from carpool.frontend.grpc.rpc_heads import PRINTABLE, HeadReader, Status, trailers
from later import many

names = st.sampled_from(["x-a", "x-b", "user-agent", "x-long-name-of-a-field"])
values = st.sampled_from(["", "1", "a value", "y" * 200, "z" * 3000]) | st.text("abc%~ ", max_size=9)
lists = st.lists(st.lists(st.tuples(names, values), max_size=6), min_size=1, max_size=12)
CALL = [(":method", "POST"), (":scheme", "http"), (":path", "/s/m"), ("content-type", "application/grpc")]


@settings(max_examples=many(400))
@given(lists, st.booleans(), st.sampled_from([4096, 200, 0]))
def test_blocks_mean_what_they_meant(heads: list[list[tuple[str, str]]], huffman: bool, table: int) -> None:
    """Many in a row, with a table that changes and is too small for some of them."""
    encoder = hpack.Encoder()
    encoder.header_table_size = table
    reader, known = BlockReader(1 << 16), HeadReader(1 << 16)
    for fields in heads * 2:
        block = encoder.encode([*CALL, *fields], huffman=huffman)
        sent = [(name.encode(), value.encode()) for name, value in [*CALL, *fields]]
        found, size = reader.read(block)
        assert found == sent
        assert size == sum(32 + len(name) + len(value) for name, value in sent)
        assert list(known.read(block).metadata) == fields


def parent_block(*parents: bytes, more: bytes = b"") -> bytes:
    """As gRPC's own library writes it: never into the table."""
    before = b"".join(field(name.encode(), value.encode()) for name, value in CALL)
    return before + b"".join(field(b"traceparent", parent) for parent in parents) + more


def test_every_call_has_another_parent() -> None:
    reader, wish = HeadReader(1 << 16), field(b"x-carpool-source", b"gate")
    first = reader.read(parent_block(b"00-%032x-%016x-01" % (1, 1), more=wish))
    first.asked = read_metadata(first.metadata)
    for number in range(2, 300):
        block = parent_block(b"00-%032x-%016x-01" % (number, number), more=wish)
        found, anew = reader.read(block), HeadReader(1 << 16).read(block)
        assert found.asked == read_metadata(anew.metadata), "read once"
        for name in (name for name in dir(anew) if not name.startswith("_") and name != "asked"):
            assert callable(getattr(anew, name)) or getattr(found, name) == getattr(anew, name)


def test_a_parent_is_nothing_else() -> None:
    """Neither one of several, nor the inside of another field, nor left out altogether."""
    reader, one, two = HeadReader(1 << 16), b"00-%032x-%016x-01" % (1, 1), b"00-%032x-%016x-01" % (2, 2)
    reader.read(parent_block(one)).asked = read_metadata(())
    inside = b"\x00\x0btraceparent\x37"
    blocks = [parent_block(one, two), parent_block(two, two), parent_block(), parent_block(one[:-1])]
    blocks += [parent_block(one, more=field(b"x", inside + text)) for text in (one, two)]
    blocks += [parent_block(more=field(b"x", inside + text)) for text in (one, two)]
    for block in blocks * 2:
        found, anew = reader.read(block), HeadReader(1 << 16).read(block)
        assert (found.metadata, found.fault, found.asked) == (anew.metadata, anew.fault, None)
    with pytest.raises(Breach):
        reader.read(parent_block(one).removesuffix(one))


@settings(max_examples=many(2000))
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_mean_the_same_to_both(blocks: list[bytes]) -> None:
    reader, library = BlockReader(1 << 16), hpack.Decoder()
    for block in blocks:
        try:
            wanted = [(bytes(name), bytes(value)) for name, value in library.decode(block, raw=True)]
        except (hpack.HPACKError, IndexError):
            with pytest.raises(Breach):
                reader.read(block)
            return
        try:
            found, _ = reader.read(block)
        except Breach:  # a number that the library reads, though it is longer than any can be
            return
        assert found == wanted


def test_a_head_that_is_too_long_is_skimmed_and_the_table_stays_right() -> None:
    encoder, reader = hpack.Encoder(), BlockReader(1000)
    for fields in ([("x-a", "y" * 900), ("x-b", "z" * 200)], [("x-c", "w" * 40_000)], [("x-b", "z" * 200)]):
        found, size = reader.read(encoder.encode(fields, huffman=True))
        assert (size > 1000) == (fields[0][0] != "x-b")
    assert found == [(b"x-b", b"z" * 200)]


def test_fields_are_counted() -> None:
    with pytest.raises(Breach) as raised:
        BlockReader(1 << 16).read(b"\x82" * 600)
    assert raised.value.code is Code.ENHANCE_YOUR_CALM


@given(st.text(max_size=300), st.binary(max_size=300))
def test_what_we_write_can_be_read(details: str, value: bytes) -> None:
    decoder = hpack.Decoder(1 << 20)
    block = trailers(Status.INTERNAL, details) + field(b"x", value)
    found = dict(decoder.decode(block, raw=True))
    assert found[b"grpc-status"] == b"13"
    assert found[b"x"] == value
    message = found.get(b"grpc-message", b"").decode("ascii")
    assert set(message) <= set(PRINTABLE + "%") | set(filter(str.isalnum, map(chr, range(128))))
