"""Long JSON is read by another process, and what goes wrong there is told here."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from carpool.errors import InvalidInput
from carpool.frontend import packing as long_json
from carpool.frontend.packing import LONG, LongJson, prepare
from carpool.types import Datatype, Signature, TensorSpec

ANY = Signature("free", (TensorSpec("x", Datatype.FP32, (-1,)),), (TensorSpec("y", Datatype.FP32, (1,)),), 8)
COUNT = 200_000
BODY = b'{"id":"7","inputs":[{"name":"x","datatype":"FP32","shape":[1,%d],"data":[%b]}]}' % (
    COUNT,
    b",".join([b"0.5"] * COUNT),
)


@pytest.fixture
def reader() -> Iterator[LongJson]:
    made = LongJson()
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
