"""U²-Net-p for batches: the file as exported is for one picture at a time and gives seven maps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, ValueInfoProto

SIDE = 320


def for_batches(model: ModelProto) -> ModelProto:
    """`images` [batch, 3, 320, 320] → `mask` [batch, 1, 320, 320]: the first map, which joins the others.

    Nothing in the graph depends on the batch being one, only what it says of itself. So the same numbers come
    out, and the six maps of its stages, which nobody asks for, are no longer copied out.
    """
    graph = model.graph
    asked, mask = graph.input[0].name, graph.output[0].name
    unused = {output.name for output in graph.output[1:]}
    kept = [node for node in graph.node if not unused & set(node.output)]
    del graph.node[:], graph.output[1:], graph.value_info[:]
    graph.node.extend(kept)
    _rename(graph, {asked: "images", mask: "mask"})
    _shape(graph.input[0], ["batch", 3, SIDE, SIDE])
    _shape(graph.output[0], ["batch", 1, SIDE, SIDE])
    return model


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in (*graph.input, *graph.output):
        tensor.name = names.get(tensor.name, tensor.name)


def _shape(tensor: ValueInfoProto, shape: list[str | int]) -> None:
    from onnx import helper

    tensor.type.CopyFrom(helper.make_tensor_type_proto(tensor.type.tensor_type.elem_type, shape))
