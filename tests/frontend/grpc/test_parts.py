"""Taking a request apart by hand gives what a real parser gives, and makes no more of it than is needed."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import InvalidInput, TooLarge
from carpool.frontend.grpc.infer_messages import (
    LONGEST_REST,
    Families,
    Family,
    Parts,
    read_family,
    read_request,
    take_apart,
    take_apart_whole,
)
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


def parse_whole(message: bytes) -> Parts:
    """Does the same with a real parser, which makes an object of everything."""
    try:
        request = pb.ModelInferRequest.FromString(message)
    except DecodeError:
        raise InvalidInput("no request") from None
    contents, request_id = list(request.raw_input_contents), request.id.encode()
    request.ClearField("raw_input_contents")
    request.ClearField("id")
    request.DiscardUnknownFields()
    return Parts(request.SerializeToString(deterministic=True), request_id, contents)


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
def test_what_is_unusual_takes_a_closer_look(message: bytes) -> None:
    assert take_apart(message) is None
    try:
        parsed = parse_whole(message)
    except InvalidInput:
        with pytest.raises(InvalidInput):
            take_apart_whole(message)
    else:
        assert same(take_apart_whole(message), parsed)


def test_the_last_id_counts_as_the_protocol_says() -> None:
    parts = take_apart(b"\x1a\x01a\x1a\x01b")
    assert parts is not None
    assert parts.id == b"b" == parse_whole(b"\x1a\x01a\x1a\x01b").id


@pytest.mark.parametrize(
    "unknown",
    [
        b"\xa2\x06\x03abc",
        b"\x08\x01",
        b"\x0d1234",
        b"\x3912345678",
        b"\x13\x0a\x01x\x1b\x1c\x14",
        b"\x8a\x00\x01m",
    ],
    ids=["bytes", "varint", "four", "eight", "groups", "long-tag"],
)
def test_what_a_parser_drops_is_dropped(unknown: bytes) -> None:
    message = pb.ModelInferRequest(model_name="m", id="i").SerializeToString() + unknown
    parts = take_apart_whole(message)
    assert same(parts, parse_whole(message))
    assert (parts.id, parts.contents) == (b"i", [])


# ── typed contents ──


_VALUES = {
    "bool_contents": st.booleans(),
    "int_contents": st.integers(-(2**31), 2**31 - 1),
    "int64_contents": st.integers(-(2**63), 2**63 - 1),
    "uint_contents": st.integers(0, 2**32 - 1),
    "uint64_contents": st.integers(0, 2**64 - 1),
    "fp32_contents": st.floats(width=32),
    "fp64_contents": st.floats(),
    "bytes_contents": st.binary(max_size=200),
}


@st.composite
def typed_requests(draw: st.DrawFn) -> bytes:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=draw(st.lists(st.binary(max_size=9))))
    for name in draw(st.lists(texts, max_size=3)):
        given = request.inputs.add(name=name, datatype="FP32", shape=[1])
        if draw(st.booleans()):
            given.contents.SetInParent()
        for field in draw(st.sets(st.sampled_from(sorted(_VALUES)), max_size=2)):
            getattr(given.contents, field).extend(draw(st.lists(_VALUES[field], max_size=5)))
    return bytes(request.SerializeToString())


@given(typed_requests(), st.data())
def test_typed_contents_are_taken_out_and_everything_else_stays(message: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(message)))
    for one in (message, message + message, message[:cut]):
        try:
            request = pb.ModelInferRequest.FromString(one)
        except DecodeError:
            continue
        read, typed = read_request(take_apart_whole(one))
        assert len(typed) == len(request.inputs) == len(read.inputs)
        for contents, whole, rest in zip(typed, request.inputs, read.inputs, strict=True):
            assert (contents is not None) == whole.HasField("contents")
            assert not rest.HasField("contents")
            assert (rest.name, rest.datatype, list(rest.shape)) == (
                whole.name,
                whole.datatype,
                list(whole.shape),
            )
            merged = pb.InferTensorContents.FromString(b"".join(contents or ()))
            assert merged == whole.contents


@given(st.binary(max_size=200) | st.builds(lambda a, b: a[: len(a) // 2] + b, typed_requests(), st.binary()))
def test_any_bytes_are_a_request_or_an_error(message: bytes) -> None:
    try:
        parts = take_apart_whole(message)
        request, typed = read_request(parts)
        read_family(request, parts.contents, typed)
    except InvalidInput:
        pass


@pytest.mark.parametrize(
    "repeated", [b"\x3a\x00", b"\x2a\x00", b"\x32\x00", b"\x22\x00", b"\x1a\x00", b"\x48\x01"]
)
def test_a_message_of_many_small_fields_is_not_walked_to_its_end(repeated: bytes) -> None:
    """Two bytes are enough for an object: a million of them come as a thousand, compressed."""
    touched = CountedBytes(repeated * 1_000_000)
    with pytest.raises(InvalidInput, match="fields"):
        take_apart(touched) or take_apart_whole(touched)  # type: ignore[arg-type]
    assert touched.read < 100_000


@pytest.mark.parametrize("inside", [b"\x18\x01", b"\x22\x00", b"\x2a\x00", b"\x0a\x00"])
def test_an_input_of_many_small_fields_is_not_parsed(inside: bytes) -> None:
    tensor = inside * 1_000_000
    message = b"\x0a\x01m\x2a" + varint(len(tensor)) + tensor
    assert take_apart(message) is None
    with pytest.raises(InvalidInput, match="the message has more than 16,384 fields"):
        take_apart_whole(message)


def test_many_inputs_of_many_small_fields_are_walked_as_one_message() -> None:
    tensor = b"\x0a\x01x" + b"\x2a\x00" * 1000
    with pytest.raises(InvalidInput, match="the message has more than 16,384 fields"):
        take_apart_whole((b"\x2a" + varint(len(tensor)) + tensor) * 1000)
    parts = take_apart_whole((b"\x2a" + varint(len(tensor)) + tensor) * 16)
    assert [len(contents or ()) for contents in parts.typed or ()] == [1000] * 16


def test_what_stands_beside_the_tensors_is_bounded() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1 << 20)])
    request.parameters["x"].string_param = "x" * (LONGEST_REST - 100)
    assert len(take_apart_whole(request.SerializeToString()).rest) <= LONGEST_REST
    request.parameters["x"].string_param = "x" * LONGEST_REST
    with pytest.raises(TooLarge, match="262,144 bytes beside its tensors"):
        take_apart_whole(request.SerializeToString())


class CountedBytes(bytes):
    """Counts the bytes that are looked at one by one."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read += 1
        return super().__getitem__(index)


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])


# ── requests that are alike ──


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
