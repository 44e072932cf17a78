"""What an ONNX file declares for its outputs holds, also where its runtime infers something else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from backends.onnx_models import Dims, write
from carpool import backends
from carpool.config.model import ModelConfig, TensorConfig
from carpool.config.onnx_outputs import as_declared, read_outputs
from carpool.config.repository import ModelVersion
from carpool.engine.run.collator import Collator
from carpool.engine.run.model_inputs import signature_of
from carpool.errors import ModelError


def expanding(path: Path, declared: Dims, returned: list[int]) -> ModelVersion:
    """A model that declares one shape and returns another, which its runtime can infer."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Expand", ["s", "shape"], ["y"]),
    ]
    tensors = [("x", "FP32", ("N", 4))], [("y", "FP32", declared)]
    write(path, nodes, *tensors, {"shape": np.array(returned, np.int64)})
    return ModelVersion(1, path)


def test_an_answer_of_another_shape_is_an_error_that_names_both(tmp_path: Path) -> None:
    for number, (declared, returned, known) in enumerate(
        (
            (("N", 4), [1, 5_000_000], "[1, 4]"),
            ((1, 7), [1, 5], "[1, 7]"),
            (("N", 4, 2), [1, 5], "[1, 4, 2]"),
        )
    ):
        version = expanding(tmp_path / f"{number}.onnx", declared, returned)
        assert version.file is not None
        assert read_outputs(version.file) == {
            "y": tuple(-1 if isinstance(one, str) else one for one in declared)
        }
        config = ModelConfig(name="m", path=tmp_path, backend="onnxruntime")
        described = backends.describe(config, version)
        backend = backends.load(described, version)
        answer = backend.run({"x": np.zeros((1, 4), np.float32)}, ("y",))
        with pytest.raises(ModelError) as found:
            Collator(signature_of(described), 1).check(answer, ("y",), 1)
        assert str(found.value) == (
            f'm returned the output "y" with shape {returned}, but {known} is declared'
        )
        backend.close()
        # Whoever knows better says so in the settings.
        own = ModelConfig(
            name="m",
            path=tmp_path,
            backend="onnxruntime",
            max_batch=0,
            inputs=(TensorConfig("x", "FP32", (-1, 4)),),
            outputs=(TensorConfig("y", "FP32", tuple(returned)),),
        )
        if len(declared) == len(returned):
            Collator(signature_of(backends.describe(own, version)), 1).check(answer, ("y",), 1)


def test_lengths_that_vary_stay_free(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write(
        path,
        [helper.make_node("Neg", ["x"], ["y"])],
        [("x", "FP32", ("N", "M"))],
        [("y", "FP32", ("N", "M"))],
    )
    config = ModelConfig(name="m", path=tmp_path, backend="onnxruntime")
    described = backends.describe(config, ModelVersion(1, path))
    assert described.outputs == (TensorConfig("y", "FP32", (-1,)),)


def test_what_is_no_onnx_changes_nothing(tmp_path: Path) -> None:
    version = expanding(tmp_path / "model.onnx", ("N", 4), [1, 5])
    config = ModelConfig(name="m", path=tmp_path, backend="onnxruntime")
    signature = backends.read_signature(config, version)
    (tmp_path / "broken.onnx").write_bytes(b"\x3a\xff\xff\xff\xff\x0f" + b"x" * 50)
    for file in (None, tmp_path / "broken.onnx", tmp_path / "gone.onnx", tmp_path / "model.pt"):
        assert as_declared(signature, file) == signature
