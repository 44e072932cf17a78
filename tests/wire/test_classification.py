"""The classification extension, as clients parse it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from carpool.errors import InvalidInput
from carpool.types import Datatype, InferResponse, RequestedOutput
from carpool.wire import v2
from carpool.wire.codec import classify
from wire.samples import joined, tensor_of


@pytest.mark.parametrize(
    ("datatype", "values", "k", "found"),
    [
        (Datatype.FP32, [[0.25, 0.5, 0.125]], 2, [[b"0.500000:1", b"0.250000:0"]]),
        (Datatype.FP32, [[1, 2], [4, 3]], 1, [[b"2.000000:1"], [b"4.000000:0"]]),
        (Datatype.UINT8, [[0, 255]], 9, [[b"255:1", b"0:0"]]),
        (
            Datatype.INT64,
            [[-5, 2**62, 2**62 + 1]],
            3,
            [[f"{2**62 + 1}:2".encode(), f"{2**62}:1".encode(), b"-5:0"]],
        ),
        (Datatype.FP64, [[1, 3, 3, 2]], 3, [[b"3.000000:1", b"3.000000:2", b"2.000000:3"]]),
        (Datatype.FP32, [[np.nan, -1]], 2, [[b"-1.000000:1", b"nan:0"]]),
        (Datatype.FP16, [[0.5, 1]], 1, [[b"1.000000:1"]]),
        (Datatype.BF16, [[0x3F80, 0x4000]], 1, [[b"2.000000:1"]]),
        (Datatype.BOOL, [[False, True]], 1, [[b"1:1"]]),
        (Datatype.FP32, [[[1, 2], [4, 3]]], 1, [[b"4.000000:2"]]),
    ],
)
def test_best_values_per_row(datatype: Datatype, values: Any, k: int, found: list[list[bytes]]) -> None:
    tensor = classify(tensor_of("scores", datatype, values), k)
    assert tensor.datatype is Datatype.BYTES
    assert tensor.shape == tensor.data.shape == (len(found), len(found[0]))
    assert tensor.data.tolist() == found


def test_a_model_without_batches_has_one_row() -> None:
    tensor = classify(tensor_of("scores", Datatype.INT8, [1, 2]), 1, batched=False)
    assert (tensor.shape, tensor.data.tolist()) == ((1,), [b"2:1"])


def test_empty_outputs_have_no_classes() -> None:
    assert classify(tensor_of("scores", Datatype.INT8, np.empty((0, 3))), 2).shape == (0, 2)
    assert classify(tensor_of("scores", Datatype.INT8, np.empty((2, 0))), 2).shape == (2, 0)


@pytest.mark.parametrize("binary", [True, False])
def test_labels_are_in_the_answer(binary: bool) -> None:
    answer = InferResponse("net", [tensor_of("scores", Datatype.FP32, [[0.25, 0.5, 0.125]])])
    wanted = [RequestedOutput("scores", binary, classification=3)]
    encoded = v2.encode_response(answer, wanted, labels={"scores": ["cat", "dog"]})
    output = v2.decode_response(joined(encoded), encoded.header_length).outputs[0]
    assert output.data.tolist() == [[b"0.500000:1:dog", b"0.250000:0:cat", b"0.125000:2"]]


def test_strings_cannot_be_classified() -> None:
    answer = InferResponse("net", [tensor_of("text", Datatype.BYTES, [[b"a"]])])
    with pytest.raises(
        InvalidInput, match="class result not available for output due to unsupported type 'BYTES'"
    ):
        v2.encode_response(answer, [RequestedOutput("text", classification=1)])
