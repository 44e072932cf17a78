"""Messages of Frigate's zmq detector, as its plugin sends them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from carpool.errors import InvalidInput
from carpool.extensions.frigate.zmq_bridge import ROWS, nothing, read_labelmap, reply
from carpool.types import Array

HEIGHT, WIDTH = 4, 8


def found_in(pixels: Array) -> Sequence[Mapping[str, Any]]:
    assert (pixels.shape, pixels.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
    assert pixels[0, 0].tolist() == [255, 0, 0]
    low = {"label": "dog", "class_id": 7, "score": 0.5, "box": [0, 0, 8, 4]}
    return [low, {"label": "cat", "class_id": 3, "score": 0.75, "box": [2, 1, 6, 3]}]


def message(tensor: Array) -> list[bytes]:
    head = {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "model_type": "yologeneric"}
    return [json.dumps(head).encode(), tensor.tobytes()]


def red() -> Array:
    tensor: Array = np.zeros((1, HEIGHT, WIDTH, 3), np.uint8)
    tensor[..., 0] = 255
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        red(),
        np.ascontiguousarray(red().transpose(0, 3, 1, 2)),
        (red() / 255).astype(np.float32),
        red().astype(np.float32),
    ],
    ids=["nhwc", "nchw", "shares", "floats"],
)
def test_rows_are_sorted_with_sides_as_shares(tensor: Array) -> None:
    rows = np.frombuffer(reply(message(tensor), found_in, {}), np.float32).reshape(ROWS, 6)
    assert rows[0].tolist() == [3.0, 0.75, 0.25, 0.25, 0.75, 0.75]
    assert rows[1].tolist() == [7.0, 0.5, 0.0, 0.0, 1.0, 1.0]
    assert not rows[2:].any()


def test_classes_get_frigates_numbers() -> None:
    numbers = read_labelmap("0  person\n1  bicycle\n16  cat\n17  cat\n")
    rows = np.frombuffer(reply(message(red()), found_in, numbers), np.float32).reshape(ROWS, 6)
    assert rows[0, 0] == 16
    assert not rows[1:].any()
    assert read_labelmap("person\n\ntraffic light\n") == {"person": 0, "traffic light": 1}


def test_more_boxes_than_rows_are_cut() -> None:
    many = [{"label": "a", "class_id": 1, "score": 0.5, "box": [0, 0, 1, 1]}] * 40
    assert len(reply(message(red()), lambda _: many, {})) == len(nothing()) == 480


def test_the_model_is_always_there() -> None:
    asked = json.dumps({"model_request": True, "model_name": "any.onnx"}).encode()
    assert json.loads(reply([asked], found_in, {})) == {"model_available": True, "model_loaded": True}
    sent = json.dumps({"model_data": True, "model_name": "any.onnx"}).encode()
    assert json.loads(reply([sent, b"file"], found_in, {}))["model_loaded"]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"{"],
        [b"[" * 100_000],
        [b"3"],
        [b"{}"],
        [json.dumps({"shape": [1, 4, 8, 3], "dtype": "uint8"}).encode()],
        [json.dumps({"shape": [1, 4, 8, 3], "dtype": "uint8"}).encode(), b"short"],
        [json.dumps({"shape": [1, 4, 8, 3], "dtype": "object"}).encode(), b""],
        [json.dumps({"shape": [True, 4, 3], "dtype": "uint8"}).encode(), b""],
        [json.dumps({"shape": [2, 4, 8, 3], "dtype": "uint8"}).encode(), bytes(192)],
        [json.dumps({"shape": [-1, 8, 3], "dtype": "uint8"}).encode(), bytes(96)],
    ],
)
def test_other_messages_are_named(frames: list[bytes]) -> None:
    with pytest.raises(InvalidInput):
        reply(frames, found_in, {})
