"""Long answers in pieces: the text is what it is in one piece, and no piece is long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.errors import ModelError
from carpool.types import Array, Datatype, InferResponse, RequestedOutput, Tensor
from carpool.wire.codec import encode_response
from carpool.wire.slices import ELEMENTS, PIECE_BYTES, TEXT_BYTES, SlicedBytes, SlicedJson, Values

_LONGEST_NUMBER = 26
_MANY = 3 * ELEMENTS + 1


def tensor(name: str, datatype: Datatype, data: Array) -> Tensor:
    return Tensor(name, datatype, data.shape, data)


def strings(*values: bytes) -> Array:
    data = np.empty(len(values), dtype=object)
    data[:] = values
    return data


def both(
    tensors: Sequence[Tensor], outputs: Sequence[RequestedOutput] = ()
) -> tuple[bytes, list[bytes], int]:
    """The head in one piece; in slices; and the bytes behind it."""
    response = InferResponse("m", list(tensors), "1", "an id")
    whole = encode_response(response, outputs)
    sliced = encode_response(response, outputs, sliced=True)
    assert sliced.json is not None
    assert sliced.buffers == whole.buffers[1:]
    return bytes(whole.buffers[0]), list(sliced.json.pieces()), sliced.size


def test_json_in_slices_is_the_same_text() -> None:
    draw = np.random.default_rng(1)
    floats = draw.standard_normal(_MANY).astype(np.float32) * np.float32(1e20)
    cases = [
        tensor("f", Datatype.FP32, floats),
        tensor("d", Datatype.FP64, draw.standard_normal((3, ELEMENTS))),
        tensor("strided", Datatype.FP32, floats[::2]),
        tensor("i", Datatype.INT64, draw.integers(-(1 << 62), 1 << 62, _MANY)),
        tensor("u", Datatype.UINT8, np.arange(_MANY).astype(np.uint8)),
        tensor("b", Datatype.BOOL, np.arange(_MANY) % 3 == 0),
        tensor("s", Datatype.BYTES, strings(*(b"%d \xc3\xa9" % n for n in range(_MANY)))),
        tensor("l", Datatype.BYTES, strings(b"a", 'é"'.encode() * TEXT_BYTES, b"", b"b" * (TEXT_BYTES + 1))),
    ]
    for case in (*([one] for one in cases), cases):
        whole, pieces, _ = both(case)
        assert b"".join(pieces) == whole
        assert max(map(len, pieces)) <= max(_LONGEST_NUMBER * ELEMENTS, 7 * TEXT_BYTES)


def test_no_more_elements_are_written_at_once_than_a_slice_has(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    dumps = orjson.dumps

    def counting(value: Any, *rest: Any, **more: Any) -> bytes:
        written.append(getattr(value, "size", 0))
        return dumps(value, *rest, **more)

    monkeypatch.setattr(orjson, "dumps", counting)
    response = InferResponse("m", [tensor("y", Datatype.FP32, np.zeros(_MANY, np.float32))], "1")
    found = encode_response(response, sliced=True)
    assert not any(written), "nothing of it is written yet"
    assert found.json is not None
    for _ in found.json.pieces():
        pass
    assert max(written) == ELEMENTS
    assert sum(written) == _MANY


def test_short_values_are_written_as_before() -> None:
    response = InferResponse("m", [tensor("y", Datatype.FP32, np.zeros(ELEMENTS, np.float32))], "1")
    assert encode_response(response, sliced=True) == encode_response(response)


def test_beside_binary_outputs_and_short_ones() -> None:
    long = tensor("y", Datatype.FP32, np.ones(_MANY, np.float32))
    short = tensor("z", Datatype.INT32, np.arange(3, dtype=np.int32))
    outputs = [RequestedOutput("z"), RequestedOutput("y"), RequestedOutput("w", binary=True)]
    whole, pieces, size = both([long, short, tensor("w", Datatype.FP32, long.data)], outputs)
    assert b"".join(pieces) == whole
    assert size == long.data.nbytes


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_json_cannot_say_is_found_before_the_first_piece(wrong: float) -> None:
    data = np.zeros(1 << 19, np.float32)
    data[-1] = wrong
    pieces = SlicedJson([b"[", Values(tensor("y", Datatype.FP32, data)), b"]"]).pieces()
    with pytest.raises(ModelError, match="output 'y' holds NaN or infinity, which can only be binary"):
        assert not any(pieces)


def test_bytes_that_are_no_text_are_found_before_the_first_piece() -> None:
    for text in (strings(*[b"a"] * _MANY, b"\xff"), strings(b"a" * (3 * TEXT_BYTES) + b"\xc3")):
        pieces = SlicedJson([b"[", Values(tensor("y", Datatype.BYTES, text)), b"]"]).pieces()
        with pytest.raises(ModelError, match="output 'y' is not UTF-8 text"):
            assert not any(pieces)


def test_as_python_writes_numbers_and_what_is_no_text_as_python_does() -> None:
    draw = np.random.default_rng(2)
    floats = draw.standard_normal(_MANY).astype(np.float32) * np.float32(1e-20)
    floats[5] = np.nan
    text = strings(*[b"a\xff"] * _MANY, "é".encode() * TEXT_BYTES + b"\xc3")
    for datatype, data in (
        (Datatype.FP32, floats),
        (Datatype.FP16, floats.astype(np.float16)),
        (Datatype.INT8, np.arange(_MANY).astype(np.int8)),
        (Datatype.BYTES, text),
    ):
        values: Any = data.tolist()
        if datatype is Datatype.BYTES:
            values = [one.decode(errors="replace") for one in values]
        pieces = SlicedJson([b"[", Values(tensor("y", datatype, data), as_python=True), b"]"]).pieces()
        assert b"".join(pieces) == orjson.dumps(values)


def test_what_is_being_written_moves_to_memory_of_its_own() -> None:
    """As when a slow client has an answer in a slot, which is then used for something else."""
    expected = np.arange(_MANY, dtype=np.float32)
    data = expected.copy()
    json = SlicedJson([b"[", Values(tensor("y", Datatype.FP32, data)), b"]"])
    raw = SlicedBytes([data.data.cast("B"), b"", b"end"] * 9)
    json_pieces, raw_pieces = json.pieces(), raw.pieces()
    text, some = next(piece for piece in json_pieces if piece), bytes(next(raw_pieces))
    assert (json.held, raw.held) == (data.nbytes, 9 * (data.nbytes + 3))
    json.move()
    raw.move()
    data[:] = -1
    assert orjson.loads(text + b"".join(json_pieces)) == expected.tolist()
    left = [some, *map(bytes, raw_pieces)]
    assert b"".join(left) == (expected.tobytes() + b"end") * 9
    assert max(map(len, left)) <= PIECE_BYTES
