"""A model behind Triton's Python backend: gather the requests' tensors, run once, split.

It is `onnx_session.py`'s, or with BENCH_LOADER=device the pretended device's.
"""

import importlib
import os
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

LOADER = importlib.import_module(os.environ.get("BENCH_LOADER", "onnx_session"))


class TritonPythonModel:
    def initialize(self, _args: dict[str, str]) -> None:
        self._model = LOADER.load()

    def execute(self, requests: list[Any]) -> list[Any]:
        parts = [pb.get_input_tensor_by_name(request, "input").as_numpy() for request in requests]
        scores = self._model(parts[0] if len(parts) == 1 else np.concatenate(parts))
        answers, start = [], 0
        for part in parts:
            rows = scores[start : start + len(part)]
            answers.append(pb.InferenceResponse([pb.Tensor("output", rows)]))
            start += len(part)
        return answers
