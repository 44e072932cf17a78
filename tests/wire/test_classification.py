"""The classification extension, as clients parse it."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.types import (
    MAX_ASKED_CLASSES,
    Array,
    Datatype,
    InferResponse,
    RequestedOutput,
    Signature,
    Tensor,
    TensorSpec,
)
from carpool.wire import v2
from carpool.wire.classes import _best, any_takes_long, classify, with_classes
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


def _sorted(numbers: Array, k: int) -> list[int]:
    """The order that clients are told of: by a sort of all of them."""
    keys = np.where(np.isnan(numbers), -np.inf, numbers) if numbers.dtype.kind == "f" else numbers
    order = len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
    best: list[int] = order[:k].tolist()
    return best


@given(st.data(), st.sampled_from(["f4", "f8", "f2", "u1", "i8", "u8", "?"]), st.integers(1, 3))
def test_the_best_are_those_of_a_stable_sort(data: st.DataObject, dtype: str, rows: int) -> None:
    """Of many values only the best are sorted; most of these are equal."""
    size = data.draw(st.sampled_from([1, 2, 7, 1024, 1025, 3000]))
    kinds = data.draw(st.lists(st.sampled_from([0, 1, 2, 3, 100, 101]), min_size=1, max_size=6))
    drawn = np.random.default_rng(data.draw(st.integers(0, 99))).choice(kinds, (rows, size))
    values = drawn.astype(dtype)
    if values.dtype.kind == "f":
        values[drawn == 3] = np.nan
        values[drawn == 2] = -np.inf
    k = data.draw(st.sampled_from([1, 2, 5, 1000, 5000]))
    assert _best(values, min(k, size)).tolist() == [_sorted(row, k) for row in values]


def test_of_a_large_output_only_the_best_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_values: list[int] = []
    argsort = np.argsort

    def counted(values: Array, *given: Any, **more: Any) -> Array:
        sorted_values.append(values.size)
        return argsort(values, *given, **more)

    monkeypatch.setattr(np, "argsort", counted)
    large = tensor_of("scores", Datatype.FP32, np.arange(200_000).reshape(2, 100_000) % 1000)
    found = classify(large, 1000)
    assert (found.shape, sum(sorted_values)) == ((2, 1000), 2000)
    assert found.data[0, 0] == b"999.000000:999"


@pytest.mark.parametrize(
    ("labels", "asked", "most"), [(0, 1001, 1000), (0, 10**18, 1000), (4000, 4001, 4000)]
)
def test_only_so_many_classes_may_be_asked_for(labels: int, asked: int, most: int) -> None:
    specs = (TensorSpec("x", Datatype.FP32, (1,)),), (TensorSpec("scores", Datatype.FP32, (-1,)),)
    signature = Signature("net", *specs, 8, classes=max(MAX_ASKED_CLASSES, labels))

    def head(classes: int, rows: int = 1) -> bytes:
        return orjson.dumps(
            {
                "inputs": [
                    {
                        "name": "x",
                        "datatype": "FP32",
                        "shape": [rows, 1],
                        "parameters": {"binary_data_size": 4 * rows},
                    }
                ],
                "outputs": [{"name": "scores", "parameters": {"classification": classes}}],
            }
        )

    assert v2.read_head(head(most), signature).outputs[0].classification == most
    with pytest.raises(InvalidInput, match=f"ask for at most {most:,}$") as raised:
        v2.read_head(head(asked), signature)
    assert raised.value.field == "output 'scores'.parameters.classification"
    few = (TensorSpec("scores", Datatype.FP32, (16,)),)
    v2.read_head(head(MAX_ASKED_CLASSES, 4096), Signature("net", specs[0], few, 4096))  # of 16 that there are
    many = Signature("net", *specs, 4096, classes=MAX_ASKED_CLASSES)
    with pytest.raises(InvalidInput, match="ask for at most 16 for each of 4096 rows"):
        v2.read_head(head(17, 4096), many)


def test_what_takes_long_is_told_by_values_and_by_classes() -> None:
    small, large = (tensor_of(str(size), Datatype.FP32, np.zeros((2, size))) for size in (1000, 10_000))

    def long(k: int, *tensors: Tensor) -> bool:
        return any_takes_long(
            [RequestedOutput(one.name, classification=k) for one in tensors], [small, large]
        )

    assert not long(5, small)
    assert not long(0, large)
    assert long(1, large)
    assert long(1000, small)


def test_classes_that_are_there_are_not_looked_for_again() -> None:
    """Others look at the answer too, and see what the model gave."""
    tensor = tensor_of("scores", Datatype.FP32, [[0.25, 0.5]])
    asked = [RequestedOutput("scores", classification=1)]
    (found,) = with_classes(asked, [tensor], {"scores": ["cat", "dog"]}, batched=True)
    assert found.data is tensor.data
    assert classify(found, 1).data.tolist() == [[b"0.500000:1:dog"]]
    encoded = v2.encode_response(InferResponse("net", [found]), asked)
    assert b'"data":["0.500000:1:dog"]' in joined(encoded)
