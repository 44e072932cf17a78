"""Requests as bytes, read by the server's own code; and who asks, by weight."""

from __future__ import annotations

from collections import Counter

import pytest

from carpool.errors import InvalidInput
from carpool.frontend.http.exchange import HttpHead
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import HeadFinder, parse_head
from carpool.lab.load.grpc_client import tensor_calls
from carpool.lab.load.messages import (
    Asking,
    Draw,
    Filling,
    check_headers,
    check_source,
    make_tensors,
    picture_messages,
    tensor_messages,
)
from carpool.lab.load.tally import Ticket
from carpool.types import Datatype, Signature, Tensor, TensorSpec
from carpool.wire.v2 import read_header_length
from wire.samples import decode_request

SIGNATURE = Signature("m", (TensorSpec("x", Datatype.UINT8, (1000,)),), (), 64)
ASKING = Asking("host:1", "/v2/models/m/infer", (("Authorization", "Bearer x"),), deadline_ms=12.5)


def bodies(images: int) -> list[list[Tensor]]:
    return make_tensors([TensorSpec("x", Datatype.UINT8, (-1, 1000))], Filling(distinct=2), images)


def parse(message: tuple[bytes, bytes]) -> tuple[HttpHead, bytes]:
    head, separator, body = b"".join(message).partition(b"\r\n\r\n")
    limits = Limits()
    return parse_head(head + separator, limits, HeadFinder(limits)), body


@pytest.mark.parametrize("images", [1, 40])  # 40 KB are written apart from the head
def test_a_server_reads_what_was_meant(images: int) -> None:
    message = tensor_messages(ASKING, "m", bodies, Draw((("cam", 1),), ((2, 1),)))
    head, body = parse(message(Ticket(0, 0.0, images=images)))
    assert (head.method, head.path, head.content_length) == ("POST", "/v2/models/m/infer", len(body))
    assert head.headers[b"x-carpool-source"] == b"cam"
    assert head.headers[b"x-carpool-deadline-ms"] == b"12.500"
    assert head.headers[b"authorization"] == b"Bearer x"
    length = read_header_length(head.headers[b"inference-header-content-length"], len(body))
    request = decode_request(body, length, SIGNATURE)
    assert request.options.priority == 2
    assert request.binary_output
    assert request.inputs[0].shape == (images, 1000)


def test_different_tensors_take_turns() -> None:
    message = tensor_messages(ASKING, "m", bodies, Draw())
    assert message(Ticket(0, 0.0)) != message(Ticket(1, 0.0))
    assert message(Ticket(0, 0.0)) is message(Ticket(2, 0.0))


def test_a_call_has_the_same_in_its_metadata() -> None:
    call = tensor_calls(ASKING, "m", "", bodies, Draw((("cam", 1),)))
    _, metadata = call(Ticket(0, 0.0))
    assert dict(metadata) == {
        "authorization": "Bearer x",
        "x-carpool-source": "cam",
        "x-carpool-deadline-ms": "12.500",
    }


def test_pictures_are_bodies_as_they_are() -> None:
    pictures = [(b"jpeg", "image/jpeg"), (b"p" * 100_000, "image/png")]
    message = picture_messages(Asking("h", "/detect"), pictures, Draw())
    for number, (picture, kind) in enumerate(pictures):
        head, body = parse(message(Ticket(number, 0.0)))
        assert (head.path, body, head.headers[b"content-type"]) == ("/detect", picture, kind.encode())


def test_sources_come_by_weight_and_a_trace_has_its_own() -> None:
    draw = Draw((("often", 3), ("rarely", 1)))
    seen = Counter(draw.source(Ticket(number, 0.0)) for number in range(4000))
    assert seen["often"] / seen["rarely"] == pytest.approx(3, rel=0.15)
    assert draw.source(Ticket(0, 0.0, source="gate")) == "gate"
    assert Draw().source(Ticket(5, 0.0)) == ""
    assert Draw().priority(Ticket(5, 0.0)) == 0


@pytest.mark.parametrize(
    "header", [("A b", "x"), ("A", "x\r\nB: y"), ("Host", "y"), ("content-length", "1"), ("", "x")]
)
def test_headers_that_would_break_the_request(header: tuple[str, str]) -> None:
    with pytest.raises(InvalidInput, match="--header"):
        check_headers([header])


@pytest.mark.parametrize("source", ["", "x" * 129, "a\nb"])
def test_sources_that_the_server_would_refuse(source: str) -> None:
    with pytest.raises(InvalidInput, match="--source"):
        check_source(source)
