"""The generator's messages are those that Triton's own client writes and reads."""

from __future__ import annotations

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from carpool.lab.load.grpc_client import infer_request, read_answer, read_error
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Kind, Timing, failed
from carpool.types import Datatype, Tensor


@settings(deadline=None)
@given(
    st.text(max_size=20),
    st.lists(st.integers(0, 5), max_size=4),
    st.integers(0, 9),
)
def test_a_request_reads_as_it_was_meant(name: str, shape: list[int], priority: int) -> None:
    tensor = Tensor(name, Datatype.FP32, tuple(shape), np.ones(shape, np.float32))
    written = infer_request("model", "3", [tensor], priority)
    read = service_pb2.ModelInferRequest.FromString(written)
    assert (read.model_name, read.model_version) == ("model", "3")
    assert (read.inputs[0].name, read.inputs[0].datatype) == (name, "FP32")
    assert list(read.inputs[0].shape) == shape
    assert list(read.raw_input_contents) == [np.ones(shape, np.float32).tobytes()]
    assert read.parameters["priority"].int64_param == priority


def test_an_answer_says_where_its_time_went() -> None:
    answer = service_pb2.ModelInferResponse(model_name="m", raw_output_contents=[b"1234"])
    assert read_answer(answer.SerializeToString()) == PLAIN_ANSWER
    answer.parameters["carpool_queue_ms"].double_param = 2.0
    answer.parameters["carpool_infer_ms"].double_param = 4.0
    answer.parameters["carpool_batch"].int64_param = 17
    answer.parameters["other"].string_param = "x"
    assert read_answer(answer.SerializeToString()) == Answer(Kind.ANSWERED, "", Timing(0.002, 0.004, 17))
    answer.parameters["carpool_post_ms"].double_param = 1.0
    timed = Answer(Kind.ANSWERED, "", Timing(0.002, 0.004, 17, 0.001))
    assert read_answer(answer.SerializeToString()) == timed


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_answer_or_malformed(message: bytes) -> None:
    assert read_answer(message).kind in (Kind.ANSWERED, Kind.FAILED)


@pytest.mark.parametrize("message", [b"\x0a\xff", b"\x0b\x00", b"\xff" * 12, b"\x09\x00"])
def test_what_is_no_message_is_malformed(message: bytes) -> None:
    assert read_answer(message) == failed("malformed")


@pytest.mark.parametrize(
    ("code", "reason", "means"),
    [
        ("RESOURCE_EXHAUSTED", "overload", Answer(Kind.REFUSED, "overload")),
        ("RESOURCE_EXHAUSTED", "", Answer(Kind.REFUSED, "grpc-resource-exhausted")),
        ("DEADLINE_EXCEEDED", "deadline", Answer(Kind.REFUSED, "deadline")),
        ("ABORTED", "replaced", Answer(Kind.REFUSED, "replaced")),
        ("UNAVAILABLE", "queue-full", Answer(Kind.REFUSED, "queue-full")),
        ("UNAVAILABLE", "", failed("grpc-unavailable")),  # as when nobody is there
        ("INTERNAL", "model-error", failed("model-error")),
        ("INVALID_ARGUMENT", "<odd>", failed("grpc-invalid-argument")),
    ],
)
def test_statuses_and_reasons(code: str, reason: str, means: Answer) -> None:
    trailing = {"carpool-reason": reason} if reason else {}
    assert read_error(grpc.StatusCode[code], trailing) == means
