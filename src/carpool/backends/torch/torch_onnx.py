"""An ONNX file as a PyTorch network, made by onnx2torch: for GPUs where onnxruntime has no CUDA.

What the file computes with constants alone, such as weights that are stored in 8 bits, is computed once by
onnxruntime before, which every server has.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from carpool.config.model import ModelConfig
from carpool.errors import Unsupported

ONNX = ".onnx"


class OnnxNetwork(torch.nn.Module):
    """Takes the inputs in the order of the file, and answers by the names of its outputs."""

    def __init__(self, network: torch.nn.Module, inputs: list[str], outputs: list[str]) -> None:
        super().__init__()
        self.network = network
        self.inputs = tuple(inputs)
        self._outputs = outputs

    def forward(self, *given: torch.Tensor) -> dict[str, torch.Tensor]:
        answer: Any = self.network(*given)
        answers = answer if isinstance(answer, tuple | list) else (answer,)
        return dict(zip(self._outputs, answers, strict=True))


def open_onnx(config: ModelConfig, file: Path) -> OnnxNetwork:
    """Raises which operator has no counterpart."""
    import onnx
    import onnx2torch
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="carpool-onnx-") as folder:
        plain = Path(folder) / "plain.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(plain)
        options.log_severity_level = 4
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [[node.name for node in side] for side in (session.get_inputs(), session.get_outputs())]
        del session
        graph = onnx.load(plain)
    try:
        network = onnx2torch.convert(graph)
    except NotImplementedError as error:
        raise Unsupported(f"{config.name}: {file.name} cannot run on PyTorch: {error}") from None
    return OnnxNetwork(network, *names)
