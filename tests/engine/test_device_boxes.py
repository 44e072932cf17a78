"""Detectors whose device chooses the boxes: when it does, and what clients and front ends then see."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.model import KEPT, DetectSettings
from carpool.config.toml import toml_config
from carpool.engine.loading.device_pictures import OUTPUT
from carpool.engine.loading.loading import Settled, settle
from carpool.errors import ConfigError
from carpool.types import Datatype, Signature, TensorSpec

TOML = """
backend = "{backend}"
max_batch = 4
[pytorch]
device = "{device}"
[detect]
format = "yolov8"
nms = "{nms}"
normalized = true
max_detections = 7
"""
RAW = TensorSpec("raw", Datatype.FP32, (7, 50))


def settled(
    nms: str, device: str = "cpu", backend: str = "pytorch", output: TensorSpec = RAW, max_batch: int = 4
) -> Settled:
    text = TOML.format(backend=backend, device=device, nms=nms)
    if backend != "pytorch":
        text = text.replace(f'[pytorch]\ndevice = "{device}"\n', "")
    signature = Signature("m", (TensorSpec("x", Datatype.UINT8, (3, 30, 40)),), (output,), max_batch)
    return settle(toml_config(text, Path("m/model.toml")), signature, {})


@pytest.mark.parametrize(("nms", "device"), [("device", "cpu"), ("device", "cuda:0"), ("auto", "cuda:0")])
def test_the_device_adds_an_output_that_answers_are_read_from(nms: str, device: str) -> None:
    config, signature, vision, finish = settled(nms, device)
    assert finish is not None
    assert list(finish.adds) == [OUTPUT]
    assert [tensor.name for tensor in config.outputs] == [OUTPUT]  # beside those that the model declares
    assert signature.outputs == (RAW, TensorSpec(OUTPUT, Datatype.FP32, (7, 6)))
    assert vision is not None
    assert vision.outputs == signature.outputs[1:]
    assert isinstance(vision.table, DetectSettings)
    assert vision.table.format == KEPT
    assert not vision.table.normalized  # the device has made pixels of them


@pytest.mark.parametrize(("nms", "device"), [("cpu", "cuda:0"), ("auto", "cpu")])
def test_elsewhere_the_front_end_suppresses(nms: str, device: str) -> None:
    _, signature, vision, finish = settled(nms, device)
    assert finish is None
    assert signature.outputs == (RAW,)
    assert vision is not None
    assert vision.outputs == (RAW,)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"backend": "onnxruntime"}, "pytorch backend"),
        ({"max_batch": 0}, "takes batches"),
        ({"output": TensorSpec(OUTPUT, Datatype.FP32, (7, 50))}, "has already"),
        ({"output": TensorSpec("raw", Datatype.FP32, (7, -1))}, "shapes are known"),
    ],
)
def test_a_model_that_cannot_is_told_what_to_change(changes: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        settled("device", **changes)  # type: ignore[arg-type]
    assert "detect.nms" in error.value.message
    assert settled("auto", **changes)[3] is None  # type: ignore[arg-type]
