"""HTTP/2 as the gRPC front end speaks it: what it takes, and how it ends what breaks the rules."""

from __future__ import annotations

import random
import struct
import threading
import zlib
from collections.abc import Iterator
from time import monotonic

import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.frontend.clients.loop_turns import StreamTurns
from carpool.frontend.grpc import h2_connection, rpc
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.h2_frames import Code, field, frame, reset, window_update
from carpool.frontend.grpc.rpc_heads import Status
from carpool.types import Datatype
from frontend.fake_door import echo
from frontend.grpc.front_end import MAX_BODY, SERVICE, SUM, FrontEnd, floats, front_end, image_request
from frontend.grpc.wire import LAST, OPENING, WHOLE, Said, Wire, block, data, framed, head, wire
from frontend.http.front_end import models
from frontend.http.harness import PATIENCE
from waiting import until

MESSAGE = framed(image_request().SerializeToString())
ALIVE = "/grpc.health.v1.Health/Check"
MANY = 20_000


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end(*models(), echo("long", Datatype.UINT8), slots=400) as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[Wire]:
    with wire(front) as made:
        yield made


def is_good(said: Said) -> bool:
    response = pb.ModelInferResponse.FromString(said.data[5:])
    return floats(response) == SUM and said.fields[":status"] == "200" and said.status == Status.OK


def ask(client: Wire, stream: int = 1, **more: str) -> Said:
    client.send(head(stream, **more), data(stream, MESSAGE))
    return client.answer(stream)


# ── what is allowed ──


def test_a_call(client: Wire) -> None:
    for stream in (1, 3, 7):
        assert is_good(ask(client, stream))


@pytest.mark.parametrize("at", range(1, len(MESSAGE)))
def test_a_message_may_be_cut_anywhere(client: Wire, at: int) -> None:
    client.send(head(1), data(1, MESSAGE[:at], 0), data(1, MESSAGE[at:]))
    assert is_good(client.answer(1))


def test_a_connection_may_be_cut_anywhere(front: FrontEnd) -> None:
    sent = OPENING + head(1) + data(1, MESSAGE)
    with wire(front, b"") as client:
        for position in range(len(sent)):
            client.send(sent[position : position + 1])
        assert is_good(client.answer(1))


@pytest.mark.parametrize("seed", range(6))
def test_long_messages_side_by_side_in_frames_of_any_size(front: FrontEnd, seed: int) -> None:
    """Whole frames of one message are taken together, as far as they are here: nothing may get lost between
    them, nor into another's message."""
    chance = random.Random(seed)
    sent = {stream: chance.randbytes(chance.randrange(20_000, 300_000)) for stream in (1, 3, 5)}
    rest = {stream: framed(long_message(content)) for stream, content in sent.items()}
    frames = [head(stream) for stream in sent]
    while rest:
        stream = chance.choice((*rest, min(rest)))
        size = chance.choice((0, 1, 15, 16, 1023, 1024, 5000, 16_384, 100_000))
        piece, rest[stream] = rest[stream][:size], rest[stream][size:]
        if rest[stream]:
            flags = chance.choice((0, 0, 0, 0, h2.PADDED))
            padding = b"\x03" if flags else b""
            frames.append(data(stream, padding + piece + bytes(len(padding) and 3), flags))
        else:
            del rest[stream]
            frames.append(data(stream, piece, h2.END_STREAM))
    answers, waiting = dict.fromkeys(sent, b""), set(sent)
    room = h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24}) + window_update(0, 1 << 24)
    with wire(front, h2.PREFACE + room) as client:
        threading.Thread(target=client.send, args=frames).start()
        for found in client.frames():
            assert found.kind not in (h2.GOAWAY, h2.RST_STREAM), found
            if found.kind == h2.DATA:
                answers[found.stream] += found.payload
            if found.kind != h2.SETTINGS and found.flags & h2.END_STREAM:
                waiting.discard(found.stream)
            if not waiting:
                break
    for stream, answer in answers.items():
        assert pb.ModelInferResponse.FromString(answer[5:]).raw_output_contents[0] == sent[stream]
    front.until_slots_are_back()


def long_message(content: bytes) -> bytes:
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, len(content)])
    request.raw_input_contents.append(content)
    return bytes(request.SerializeToString())


def test_every_byte_in_a_frame_of_its_own_and_nothing_between_them(client: Wire) -> None:
    frames = [data(1, MESSAGE[at : at + 1], 0) + data(1, b"", 0) for at in range(len(MESSAGE))]
    client.send(head(1), *frames, data(1, b""))
    assert is_good(client.answer(1))


def test_padding_priorities_and_frames_of_other_kinds(client: Wire) -> None:
    payload = b"\x07" + b"\0\0\0\0\x10" + block() + bytes(7)
    client.send(
        frame(h2.PRIORITY, 0, 5, b"\0\0\0\1\x10"),
        frame(h2.HEADERS, WHOLE | h2.PADDED | h2.HAS_PRIORITY, 1, payload),
        frame(0xEE, 0xFF, 1, b"whatever"),
        data(1, b"\x03" + MESSAGE[:9] + bytes(3), h2.PADDED),
        data(1, b"\x00" + MESSAGE[9:] + b"", h2.PADDED | h2.END_STREAM),
    )
    assert is_good(client.answer(1))


def test_a_head_in_pieces_and_trailers(client: Wire) -> None:
    parts = [block()[at : at + 20] for at in range(0, len(block()), 20)]
    client.send(
        frame(h2.HEADERS, 0, 1, parts[0]),
        *(frame(h2.CONTINUATION, 0, 1, part) for part in parts[1:-1]),
        frame(h2.CONTINUATION, WHOLE, 1, parts[-1]),
        data(1, MESSAGE, 0),
        frame(h2.HEADERS, LAST, 1, field(b"x-more", b"y")),
    )
    assert is_good(client.answer(1))


def test_calls_side_by_side(front: FrontEnd, client: Wire) -> None:
    streams = range(1, 41, 2)
    client.send(*map(head, streams), *(data(stream, MESSAGE[:20], 0) for stream in streams))
    client.send(*(data(stream, MESSAGE[20:]) for stream in streams))
    done = [found for found in (client.until(h2.HEADERS, h2.END_STREAM) for _ in streams) if found]
    assert sorted(found.stream for found in done) == list(streams)


def test_answers_wait_for_windows(front: FrontEnd) -> None:
    size = 100_000
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size))
    message = framed(request.SerializeToString())
    small = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 10, h2.HEADER_TABLE_SIZE: 0})
    with wire(front, small) as client:
        client.send(
            head(1), *(data(1, message[at : at + 16_000], 0) for at in range(0, len(message), 16_000))
        )
        client.send(data(1, b""))
        first = client.until(h2.DATA)
        assert len(first.payload) == 10
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 5}))  # less than nothing is left
        client.send(window_update(1, 20))
        assert len(client.until(h2.DATA).payload) == 15
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20}))
        received = 25
        while received < h2.DEFAULT_WINDOW:
            received += len(client.until(h2.DATA).payload)
        assert received == h2.DEFAULT_WINDOW  # that of the connection
        client.send(window_update(0, 1 << 20))
        while received < size:
            received += len(client.until(h2.DATA).payload)
        assert client.until(h2.HEADERS, h2.END_STREAM).stream == 1
        assert client.is_alive()


def test_windows_open_for_long_messages() -> None:
    size = 6 << 20
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size))
    message = framed(request.SerializeToString())
    with front_end(echo("long", Datatype.UINT8), max_body_bytes=2 * size) as front, wire(front) as client:
        client.send(head(1), data(1, message[:10], 0))
        more = client.until(h2.WINDOW_UPDATE)
        while more.stream != 1:
            more = client.until(h2.WINDOW_UPDATE)
        step = 1 << 19
        client.send(window_update(0, 1 << 24), window_update(1, 1 << 24))
        for at in range(10, len(message), step):
            last = at + step >= len(message)
            client.send(data(1, message[at : at + step], h2.END_STREAM if last else 0))
        assert len(client.answer(1).data) > size


def test_the_same_head_again_is_found_by_its_bytes_until_the_table_changes(client: Wire) -> None:
    """Two calls whose heads are the same bytes, and mean two things."""
    kept = b"\x40" + field(b"x-carpool-source", b"one")[1:]  # put into the table, as its first entry
    other = b"\x40" + field(b"x-carpool-latest", b"yes!")[1:]
    by_number = block() + b"\xbe"  # the first entry
    for stream, prepared in ((1, kept), (5, other)):
        client.send(frame(h2.HEADERS, WHOLE, stream, block(path=ALIVE) + prepared), data(stream, framed(b"")))
        client.answer(stream)
        client.send(frame(h2.HEADERS, WHOLE, stream + 2, by_number), data(stream + 2, MESSAGE))
        said = client.answer(stream + 2)
        if stream == 1:
            assert is_good(said)
        else:
            assert said.fields["carpool-field"] == "X-Carpool-Latest"


# ── calls that are wrong ──


@pytest.mark.parametrize(
    ("fields", "payload", "status"),
    [
        ({}, framed(b"", compressed=True), Status.INTERNAL),
        ({}, b"\x02\0\0\0\0", Status.INTERNAL),
        ({}, b"", Status.INTERNAL),
        ({}, b"\0\0", Status.INTERNAL),
        ({}, MESSAGE[:-1], Status.INTERNAL),
        ({"grpc_encoding": "br"}, MESSAGE, Status.UNIMPLEMENTED),
        ({"grpc_encoding": "gzip"}, framed(b"not gzip", compressed=True), Status.INTERNAL),
        ({"grpc_encoding": "deflate"}, framed(zlib.compress(b"x")[:-1], compressed=True), Status.INTERNAL),
        ({"grpc_timeout": "soon"}, MESSAGE, Status.INTERNAL),
        ({"grpc_timeout": "123456789S"}, MESSAGE, Status.INTERNAL),
        ({"grpc_timeout": "0n"}, MESSAGE[:10], Status.DEADLINE_EXCEEDED),
        ({"path": SERVICE + "Nothing"}, MESSAGE, Status.UNIMPLEMENTED),
        ({"path": "*"}, MESSAGE, Status.UNIMPLEMENTED),
    ],
)
def test_a_call_that_is_wrong_ends_alone(
    client: Wire, fields: dict[str, str], payload: bytes, status: Status
) -> None:
    ends = 0 if status is Status.DEADLINE_EXCEEDED else h2.END_STREAM
    client.send(head(1, **fields), data(1, payload, ends))
    said = client.answer(1)
    assert (said.fields[":status"], said.status) == ("200", status)
    assert said.fields["grpc-message"]
    assert is_good(ask(client, 3))


def test_a_message_too_many(client: Wire) -> None:
    client.send(head(1), data(1, framed(bytes(10))[:9], 0))
    client.send(data(1, b"\0" * 6 + MESSAGE, 0))
    assert client.answer(1).status in (Status.INTERNAL, Status.INVALID_ARGUMENT)
    assert is_good(ask(client, 3))


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"method": "GET"}, "405"), ({"content_type": "text/plain"}, "415"), ({"content_type": ""}, "415")],
)
def test_what_is_no_grpc_is_told_so(client: Wire, fields: dict[str, str], status: str) -> None:
    client.send(head(1, **fields))
    assert client.answer(1).fields == {":status": status}
    assert is_good(ask(client, 3))


@pytest.mark.parametrize("kind", ["application/grpc+proto", "application/grpc;x=y"])
def test_kinds_of_messages(client: Wire, kind: str) -> None:
    assert is_good(ask(client, content_type=kind))


@pytest.mark.parametrize(("encoding", "wbits"), [("gzip", 31), ("deflate", 15)])
def test_bombs_are_refused_by_what_comes_out(
    front: FrontEnd, client: Wire, encoding: str, wbits: int
) -> None:
    press = zlib.compressobj(1, zlib.DEFLATED, wbits)
    bomb = press.compress(bytes(16 * MAX_BODY)) + press.flush()
    client.send(head(1, grpc_encoding=encoding), data(1, framed(bomb, compressed=True)))
    said = client.answer(1)
    assert said.status == Status.RESOURCE_EXHAUSTED
    assert "larger than max" in said.fields["grpc-message"]
    until(lambda: front.server.service.accounts.bytes == 0)
    assert is_good(ask(client, 3))


def test_a_length_that_no_model_takes_is_refused_before_the_message(client: Wire) -> None:
    client.send(head(1), data(1, b"\0" + struct.pack(">L", 1 << 30), 0))
    said = client.answer(1)
    assert said.status == Status.RESOURCE_EXHAUSTED
    client.send(data(1, bytes(1000), 0), data(1, b""))  # what was on its way
    assert is_good(ask(client, 3))


# ── streams that are wrong ──


HEADS = {
    "upper case": block() + field(b"X-Upper", b"y"),
    "an unknown pseudo-header": field(b":unknown", b"y") + block(),
    "one for answers": field(b":status", b"200") + block(),
    "one twice": field(b":path", b"/") + block(),
    "one behind others": block() + field(b":late", b"y"),
    "none at all": field(b"te", b"trailers"),
    "an empty path": block(path=""),
    "connection": block() + field(b"connection", b"close"),
    "another te": block() + field(b"te", b"gzip"),
    "a line": block() + field(b"x", b"a\r\nb"),
    "a length that is no number": block() + field(b"content-length", b"-1"),
}


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_cannot_be_resets_its_stream(client: Wire, kind: str) -> None:
    client.send(frame(h2.HEADERS, LAST, 1, HEADS[kind]))
    assert client.answer(1).reset is Code.PROTOCOL_ERROR
    assert is_good(ask(client, 3))


STREAMS = {
    "data after its end": (head(1, LAST | 0) + data(1, b"x"), Code.STREAM_CLOSED),
    "a length that is not true": (
        frame(h2.HEADERS, WHOLE, 1, block() + field(b"content-length", b"7")) + data(1, MESSAGE),
        Code.PROTOCOL_ERROR,
    ),
    "a head in the middle": (head(1) + head(1), Code.PROTOCOL_ERROR),
    "special trailers": (
        head(1) + frame(h2.HEADERS, LAST, 1, field(b":path", b"/")),
        Code.PROTOCOL_ERROR,
    ),
    "a window opened by nothing": (head(1) + window_update(1, 0), Code.PROTOCOL_ERROR),
    "a window too large": (head(1) + window_update(1, h2.LARGEST_WINDOW), Code.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_what_breaks_a_stream_leaves_the_others(client: Wire, kind: str) -> None:
    sent, code = STREAMS[kind]
    client.send(sent)
    said = client.answer(1)
    while said.reset is Code.NO_ERROR or said.reset is None:  # it was refused before
        said = client.answer(1)
    assert said.reset is code
    assert client.is_alive()


def test_more_than_a_calls_window(monkeypatch: pytest.MonkeyPatch, client: Wire) -> None:
    assert client.is_alive()
    monkeypatch.setattr(rpc, "WINDOW", 10)  # not what was offered
    client.send(head(1), data(1, MESSAGE))
    assert client.answer(1).reset is Code.FLOW_CONTROL_ERROR
    monkeypatch.undo()
    assert is_good(ask(client, 3))


def test_more_than_the_connections_window(monkeypatch: pytest.MonkeyPatch, front: FrontEnd) -> None:
    monkeypatch.setattr(h2_connection, "CONNECTION_WINDOW", 10)
    with wire(front) as client:
        client.send(head(1), data(1, MESSAGE))
        assert client.goaway() is Code.FLOW_CONTROL_ERROR


def test_no_more_calls_at_once_than_were_offered(front: FrontEnd, client: Wire) -> None:
    offered = client.until(h2.SETTINGS).payload
    most = dict(struct.iter_unpack(">HL", offered))[h2.MAX_CONCURRENT_STREAMS]
    client.send(*(head(2 * number + 1) for number in range(most + 1)))
    refused = client.until(h2.RST_STREAM)
    assert (refused.stream, refused.payload) == (2 * most + 1, struct.pack(">L", Code.REFUSED_STREAM))


# ── connections that are wrong ──

PING = frame(h2.PING, 0, 0, bytes(8))
BREACHES = {
    "no preface": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", Code.PROTOCOL_ERROR),
    "no settings": (h2.PREFACE + PING, Code.PROTOCOL_ERROR),
    "a frame that is too long": (OPENING + b"\x10\0\1\0\0\0\0\0\1", Code.FRAME_SIZE_ERROR),
    "data of no stream": (OPENING + data(0, b"x"), Code.PROTOCOL_ERROR),
    "data of a stream that is idle": (OPENING + data(1, b"x"), Code.PROTOCOL_ERROR),
    "a head of no stream": (OPENING + head(0), Code.PROTOCOL_ERROR),
    "a head of an even stream": (OPENING + head(2), Code.PROTOCOL_ERROR),
    "streams that go backwards": (OPENING + head(5, LAST, path=ALIVE) + head(3, LAST), Code.STREAM_CLOSED),
    "more padding than data": (OPENING + head(1) + data(1, b"\x09abc", h2.PADDED), Code.PROTOCOL_ERROR),
    "padding of nothing": (OPENING + head(1) + data(1, b"", h2.PADDED), Code.PROTOCOL_ERROR),
    "more padding than head": (
        OPENING + frame(h2.HEADERS, WHOLE | h2.PADDED, 1, b"\xff" + block()),
        Code.PROTOCOL_ERROR,
    ),
    "a priority cut off": (
        OPENING + frame(h2.HEADERS, WHOLE | h2.HAS_PRIORITY, 1, b"\0\0"),
        Code.FRAME_SIZE_ERROR,
    ),
    "a stream that waits for itself": (
        OPENING + frame(h2.PRIORITY, 0, 3, b"\0\0\0\3\0"),
        Code.PROTOCOL_ERROR,
    ),
    "a priority of no stream": (OPENING + frame(h2.PRIORITY, 0, 0, bytes(5)), Code.PROTOCOL_ERROR),
    "a short priority": (OPENING + frame(h2.PRIORITY, 0, 1, bytes(4)), Code.FRAME_SIZE_ERROR),
    "a reset of no stream": (OPENING + reset(0, Code.CANCEL), Code.PROTOCOL_ERROR),
    "a reset of an idle stream": (OPENING + reset(1, Code.CANCEL), Code.PROTOCOL_ERROR),
    "a short reset": (OPENING + head(1) + frame(h2.RST_STREAM, 0, 1, bytes(3)), Code.FRAME_SIZE_ERROR),
    "settings of a stream": (OPENING + frame(h2.SETTINGS, 0, 1), Code.PROTOCOL_ERROR),
    "settings cut off": (OPENING + frame(h2.SETTINGS, 0, 0, bytes(5)), Code.FRAME_SIZE_ERROR),
    "settings seen and more": (OPENING + frame(h2.SETTINGS, h2.ACK, 0, bytes(6)), Code.FRAME_SIZE_ERROR),
    "push": (OPENING + h2.settings({h2.ENABLE_PUSH: 2}), Code.PROTOCOL_ERROR),
    "a window of two gigabytes": (
        OPENING + h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 31}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "frames that are too small": (OPENING + h2.settings({h2.MAX_FRAME_SIZE: 100}), Code.PROTOCOL_ERROR),
    "settings without end": (
        OPENING + frame(h2.SETTINGS, 0, 0, struct.pack(">HL", 99, 1) * 100),
        Code.ENHANCE_YOUR_CALM,
    ),
    "a window over all": (OPENING + window_update(0, h2.LARGEST_WINDOW), Code.FLOW_CONTROL_ERROR),
    "a window by nothing": (OPENING + window_update(0, 0), Code.PROTOCOL_ERROR),
    "a short window": (OPENING + frame(h2.WINDOW_UPDATE, 0, 0, bytes(3)), Code.FRAME_SIZE_ERROR),
    "a window of an idle stream": (OPENING + window_update(1, 1), Code.PROTOCOL_ERROR),
    "calls whose windows overflow": (
        OPENING
        + head(1)
        + window_update(1, h2.LARGEST_WINDOW - h2.DEFAULT_WINDOW)
        + h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 20}),
        Code.FLOW_CONTROL_ERROR,
    ),
    "a push by a client": (OPENING + frame(h2.PUSH_PROMISE, WHOLE, 1, bytes(4)), Code.PROTOCOL_ERROR),
    "a ping of a stream": (OPENING + frame(h2.PING, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "a short ping": (OPENING + frame(h2.PING, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "a farewell of a stream": (OPENING + frame(h2.GOAWAY, 0, 1, bytes(8)), Code.PROTOCOL_ERROR),
    "a short farewell": (OPENING + frame(h2.GOAWAY, 0, 0, bytes(7)), Code.FRAME_SIZE_ERROR),
    "a continuation of nothing": (OPENING + frame(h2.CONTINUATION, WHOLE, 1, b""), Code.PROTOCOL_ERROR),
    "a continuation of another": (
        OPENING + frame(h2.HEADERS, 0, 1, block()) + frame(h2.CONTINUATION, WHOLE, 3, b""),
        Code.PROTOCOL_ERROR,
    ),
    "a frame within a head": (OPENING + frame(h2.HEADERS, 0, 1, block()) + PING, Code.PROTOCOL_ERROR),
    "an unknown frame within a head": (
        OPENING + frame(h2.HEADERS, 0, 1, block()) + frame(0xEE, 0, 1),
        Code.PROTOCOL_ERROR,
    ),
    "a head of a stream that is closed": (
        OPENING + head(1, LAST) + reset(1, Code.CANCEL) + head(1, LAST),
        Code.STREAM_CLOSED,
    ),
    "an entry that is not there": (OPENING + frame(h2.HEADERS, LAST, 1, b"\xfe"), Code.COMPRESSION_ERROR),
    "the entry 0": (OPENING + frame(h2.HEADERS, LAST, 1, b"\x80"), Code.COMPRESSION_ERROR),
    "a field cut off": (OPENING + frame(h2.HEADERS, LAST, 1, block()[:-3]), Code.COMPRESSION_ERROR),
    "a number without end": (
        OPENING + frame(h2.HEADERS, LAST, 1, b"\xff" + b"\xff" * 20),
        Code.COMPRESSION_ERROR,
    ),
    "a code that is none": (
        OPENING + frame(h2.HEADERS, LAST, 1, b"\x00\x84\xff\xff\xff\xff\x00"),
        Code.COMPRESSION_ERROR,
    ),
    "a table too large": (
        OPENING + frame(h2.HEADERS, LAST, 1, b"\x3f\xe2\x1f" + block()),
        Code.COMPRESSION_ERROR,
    ),
    "a table late": (OPENING + frame(h2.HEADERS, LAST, 1, block() + b"\x20"), Code.COMPRESSION_ERROR),
    "a head of 300 KB": (
        OPENING + frame(h2.HEADERS, LAST, 1, block(x_much="y" * 300_000)),
        Code.ENHANCE_YOUR_CALM,
    ),
    "a thousand fields": (
        OPENING + frame(h2.HEADERS, LAST, 1, block() + b"\x90" * 1000),
        Code.ENHANCE_YOUR_CALM,
    ),
}


@pytest.mark.parametrize("kind", BREACHES)
def test_a_breach_ends_the_connection_and_says_why(front: FrontEnd, kind: str) -> None:
    sent, code = BREACHES[kind]
    with wire(front, sent) as client:
        assert client.goaway() is code
        assert list(client.frames()) == []
    with wire(front) as other:
        assert is_good(ask(other))


FLOODS = {
    "pings": PING,
    "settings": frame(h2.SETTINGS, 0, 0),
    "settings seen": frame(h2.SETTINGS, h2.ACK, 0),
    "priorities": frame(h2.PRIORITY, 0, 1, b"\0\0\0\5\0"),
    "windows": window_update(0, 1),
    "unknown frames": frame(0xEE, 0, 0, b"x"),
    "empty data": data(1, b"", 0),
    "bytes": data(1, b"\0", 0),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_of_nothing_ends(front: FrontEnd, kind: str) -> None:
    start = head(1, path=SERVICE + "ModelStreamInfer") if "data" in kind or kind == "bytes" else b""
    with wire(front, OPENING + start) as client:
        sender = threading.Thread(target=client.send, args=[FLOODS[kind]] * MANY, daemon=True)
        sender.start()
        assert client.goaway() is Code.ENHANCE_YOUR_CALM
    sender.join(PATIENCE)
    assert not sender.is_alive()


@pytest.mark.parametrize("kind", ["opened", "with a message", "malformed"])
def test_rapid_resets_end(front: FrontEnd, kind: str) -> None:
    more = {"opened": b"", "with a message": MESSAGE, "malformed": b""}[kind]
    wrong = {"path": ""} if kind == "malformed" else {}
    frames = []
    for stream in range(1, MANY, 2):
        frames += [head(stream, **wrong)]
        frames += [data(stream, more)] if more else []
        frames += [reset(stream, Code.CANCEL)]
    front.door.held = True
    try:
        with wire(front) as client:
            sender = threading.Thread(target=client.send, args=frames, daemon=True)
            sender.start()
            assert client.goaway() is Code.ENHANCE_YOUR_CALM
    finally:
        front.door.held = False
    front.until_slots_are_back()
    until(lambda: front.server.service.running == 0)


def test_a_head_that_never_ends_ends(front: FrontEnd) -> None:
    with wire(front, OPENING + frame(h2.HEADERS, 0, 1, block())) as client:
        more = [frame(h2.CONTINUATION, 0, 1, b"")] * MANY
        sender = threading.Thread(target=client.send, args=more, daemon=True)
        sender.start()
        assert client.goaway() is Code.ENHANCE_YOUR_CALM


def test_honest_clients_are_no_flood(front: FrontEnd, client: Wire) -> None:
    """Many calls on one connection, with what libraries send around them; and some of them cancelled."""
    for number in range(1500):
        stream = 2 * number + 1
        client.send(PING if number % 3 else b"", window_update(0, 1000), head(stream), data(stream, MESSAGE))
        assert is_good(client.answer(stream))


# ── ends ──


def test_stopping_says_goodbye_in_two_steps() -> None:
    with front_end() as front, wire(front) as client:
        assert is_good(ask(client))
        stopping = threading.Thread(target=front.stop, args=(PATIENCE,))
        stopping.start()
        first = client.until(h2.GOAWAY)
        assert first.payload[:4] == struct.pack(">L", h2.LARGEST_WINDOW)
        client.send(head(3, path=ALIVE), data(3, framed(b"")))  # it was on its way
        ping = client.until(h2.PING)
        assert client.answer(3).status == Status.OK
        client.send(frame(h2.PING, h2.ACK, 0, ping.payload))
        last = client.until(h2.GOAWAY)
        assert last.payload[:8] == struct.pack(">LL", 3, Code.NO_ERROR)
        assert client.receive() is None
        stopping.join(PATIENCE)


def test_a_client_that_says_goodbye_gets_its_answers(front: FrontEnd, client: Wire) -> None:
    front.door.held = True
    try:
        front.door.calls.clear()
        client.send(head(1), data(1, MESSAGE), h2.goaway(0, Code.NO_ERROR))
        front.run(front.wait_for_calls()[0].finish)
    finally:
        front.door.held = False
    assert is_good(client.answer(1))
    assert client.receive() is None


def test_a_client_more_than_allowed_is_turned_away() -> None:
    with front_end(max_connections=2) as front, wire(front) as first, wire(front) as second:
        assert first.is_alive()
        assert second.is_alive()
        with wire(front) as third:
            assert third.goaway() is Code.ENHANCE_YOUR_CALM
        assert is_good(ask(first))


def test_a_thousand_clients_that_leave_anywhere_leave_nothing(front: FrontEnd) -> None:
    """At a place of the conversation that moves from one to the next."""
    sent = OPENING + head(1) + data(1, MESSAGE) + head(3) + data(3, MESSAGE[:20], 0)
    front.door.held = True
    try:
        for number in range(1000):
            client = Wire(front, sent[: number * 7 % len(sent)])
            if number % 2:
                client.socket.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER: leave with a reset
            client.close()
        shared = front.server._shared
        assert shared is not None
        until(lambda: not shared.connections)
    finally:
        front.door.held = False
    front.until_slots_are_back()
    service, accounts = front.server.service, front.server.service.accounts
    assert (accounts.calls, service.running, accounts.bytes, accounts.unread) == (0, 0, 0, 0)
    with wire(front) as client:
        assert is_good(ask(client))


# ── streams of many messages ──


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_that_nobody_reads_are_kept_as_their_bytes(front: FrontEnd, client: Wire, size: int) -> None:
    """Many more than are read at once, cut anywhere: each is answered."""
    requests = b"".join(framed(image_request(id=str(n)).SerializeToString()) for n in range(1000))
    client.send(
        window_update(0, 1 << 24), window_update(0, 1 << 24), head(1, path=SERVICE + "ModelStreamInfer")
    )
    step = size * 97
    parts = [requests[at : at + step] for at in range(0, len(requests), step)]
    sender = threading.Thread(target=client.send, args=[data(1, part, 0) for part in parts], daemon=True)
    client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 24}))
    front.door.held = True
    sender.start()
    try:
        front.wait_for_calls(100)
    finally:
        front.door.held = False
    for call in list(front.door.calls):
        if not call.answered:
            front.run(call.finish)
    sender.join(PATIENCE)
    client.send(data(1, b""))
    said = client.answer(1)
    assert said.status == Status.OK
    ids, position = set(), 0
    while position < len(said.data):
        length = int.from_bytes(said.data[position + 1 : position + 5], "big")
        answer = pb.ModelStreamInferResponse.FromString(said.data[position + 5 : position + 5 + length])
        ids.add(answer.infer_response.id)
        position += 5 + length
    assert len(ids) == 1000


def test_messages_of_a_byte_that_wait_take_no_memory(
    front: FrontEnd, client: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamTurns, "push", lambda _turns, _stream: None)  # none is begun
    client.send(head(1, path=SERVICE + "ModelStreamInfer"), *([data(1, framed(b"x") * 3000, 0)] * 50))
    assert client.is_alive()
    service, shared = front.server.service, front.server._shared
    assert shared is not None
    (rpc_here,) = [rpc for one in shared.connections for rpc in one._rpcs.values()]
    assert len(rpc_here._queue) <= 64
    assert 0 < service.accounts.bytes <= 50 * 3000 * 6
    client.close()
    until(lambda: service.accounts.bytes == 0)


# ── time ──


def later(front: FrontEnd, seconds: float) -> None:
    """As if so much time had passed: what looks at the clock is told."""
    shared = front.server._shared
    assert shared is not None
    now = monotonic() + seconds

    def look() -> None:
        for connection in list(shared.connections):
            connection.check_time(now)
        front.server.service.sweep(now)

    front.run(look)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", Code.SETTINGS_TIMEOUT),
        (h2.PREFACE, Code.SETTINGS_TIMEOUT),
        (OPENING + head(1)[:-1], Code.ENHANCE_YOUR_CALM),
        (OPENING + frame(h2.HEADERS, 0, 1, block()), Code.ENHANCE_YOUR_CALM),
        (OPENING + PING[:4], Code.ENHANCE_YOUR_CALM),
    ],
)
def test_what_takes_too_long_to_say_ends_the_connection(sent: bytes, code: Code) -> None:
    with front_end() as front, wire(front, sent) as client:
        client.until(h2.SETTINGS)
        until(lambda: front.run(lambda: seen(front)))
        later(front, 11.0)
        assert client.goaway() is code


def seen(front: FrontEnd) -> bool:
    """Whether the one client's bytes were read, or there were none."""
    (connection,) = front.server._shared.connections
    return not connection._settled or bool(connection._ahead_since)


def test_a_message_that_comes_too_slowly_is_given_up() -> None:
    with front_end() as front, wire(front) as client:
        stream = {"path": SERVICE + "ModelStreamInfer"}
        client.send(head(1), data(1, MESSAGE[:20], 0), head(3, **stream), data(3, MESSAGE[:20], 0))
        until(lambda: front.server.service.accounts.bytes == 30)
        later(front, 6.0)
        said = client.answer(1)
        assert (said.status, said.fields["grpc-message"]) == (
            Status.DEADLINE_EXCEEDED,
            "the message arrived too slowly",
        )
        client.send(data(3, MESSAGE[20:]))  # a stream has time
        assert client.answer(3).status == Status.OK


def test_a_client_that_is_gone_is_noticed() -> None:
    with front_end() as front, wire(front) as client:
        assert client.is_alive()
        later(front, 0.0)
        later(front, 61.0)
        ping = client.until(h2.PING)
        assert not ping.flags
        later(front, 61.0 + 21.0)
        assert client.receive() is None


def test_an_answer_for_which_no_window_comes_is_given_up(front: FrontEnd) -> None:
    with wire(front, h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 10})) as client:
        client.send(head(1), data(1, MESSAGE))
        client.until(h2.DATA)
        later(front, 1.0)
        later(front, 62.0)
        assert client.answer(1).reset is Code.CANCEL


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """Its answers stay bounded, and nothing more is read from it."""
    size = 1 << 20
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="x", datatype="UINT8", shape=[1, size])
    request.raw_input_contents.append(bytes(size))
    message = framed(request.SerializeToString())
    wide = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 1 << 30}) + window_update(0, 1 << 30)
    with (
        front_end(echo("long", Datatype.UINT8), max_body_bytes=2 * size) as front,
        wire(front, wide) as client,
    ):
        shared = front.server._shared
        assert shared is not None
        half = len(message) // 2
        calls = [head(n) + data(n, message[:half], 0) + data(n, message[half:]) for n in range(1, 401, 2)]
        sender = threading.Thread(target=client.send, args=calls, daemon=True)
        sender.start()
        until(lambda: shared.accounts.unread > 0)
        later(front, 11.0)
        until(lambda: not shared.connections)
        sender.join(PATIENCE)
        assert not sender.is_alive()
        assert len(front.door.calls) < 200
