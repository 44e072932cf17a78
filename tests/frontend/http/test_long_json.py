"""Long JSON is read by another process, and what goes wrong there is told here."""

from __future__ import annotations

import base64
import os
import signal
import tracemalloc
from collections.abc import Iterator

import orjson
import pytest

from carpool.errors import CarpoolError, InvalidInput, TooLarge
from carpool.frontend.calls import packing as long_json
from carpool.frontend.calls.packing import LONG, LONG_PICTURE, LongJson, prepare
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.http.body import GatheredBody, Payer, charge_reading
from carpool.frontend.http.chat_format import read_chat
from carpool.frontend.http.generate_route import read_picture, read_tensors
from carpool.frontend.http.image_reading import BodyLayout, read_pictures
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.types import Datatype, Signature, TensorSpec

ANY = Signature("free", (TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (1,)),), 8)
COUNT = 200_000
BODY = b'{"id":"7","inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (
    COUNT,
    b",".join([b"0.5"] * COUNT),
)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[LongJson]:
    monkeypatch.setattr(long_json, "_LONGEST_S", 300.0)  # on a busy machine the process is long in starting
    made = LongJson(lambda _body, _seconds: None)
    yield made
    made.close()


def _not_here(*_: object) -> None:
    raise AssertionError("read in this process, where everybody else waits for it")


def test_it_reads_what_this_process_would_read(reader: LongJson, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted_head, wanted_pieces = prepare(BODY, None, ANY)
    monkeypatch.setattr(long_json, "prepare", _not_here)
    for _ in range(2):  # one process serves many
        head, pieces = reader.prepare(BODY, None, ANY)
        assert (head.id, head.batch, head.tail_size) == ("7", 1, wanted_head.tail_size)
        assert b"".join(pieces) == b"".join(map(bytes, wanted_pieces))


def test_a_long_body_is_charged_to_its_client() -> None:
    accounts = Accounts(100)
    for name in ("greedy", "other"):
        accounts.account(name, 0.0)
    reader = LongJson(charge_reading)
    body = GatheredBody(len(BODY), Payer(accounts, "greedy"))
    body.take(BODY)
    try:
        for _ in range(100):  # each takes some milliseconds
            reader.prepare(body, None, ANY)
            if accounts.rest_s("greedy", 0.0) > 0.0:
                break
        else:
            raise AssertionError("nobody paid for it")
    finally:
        reader.close()
    assert accounts.rest_s("other", 0.0) == 0.0


def test_short_ones_are_read_here(reader: LongJson) -> None:
    body = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1,1],"data":[1]}]}'
    assert reader.prepare(body, None, ANY)[0].batch == 1
    assert reader._process is None


@pytest.mark.parametrize("body", [bytes(LONG + 1), b'{"inputs":"' + b"x" * LONG, b"[" * (LONG + 1)])
def test_what_is_wrong_is_told(reader: LongJson, body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "prepare", _not_here)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="JSON"):
            reader.prepare(body, None, ANY)


def test_one_that_was_killed_is_replaced(reader: LongJson) -> None:
    reader.prepare(BODY, None, ANY)
    assert reader._process is not None
    first = reader._process.pid
    os.kill(first, signal.SIGKILL)
    reader._process.wait()
    assert reader.prepare(BODY, None, ANY)[0].id == "7"
    assert reader._process.pid != first


PICTURE = os.urandom(LONG_PICTURE)
TEXT = base64.b64encode(PICTURE).decode()


def test_pictures_in_long_json_are_read_there(reader: LongJson) -> None:
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{TEXT}"}}
    chat = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": [part]}]})
    images = orjson.dumps({"images": [TEXT, TEXT]})
    tensor = orjson.dumps({"x": TEXT, "id": "9"})
    assert reader.read(read_chat, chat, at_most=len(chat)).picture == PICTURE
    assert reader._process is None  # nothing but the length decides
    assert reader.read(read_chat, chat, at_most=LONG_PICTURE).picture == PICTURE
    assert reader._process is not None
    assert (
        reader.read(read_pictures, images, BodyLayout("json"), at_most=LONG_PICTURE).pictures == [PICTURE] * 2
    )
    found = reader.read(read_picture, tensor, ANY, at_most=LONG_PICTURE)
    assert found is not None
    assert (found.picture, found.id) == (PICTURE, "9")
    head, pieces = reader.read(read_tensors, b'{"x":[%b]}' % b",".join([b"0.5"] * COUNT), ANY)
    assert (head.tail_size, sum(map(len, pieces))) == (4 * COUNT, 4 * COUNT)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (orjson.dumps({"images": ["AAAA"] * 65, "blank": " " * LONG}), InvalidInput),
        (orjson.dumps({"images": ["A" * LONG] + ["AAAA"] * 64}), TooLarge),
    ],
)
def test_errors_of_pictures_keep_their_kind(reader: LongJson, body: bytes, kind: type[CarpoolError]) -> None:
    with pytest.raises(kind) as raised:
        reader.read(read_pictures, body, BodyLayout("json"))
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
