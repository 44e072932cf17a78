"""Runs an ONNX file as a PyTorch network: for GPUs where onnxruntime has no CUDA.

What the file computes with constants alone, such as weights that are stored in 8 bits, is computed once by
onnxruntime before, which every server has. The rest runs node by node (`onnx_operators`), in the precision of
the settings; `torch.compile` and CUDA graphs take it like any other network.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from carpool.backends.agreement import how_far
from carpool.backends.onnxruntime import ONNX_TYPES
from carpool.config.model import ModelConfig
from carpool.errors import Unsupported
from carpool.extensions.torch.onnx_operators import (
    CONVOLUTION_RELU,
    MADE_AT_PLACE,
    NUMBERS,
    OPERATORS,
    SIZES_AT,
    NoCounterpart,
    Node,
    RunPlace,
    Value,
)
from carpool.types import Array

ONNX = ".onnx"
_QUIET = 4
_SIDE = 224  # of pictures, where no size is declared
_CLOSE = 1e-3  # of the size of an output; of whole numbers: where two are nearly equal, either may win
_MOST_SIZES = 64  # whole numbers in a row that may be sizes
_OWN = ("", "ai.onnx")
_INSTEAD = (
    "to run it on a GPU all the same, pip uninstall onnxruntime, then pip install onnxruntime-gpu, and leave "
    'out backend = "onnx_torch"; or leave that out alone, and it runs on the CPU'
)

_log = logging.getLogger(__name__)


class OnnxNetwork(torch.nn.Module):
    """Takes the inputs in the order of the file, and answers by the names of its outputs."""

    def __init__(self, graph: Any, version: int) -> None:
        """Raises `NoCounterpart` with all operators that have none."""
        from onnx import numpy_helper

        super().__init__()
        self._sizes: dict[str, Value] = {}
        self._stored: dict[str, str] = {}  # constants by name: the buffer that holds each
        for tensor in graph.initializer:
            self._keep(tensor.name, numpy_helper.to_array(tensor))
        self.inputs = tuple(one.name for one in graph.input if one.name not in self._stored)
        self._outputs = tuple(one.name for one in graph.output)
        for node in graph.node:
            if node.op_type == "Constant":
                self._keep(node.output[0], _constant(node))
        self._constants = {one.name for one in graph.initializer}
        self._constants |= {one.output[0] for one in graph.node if one.op_type == "Constant"}
        self.nodes = self._with_ends(_in_order(graph, version))

    def _keep(self, name: str, array: Array) -> None:
        """As a buffer, which follows the network's precision and device; numbers that may be sizes, and
        floats that stand alone, also as they are: 1e-12 is nothing in half precision."""
        self._stored[name] = f"constant_{len(self._stored)}"
        self.register_buffer(self._stored[name], torch.from_numpy(np.array(array)))
        row = array.ndim <= 1 and array.size <= _MOST_SIZES
        if row and array.dtype in (np.int64, np.int32, np.bool_):
            self._sizes[name] = array.item() if array.ndim == 0 else tuple(array.tolist())
        elif row and array.dtype.kind == "f":
            self._sizes[name] = array.item() if array.size == 1 else tuple(array.tolist())

    def forward(self, *given: Tensor) -> dict[str, Tensor]:
        values: dict[str, Value] = dict(zip(self.inputs, given, strict=True))
        floats = [one.dtype for one in given if one.is_floating_point()]
        place = RunPlace(floats[0] if floats else torch.float32, given[0].device)
        for node in self.nodes:
            inputs = self._given(node, values)
            if node.kind in MADE_AT_PLACE:
                made = MADE_AT_PLACE[node.kind](node, *inputs, place=place)
            else:
                made = OPERATORS[node.kind](node, *inputs)
            several = len(node.outputs) > 1
            values.update(zip(node.outputs, made, strict=False) if several else ((node.outputs[0], made),))
            for name in node.frees:
                del values[name]
        return {name: self._answer(values.get(name), name, place) for name in self._outputs}

    def _with_ends(self, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Returns the nodes, each with what no later one needs. Constants are not among the values of a
        run."""
        kept = {*self._outputs, *self._constants, ""}
        found: list[Node] = []
        for node in reversed(nodes):
            ends = tuple(name for name in dict.fromkeys((*node.inputs, *node.outputs)) if name not in kept)
            kept.update(ends)
            found.append(replace(node, frees=ends))
        return tuple(reversed(found))

    def fused_nodes(self) -> tuple[Node, ...] | None:
        """Returns the nodes with convolutions that compute the addition and ReLU behind them, too; None:
        there are no such."""
        uses = Counter(name for node in self.nodes for name in node.inputs) + Counter(self._outputs)
        made = {name: node for node in self.nodes for name in node.outputs}
        gone: set[int] = set()
        fused: dict[int, Node] = {}

        def convolution(name: str) -> Node | None:
            node = made.get(name)
            alone = node is not None and uses[name] == 1 and id(node) not in gone
            return node if alone and node is not None and self._is_fusible(node) else None

        for relu in self.nodes:
            source = made.get(relu.inputs[0]) if relu.kind == "Relu" else None
            if source is None or uses[relu.inputs[0]] != 1:
                continue
            others: tuple[str, ...] = ()
            found = convolution(relu.inputs[0])
            if source.kind == "Add":
                one, other = source.inputs
                found = convolution(one)
                if found is None:
                    one, other = other, one
                    found = convolution(one)
                others = (other,)
            if found is None or any(name in self._constants for name in others):
                continue
            gone |= {id(found), id(source)}
            inputs = (*found.inputs, "")[:3] + others
            fused[id(relu)] = replace(found, kind=CONVOLUTION_RELU, inputs=inputs, outputs=relu.outputs)
        if not fused:
            return None
        return self._with_ends([fused.get(id(node), node) for node in self.nodes if id(node) not in gone])

    def _is_fusible(self, node: Node) -> bool:
        """Returns whether it is a convolution in two dimensions, padded evenly, of all channels at once."""
        weight = self._stored.get(node.inputs[1]) if node.kind == "Conv" else None
        if weight is None or getattr(self, weight).dim() != 4 or node.get("group", 1) != 1:
            return False
        pads = list(node.get("pads", [0] * 4))
        told = node.get("auto_pad", b"NOTSET")
        return pads[:2] == pads[2:] and told in (b"NOTSET", b"VALID", "NOTSET", "VALID")

    def _given(self, node: Node, values: dict[str, Value]) -> list[Value]:
        """Returns constants as sizes where the operator takes sizes, or where nothing else is a tensor."""
        computed = any(isinstance(values.get(name), Tensor) for name in node.inputs)
        at = SIZES_AT.get(node.kind, ())
        found: list[Value] = []
        for number, name in enumerate(node.inputs):
            if not name:
                found.append(None)
            elif name in values:
                found.append(values[name])
            elif name in self._sizes and (number in at or not computed or self._is_number(node, name)):
                found.append(self._sizes[name])
            else:
                found.append(getattr(self, self._stored[name]))
        return found

    def _is_number(self, node: Node, name: str) -> bool:
        return node.kind in NUMBERS and isinstance(self._sizes[name], float)

    def _answer(self, value: Value, name: str, place: RunPlace) -> Tensor:
        if value is None:
            return getattr(self, self._stored[name])  # type: ignore[no-any-return]
        return value if isinstance(value, Tensor) else torch.tensor(value, device=place.device)


def _constant(node: Any) -> Array:
    from onnx import helper, numpy_helper

    (attribute,) = node.attribute
    value = helper.get_attribute_value(attribute)
    return numpy_helper.to_array(value) if attribute.name == "value" else np.array(value)


def _in_order(graph: Any, version: int) -> list[Node]:
    """Returns all nodes but constants. Raises `NoCounterpart` with all operators that have none."""
    from onnx import TensorProto, helper, numpy_helper

    lacking: set[str] = set()
    nodes: list[Node] = []
    for one in graph.node:
        if one.op_type == "Constant":
            continue
        known = one.op_type in OPERATORS or one.op_type in MADE_AT_PLACE
        if one.domain not in _OWN or not known:
            lacking.add(one.op_type if one.domain in _OWN else f"{one.domain}.{one.op_type}")
        attributes = {entry.name: helper.get_attribute_value(entry) for entry in one.attribute}
        for name, value in attributes.items():
            if isinstance(value, TensorProto):
                attributes[name] = numpy_helper.to_array(value)
        nodes.append(Node(one.op_type, version, tuple(one.input), tuple(one.output), attributes))
    if lacking:
        raise NoCounterpart(", ".join(sorted(lacking)))
    return nodes


def open_onnx(config: ModelConfig, file: Path) -> OnnxNetwork:
    """Raises which operator has no counterpart, or that the answers are others than those of onnxruntime."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="carpool-onnx-") as folder:
        plain = Path(folder) / "plain.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(plain)
        options.log_severity_level = _QUIET
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        model = onnx.load(plain)
    version = next(one.version for one in model.opset_import if one.domain in _OWN)
    try:
        network = OnnxNetwork(model.graph, version).eval()
        _compare(config, session, network)
    except NoCounterpart as error:
        raise Unsupported(
            f"{config.name}: {file.name} cannot run on PyTorch, which has no counterpart of {error}; "
            f"{_INSTEAD}"
        ) from None
    return network


def _compare(config: ModelConfig, session: Any, network: OnnxNetwork) -> None:
    """Compares both on noise, once."""
    random = np.random.default_rng(1)
    height, width = (config.image.size if config.image is not None else None) or (_SIDE, _SIDE)
    sides = {2: height, 3: width}  # of pictures in planes; what else varies is 1
    given: dict[str, Array] = {}
    for node in session.get_inputs():
        dims = [dim if isinstance(dim, int) else sides.get(at, 1) for at, dim in enumerate(node.shape)]
        datatype = ONNX_TYPES[node.type].dtype
        given[node.name] = random.random(dims, np.float32).astype(datatype)
    try:
        right = session.run(None, given)
    except Exception as error:  # sizes that are not declared may not fit
        _log.warning("%s: its answers were not compared with onnxruntime's: %s", config.name, error)
        return
    with torch.inference_mode(), warnings.catch_warnings(action="ignore"):
        answered = network(*(torch.from_numpy(given[name]) for name in network.inputs))
    for (name, tensor), array in zip(answered.items(), right, strict=True):
        if how_far(array, tensor.numpy().astype(array.dtype, copy=False)) > _CLOSE:
            raise Unsupported(
                f'{config.name}: on PyTorch the output "{name}" would not be what onnxruntime answers; '
                f"{_INSTEAD}"
            )
