"""Answers whose client takes nothing: each is cut off in its time, and all together have a bound."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc.service_pb2 as pb

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.rpc import TOO_SLOW
from carpool.frontend.grpc.rpc_heads import Status
from carpool.frontend.grpc.stream_infer import MOST_UNWRITTEN
from frontend.fake_door import FakeCall
from frontend.grpc.front_end import SERVICE, FrontEnd, front_end
from frontend.grpc.test_many_answers import ONE, REPEAT
from frontend.grpc.wire import Wire, data, framed, head, wire
from waiting import until

NO_WINDOW = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})
PIECE = {"OUT": np.zeros(1 << 18, np.int32)}
STREAM = SERVICE + "ModelStreamInfer"


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end(REPEAT, ONE) as running:
        running.door.held = True
        yield running
        running.door.held = False
        running.until_slots_are_back()


def asked(client: Wire, stream: int = 1, model: str = "repeat") -> None:
    request = pb.ModelInferRequest(model_name=model, id="a")
    request.inputs.add(name="IN", datatype="INT32", shape=[1]).contents.int_contents.append(1)
    client.send(head(stream, path=STREAM), data(stream, framed(request.SerializeToString()), 0))


def say(front: FrontEnd, call: FakeCall, count: int) -> None:
    for _ in range(count):
        if call.cancelled:
            return
        front.run(lambda: call.say(PIECE))


def test_a_client_without_a_window_is_cut_off_with_a_status_and_its_memory_is_free(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    with wire(front, NO_WINDOW) as client, wire(front) as other:
        asked(client)
        (call,) = front.wait_for_calls(1)
        say(front, call, 64)
        assert call.cancelled  # the model goes on with others
        assert MOST_UNWRITTEN < accounts.unread < MOST_UNWRITTEN + (3 << 20)
        accounts.patience_s = 0.0
        until(lambda: accounts.unread == 0)
        said = client.answer(1)
        assert (said.status, said.fields["grpc-message"]) == (Status.UNAVAILABLE, TOO_SLOW)
        assert said.fields["carpool-reason"] == "slow-reader"
        assert said.data == b""
        assert client.is_alive()
        assert other.is_alive()
        until(lambda: not front.server.service.running)


def test_a_request_that_is_under_way_is_let_go_with_its_stream(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    with wire(front, NO_WINDOW) as client:
        asked(client)
        (call,) = front.wait_for_calls(1)
        say(front, call, 1)
        assert not call.cancelled
        accounts.patience_s = 0.0
        assert client.answer(1).status == Status.UNAVAILABLE
        until(lambda: call.cancelled)
        assert accounts.unread == 0


def test_streams_of_many_requests_have_one_bound(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    accounts.most_bytes = 16 << 20  # one client gets half
    with wire(front, NO_WINDOW) as client:
        for number in range(16):
            asked(client, 2 * number + 1)
        for call in front.wait_for_calls(16):
            say(front, call, 3)
            assert accounts.unread <= accounts.most_bytes // 2
        ended = [client.answer(2 * number + 1).status for number in range(13)]
        assert set(ended) == {Status.UNAVAILABLE}


def test_who_reads_is_not_cut_off_for_those_who_do_not(front: FrontEnd) -> None:
    accounts = front.server.service.accounts
    accounts.most_bytes = 16 << 20  # one client gets half
    with wire(front, NO_WINDOW) as idle, wire(front) as reader:
        asked(idle)
        (first,) = front.wait_for_calls(1)
        say(front, first, 7)
        asked(reader)
        second = front.wait_for_calls(2)[1]
        for _ in range(20):
            say(front, second, 2)
            reader.send(h2.window_update(0, 3 << 20), h2.window_update(1, 3 << 20))
            read = 0
            while read < 2 << 20:
                found = reader.receive()
                assert found is not None
                read += len(found.payload) if found.kind == h2.DATA else 0
        assert not second.cancelled
        assert idle.answer(1).status == Status.UNAVAILABLE
        reader.send(h2.reset(1, h2.Code.CANCEL))
