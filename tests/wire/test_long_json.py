"""Long JSON reads as it would at once, and lets others have their turn while it is read."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.types import Datatype
from carpool.wire import long_json
from carpool.wire.codec import from_json
from carpool.wire.head import TensorHead, load_object
from carpool.wire.long_json import LongNumbers, ShortJson, decode_base64

MEMBERS = 70_000  # bytes that make a document long


def numbers_in(value: Any) -> Any:
    """Puts lists in the place of `LongNumbers`."""
    if isinstance(value, LongNumbers):
        shape = value.shape()
        flat = [one for piece in value.slices() for one in piece]
        return np.array(flat, object).reshape(shape).tolist()
    if isinstance(value, dict):
        return {name: numbers_in(one) for name, one in value.items()}
    return [numbers_in(one) for one in value] if isinstance(value, list) else value


def read(body: bytes) -> Any:
    return numbers_in(load_object(body, "request"))


NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=2),
    st.lists(NUMBERS, min_size=1, max_size=20),
    st.tuples(TEXTS, TEXTS, NUMBERS),
    st.booleans(),
    st.booleans(),
)
def test_it_reads_what_would_be_read_at_once(
    shape: list[int], values: list[Any], others: tuple[str, str, Any], ascii_only: bool, spaced: bool
) -> None:
    name, text, number = others
    nested = np.resize(np.array(values, object), (512, *shape)).tolist()
    document = {
        name: [text, {"x": text * 3000}],
        text * 100: number,
        "long": "a" * MEMBERS,
        "numbers": [{"nested": nested, "flat": np.resize(np.array(values, object), 5000).tolist()}],
    }
    body = json.dumps(document, ensure_ascii=ascii_only, indent=1 if spaced else None).encode(
        errors="replace"
    )
    assert read(body) == orjson.loads(body)


def numbers(text: bytes) -> LongNumbers:
    found = load_object(b'{"a":%b,"b":"%b"}' % (text, b"x" * MEMBERS), "request")["a"]
    assert isinstance(found, LongNumbers)
    return found


def wrong(text: bytes, shape: Sequence[int]) -> str:
    head = TensorHead("x", Datatype.FP32, tuple(shape))
    with pytest.raises(InvalidInput) as raised:
        from_json(numbers(text), head, "input 'x'")
    return raised.value.message


ROW = b"[" + b"1," * 299 + b"1]"


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        (b"[%b,%b]" % (ROW, ROW[:-3] + b"]"), [2, 300], "unevenly"),
        (b"[%b%b]" % (ROW, ROW), [2, 300], "unevenly"),
        (b"[%b,1]" % ROW, [301], "unevenly"),
        (b"[%b,,%b]" % (ROW, ROW), [3, 300], "unevenly"),
        (ROW.replace(b"1,", b",", 1), [300], "not valid JSON"),
        (ROW[:-2] + b"]", [300], "not valid JSON"),
        (ROW.replace(b"1,", b"1 1,", 1), [300], "not valid JSON"),
        (ROW.replace(b"1,", b"01,", 1), [300], "not valid JSON"),
        (ROW.replace(b"1,", b"true,", 1), [300], "only numbers"),
        (ROW.replace(b"1,", b"1e40,", 1), [300], "out of range"),
        (ROW, [299], "has 300 elements"),
        (b"[%b,%b]" % (ROW, ROW), [300, 2], "not nested as shape"),
        (b"[%b,%b]" % (ROW, ROW), [2, 300, 1], "not nested as shape"),
        (b"[" * 99 + ROW + b"]" * 98, [300], "unevenly"),
    ],
)
def test_what_is_wrong_with_numbers(text: bytes, shape: Sequence[int], words: str) -> None:
    assert words in wrong(text, shape)


def test_numbers_nested_deeper_than_their_shape_are_flattened() -> None:
    head = TensorHead("x", Datatype.INT32, (600,))
    assert from_json(numbers(b"[[%b],[%b]]" % (ROW, ROW)), head, "x").tolist() == [1] * 600


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'"' + b"\\" * 100_001, "not valid JSON"),
        (b'"' + b"x" * 100_000, "not valid JSON"),
        (b'"' + b"x\n" * 50_000 + b'"', "not valid JSON"),
        (b'"' + b"\\ud800" * 50_000 + b'"', "not valid JSON"),
        (b" " * 100_000 + b"x", "not valid JSON"),
        (b"[" + b'"a",' * 250_000 + b'"a"]', "more than"),
        (b"[" + b'"' + b"a" * 200 + b'",' + (b'"%b",' % (b"a" * 200)) * 25_000 + b"1]", "more than"),
        (b"[" + b'{"a":1},' * 11_000 + b"1]", "more than 100,000 values or 10,000 lists beside"),
        (b"[" * 150 + b"1," * 50_000 + b"1" + b"]" * 150, "nested too deeply"),
        (b'[{"a":' * 995 + b'"%b"' % (b"x" * MEMBERS) + b"}]" * 995, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_documents(text: bytes, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        load_object(b'{"a":%b}' % text, "request")


def test_a_mark_cannot_be_written_by_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    body = orjson.dumps({"a": "x" * MEMBERS})
    marks = {ShortJson(body).left for _ in range(3)}
    assert len(marks) == 3


@pytest.mark.parametrize("size", [0, 1, 2, 3, 65_535, 200_001])
@pytest.mark.parametrize("line", [0, 76])
def test_base64(size: int, line: int) -> None:
    data = os.urandom(size)
    text = base64.b64encode(data).decode()
    if line:
        text = "\r\n".join(text[start : start + line] for start in range(0, len(text), line))
    assert decode_base64(text) == data


@pytest.mark.parametrize(
    "text", ["QQ=" * 50_000, "QQ==" * 50_000, "Q" * 100_001, "é" * 100_000, "QUFB" * 40_000 + "QQ"]
)
def test_wrong_base64(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode_base64(text)


def test_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """By counts: no piece that is read at once is long, and after each one another thread may run."""
    read_at_once: list[int] = []
    turns = 0

    def loads(data: bytes) -> Any:
        read_at_once.append(len(data))
        return orjson.loads(data)

    def rest(_seconds: float) -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(long_json, "_read", loads)
    monkeypatch.setattr(long_json, "sleep", rest)
    body = b'{"data":[%b0.5],"text":"%b"}' % (b"0.123456789," * 100_000, b"A" * 1_000_000)
    document = load_object(body, "request")
    from_json(document["data"], TensorHead("x", Datatype.FP32, (100_001,)), "x")
    decode_base64(document["text"])
    assert max(read_at_once) < 70_000
    assert turns > 3 * len(body) // 70_000
