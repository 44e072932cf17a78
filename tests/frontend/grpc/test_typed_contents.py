"""Numbers in typed fields are read as a protobuf parser reads them, without an object for each."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import InvalidInput
from carpool.frontend.grpc import typed_contents
from carpool.frontend.grpc.typed_contents import typed_tensor
from carpool.types import Datatype, Tensor
from carpool.wire.codec import to_binary
from carpool.wire.head import TensorHead
from frontend.grpc.test_parts import varint

FIELDS = {
    Datatype.BOOL: ("bool_contents", 1, st.booleans()),
    Datatype.INT8: ("int_contents", 2, st.integers(-(2**7), 2**7 - 1)),
    Datatype.INT16: ("int_contents", 2, st.integers(-(2**15), 2**15 - 1)),
    Datatype.INT32: ("int_contents", 2, st.integers(-(2**31), 2**31 - 1)),
    Datatype.INT64: ("int64_contents", 3, st.integers(-(2**63), 2**63 - 1)),
    Datatype.UINT8: ("uint_contents", 4, st.integers(0, 2**8 - 1)),
    Datatype.UINT16: ("uint_contents", 4, st.integers(0, 2**16 - 1)),
    Datatype.UINT32: ("uint_contents", 4, st.integers(0, 2**32 - 1)),
    Datatype.UINT64: ("uint64_contents", 5, st.integers(0, 2**64 - 1)),
    Datatype.FP32: ("fp32_contents", 6, st.floats(width=32)),
    Datatype.FP64: ("fp64_contents", 7, st.floats()),
    Datatype.BYTES: ("bytes_contents", 8, st.binary(max_size=300)),
}


def read(datatype: Datatype, contents: Sequence[bytes], elements: int) -> bytes:
    return bytes(typed_tensor(TensorHead("x", datatype, (elements,)), elements, contents))


def parsed(datatype: Datatype, message: bytes) -> tuple[bytes, int]:
    """The tensor as it was read before: by a parser, one object a value."""
    values = list(getattr(pb.InferTensorContents.FromString(message), FIELDS[datatype][0]))
    if datatype is Datatype.BYTES:
        return b"".join(len(value).to_bytes(4, "little") + value for value in values), len(values)
    return np.array(values, datatype.dtype).tobytes(), len(values)


@given(st.data(), st.sampled_from(sorted(FIELDS, key=lambda one: one.value)))
def test_values_are_read_as_a_parser_reads_them(data: st.DataObject, datatype: Datatype) -> None:
    name, _, values = FIELDS[datatype]
    pieces = []
    for _ in range(data.draw(st.integers(1, 3))):
        message = pb.InferTensorContents()
        getattr(message, name).extend(data.draw(st.lists(values, max_size=40)))
        pieces.append(message.SerializeToString())
    expected, count = parsed(datatype, b"".join(pieces))
    assert read(datatype, pieces, count) == read(datatype, [b"".join(pieces)], count) == expected
    with pytest.raises(InvalidInput, match=f"has {count} values, but shape"):
        read(datatype, pieces, count + 1)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=20), st.sampled_from([1, 2, 3, 4, 5]), st.booleans())
def test_numbers_one_by_one_and_numbers_that_are_too_long(
    values: list[int], number: int, packed: bool
) -> None:
    """Parsers take them, and drop the upper bits."""
    datatype = next(one for one, (_, of, _) in FIELDS.items() if of == number and one.size in (1, 4, 8))
    datatype = {2: Datatype.INT32, 4: Datatype.UINT32}.get(number, datatype)
    if packed:
        run = b"".join(map(varint, values))
        message = varint(number << 3 | 2) + varint(len(run)) + run
    else:
        message = b"".join(varint(number << 3) + varint(value) for value in values)
    expected, count = parsed(datatype, message)
    assert read(datatype, [message], count) == expected


@given(st.binary(max_size=120), st.sampled_from(sorted(FIELDS, key=lambda one: one.value)))
def test_any_bytes_are_a_tensor_or_an_error(message: bytes, datatype: Datatype) -> None:
    try:
        expected, count = parsed(datatype, message)
    except (DecodeError, OverflowError):
        count = 1
        expected = b""
    try:
        found = read(datatype, [message], count)
    except InvalidInput:
        return
    assert not expected or found == expected


@pytest.mark.parametrize("piece", [7, 8, 9])
def test_a_number_is_whole_wherever_a_piece_of_its_run_ends(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_contents, "_PIECE", max(piece, 10))
    values = [2 ** (3 * (number % 21)) for number in range(200)]
    message = pb.InferTensorContents(uint64_contents=values).SerializeToString()
    assert read(Datatype.UINT64, [message], 200) == np.array(values, np.uint64).tobytes()


def test_millions_of_values_are_refused_before_any_of_them_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong field, a wrong count, and values one by one that are more than the shape has."""
    many = 3_000_000
    run = varint(4 << 3 | 2) + varint(many) + bytes(many)
    monkeypatch.setattr(typed_contents, "_read", lambda *_given: pytest.fail("a value was read"))
    for datatype, message, sentence in (
        (Datatype.FP32, run, "go into fp32_contents, not into uint_contents"),
        (Datatype.FP16, run, "only raw_input_contents"),
        (Datatype.UINT8, run, f"has {many} values, but shape \\[6\\] needs 6"),
        (Datatype.UINT8, b"\x20\x01" * many, "has more than 4,102 fields"),
        (Datatype.BYTES, b"\x42\x00" * many, "has more than 4,102 fields"),
        (Datatype.UINT8, b"\x42\x00" * 10, "not into bytes_contents"),
        (Datatype.UINT8, b"\x48\x00" * many, "has more than 4,102 fields"),
    ):
        tracemalloc.start()
        with pytest.raises(InvalidInput, match=sentence):
            read(datatype, [message], 6)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 << 20


def test_what_is_read_takes_little_more_than_the_tensor() -> None:
    many = 2_000_000
    message = varint(2 << 3 | 2) + varint(many) + b"\x01" * many
    tracemalloc.start()
    tensor = read(Datatype.INT32, [message], many)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert tensor == np.ones(many, np.int32).tobytes()
    assert peak < 3 * len(tensor)  # with the copy that this test makes


def test_strings_are_framed_as_raw_contents_are() -> None:
    array = np.array([b"", b"abc", bytes(70_000)], object)
    message = pb.InferTensorContents(bytes_contents=array.tolist()).SerializeToString()
    assert read(Datatype.BYTES, [message], 3) == to_binary(Tensor("x", Datatype.BYTES, (3,), array))
