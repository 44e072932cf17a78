"""Triton's Python models in a whole server: what a request says of itself, and models in the runner."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc

from engine import repositories
from live.server import infer_path, json_request, outputs_of, serving

TOLD = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            parameters = json.loads(request.parameters())
            said = [len(request.request_id()), parameters.get("gain", 0) + request.correlation_id()]
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([said], np.float32))])
"""
ASKS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "x")
            found = pb_utils.InferenceRequest(model_name="net", inputs=[x]).exec()
            if found.has_error():
                return pb_utils.InferenceResponse(error=found.error())
            y = pb_utils.get_output_tensor_by_name(found, "y").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 1)])
"""
SETTINGS = """
backend = "pytorch"
max_batch = 8
[pytorch]
device = "cpu"
[[input]]
name = "x"
datatype = "FP32"
shape = [2]
[[output]]
name = "y"
datatype = "FP32"
shape = [2]
"""


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def write_net(folder: Path) -> None:
    (folder / "net" / "1").mkdir(parents=True)
    with warnings.catch_warnings(action="ignore"):  # which form a model comes in is not for us to judge
        torch.jit.script(Doubled()).save(str(folder / "net" / "1" / "model.pt"))  # type: ignore[no-untyped-call]
    (folder / "net" / "model.toml").write_text(SETTINGS)


@pytest.mark.conformance
def test_a_model_hears_of_each_request_and_asks_models_in_the_runner(tmp_path: Path) -> None:
    models = tmp_path / "models"
    repositories.python(models, TOLD, name="told")
    repositories.python(models, ASKS, name="asks", head="slo_ms = 5000")
    write_net(models)
    with serving(models, grpc=1, folder=tmp_path) as server:
        with server.connect() as client:
            asked = json_request([1, 2], (1, 2), id="seven", parameters={"gain": 3, "sequence_id": 4})
            assert outputs_of(client.post(infer_path("told"), asked)) == {"y": [5, 7]}
            assert outputs_of(client.post(infer_path("told"), json_request([1, 2], (1, 2)))) == {"y": [0, 0]}
            for number in range(3):
                asked = json_request([number, 2], (1, 2))
                assert outputs_of(client.post(infer_path("asks"), asked)) == {"y": [2 * number + 1, 5]}
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as grpc:
            given = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
            given.set_data_from_numpy(np.array([[1, 2]], np.float32))
            told = grpc.infer("told", [given], request_id="four", sequence_id=2, parameters={"gain": 1})
            assert told.as_numpy("y").tolist() == [[4, 3]]
            assert grpc.infer("asks", [given]).as_numpy("y").tolist() == [[3, 5]]
        (after,) = server.events("loads-after")
        assert after["others"] == "net"
        assert after["why"] == "its code"
