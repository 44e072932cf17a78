"""Write a repository as a Triton server on a GPU has it, to move it over: a small convolutional net in ONNX.

    python examples/make_vision_repository.py models
    carpool serve models

The weights are random: it costs what a small classifier costs, and means nothing. Needs onnx.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIDE, CLASSES = 128, 10
CHANNELS = (3, 64, 128, 256)  # of the input and after each layer

CONFIG = """\
name: "scenes"
platform: "onnxruntime_onnx"
max_batch_size: 32
input [ { name: "image" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 128, 128 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 10 ] label_filename: "labels.txt" } ]
instance_group [ { count: 1 kind: KIND_GPU gpus: [ 0 ] } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 5000
  default_queue_policy { max_queue_size: 512 }
}
model_warmup [ { name: "one" batch_size: 1 inputs { key: "image" value {
  data_type: TYPE_FP32 dims: [ 3, 128, 128 ] zero_data: true } } } ]
version_policy { latest { num_versions: 1 } }
parameters [ { key: "carpool_preset" value: { string_value: "plain" } } ]
"""


def small_net() -> onnx.ModelProto:
    """Convolutions that halve the picture, the mean over what is left, and one matrix."""
    random = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {}
    nodes = []
    last = "image"
    for layer, (before, after) in enumerate(itertools.pairwise(CHANNELS)):
        weights[f"w{layer}"] = random.normal(0, before**-0.5 / 3, (after, before, 3, 3)).astype(np.float32)
        nodes.append(
            helper.make_node("Conv", [last, f"w{layer}"], [f"c{layer}"], pads=[1] * 4, strides=[2, 2])
        )
        nodes.append(helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]))
        last = f"r{layer}"
    weights["classes"] = random.normal(0, 1, (CHANNELS[-1], CLASSES)).astype(np.float32)
    nodes.append(helper.make_node("GlobalAveragePool", [last], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    nodes.append(helper.make_node("MatMul", ["flat", "classes"], ["scores"]))
    graph = helper.make_graph(
        nodes,
        "scenes",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, SIDE, SIDE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def main(folder: Path) -> None:
    version = folder / "scenes" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version.parent / "labels.txt").write_text("".join(f"scene {number}\n" for number in range(CLASSES)))
    onnx.save(small_net(), str(version / "model.onnx"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models"))
