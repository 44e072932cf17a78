"""What a Python program gives, held against what the model takes; optional inputs above all."""

from __future__ import annotations

import numpy as np
import pytest

from carpool.engine.run.model_inputs import check_inputs, shape_key
from carpool.errors import InvalidInput
from carpool.types import Datatype, Signature, TensorSpec

A = TensorSpec("a", Datatype.FP32, (2,))
B = TensorSpec("b", Datatype.FP32, (2,), optional=True)
C = TensorSpec("c", Datatype.FP32, (-1,), optional=True)
ROW = np.zeros((1, 2), np.float32)


def signature(*inputs: TensorSpec, max_batch: int = 4) -> Signature:
    return Signature("m", inputs, (), max_batch)


def test_an_optional_input_may_be_left_out() -> None:
    assert list(check_inputs(signature(A, B), {"a": ROW})[0]) == ["a"]
    assert list(check_inputs(signature(A, B), {"a": ROW, "b": ROW})[0]) == ["a", "b"]


def test_a_required_one_may_not() -> None:
    with pytest.raises(InvalidInput, match="needs the input 'a'"):
        check_inputs(signature(A, B), {"b": ROW})


def test_a_batch_needs_one_input_to_say_how_large_it_is() -> None:
    with pytest.raises(InvalidInput, match="needs at least one of its inputs"):
        check_inputs(signature(B), {})
    assert check_inputs(signature(B, max_batch=0), {}) == ({}, False)


def test_who_brings_other_inputs_rides_in_another_batch() -> None:
    model = signature(A, B, C)
    keys = [
        shape_key(model, given)
        for given in (
            {"a": ROW},
            {"a": ROW, "b": ROW},
            {"a": ROW, "c": np.zeros((1, 3), np.float32)},
            {"a": ROW, "c": np.zeros((1, 4), np.float32)},
            {"a": ROW, "b": ROW, "c": np.zeros((1, 4), np.float32)},
        )
    ]
    assert len(set(keys)) == len(keys)
    assert shape_key(model, {"a": ROW}) == shape_key(model, {"a": np.ones((3, 2), np.float32)})
    assert shape_key(signature(A), {"a": ROW}) is None
