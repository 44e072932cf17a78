"""Whatever arrives, only Carpool's own errors come out."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import orjson
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import CarpoolError
from carpool.types import Datatype, RequestedOutput, RequestOptions, TensorSpec
from carpool.wire import v2
from later import many
from wire.samples import decode_request, entry, joined, request_of, signature, tensor_of

MODEL = signature(
    TensorSpec("image", Datatype.UINT8, (-1, 3)),
    TensorSpec("text", Datatype.BYTES, (-1,)),
    TensorSpec("flag", Datatype.BOOL, (2,)),
)
VALID = v2.encode_request(
    request_of(
        tensor_of("image", Datatype.UINT8, np.zeros((1, 2, 3))),
        tensor_of("text", Datatype.BYTES, [[b"ab", b"c"]]),
        tensor_of("flag", Datatype.BOOL, [[True, False]]),
        id="1",
        outputs=[RequestedOutput("scores", True, 2)],
        options=RequestOptions(priority=1, timeout=0.5, source="s"),
    )
)
BODY, END = joined(VALID), VALID.header_length or 0
RAW = signature(TensorSpec("x", Datatype.FP32, (-1, 3)))
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def feed(body: bytes, header_length: int | None) -> None:
    for model in (MODEL, RAW):
        with contextlib.suppress(CarpoolError):
            decode_request(body, header_length, model)
    with contextlib.suppress(CarpoolError):
        v2.decode_response(body, header_length)
    v2.decode_error(body)


@settings(max_examples=many(200), deadline=None)
@given(st.binary(max_size=64), st.none() | st.integers(-1, 70))
@example(b"", None)
@example(b"", 0)
def test_random_bytes(body: bytes, header_length: int | None) -> None:
    feed(body, header_length)


@settings(max_examples=many(300), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(BODY) - 1), st.integers(0, 255)), max_size=4), st.integers(-3, 3)
)
def test_changed_bytes(changes: list[tuple[int, int]], shift: int) -> None:
    body = bytearray(BODY)
    for position, value in changes:
        body[position] = value
    feed(bytes(body), END + shift)
    feed(bytes(body[: len(body) + min(shift, 0)]), END)


def paths(node: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [prefix, *(path for key, value in items for path in paths(value, (*prefix, key)))]


PATHS = paths(orjson.loads(BODY[:END]))[1:]


@settings(max_examples=many(300), deadline=None)
@given(st.sampled_from(PATHS), junk)
def test_changed_values(path: tuple[Any, ...], value: Any) -> None:
    document = orjson.loads(BODY[:END])
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    json = orjson.dumps(document)
    feed(json + BODY[END:], len(json))


@settings(max_examples=many(300), deadline=None)
@given(junk, st.sampled_from(list(Datatype)), st.lists(st.integers(0, 3), max_size=3))
def test_any_json_data(data: Any, datatype: Datatype, shape: list[int]) -> None:
    model = signature(TensorSpec("x", datatype, tuple(shape)), max_batch=0)
    with contextlib.suppress(CarpoolError):
        body = orjson.dumps({"inputs": [entry("x", datatype.value, shape, data=data)]})
        tensor = decode_request(body, None, model).inputs[0]
        assert (tensor.data.shape, tensor.data.dtype) == (tuple(shape), datatype.dtype)


@settings(max_examples=many(100), deadline=None)
@given(st.text(max_size=6) | st.binary(max_size=6))
def test_any_header_length(value: str | bytes) -> None:
    with contextlib.suppress(CarpoolError):
        assert v2.read_header_length(value, 10) in range(11)
