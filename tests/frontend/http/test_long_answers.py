"""Answers that are written in pieces: what clients get, what is held meanwhile, and that it is given back."""

from __future__ import annotations

import gzip
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from carpool.errors import Unavailable
from carpool.frontend.clients.accounts import Accounts
from carpool.frontend.http import long_answer, protocol
from carpool.frontend.http.infer_route import LONG_ANSWER
from carpool.frontend.http.long_answer import LongAnswer, LongAnswers, LongBody, LongEvents
from carpool.types import Datatype, InferResponse, Tensor, TensorSpec
from carpool.wire.codec import encode_response
from carpool.wire.slices import ELEMENTS, PIECE_BYTES, SlicedBytes
from frontend.fake_door import FakeModel, echo
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, post
from waiting import until

COUNT = 40 * ELEMENTS + 7
VALUES = np.random.default_rng(3).standard_normal(COUNT).astype(np.float32)
BYTES = 6 * LONG_ANSWER
RAW = b"Inference-Header-Content-Length: 0\r\n"
X = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
ONE = [TensorSpec("x", Datatype.FP32, (1,))]


def many(_inputs: Any) -> Any:
    yield {"y": VALUES}
    yield {"y": [1.0]}
    yield {"y": VALUES[::2]}


def models() -> list[FakeModel]:
    y, z = ([TensorSpec(name, Datatype.FP32, (-1,))] for name in "yz")
    return [
        FakeModel("wide", ONE, y, lambda _inputs: {"y": VALUES}, max_batch=0),
        FakeModel("nan", ONE, y, lambda _inputs: {"y": np.append(VALUES, np.nan)}, max_batch=0),
        FakeModel("two", ONE, [*y, *z], lambda _: {"y": VALUES, "z": VALUES}, max_batch=0),
        FakeModel("parts", ONE, y, many, max_batch=0, decoupled=True),
        echo("echo", Datatype.UINT8, max_batch=0),
        FakeModel(
            "halves",
            [TensorSpec("x", Datatype.UINT8, (BYTES,))],
            [TensorSpec("y", Datatype.UINT8, (BYTES // 2,))],
            lambda inputs: {"y": inputs["x"][::2]},
            max_batch=0,
        ),
    ]


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end(*models(), max_body_bytes=16 << 20, sweep_s=0.02) as running:
        yield running
        until(lambda: held(running) == 0)
        running.until_slots_are_back()


def held(front: FrontEnd) -> int:
    """Bytes that are counted for clients, and answers that are being written."""
    shared = front.server.server._shared
    return shared.accounts.bytes + len(shared.long_answers.writing)


def ask(client: Client, model: str, extra: bytes = b"", **more: Any) -> Any:
    return client.post(f"/v2/models/{model}/infer", orjson.dumps({"inputs": [X], **more}), extra)


def whole(**more: Any) -> bytes:
    response = InferResponse("wide", [Tensor("y", Datatype.FP32, VALUES.shape, VALUES)], "1", **more)
    return bytes(encode_response(response).buffers[0])


class Turns:
    """Counts the pieces of each turn, and how long they are."""

    def __init__(self, front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[int] = []
        send = long_answer.LongAnswer._send

        def counting(answer: long_answer.LongAnswer, piece: Any) -> None:
            self.pieces.append(len(piece))
            send(answer, piece)

        monkeypatch.setattr(long_answer.LongAnswer, "_send", counting)


def test_json_is_the_same_text_in_chunks(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(front, monkeypatch)
    with front.connect() as client:
        for _ in range(2):  # the connection goes on
            response = ask(client, "wide")
            assert (response.status, response.body) == (200, whole())
            assert response.fields["transfer-encoding"] == "chunked"
            assert "content-length" not in response.fields
            assert "server-timing" in response.fields
        assert ask(client, "wide", id="r 1").body == whole(id="r 1")
    assert max(turns.pieces) < 26 * ELEMENTS, "a slice a turn"
    assert len(turns.pieces) > 3 * COUNT // ELEMENTS
    assert front.count("wide", "nv_inference_request_success") == 3


def test_to_a_client_of_http_1_0_it_ends_with_the_connection(front: FrontEnd) -> None:
    body = orjson.dumps({"inputs": [X]})
    with front.connect() as client:
        sent = post("/v2/models/wide/infer", body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        head, _, text = client.send(sent).rest().partition(b"\r\n\r\n")
    assert text == whole()
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head


def test_what_json_cannot_represent_has_its_status(front: FrontEnd) -> None:
    with front.connect() as client:
        response = ask(client, "nan")
        assert response.status == 500
        assert "holds NaN or infinity" in orjson.loads(response.body)["error"]
        assert ask(client, "wide").status == 200
    assert front.count("nan", "nv_inference_request_success") == 0


def test_json_beside_tensors_and_compressed_has_its_length(front: FrontEnd) -> None:
    outputs = [{"name": "y"}, {"name": "z", "parameters": {"binary_data": True}}]
    with front.connect() as client:
        mixed = ask(client, "two", outputs=outputs)
        length = int(mixed.fields["inference-header-content-length"])
        listed = orjson.loads(mixed.body[:length])["outputs"]
        assert [entry["name"] for entry in listed] == ["y", "z"]
        assert np.array_equal(np.array(listed[0]["data"], np.float32), VALUES)
        assert mixed.body[length:] == VALUES.tobytes()
        small = ask(client, "wide", b"Accept-Encoding: gzip\r\n")
        assert small.fields["content-encoding"] == "gzip"
        assert int(small.fields["content-length"]) == len(small.body)
        assert gzip.decompress(small.body) == whole()
        tensors = client.post("/v2/models/echo/infer", bytes(BYTES), RAW + b"Accept-Encoding: gzip\r\n")
        assert gzip.decompress(tensors.body).endswith(bytes(BYTES))


def test_long_tensors_leave_their_slot_uncopied_and_whole(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(front, monkeypatch)
    sent = np.random.default_rng(4).integers(0, 256, BYTES, np.uint8).tobytes()
    with front.connect() as client:
        response = client.post("/v2/models/echo/infer", sent, RAW)
    assert response.body.endswith(sent), "a slot is scribbled over when it is released"
    assert int(response.fields["content-length"]) == len(response.body)
    assert max(turns.pieces) == PIECE_BYTES


def test_a_client_that_shuts_its_side_still_reads_all(front: FrontEnd) -> None:
    front.door.held = True
    with front.connect() as client:
        client.send(post("/v2/models/wide/infer", orjson.dumps({"inputs": [X]})))
        call = front.wait_for_call()
        front.run(call.finish)
        client.until(b"\r\n\r\n")
        assert client.finish_sending().response().body == whole()


def test_when_the_client_leaves_all_is_given_back(front: FrontEnd) -> None:
    for model, body, extra in (("wide", orjson.dumps({"inputs": [X]}), b""), ("echo", bytes(BYTES), RAW)):
        for leave in (Client.reset, Client.finish_sending):
            client = Client("127.0.0.1", front.server.port, receive_buffer=4096)
            client.send(post(f"/v2/models/{model}/infer", body, extra))
            until(lambda: held(front) > 0)
            leave(client)
            client.socket.close()
            until(lambda: held(front) == 0)
            front.until_slots_are_back()


def test_a_client_that_leaves_before_its_answer_begins_is_counted(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_answer.LongAnswer, "_go_on", lambda _answer: None)
    classes = {"name": "y", "parameters": {"classification": 2}}  # which a thread finds
    body = orjson.dumps({"inputs": [X], "outputs": [classes, {"name": "z"}]})
    with front.connect() as client:
        client.send(post("/v2/models/two/infer", body))
        until(lambda: held(front) > 0)
        client.reset()
    until(lambda: held(front) == 0)
    failures = [line for line in front.metrics().splitlines() if 'failure{model="two"' in line]
    assert sum(float(line.rpartition(" ")[2]) for line in failures) == 1


def test_one_that_is_read_slowly_leaves_its_slot_and_stays_whole(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_answer, "_IN_SLOT_S", 0.0)
    sent = np.random.default_rng(5).integers(0, 256, BYTES, np.uint8).tobytes()
    with Client("127.0.0.1", front.server.port, receive_buffer=4096) as client:
        client.send(post("/v2/models/echo/infer", sent, RAW))
        until(lambda: front.door.calls and front.door.calls[-1].released)
        assert held(front) > BYTES, "it still counts for its client"
        assert client.response().body.endswith(sent)


def test_a_client_that_holds_too_much_is_told_so(front: FrontEnd) -> None:
    shared = front.server.server._shared
    other = front.run(lambda: shared.accounts.body("another", 0.0))
    front.run(lambda: shared.accounts.take(other, shared.accounts.most_bytes - LONG_ANSWER))
    with front.connect() as client:
        assert ask(client, "wide").status == 503
        front.run(lambda: shared.accounts.close(other))
        assert ask(client, "wide").status == 200


def test_while_one_is_written_others_are_answered(front: FrontEnd) -> None:
    with Client("127.0.0.1", front.server.port, receive_buffer=4096) as slow, front.connect() as other:
        slow.send(post("/v2/models/wide/infer", orjson.dumps({"inputs": [X]})))
        until(lambda: held(front) > 0)
        assert other.get("/v2/health/live").status == 200
        assert slow.response().body == whole()


# ── the generate extension ──


def documents(front: FrontEnd, route: str, model: str) -> list[Any]:
    with front.connect() as client:
        response = client.post(f"/v2/models/{model}/{route}", json.dumps({"x": 1.0}).encode())
        assert response.status == 200
        again = client.get("/v2/health/live")  # the connection goes on
        assert again.status == 200
    text = response.body.decode()
    if route == "generate":
        return [json.loads(text)]
    assert text.endswith("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-1]]


def test_generate_writes_as_python_does(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(front, monkeypatch)
    expected = {"model_name": "wide", "model_version": "1", "y": VALUES.tolist()}
    assert documents(front, "generate", "wide") == [expected]
    assert documents(front, "generate_stream", "wide") == [expected]
    assert max(turns.pieces) < 26 * ELEMENTS


def test_events_keep_their_order_and_short_ones_wait_behind_long_ones(front: FrontEnd) -> None:
    found = documents(front, "generate_stream", "parts")
    assert [event["y"] for event in found] == [VALUES.tolist(), 1.0, VALUES[::2].tolist()]


def test_streams_that_nobody_reads_hold_what_their_answers_are_and_give_it_back(front: FrontEnd) -> None:
    body = json.dumps({"x": 1.0}).encode()
    clients = [Client("127.0.0.1", front.server.port, receive_buffer=4096) for _ in range(8)]
    for client in clients:
        client.send(post("/v2/models/wide/generate_stream", body))
    shared = front.server.server._shared
    until(lambda: len(front.door.calls) == len(clients) and len(shared.long_answers.writing) == len(clients))
    assert shared.accounts.bytes < 2 * len(clients) * VALUES.nbytes, "no text is held"
    for client in clients:
        client.socket.close()
    until(lambda: held(front) == 0)


def test_for_a_stream_that_is_given_up_its_model_stops(front: FrontEnd) -> None:
    front.door.held = True
    shared = front.server.server._shared
    with Client("127.0.0.1", front.server.port, receive_buffer=4096) as client:
        client.send(post("/v2/models/parts/generate_stream", json.dumps({"x": 1.0}).encode()))
        call = front.wait_for_call()
        front.run(lambda: call.say({"y": VALUES}))
        until(lambda: shared.long_answers.writing)
        front.run(lambda: [answer.give_up() for answer in list(shared.long_answers.writing)])
        assert call.cancelled


def test_a_stream_without_room_for_its_event_is_a_failure(front: FrontEnd) -> None:
    shared = front.server.server._shared
    other = front.run(lambda: shared.accounts.body("another", 0.0))
    front.run(lambda: shared.accounts.take(other, shared.accounts.most_bytes - LONG_ANSWER))
    with front.connect() as client:
        client.send(post("/v2/models/wide/generate_stream", json.dumps({"x": 1.0}).encode()))
        client.rest()
    front.run(lambda: shared.accounts.close(other))
    assert front.count("wide", "nv_inference_request_success") == 0


class Pipelined:
    """A client whose next request is answered as soon as an answer has ended."""

    unsent = 0

    def __init__(self) -> None:
        self.behind: Callable[[], None] | None = None

    def begin_long(self, _fields: bytes, _length: int | None) -> bool:
        return False

    def send_view(self, piece: Any) -> None:
        """Takes it."""

    def end_long(self, *, chunked: bool) -> None:
        behind, self.behind = self.behind, None
        if behind is not None:
            behind()

    def abort(self) -> None:
        raise AssertionError


def test_an_answer_that_begins_at_the_end_of_another_begins_once() -> None:
    turns: deque[Callable[[], None]] = deque()
    reader, line, most = Pipelined(), deque[LongAnswer](), 0
    shared: Any = LongAnswers(cast(Any, None), Accounts(8), turns.append, cast(Any, None))

    def begin() -> None:
        events = LongEvents(bool, cast(Any, None), bool, cast(Any, bool))
        shared.begin("one", reader, LongBody(SlicedBytes([bytes(3 * PIECE_BYTES)]), events, b"", 1), line)

    reader.behind = begin
    begin()
    while turns:
        most = max(most, len(turns))
        turns.popleft()()
    assert (most, len(line), len(shared.writing)) == (1, 0, 0)


def test_who_hears_of_an_answer_and_fails_ends_it_and_not_the_turns_of_others() -> None:
    turns: deque[Callable[[], None]] = deque()
    aborted, ended, failed, line = list[None](), list[None](), list[object](), deque[LongAnswer]()

    def observer() -> None:
        raise ZeroDivisionError

    reader: Any = SimpleNamespace(begin_long=lambda *_: False, abort=lambda: aborted.append(None), unsent=0)
    shared: Any = LongAnswers(cast(Any, None), Accounts(8), turns.append, cast(Any, None))
    events = LongEvents(observer, failed.append, lambda: ended.append(None), cast(Any, bool))
    shared.begin("one", reader, LongBody(SlicedBytes([bytes(PIECE_BYTES)]), events, b"", 1), line)
    while turns:
        turns.popleft()()
    assert (len(aborted), len(ended), failed, len(line)) == (1, 1, [], 0)


def test_nothing_is_written_in_a_thread_of_its_own(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are written where others have their turn in between: a thread would hold the interpreter."""
    threads = set[int]()
    go_on = long_answer.LongAnswer._go_on

    def counting(answer: long_answer.LongAnswer) -> None:
        threads.add(threading.get_ident())
        go_on(answer)

    monkeypatch.setattr(long_answer.LongAnswer, "_go_on", counting)
    with front.connect() as client:
        assert ask(client, "wide").status == 200
    assert threads == {front.server.thread.ident}


# ── long bodies ──


def test_a_long_body_is_admitted_with_its_answer_for_its_client(front: FrontEnd) -> None:
    with front.connect() as client:
        assert client.post("/v2/models/echo/infer", bytes(BYTES), RAW).status == 200
        assert front.door.reserved == [(BYTES, "127.0.0.1")], "as many again, where nobody knows"
        assert client.post("/v2/models/halves/infer", bytes(BYTES), RAW).status == 200
        assert front.door.reserved[1:] == [(BYTES // 2, "127.0.0.1")]
        assert client.post("/v2/models/echo/infer", bytes(1000), RAW).status == 200
        assert len(front.door.reserved) == 2, "short ones are not looked at"


def test_a_rejected_long_body_is_read_past_when_it_may_come_again(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    call_later = front.server.loop.call_later

    def noting(delay: float, *rest: Any) -> Any:
        if delay == protocol._RETRY_S:
            waits.append(delay)
            delay = 0.0
        return call_later(delay, *rest)

    with front.connect() as client:
        front.door.rejection = Unavailable("no room", reason="no-slots")
        shared = front.server.server._shared
        monkeypatch.setattr(shared, "loop", Stub(noting))
        rejected = client.post("/v2/models/echo/infer", bytes(BYTES), RAW)
        assert (rejected.status, rejected.fields["retry-after"]) == (503, "1")
        assert front.door.slots_in_use == []
        assert waits == [1.0]
        front.door.rejection = None
        assert client.post("/v2/models/echo/infer", bytes(BYTES), RAW).status == 200


class Stub:
    """A loop that only calls later."""

    def __init__(self, call_later: Any) -> None:
        self.call_later = call_later
