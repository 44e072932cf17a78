"""The model that every server runs, and the picture that every request carries.

The model is so small that what is measured is the server: a 224×224×3 image of bytes becomes floats, each
row is averaged, and one small matrix makes ten scores of the averages.
"""

from pathlib import Path

import numpy as np

SHAPE = (224, 224, 3)
SCORES = 10
MAX_BATCH = 32
INPUT, OUTPUT = "input", "output"


def write_model(path: Path) -> None:
    """Write the ONNX file."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weights = np.random.default_rng(0).normal(size=(SHAPE[0], SCORES)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("Cast", [INPUT], ["floats"], to=TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["floats"], ["rows"], axes=[2, 3], keepdims=0),
            helper.make_node("MatMul", ["rows", "weights"], [OUTPUT]),
        ],
        "tiny",
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, ["N", *SHAPE])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.FLOAT, ["N", SCORES])],
        [numpy_helper.from_array(weights, "weights")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))


def image() -> np.ndarray:
    """The same 150,528 bytes every time."""
    return np.random.default_rng(1).integers(0, 256, SHAPE, dtype=np.uint8)


def expected(model: Path) -> np.ndarray:
    """The ten scores of `image()`, from the runtime itself: every server must answer these."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {INPUT: image()[np.newaxis]})[0][0])
