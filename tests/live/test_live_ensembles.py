"""Ensembles on a server of real processes: Triton's clients, the times of steps, and models in the runner."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from engine import ensembles
from engine.test_ensembles import omitting
from extensions.torch.test_live_runner import runner_pids, write_model
from frontend.http.harness import Response
from live.server import PATIENCE_S, Live, infer_path, is_alive, json_request, outputs_of, serving
from live.test_faults import in_background
from waiting import until

X = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("ensembles")
    models = folder / "models"
    ensembles.chain(models, more=ensembles.promise(30_000))
    steps = ensembles.step("chain", [("in", "in")], [("out", "out")])
    ensembles.write(models, "outer", ensembles.text(steps))
    omitting(models)
    write_model(models / "twice", folder / "go")
    write_model(models / "again", folder / "go")
    in_runner = (
        ensembles.step("twice", [("x", "in")], [("y", "mid")]),
        ensembles.step("again", [("x", "mid")], [("y", "out")]),
    )
    settings = ensembles.text(*in_runner, max_batch=4).replace("dims: [ 3 ]", "dims: [ 2 ]")
    ensembles.write(models, "four_times", settings)
    with serving(models, frontends=1, grpc=1, folder=folder) as running:
        yield running


IN_THE_RUNNER = X[:, :2].copy()
WAITS = 7.5  # twice that is what a model in the runner does not answer


def asked(module: Any, client: Any, model: str, name: str, x: np.ndarray[Any, Any]) -> Any:
    given = module.InferInput(name, list(x.shape), "FP32")
    given.set_data_from_numpy(x)
    return client.infer(model, [given])


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritons_clients_ask_an_ensemble_like_any_model(server: Live, kind: str) -> None:
    module: Any = tritonclient.http if kind == "http" else tritonclient.grpc
    url = server.url if kind == "http" else f"127.0.0.1:{server.grpc_port}"
    with module.InferenceServerClient(url) as client:
        mid = asked(module, client, "one", "x", X).as_numpy("y")
        by_hand = asked(module, client, "ten", "x", mid).as_numpy("y")
        for model in ("chain", "outer"):
            answer = asked(module, client, model, "in", X)
            np.testing.assert_array_equal(answer.as_numpy("out"), by_hand)
        assert client.is_model_ready("chain")


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_outputs_that_are_left_out_are_not_in_the_answer(server: Live, kind: str) -> None:
    module: Any = tritonclient.http if kind == "http" else tritonclient.grpc
    url = server.url if kind == "http" else f"127.0.0.1:{server.grpc_port}"
    with module.InferenceServerClient(url) as client:
        given = module.InferInput("in", [2, 3], "FP32")
        given.set_data_from_numpy(-X)
        wanted = [module.InferRequestedOutput(name) for name in ("more", "out")]
        for outputs in (None, wanted):
            answer = client.infer("some", [given], outputs=outputs)
            np.testing.assert_array_equal(answer.as_numpy("out"), -X)
            assert answer.as_numpy("more") is None


def test_its_settings_and_statistics_are_told_as_tritons(server: Live) -> None:
    with tritonclient.http.InferenceServerClient(server.url) as client:
        asked(tritonclient.http, client, "chain", "in", X)
        config = client.get_model_config("chain")
        assert config["platform"] == "ensemble"
        assert [step["model_name"] for step in config["ensemble_scheduling"]["step"]] == ["one", "ten"]
        assert client.get_model_metadata("chain")["platform"] == "ensemble"
        (found,) = client.get_inference_statistics("chain")["model_stats"]
        assert found["inference_stats"]["success"]["count"] >= 1
        assert found["inference_count"] >= 2
        assert found["execution_count"] >= 1


def test_the_answer_says_where_each_step_spent_its_time(server: Live) -> None:
    with server.connect() as client:
        body = json_request([1, 2, 3], [1, 3]).replace(b'"x"', b'"in"')
        answer = client.post(infer_path("chain"), body)
    assert answer.status == 200
    told = answer.fields["server-timing"]
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        response = asked(tritonclient.grpc, client, "chain", "in", X[:1]).get_response()
        told_over_grpc = response.parameters["carpool_steps"].string_param
    assert "queue;dur=" in told
    for part in ("one.queue;dur=", "one.infer;dur=", 'one.batch;desc="1"', "ten.infer;dur="):
        assert part in told
        assert part in told_over_grpc


def answers_from_the_runner(client: Any) -> bool:
    try:
        found = asked(tritonclient.http, client, "four_times", "in", IN_THE_RUNNER).as_numpy("out")
    except tritonclient.utils.InferenceServerException:
        return False
    return bool((found == 4 * IN_THE_RUNNER).all())


@pytest.mark.conformance
def test_steps_may_run_in_the_runner_which_may_die_between_them(server: Live) -> None:
    go = server.log_file.parent / "go"
    with tritonclient.http.InferenceServerClient(server.url) as client:
        assert answers_from_the_runner(client)
        body = json_request([WAITS, WAITS], [1, 2]).replace(b'"x"', b'"in"')

        def ask(_: int) -> Response:
            with server.connect() as one:
                return one.post(infer_path("four_times"), body)

        on_their_way = in_background(3, ask)
        until(go.with_suffix(".waited-for").exists, "no request came to the second step")
        (pid,) = runner_pids(server)
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid), "it was killed")
        go.touch()  # who was in a queue rides in the next one
        answers = [answer.result(PATIENCE_S) for answer in on_their_way]
        told = [answer for answer in answers if answer.status != 200]
        assert told  # at least who rode in it
        assert all(b"in ensemble 'four_times'" in answer.body for answer in told)
        answered = [outputs_of(answer)["out"] for answer in answers if answer.status == 200]
        assert all(found == [4 * WAITS] * 2 for found in answered)
        until(lambda: answers_from_the_runner(client), "it answers again", 120.0)
