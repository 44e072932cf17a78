"""Answers of more than a MiB over gRPC: sent from where they lie, a part in a turn, and let go of once."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb

from carpool.errors import Unavailable
from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc import h2_outgoing, rpc
from carpool.types import Datatype, TensorSpec
from frontend.fake_door import FakeModel, echo
from frontend.grpc.front_end import SERVICE, FrontEnd, channel, front_end, refusal, send
from frontend.grpc.wire import data, framed, head, wire
from waiting import until

SIZE = 5 << 20
SENT = np.random.default_rng(6).integers(0, 256, SIZE, np.uint8).tobytes()
LONGEST = {"grpc.max_receive_message_length": 2 * SIZE, "grpc.max_send_message_length": 2 * SIZE}
INFER = SERVICE + "ModelInfer"


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end(echo("echo", Datatype.UINT8, max_batch=0), max_body_bytes=2 * SIZE) as running:
        yield running
        until(lambda: not running.server.service.long_answers)
        running.until_slots_are_back()
        until(lambda: running.server.service.accounts.unread == 0)


def message() -> bytes:
    request = pb.ModelInferRequest(model_name="echo", id="a")
    request.inputs.add(name="x", datatype="UINT8", shape=[SIZE])
    request.raw_input_contents.append(SENT)
    return bytes(request.SerializeToString())


def answered(found: bytes) -> bytes:
    response = pb.ModelInferResponse.FromString(found)
    assert (response.model_name, response.id) == ("echo", "a")
    assert "carpool_batch" in response.parameters
    return bytes(response.raw_output_contents[0])


def test_it_is_whole_with_its_parameters_and_the_slot_is_let_go_once(front: FrontEnd) -> None:
    with channel(front, **LONGEST) as connected:
        for _ in range(2):
            assert answered(send(connected, message())) == SENT, (
                "a slot is scribbled over when it is released"
            )
            front.until_slots_are_back()
    assert front.count("echo", "nv_inference_request_success") == 2
    assert front.door.reserved == [(len(message()), "127.0.0.1")] * 2, "admitted with room for the answer"


def test_it_is_compressed_for_a_client_that_asks_for_that(front: FrontEnd) -> None:
    with channel(front, **LONGEST) as connected:
        found = send(connected, message(), metadata=(("x-carpool-compression", "gzip"),))
    assert answered(found) == SENT


@pytest.mark.interpreted
def test_no_turn_frames_more_than_its_part(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    flush = h2_outgoing.Outgoing.flush

    def counting(outgoing: h2_outgoing.Outgoing) -> None:
        turns.append(outgoing._bytes)
        flush(outgoing)

    monkeypatch.setattr(h2_outgoing.Outgoing, "flush", counting)
    wishes = {h2.INITIAL_WINDOW_SIZE: 2 * SIZE, h2.MAX_FRAME_SIZE: h2.LARGEST_FRAME}
    window = h2.PREFACE + h2.settings(wishes) + h2.window_update(0, 2 * SIZE)
    with wire(front, window) as client:
        client.send(head(1, path=INFER))
        body = framed(message())
        for start in range(0, len(body), h2.SMALLEST_FRAME):
            last = start + h2.SMALLEST_FRAME >= len(body)
            client.send(data(1, body[start : start + h2.SMALLEST_FRAME], h2.END_STREAM if last else 0))
        assert answered(client.answer(1).data[5:]) == SENT
    assert max(turns) < h2_outgoing._IN_A_TURN + 2 * h2_outgoing._LONGEST_FRAME
    assert sum(turns) > SIZE


def test_a_client_that_leaves_or_opens_no_window_leaves_nothing(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})
    service = front.server.service
    for moved in (False, True):
        with wire(front, closed) as client:
            client.send(head(1, path=INFER))
            body = framed(message())
            for start in range(0, len(body), h2.SMALLEST_FRAME):
                client.send(data(1, body[start : start + h2.SMALLEST_FRAME], 0))
            until(lambda: service.long_answers and service.accounts.unread > SIZE)
            if moved:
                monkeypatch.setattr(rpc, "_IN_SLOT_S", 0.0)
                until(lambda: not service.long_answers)  # out of its slot, and still to be read
                front.until_slots_are_back()
                assert service.accounts.unread > SIZE
                client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 2 * SIZE}), h2.window_update(0, 2 * SIZE))
                assert answered(client.answer(1).data[5:]) == SENT
        until(lambda: not service.long_answers)
        front.until_slots_are_back()


def test_without_room_it_is_rejected_before_its_message_comes(front: FrontEnd) -> None:
    front.door.rejection = Unavailable("no room", reason="no-slots")
    with channel(front, **LONGEST) as connected:
        status, _, metadata = refusal(lambda: send(connected, message()))
        assert (status, metadata["carpool-reason"]) == (grpc.StatusCode.UNAVAILABLE, "no-slots")
        assert metadata["retry-after"] == "1"
        assert not front.door.calls
        front.door.rejection = None
        assert answered(send(connected, message())) == SENT
    with wire(front) as client:
        front.door.rejection = Unavailable("no room", reason="no-slots")
        client.send(head(1, path=INFER), data(1, framed(message())[:100], 0))
        assert client.answer(1).fields["carpool-reason"] == "no-slots"
        front.door.rejection = None
        assert client.is_alive()


def test_where_no_model_gives_long_answers_none_is_reserved() -> None:
    large, small = TensorSpec("x", Datatype.UINT8, (SIZE,)), TensorSpec("y", Datatype.UINT8, (4,))
    sums = FakeModel("echo", [large], [small], lambda inputs: {"y": inputs["x"][:4]}, max_batch=0)
    wide = FakeModel("wide", [small], [large], lambda _inputs: {"y": np.zeros(SIZE)}, max_batch=0)
    with front_end(sums, wide, max_body_bytes=2 * SIZE) as front, channel(front, **LONGEST) as connected:
        for _ in range(2):
            assert answered(send(connected, message())) == SENT[:4]
        assert front.door.reserved == [(4, "127.0.0.1")] * 2


STREAM = SERVICE + "ModelStreamInfer"


def streamed(found: bytes) -> bytes:
    return answered(pb.ModelStreamInferResponse.FromString(found).infer_response.SerializeToString())


def in_frames(sent: bytes) -> Iterator[bytes]:
    for start in range(0, len(sent), h2.SMALLEST_FRAME):
        yield data(1, sent[start : start + h2.SMALLEST_FRAME], 0)


def test_in_a_stream_one_is_sent_from_its_slot_and_those_behind_it_are_copied(front: FrontEnd) -> None:
    service = front.server.service
    with wire(front, h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})) as client:
        client.send(head(1, path=STREAM))
        for frame in in_frames(framed(message())):
            client.send(frame)
        until(lambda: len(service.long_answers) == 1)
        for frame in in_frames(framed(message())):
            client.send(frame)
        until(lambda: service.accounts.unread > 2 * SIZE)
        assert len(service.long_answers) == 1
        client.send(h2.settings({h2.INITIAL_WINDOW_SIZE: 4 * SIZE}), h2.window_update(0, 4 * SIZE))
        client.send(data(1, b"", h2.END_STREAM))
        found = client.answer(1).data
    size = int.from_bytes(found[1:5], "big")
    assert streamed(found[5 : 5 + size]) == SENT
    assert streamed(found[10 + size :]) == SENT


def test_a_stream_whose_client_leaves_lets_its_long_answer_go(front: FrontEnd) -> None:
    service = front.server.service
    with wire(front, h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})) as client:
        client.send(head(1, path=STREAM))
        for frame in in_frames(framed(message())):
            client.send(frame)
        until(lambda: len(service.long_answers) == 1)
    until(lambda: not service.long_answers)
    front.until_slots_are_back()
