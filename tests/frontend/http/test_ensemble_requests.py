"""Requests that reach a model through others are counted as its own, and bring their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from engine import ensembles, repositories
from frontend.http.harness import Client
from frontend.whole_server import WholeServer, whole_server
from interactions import stage

ECHO = """
    import numpy as np
    import orjson
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        '''Answers with what it was told beside the tensors.'''

        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            gain = float(orjson.loads(request.parameters()).get("gain", 1))
            extra = len(request.request_id())
            return pb_utils.InferenceResponse([pb_utils.Tensor("y", (gain * x + extra).astype(np.float32))])
"""
ASKS = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "x")
            wanted = pb_utils.InferenceRequest(
                model_name="called", requested_output_names=["y"], inputs=[x]
            )
            return pb_utils.InferenceResponse(wanted.exec().output_tensors())
"""
X = [1.0, 2.0, 3.0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    models = tmp_path_factory.mktemp("steps")
    for name, amount in (("one", 1), ("ten", 10), ("called", 5)):
        ensembles.adds(models, name, amount)
    stage.chained(models, "chain")
    outer = ensembles.step("chain", [("in", "in")], [("out", "out")])
    ensembles.write(models, "outer", ensembles.text(outer))
    repositories.python(models, ECHO, name="echo", shape="[3]")
    told = ensembles.step("echo", [("x", "in")], [("y", "out")])
    ensembles.write(models, "telling", ensembles.text(told))
    repositories.python(models, ASKS, name="asks", shape="[3]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("carpool.backends.fake.load", lambda *_: stage.Colours())
        stage.colours(models, "finder", "detect")
        stage.colours(models, "namer")
        stage.pipeline(models, "street", "finder", "namer")
        with whole_server(models) as running:
            yield running


def infer(client: Client, model: str, name: str = "in", **rest: Any) -> list[Any]:
    return stage.values_of(stage.infer(client, model, stage.tensor(name, X, (1, 3)), **rest))


def counts(client: Client, *models: str) -> list[tuple[int, int]]:
    """Of each, the requests that were answered and that failed."""
    found = []
    for model in models:
        document = orjson.loads(client.get(f"/v2/models/{model}/stats").body)["model_stats"][0]
        stats = document["inference_stats"]
        found.append((stats["success"]["count"], stats["fail"]["count"]))
    return found


def test_requests_of_an_ensemble_are_its_steps_requests(server: WholeServer) -> None:
    with server.connect() as client:
        names = ("outer", "chain", "one", "ten")
        before = counts(client, *names)
        for _ in range(3):
            assert infer(client, "outer") == [12.0, 13.0, 14.0]
        assert infer(client, "chain") == [12.0, 13.0, 14.0]
        added = [after[0] - start[0] for after, start in zip(counts(client, *names), before, strict=True)]
        assert added == [3, 4, 4, 4]
        stats = orjson.loads(client.get("/v2/models/one/stats").body)["model_stats"][0]
        assert stats["inference_stats"]["success"]["ns"] > 0


def test_requests_of_models_and_pipelines_are_counted_as_well(server: WholeServer) -> None:
    with server.connect() as client:
        names = ("called", "finder", "namer")
        before = counts(client, *names)
        assert infer(client, "asks", "x") == [6.0, 7.0, 8.0]
        assert stage.is_street(stage.ask_picture("/detect?model=street")(client, b""))
        added = [after[0] - start[0] for after, start in zip(counts(client, *names), before, strict=True)]
        assert added == [1, 1, 1]


def test_parameters_and_the_id_reach_the_steps(server: WholeServer) -> None:
    with server.connect() as client:
        assert infer(client, "telling") == X
        assert infer(client, "telling", parameters={"gain": 3}) == [3.0, 6.0, 9.0]
        assert infer(client, "telling", id="four") == [5.0, 6.0, 7.0]
