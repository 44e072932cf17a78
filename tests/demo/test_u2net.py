"""U²-Net-p for batches gives the numbers that the file gives one picture at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime


def test_a_batch_is_its_pictures_one_by_one(source: Any, model_file: Any) -> None:
    original, ours = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        for path in (source("u2netp").weights, model_file("u2netp"))
    )
    images = np.random.default_rng(1).normal(size=(2, 3, 320, 320)).astype(np.float32)
    [together] = ours.run(None, {"images": images})
    one_by_one = [original.run(None, {"input.1": image[None]})[0] for image in images]
    # Where kernels add in another order for two pictures, the last bits of single precision differ.
    np.testing.assert_allclose(together, np.concatenate(one_by_one), rtol=0, atol=1e-5)


def test_it_says_what_it_takes_and_gives(model_file: Any) -> None:
    model = onnx.load(model_file("u2netp"))
    onnx.checker.check_model(model, full_check=True)
    for [tensor], name, channels in ((model.graph.input, "images", 3), (model.graph.output, "mask", 1)):
        dims = tensor.type.tensor_type.shape.dim
        assert tensor.name == name
        assert [dim.dim_param or dim.dim_value for dim in dims] == ["batch", channels, 320, 320]
