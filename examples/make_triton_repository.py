"""Write a small repository in Triton's layout, to try a config.pbtxt with: one matrix product in ONNX.

    python examples/make_triton_repository.py models
    carpool serve models

Needs onnx.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

PIXELS, CLASSES = 8 * 8, 4

CONFIG = """\
platform: "onnxruntime_onnx"
max_batch_size: 16
input [ { name: "image" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "scores" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 2000
}
"""


def tiny_model() -> onnx.ModelProto:
    """scores = image · weights; class k looks at the k-th quarter of the picture."""
    weights = np.kron(np.eye(CLASSES, dtype=np.float32), np.full((PIXELS // CLASSES, 1), 1 / 16, np.float32))
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["image", "weights"], ["scores"])],
        "quarters",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", PIXELS])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", CLASSES])],
        [numpy_helper.from_array(weights, "weights")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def main(folder: Path) -> None:
    version = folder / "quarters" / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version.parent / "labels.txt").write_text("top\nupper\nlower\nbottom\n")
    onnx.save(tiny_model(), str(version / "model.onnx"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models"))
