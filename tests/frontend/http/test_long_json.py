"""Long JSON of each route: what is read of it, and what is said of errors."""

from __future__ import annotations

import base64
import os
import tracemalloc

import numpy as np
import orjson
import pytest

from carpool.errors import CarpoolError, InvalidInput, TooLarge
from carpool.extensions.streams.generate_routes import read_picture, read_tensors
from carpool.extensions.text.chat_format import read_chat
from carpool.frontend.calls.packing import prepare
from carpool.frontend.http.image_reading import BodyLayout, read_pictures
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.types import Datatype, Signature, TensorSpec

LONG = 256 * 1024
ANY = Signature("free", (TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (1,)),), 8)
COUNT = 200_000
BODY = b'{"id":"7","inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (
    COUNT,
    b",".join([b"0.5"] * COUNT),
)


def test_it_reads_what_would_be_read_at_once() -> None:
    head, pieces = prepare(BODY, None, ANY)
    assert (head.id, head.batch, head.tail_size) == ("7", 1, 4 * COUNT)
    assert b"".join(map(bytes, pieces)) == np.full(COUNT, 0.5, "<f4").tobytes()


@pytest.mark.parametrize("body", [bytes(LONG + 1), b'{"inputs":"' + b"x" * LONG, b"[" * (LONG + 1)])
def test_what_is_wrong_is_told(body: bytes) -> None:
    for _ in range(2):
        with pytest.raises(InvalidInput, match="JSON"):
            prepare(body, None, ANY)


PICTURE = os.urandom(2 << 20)
TEXT = base64.b64encode(PICTURE).decode()


def test_pictures_in_long_json() -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}}
    chat = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    images = orjson.dumps({"images": [TEXT, TEXT]})
    tensor = orjson.dumps({"x": TEXT, "id": "9"})
    assert read_chat(chat).picture == PICTURE
    assert read_pictures(images, BodyLayout("json")).pictures == [PICTURE] * 2
    found = read_picture(tensor, ANY)
    assert found is not None
    assert (found.picture, found.id) == (PICTURE, "9")
    head, pieces = read_tensors(b'{"x":[%b]}' % b",".join([b"0.5"] * COUNT), ANY)
    assert (head.tail_size, sum(map(len, pieces))) == (4 * COUNT, 4 * COUNT)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (orjson.dumps({"images": ["AAAA"] * 65, "blank": " " * LONG}), InvalidInput),
        (orjson.dumps({"images": ["A" * LONG] + ["AAAA"] * 64}), TooLarge),
    ],
)
def test_errors_of_pictures_keep_their_kind(body: bytes, kind: type[CarpoolError]) -> None:
    with pytest.raises(kind) as raised:
        read_pictures(body, BodyLayout("json"))
    assert raised.value.field in ("blank", "file")


def test_lists_are_counted_before_tensors_are_read() -> None:
    with pytest.raises(InvalidInput, match="more than"):
        read_tensors(b'{"x":[%b[]]}' % (b"[]," * 1_000_000), ANY)


def test_blanks_in_base64_take_no_memory() -> None:
    """Text that was split at a million blanks would be a million strings."""
    text = " ".join(TEXT[start : start + 2] for start in range(0, len(TEXT), 2))
    tracemalloc.start()
    try:
        assert from_base64(text, "image") == PICTURE
        assert tracemalloc.get_traced_memory()[1] < 4 * len(text)
    finally:
        tracemalloc.stop()
