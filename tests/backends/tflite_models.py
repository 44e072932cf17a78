"""Small TensorFlow Lite files, written with the format's own schema, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

BATCH = -1
Shape = tuple[int, ...]
TYPES = {
    "FP16": "FLOAT16",
    "FP32": "FLOAT32",
    "FP64": "FLOAT64",
    "BF16": "BFLOAT16",
    "BYTES": "STRING",
}
_OPERATORS = schema.BuiltinOperator


@dataclass
class Graph:
    """One subgraph: tensors and operators are added by name, in order."""

    file: File
    made: schema.SubGraphT = field(default_factory=schema.SubGraphT)
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made.tensors, self.made.operators = [], []
        self.made.name = b"main"

    def tensor(
        self, name: str, datatype: str, shape: Shape, value: np.ndarray | None = None, scale: float = 0
    ) -> str:
        tensor = schema.TensorT()
        tensor.name = name.encode()
        tensor.type = getattr(schema.TensorType, TYPES.get(datatype, datatype))
        tensor.shape = [1 if dim == BATCH else dim for dim in shape]
        tensor.shapeSignature = list(shape) if BATCH in shape else None
        tensor.hasRank = True
        tensor.buffer = 0 if value is None else self.file.buffer(value)
        if scale:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [0]
        self.numbers[name] = len(self.made.tensors)
        self.made.tensors.append(tensor)
        return name

    def node(
        self,
        operator: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        options: object | None = None,
        **values: object,
    ) -> None:
        made = schema.OperatorT()
        made.opcodeIndex = self.file.code(getattr(_OPERATORS, operator))
        made.inputs = [self.numbers[name] for name in inputs]
        made.outputs = [self.numbers[name] for name in outputs]
        if options is not None:
            made.builtinOptions = options
            made.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
            for key, value in values.items():
                setattr(options, key, value)
        self.made.operators.append(made)

    def ends(self, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self.made.inputs = [self.numbers[name] for name in inputs]
        self.made.outputs = [self.numbers[name] for name in outputs]


class File:
    def __init__(self) -> None:
        self._model = schema.ModelT()
        self._model.version = 3
        self._model.description = b""
        self._model.buffers = [schema.BufferT()]
        self._model.operatorCodes, self._model.subgraphs = [], []

    def buffer(self, value: np.ndarray) -> int:
        made = schema.BufferT()
        made.data = np.frombuffer(value.tobytes(), np.uint8)
        self._model.buffers.append(made)
        return len(self._model.buffers) - 1

    def code(self, operator: int) -> int:
        for number, known in enumerate(self._model.operatorCodes):
            if known.builtinCode == operator:
                return number
        made = schema.OperatorCodeT()
        made.builtinCode, made.deprecatedBuiltinCode = operator, min(operator, 127)
        made.version = 1
        self._model.operatorCodes.append(made)
        return len(self._model.operatorCodes) - 1

    def graph(self) -> Graph:
        made = Graph(self)
        self._model.subgraphs.append(made.made)
        return made

    def signature(self, inputs: Mapping[str, str], outputs: Mapping[str, str], graph: Graph) -> None:
        """Names for clients beside those of the tensors."""

        def mapped(names: Mapping[str, str]) -> list[schema.TensorMapT]:
            maps = []
            for name, tensor in names.items():
                made = schema.TensorMapT()
                made.name, made.tensorIndex = name.encode(), graph.numbers[tensor]
                maps.append(made)
            return maps

        made = schema.SignatureDefT()
        made.signatureKey, made.subgraphIndex = b"serving_default", 0
        made.inputs, made.outputs = mapped(inputs), mapped(outputs)
        self._model.signatureDefs = [made]

    def save(self, path: Path) -> Path:
        builder = flatbuffers.Builder(1024)
        builder.Finish(self._model.Pack(builder), file_identifier=b"TFL3")
        path.write_bytes(bytes(builder.Output()))
        return path


def identity(path: Path, datatype: str = "FP32", shape: Shape = (BATCH, 3)) -> Path:
    file = File()
    graph = file.graph()
    graph.tensor("x", datatype, shape)
    graph.tensor("y", datatype, shape)
    graph.tensor("shape", "INT32", (len(shape),), np.array(shape, np.int32))
    graph.node("RESHAPE", ["x", "shape"], ["y"], schema.ReshapeOptionsT(), newShape=list(shape))
    graph.ends(["x"], ["y"])
    return file.save(path)


def identities(path: Path, *datatypes: str) -> Path:
    """x_FP32 → y_FP32, and so for each of these datatypes, in one file."""
    file = File()
    graph = file.graph()
    shape = (BATCH, 3)
    graph.tensor("shape", "INT32", (2,), np.array(shape, np.int32))
    for name in datatypes:
        graph.tensor(f"x_{name}", name, shape)
        graph.tensor(f"y_{name}", name, shape)
        options = schema.ReshapeOptionsT()
        graph.node("RESHAPE", [f"x_{name}", "shape"], [f"y_{name}"], options, newShape=list(shape))
    graph.ends([f"x_{name}" for name in datatypes], [f"y_{name}" for name in datatypes])
    return file.save(path)


def arithmetic(path: Path) -> Path:
    """double = x + x, total = the sum of each row."""
    file = File()
    graph = file.graph()
    graph.tensor("x", "FP32", (BATCH, 3))
    graph.tensor("double", "FP32", (BATCH, 3))
    graph.tensor("total", "FP32", (BATCH, 1))
    graph.tensor("axes", "INT32", (1,), np.array([1], np.int32))
    graph.node("ADD", ["x", "x"], ["double"], schema.AddOptionsT())
    graph.node("SUM", ["x", "axes"], ["total"], schema.ReducerOptionsT(), keepDims=True)
    graph.ends(["x"], ["double", "total"])
    return file.save(path)


def endless(path: Path) -> Path:
    """y = x, after a loop whose counter never moves."""
    file = File()
    main, condition, body = file.graph(), file.graph(), file.graph()
    for graph in (main, condition, body):
        graph.tensor("round", "INT32", (1,), np.zeros(1, np.int32) if graph is main else None)
        graph.tensor("x", "FP32", (BATCH, 3))
    main.tensor("rounds", "INT32", (1,))
    main.tensor("y", "FP32", (BATCH, 3))
    main.node(
        "WHILE",
        ["round", "x"],
        ["rounds", "y"],
        schema.WhileOptionsT(),
        condSubgraphIndex=1,
        bodySubgraphIndex=2,
    )
    main.ends(["x"], ["y"])
    condition.tensor("last", "INT32", (1,), np.ones(1, np.int32))
    condition.tensor("go on", "BOOL", (1,))
    condition.node("LESS", ["round", "last"], ["go on"], schema.LessOptionsT())
    condition.ends(["round", "x"], ["go on"])
    body.tensor("step", "INT32", (1,), np.zeros(1, np.int32))
    body.tensor("next", "INT32", (1,))
    body.tensor("nothing", "FP32", (1,), np.zeros(1, np.float32))
    body.tensor("same", "FP32", (BATCH, 3))
    body.node("ADD", ["round", "step"], ["next"], schema.AddOptionsT())
    body.node("ADD", ["x", "nothing"], ["same"], schema.AddOptionsT())
    body.ends(["round", "x"], ["next", "same"])
    return file.save(path)


def brightness(path: Path, side: int = 8, scale: float = 0) -> Path:
    """A classifier of pictures [n, side, side, 3]: the mean of red, green and blue; with `scale`, of whole
    numbers that stand for that many times themselves."""
    file = File()
    graph = file.graph()
    datatype = "UINT8" if scale else "FP32"
    graph.tensor("tensor 0", datatype, (BATCH, side, side, 3), scale=scale)
    graph.tensor("tensor 1", datatype, (BATCH, 3), scale=scale)
    graph.tensor("axes", "INT32", (2,), np.array([1, 2], np.int32))
    graph.node("MEAN", ["tensor 0", "axes"], ["tensor 1"], schema.ReducerOptionsT(), keepDims=False)
    graph.ends(["tensor 0"], ["tensor 1"])
    file.signature({"image": "tensor 0"}, {"scores": "tensor 1"}, graph)
    return file.save(path)


def classifier(path: Path, side: int = 16, *, softmax: bool = True, batch: int = BATCH) -> Path:
    """The mean colour of a picture in NHWC, with a softmax at the end or without."""
    file = File()
    graph = file.graph()
    graph.tensor("image", "FP32", (batch, side, side, 3))
    graph.tensor("axes", "INT32", (2,), np.array([1, 2], np.int32))
    graph.tensor("mean", "FP32", (batch, 3))
    graph.node("MEAN", ["image", "axes"], ["mean"], schema.ReducerOptionsT(), keepDims=False)
    if softmax:
        graph.tensor("Identity", "FP32", (batch, 3))
        graph.node("SOFTMAX", ["mean"], ["Identity"], schema.SoftmaxOptionsT(), beta=1.0)
    graph.ends(["image"], ["Identity" if softmax else "mean"])
    return file.save(path)
