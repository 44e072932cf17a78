"""Taking a request apart by hand gives what a real parser gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import InvalidInput
from carpool.frontend.grpc.infer_messages import Families, Family, Parts, parse_whole, take_apart
from carpool.types import RequestOptions
from carpool.wire.v2 import RequestHead

texts = st.text(max_size=20)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    request = pb.ModelInferRequest(model_name=draw(texts), model_version=draw(texts), id=draw(texts))
    for name in draw(st.lists(texts, max_size=3)):
        request.inputs.add(
            name=name, datatype="UINT8", shape=draw(st.lists(st.integers(0, 2**40), max_size=4))
        )
    for name in draw(st.lists(texts, max_size=2)):
        request.outputs.add(name=name)
    for key in draw(st.lists(texts, max_size=2)):
        request.parameters[key].int64_param = draw(st.integers(-5, 5))
    sizes = st.sampled_from([0, 1, 127, 128, 129, 16383, 16384, 2**21, 70_000])
    request.raw_input_contents.extend(bytes(draw(sizes)) for _ in range(draw(st.integers(0, 3))))
    return bytes(request.SerializeToString())


def same(parts: Parts, other: Parts) -> bool:
    """The rest may be in another order, as maps have none."""
    rests = [pb.ModelInferRequest.FromString(one.rest) for one in (parts, other)]
    return (
        rests[0] == rests[1]
        and parts.id == other.id
        and [bytes(piece) for piece in parts.contents] == [bytes(piece) for piece in other.contents]
    )


@given(requests())
def test_both_ways_agree(message: bytes) -> None:
    parts = take_apart(message)
    assert parts is not None
    assert same(parts, parse_whole(message))


@given(st.binary(max_size=64) | st.builds(lambda a, b: a + b, requests(), st.binary(min_size=1, max_size=12)))
def test_what_the_hand_accepts_the_parser_judges_alike(message: bytes) -> None:
    parts = take_apart(message)
    if parts is None:
        return
    try:
        parsed = parse_whole(message)
    except InvalidInput:
        return  # broken further in: read_family or the check of the id says so
    assert same(parts, parsed)


@given(requests(), st.data())
def test_a_message_that_ends_early_is_not_taken_apart_wrongly(message: bytes, data: st.DataObject) -> None:
    cut = message[: data.draw(st.integers(0, max(0, len(message) - 1)))]
    parts = take_apart(cut)
    if parts is not None:
        assert sum(map(len, parts.contents)) <= len(cut)


@pytest.mark.parametrize(
    "message",
    [
        b"\x0a",
        b"\x0a\xff",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x3a" + b"\x80" * 5_000_000,
        b"\x08\x01",
        b"\x80\x80\x01",
        b"\x42\x01x",
        b"\x0a\xfa\xff\xff\xff\x07",
    ],
    ids=lambda message: message[:12].hex(),
)
def test_what_is_unusual_is_left_to_the_parser(message: bytes) -> None:
    assert take_apart(message) is None


def test_the_last_id_counts_as_the_protocol_says() -> None:
    parts = take_apart(b"\x1a\x01a\x1a\x01b")
    assert parts is not None
    assert parts.id == b"b" == parse_whole(b"\x1a\x01a\x1a\x01b").id


def test_unknown_fields_are_dropped_by_the_parser() -> None:
    request = pb.ModelInferRequest(model_name="m", id="i")
    parts = parse_whole(request.SerializeToString() + b"\xa2\x06\x03abc")
    assert parts == Parts(b"\x0a\x01m", b"i", [])


def _family(contents: list[bytes] | None = None) -> Family:
    return Family("m", "", RequestHead("", (), (), RequestOptions(), True, 0), contents)


@given(requests(), requests())
def test_what_is_recognised_is_what_would_be_read(first: bytes, second: bytes) -> None:
    families, family = Families(), _family()
    parts = take_apart(first)
    assert parts is not None
    families.remember(first, parts, family)
    for message in (first, memoryview(first), second, bytes(len(first))):
        known = families.recognise(message)
        if known is not None:
            read = take_apart(message)
            assert read is not None
            assert known.family is family
            assert (known.rest, known.id, known.tail) == (read.rest, read.id, read.tail)
            assert [bytes(piece) for piece in known.contents] == [bytes(piece) for piece in read.contents]


def test_a_message_with_other_contents_is_recognised_and_one_for_another_model_is_not() -> None:
    families, family = Families(), _family()
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"abc"]).SerializeToString()
    parts = take_apart(message)
    assert parts is not None
    families.remember(message, parts, family)
    known = families.recognise(message[:-3] + b"xyz")
    assert known is not None
    assert known.contents == (b"xyz",)
    assert families.recognise(message.replace(b"m", b"n", 1)) is None
    assert families.recognise(message + b"x") is None


def test_a_message_without_contents_is_recognised_as_a_whole() -> None:
    """Its tensors are in its client's memory."""
    families, family = Families(), _family()
    message = pb.ModelInferRequest(model_name="m", model_version="1").SerializeToString()
    parts = take_apart(message)
    assert parts is not None
    families.remember(message, parts, family)
    known = families.recognise(message)
    assert known is not None
    assert (known.family, known.contents, known.rest) == (family, (), message)
    assert families.recognise(message[:-1] + b"2") is None
    assert families.recognise(message + b"x") is None


@pytest.mark.parametrize(
    ("request_id", "raw", "typed"),
    [
        ("i", [b"abc"], None),
        ("i", [], None),
        ("", [b"abc", b"d"], None),
        ("", [b"abc"], [b"a"]),
        ("", [], [b"a"]),
    ],
    ids=["its-own-id", "its-own-id-alone", "two", "typed", "typed-alone"],
)
def test_only_messages_that_differ_in_their_one_tensor_alone_are_recognised(
    request_id: str, raw: list[bytes], typed: list[bytes] | None
) -> None:
    families = Families()
    request = pb.ModelInferRequest(model_name="m", id=request_id, raw_input_contents=raw)
    message = request.SerializeToString()
    parts = take_apart(message)
    assert parts is not None
    families.remember(message, parts, _family(typed))
    assert families.recognise(message) is None
