"""An ONNX file as a PyTorch network, made by onnx2torch: for GPUs where onnxruntime has no CUDA.

What the file computes with constants alone, such as weights that are stored in 8 bits, is computed once by
onnxruntime before, which every server has.
"""

from __future__ import annotations

import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.backends.onnxruntime import ONNX_TYPES
from carpool.config.model import ModelConfig
from carpool.errors import Unsupported
from carpool.types import Array

ONNX = ".onnx"
_QUIET = 4
_SIDE = 224  # of pictures, where nobody says
_CLOSE = 1e-3  # of the largest value
_SAME = 0.999  # of whole numbers: where two are nearly equal, either may win

_log = logging.getLogger(__name__)


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
    """Raises which operator has no counterpart, or that the answers are others than those of onnxruntime."""
    import onnx
    import onnx2torch
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="carpool-onnx-") as folder:
        plain = Path(folder) / "plain.onnx"
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(plain)
        options.log_severity_level = _QUIET
        session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        names = [[node.name for node in side] for side in (session.get_inputs(), session.get_outputs())]
        graph = onnx.load(plain)
    try:
        network = OnnxNetwork(onnx2torch.convert(graph), *names).eval()
    except NotImplementedError as error:
        raise Unsupported(f"{config.name}: {file.name} cannot run on PyTorch: {error}") from None
    _compare(config, session, network)
    return network


def _compare(config: ModelConfig, session: Any, network: OnnxNetwork) -> None:
    """On noise, once: a converter that is older than its PyTorch may compute something else in silence."""
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
    except Exception as error:  # sizes that nobody told may not fit
        _log.warning("%s: its answers were not compared with onnxruntime's: %s", config.name, error)
        return
    with torch.inference_mode(), warnings.catch_warnings(action="ignore"):  # of the converter's own doing
        answered = network(*(torch.from_numpy(given[name]) for name in network.inputs))
    for (name, tensor), array in zip(answered.items(), right, strict=True):
        found = tensor.numpy()
        if found.shape != array.shape or not _alike(found, array):
            raise Unsupported(
                f'{config.name}: on PyTorch the output "{name}" would not be what onnxruntime answers: '
                "onnx2torch and this PyTorch do not go together"
            )


def _alike(found: Array, right: Array) -> bool:
    if right.dtype.kind not in "f":
        return bool(np.mean(found == right) > _SAME)
    largest = float(np.max(np.abs(right), initial=0.0)) or 1.0
    return bool(np.allclose(found, right, rtol=_CLOSE, atol=_CLOSE * largest))
