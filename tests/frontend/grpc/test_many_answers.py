"""Many answers in a stream, as tritonclient hears them; unary calls have room for one."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
import tritonclient.grpc.service_pb2 as pb

from carpool.errors import ModelError
from carpool.frontend.grpc.stream_infer import MOST_UNWRITTEN
from carpool.link.engine_client import Answer
from carpool.types import Datatype, StepTiming, TensorSpec, Timing
from frontend.fake_door import FakeModel
from frontend.grpc.front_end import FrontEnd, channel, front_end
from frontend.grpc.test_stream import Talk
from frontend.http.harness import PATIENCE
from later import later
from waiting import until


def answers(inputs: Any) -> Any:
    for value in inputs["IN"].ravel():
        if value < 0:
            raise ModelError("it had enough")
        yield {"OUT": [value], "IDX": [7]}


REPEAT = FakeModel(
    "repeat",
    [TensorSpec("IN", Datatype.INT32, (-1,))],
    [TensorSpec("OUT", Datatype.INT32, (1,)), TensorSpec("IDX", Datatype.UINT32, (1,))],
    answers,
    max_batch=0,
    mode="eager",
    decoupled=True,
)
WIDE = FakeModel(
    "wide",
    [TensorSpec("IN", Datatype.INT32, (-1,))],
    [TensorSpec("OUT", Datatype.INT32, (-1,))],
    lambda inputs: ({"OUT": np.arange(size, dtype=np.int32)} for size in inputs["IN"].ravel()),
    max_batch=0,
    mode="eager",
    decoupled=True,
)
TEXT = replace(REPEAT, name="text", writes=True)
ONE = FakeModel(
    "one",
    [TensorSpec("IN", Datatype.INT32, (-1,))],
    [TensorSpec("OUT", Datatype.INT32, (-1,))],
    lambda inputs: {"OUT": inputs["IN"]},
    max_batch=0,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[FrontEnd]:
    with front_end(REPEAT, TEXT, WIDE, ONE) as running:
        yield running


@pytest.fixture
def front(shared: FrontEnd) -> Iterator[FrontEnd]:
    shared.door.calls.clear()
    yield shared
    shared.door.held = False
    shared.until_slots_are_back()


def given(*values: int) -> list[Any]:
    tensor = triton.InferInput("IN", [len(values)], "INT32")
    tensor.set_data_from_numpy(np.array(values, np.int32))
    return [tensor]


def is_final(result: Any) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


class Heard:
    """One stream of tritonclient's."""

    def __init__(self, front: FrontEnd) -> None:
        self._client = triton.InferenceServerClient(front.url)
        self._answers: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put((result, error)))
        self.ask = self._client.async_stream_infer

    def __enter__(self) -> Heard:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def next(self) -> Any:
        result, error = self._answers.get(timeout=PATIENCE)
        assert error is None, error
        return result

    def error(self) -> str:
        _, error = self._answers.get(timeout=PATIENCE)
        return str(error.message())


def test_each_answer_says_whether_it_is_the_last(front: FrontEnd) -> None:
    with Heard(front) as heard:
        heard.ask("repeat", given(4, 2, 0, 1), request_id="a", enable_empty_final_response=True)
        found = [heard.next() for _ in range(5)]
        assert [one.as_numpy("OUT")[0] for one in found[:4]] == [4, 2, 0, 1]
        assert [is_final(one) for one in found] == [False] * 4 + [True]
        assert found[4].as_numpy("OUT") is None
        assert {one.get_response().id for one in found} == {"a"}


def test_nothing_is_said_of_an_empty_end_unless_it_is_asked_for(front: FrontEnd) -> None:
    with Heard(front) as heard:
        heard.ask("repeat", given(), request_id="none")
        heard.ask("repeat", given(5), request_id="one")
        heard.ask("one", given(6), request_id="usual")
        first, second = heard.next(), heard.next()
        assert (first.get_response().id, is_final(first)) == ("one", False)
        assert (second.get_response().id, is_final(second)) == ("usual", True)
        heard.ask("repeat", given(), enable_empty_final_response=True)
        assert is_final(heard.next())


def test_the_outputs_that_were_asked_for(front: FrontEnd) -> None:
    with Heard(front) as heard:
        heard.ask("repeat", given(5), outputs=[triton.InferRequestedOutput("IDX")])
        found = heard.next()
        assert found.as_numpy("IDX")[0] == 7
        assert found.as_numpy("OUT") is None


def test_classes_of_an_answer_are_found_in_the_loop_while_it_is_short(front: FrontEnd) -> None:
    with Heard(front) as heard:
        heard.ask("wide", given(5, 20_000), outputs=[triton.InferRequestedOutput("OUT", class_count=2)])
        assert heard.next().as_numpy("OUT").tolist() == [b"4:4", b"3:3"]
        assert "found among at most 16,384 values" in heard.error()


def test_an_error_after_some_answers_leaves_the_stream_open(front: FrontEnd) -> None:
    with Heard(front) as heard:
        heard.ask("repeat", given(1, 2, -1, 3))
        assert [heard.next().as_numpy("OUT")[0] for _ in range(2)] == [1, 2]
        assert "it had enough" in heard.error()
        heard.ask("repeat", given(9))
        assert heard.next().as_numpy("OUT")[0] == 9


@pytest.mark.parametrize("count", [1000, later(10_000)])
def test_thousands_of_answers_in_order(front: FrontEnd, count: int) -> None:
    with Heard(front) as heard:
        heard.ask("repeat", given(*range(count)))
        assert [heard.next().as_numpy("OUT")[0] for _ in range(count)] == list(range(count))


def test_the_last_answer_may_carry_the_end(front: FrontEnd) -> None:
    front.door.held = True
    with Heard(front) as heard:
        heard.ask("repeat", given(1), enable_empty_final_response=True)
        (call,) = front.wait_for_calls(1)
        front.run(lambda: (call.say({"OUT": [3]}, last=True), call.finish_parts()))
        assert is_final(heard.next())
        front.door.held = False
        heard.ask("one", given(4))
        assert heard.next().as_numpy("OUT")[0] == 4  # and nothing came in between


def test_tritonclients_aio_stream(front: FrontEnd) -> None:
    async def main() -> list[tuple[Any, bool]]:
        async with triton_aio.InferenceServerClient(front.url) as client:

            async def requests() -> Any:
                yield {"model_name": "repeat", "inputs": given(1, 2)}  # it cannot ask for an empty end

            found = []
            async for result, error in client.stream_infer(requests()):
                assert error is None
                found.append((int(result.as_numpy("OUT")[0]), is_final(result)))
            return found

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == [(1, False), (2, False)]


def test_a_unary_call_has_room_for_one_answer(front: FrontEnd) -> None:
    with (
        triton.InferenceServerClient(front.url) as client,
        pytest.raises(triton.InferenceServerException) as refused,
    ):
        client.infer("repeat", given(1))
    assert (
        refused.value.message() == "ModelInfer RPC doesn't support models with decoupled transaction policy"
    )
    assert refused.value.status() == "StatusCode.UNIMPLEMENTED"
    assert not front.door.calls


def test_a_client_that_leaves_is_heard_of(front: FrontEnd) -> None:
    front.door.held = True
    with Heard(front) as heard:
        heard.ask("repeat", given(1))
        (call,) = front.wait_for_calls(1)
        front.run(lambda: call.say({"OUT": [3]}))
        heard.next()
    until(lambda: call.cancelled)


def test_a_client_that_does_not_read_is_cut_off(front: FrontEnd) -> None:
    front.door.held = True
    with channel(front, **{"grpc.http2.lookahead_bytes": 1}) as connected:
        talk = Talk(connected)
        asked = pb.ModelInferRequest(model_name="repeat")
        tensor = asked.inputs.add(name="IN", datatype="INT32", shape=[1])
        tensor.contents.int_contents.append(1)
        talk.ask(asked)
        (call,) = front.wait_for_calls(1)
        piece = {"OUT": np.zeros(1 << 18, np.int32)}
        for _ in range(MOST_UNWRITTEN // (1 << 20) + 64):
            if call.cancelled:
                break
            front.run(lambda: call.say(piece))
        assert call.cancelled
        talk.call.cancel()


def timed(result: Any) -> set[str]:
    return {name for name in result.get_response().parameters if name.startswith("carpool_")}


def test_where_the_time_went_is_said_when_it_is_known(front: FrontEnd) -> None:
    """At the end, and never as zeros before that."""
    with Heard(front) as heard:
        heard.ask("repeat", given(4, 2), enable_empty_final_response=True)
        first, second, end = (heard.next() for _ in range(3))
        assert not timed(first) | timed(second)
        assert {"carpool_queue_ms", "carpool_infer_ms", "carpool_batch"} <= timed(end)
        assert end.get_response().parameters["carpool_infer_ms"].double_param == pytest.approx(4.0)


@pytest.mark.parametrize("fails", [False, True])
def test_the_last_piece_of_a_text_says_where_its_time_went(front: FrontEnd, fails: bool) -> None:
    front.door.held = True
    encode, write = Timing(0.002, infer=0.003, batch=1), Timing(infer=0.01, batch=7)
    timing = StepTiming(0.002, infer=0.013, batch=1, steps=(("encode", encode), ("write", write)))
    with Heard(front) as heard:
        heard.ask("text", given(1))
        (call,) = front.wait_for_calls(1)
        front.run(lambda: call.say({"OUT": [3]}))
        assert not timed(heard.next())

        def end() -> None:
            call.say({"OUT": [5]}, last=True)
            call.answered = True
            wrong = ModelError("the process died") if fails else None
            call.hears.done(Answer(timing=timing, error=wrong))

        front.run(end)
        if fails:
            assert heard.error() == "the process died"
            return
        last = heard.next()
        assert is_final(last)
        assert last.as_numpy("OUT")[0] == 5
        parameters = last.get_response().parameters
        assert parameters["carpool_infer_ms"].double_param == pytest.approx(13.0)
        assert 'write.batch;desc="7"' in parameters["carpool_steps"].string_param


def test_outputs_that_an_answer_leaves_out_are_not_replaced_by_others(front: FrontEnd) -> None:
    front.door.held = True
    with Heard(front) as heard:
        heard.ask("repeat", given(5), outputs=[triton.InferRequestedOutput("IDX")])
        (call,) = front.wait_for_calls(1)
        front.run(lambda: (call.say({"OUT": [3]}), call.say({"IDX": [4], "OUT": [3]}), call.finish_parts()))
        first, second = heard.next(), heard.next()
        assert not first.get_response().outputs
        assert [one.name for one in second.get_response().outputs] == ["IDX"]
