"""ModelStreamInfer: many requests on one call, and streams that end badly."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.errors import Refused
from carpool.frontend.grpc.stream_infer import MOST_UNANSWERED
from frontend.access.key_files import ALICE, BOB, write
from frontend.grpc.front_end import (
    SERVICE,
    SUM,
    FrontEnd,
    channel,
    floats,
    front_end,
    image_request,
    infer,
    refusal,
)
from frontend.http.harness import PATIENCE
from waiting import until

Code = grpc.StatusCode
_END = object()


@pytest.fixture(scope="module")
def shared_front() -> Iterator[FrontEnd]:
    with front_end(slots=1000) as running:
        yield running


@pytest.fixture
def front(shared_front: FrontEnd) -> Iterator[FrontEnd]:
    shared_front.door.calls.clear()
    yield shared_front
    shared_front.door.held, shared_front.door.refusal = False, None
    shared_front.until_slots_are_back()


class Talk:
    """One stream, seen from the client."""

    def __init__(self, connected: grpc.Channel, **more: Any) -> None:
        self._requests: queue.Queue[Any] = queue.Queue()
        method = connected.stream_stream(SERVICE + "ModelStreamInfer")
        self.call = method(iter(self._requests.get, _END), timeout=PATIENCE, **more)

    def say(self, message: bytes) -> None:
        self._requests.put(message)

    def ask(self, request: Any) -> None:
        self.say(request.SerializeToString())

    def hear(self) -> Any:
        return pb.ModelStreamInferResponse.FromString(next(self.call))

    def end(self) -> None:
        self._requests.put(_END)

    def is_over(self) -> bool:
        """Waits for the server to end it well."""
        return next(self.call, None) is None and self.call.code() is Code.OK


@pytest.fixture
def talk(front: FrontEnd) -> Iterator[Talk]:
    with channel(front) as connected:
        made = Talk(connected)
        yield made
        made.end()
        made.call.cancel()


def test_answers_come_as_they_finish(front: FrontEnd, talk: Talk) -> None:
    front.door.held = True
    for name in ("first", "second", "third"):
        talk.ask(image_request(id=name))
    calls = front.wait_for_calls(3)
    heard = []
    for index in (2, 0, 1):
        front.run(calls[index].finish)
        answer = talk.hear()
        heard.append(answer.infer_response.id)
        assert (answer.error_message, floats(answer.infer_response)) == ("", SUM)
        assert answer.infer_response.parameters["triton_final_response"].bool_param
        assert answer.infer_response.parameters["carpool_batch"].int64_param == 17
    assert heard == ["third", "first", "second"]
    talk.end()
    assert talk.is_over()


def test_an_error_leaves_the_stream_open_and_says_whose_it_is(front: FrontEnd, talk: Talk) -> None:
    talk.ask(image_request("nothing", id="bad"))
    answer = talk.hear()
    assert answer.error_message == "Request for unknown model: 'nothing' is not found"
    assert answer.infer_response.id == "bad"
    assert answer.infer_response.parameters["carpool_reason"].string_param == "unknown-model"
    talk.say(b"\xff\xff garbage")
    assert "ModelInferRequest" in talk.hear().error_message
    front.door.refusal = Refused("no room", retry_after_s=2.0)
    talk.ask(image_request(id="late"))
    answer = talk.hear()
    assert (answer.error_message, answer.infer_response.id) == ("no room", "late")
    assert answer.infer_response.parameters["retry_after"].string_param == "2"
    front.door.refusal = None
    talk.ask(image_request(id="good"))
    assert floats(talk.hear().infer_response) == SUM


def test_what_waits_is_answered_after_the_client_has_said_all(front: FrontEnd, talk: Talk) -> None:
    front.door.held = True
    for number in range(3):
        talk.ask(image_request(id=str(number)))
    talk.end()
    for call in list(front.wait_for_calls(3)):
        front.run(call.finish)
    assert {talk.hear().infer_response.id for _ in range(3)} == {"0", "1", "2"}
    assert talk.is_over()


def test_an_empty_stream_is_fine(talk: Talk) -> None:
    talk.end()
    assert talk.is_over()


def test_a_stream_that_stops_midway_cancels_what_waits(front: FrontEnd, talk: Talk) -> None:
    front.door.held = True
    for _ in range(5):
        talk.ask(image_request())
    calls = front.wait_for_calls(5)
    front.run(calls[0].finish)
    assert floats(talk.hear().infer_response) == SUM
    talk.call.cancel()
    until(lambda: all(call.cancelled for call in calls[1:]))
    front.until_slots_are_back()


def test_a_connection_that_breaks_cancels_what_waits(front: FrontEnd) -> None:
    front.door.held = True
    with channel(front) as connected:
        talk = Talk(connected)
        for _ in range(3):
            talk.ask(image_request())
        front.wait_for_calls(3)
    talk.end()
    until(lambda: all(call.cancelled for call in front.door.calls))
    front.until_slots_are_back()


def test_only_so_many_are_read_before_they_are_answered(front: FrontEnd, talk: Talk) -> None:
    front.door.held = True
    for number in range(MOST_UNANSWERED + 20):
        talk.ask(image_request(id=str(number)))
    calls = front.wait_for_calls(MOST_UNANSWERED)
    with channel(front) as other:  # a whole request on another call has passed meanwhile
        future = other.unary_unary(SERVICE + "ModelInfer").future(
            image_request().SerializeToString(), timeout=PATIENCE
        )
        until(lambda: len(front.door.calls) == MOST_UNANSWERED + 1)
        front.run(calls[-1].finish)
        future.result()
    assert len(front.door.calls) == MOST_UNANSWERED + 1
    front.door.held = False
    for call in list(front.door.calls):
        if not call.answered:
            front.run(call.finish)
    heard = {talk.hear().infer_response.id for _ in range(MOST_UNANSWERED + 20)}
    assert heard == {str(number) for number in range(MOST_UNANSWERED + 20)}


def test_streams_and_single_requests_live_side_by_side(front: FrontEnd, talk: Talk) -> None:
    with channel(front) as other:
        for number in range(20):
            talk.ask(image_request(id=str(number)))
            assert floats(infer(other, image_request())) == SUM
    assert sorted(int(talk.hear().infer_response.id) for _ in range(20)) == list(range(20))


def test_metadata_counts_for_every_request_of_the_stream(front: FrontEnd) -> None:
    with channel(front) as connected:
        metadata = (
            ("x-carpool-source", "cam"),
            ("x-carpool-deadline-ms", "2000"),
            ("x-carpool-compression", "gzip"),
        )
        talk = Talk(connected, metadata=metadata)
        for _ in range(2):
            talk.ask(image_request())
            assert floats(talk.hear().infer_response) == SUM
        talk.end()
        assert talk.is_over()
    for call in front.door.calls:
        assert call.source == "cam"
        assert call.arrived < call.deadline <= call.arrived + 2.0


def test_bad_metadata_ends_the_stream(front: FrontEnd) -> None:
    with channel(front) as connected:
        talk = Talk(connected, metadata=(("x-carpool-deadline-ms", "now"),))
        assert refusal(talk.hear)[0] is Code.INVALID_ARGUMENT
        talk.end()


def test_a_server_that_stops_answers_what_it_has_read() -> None:
    with front_end() as front, channel(front) as connected:
        front.door.held = True
        talk = Talk(connected)
        talk.ask(image_request(id="last"))
        call = front.wait_for_calls()[0]
        front.run(front.server.service.stop)
        front.run(call.finish)
        assert talk.hear().infer_response.id == "last"
        status, _, metadata = refusal(talk.hear)
        assert (status, metadata["carpool-reason"]) == (Code.UNAVAILABLE, "stopping")
        talk.end()


def test_a_stream_does_not_outlive_its_key(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"alice {ALICE}\nbob {BOB}\n")
    with front_end(api_key_file=file) as front, channel(front) as connected:
        talk = Talk(connected, metadata=[("x-api-key", ALICE)])
        talk.ask(image_request(id="1"))
        assert talk.hear().infer_response.id == "1"
        write(tmp_path / "keys", f"alice {ALICE} weight=2\n")
        front.run(front.access.guard.reload)
        talk.ask(image_request(id="2"))
        assert talk.hear().infer_response.id == "2"
        write(tmp_path / "keys", f"bob {BOB}\n")
        front.run(front.access.guard.reload)
        talk.ask(image_request(id="3"))
        with pytest.raises(grpc.RpcError) as raised:
            talk.hear()
        assert raised.value.code() is Code.UNAUTHENTICATED


def test_what_a_stream_has_begun_ends_with_its_key(tmp_path: Path) -> None:
    file = write(tmp_path / "keys", f"alice {ALICE}\nbob {BOB}\n")
    with front_end(api_key_file=file) as front, channel(front) as connected:
        talk, other = (Talk(connected, metadata=[("x-api-key", key)]) for key in (ALICE, BOB))
        front.door.held = True
        talk.ask(image_request(id="1"))
        other.ask(image_request(id="2"))
        first, second = sorted(front.wait_for_calls(2), key=lambda call: call.sender.source)
        write(tmp_path / "keys", f"bob {BOB}\n")
        front.run(front.access.guard.reload)
        with pytest.raises(grpc.RpcError) as raised:
            talk.hear()
        assert raised.value.code() is Code.UNAUTHENTICATED
        until(lambda: first.cancelled)
        front.run(second.finish)
        assert other.hear().infer_response.id == "2"
        other.end()
        assert other.is_over()
