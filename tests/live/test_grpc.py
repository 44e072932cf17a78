"""gRPC with real processes: Triton's clients, front ends that die, an engine that dies, and the end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from backends import onnx_models
from engine import repositories
from live.server import LAYOUTS, PATIENCE_S, READY_S, Live, infer_path, is_alive, json_request, outputs_of
from live.server import serving as serving_http
from live.test_tritons_words import Wire
from waiting import until

# Holds every batch that carries a positive number until the file `go` is there; then answers twice the input.
HELD = """
import os, time

def predict(x):
    while x.any() and not os.path.exists({go!r}):
        time.sleep(0.002)
    return 2 * x
"""
DOUBLE = "def predict(x):\n    return 2 * x\n"


@contextmanager
def serving(*models: Path, folder: Path, grpc: int = 1, **more: Any) -> Iterator[Live]:
    """Ready over HTTP, and over gRPC: each process hears from the engine by itself."""
    with serving_http(*models, folder=folder, grpc=grpc, **more) as server:
        until(lambda: all(is_ready(server) for _ in range(4 * grpc)), "gRPC is ready", READY_S)
        yield server


def is_ready(server: Live) -> bool:
    try:
        with client(server) as connected:
            return bool(connected.is_server_ready(client_timeout=PATIENCE_S))
    except InferenceServerException:
        return False


@contextmanager
def client(server: Live) -> Iterator[InferenceServerClient]:
    """On a connection of its own: channels to one address share connections otherwise."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 50)]
    options += [("grpc.max_reconnect_backoff_ms", 200)]
    with InferenceServerClient(f"127.0.0.1:{server.grpc_port}", channel_args=options) as made:
        yield made


def ask(connected: InferenceServerClient, *values: float, model: str = "model") -> list[float]:
    tensor = InferInput("x", [1, len(values)], "FP32").set_data_from_numpy(np.array([values], np.float32))
    answer = connected.infer(model, [tensor], client_timeout=PATIENCE_S).as_numpy("y")
    found: list[float] = answer[0].tolist()
    return found


def ask_alone(server: Live, *values: float) -> list[float]:
    with client(server) as connected:
        return ask(connected, *values)


def in_background(
    server: Live, count: int, ask_one: Callable[..., list[float]] = ask_alone
) -> list[Future[list[float]]]:
    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(ask_one, server, 1.0, float(number)) for number in range(count)]
    pool.shutdown(wait=False)
    return futures


def until_served(server: Live) -> None:
    """A new process has the port, and the engine behind it."""

    def served() -> bool:
        try:
            return ask_alone(server, 0.0, 0.0) == [0.0, 0.0]
        except InferenceServerException:
            return False

    until(served, "gRPC answers again", READY_S)


@pytest.fixture(scope="module", params=LAYOUTS)
def calm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server that nobody harms."""
    folder = tmp_path_factory.mktemp("calm")
    models = folder / "models"
    onnx_models.arithmetic(models / "numbers" / "1" / "model.onnx")
    onnx_models.identity(models / "same" / "1" / "model.onnx", "FP32", ("n", 2))
    repositories.python(models, DOUBLE)
    with serving(models, frontends=request.param, folder=folder) as server:
        yield server


def test_it_serves_the_same_models_as_http(calm: Live) -> None:
    with client(calm) as connected:
        assert connected.is_server_ready()
        assert connected.get_model_metadata("same", as_json=True)["name"] == "same"
        over_http = calm.get_json("/v2/models/numbers/config")
        config = connected.get_model_config("numbers").config
        assert config.name == over_http["name"]
        assert config.max_batch_size == over_http["max_batch_size"]
        assert [tensor.name for tensor in config.input] == [tensor["name"] for tensor in over_http["input"]]
        index = connected.get_model_repository_index().models
        assert {(model.name, model.state) for model in index} == {
            ("numbers", "READY"),
            ("same", "READY"),
            ("model", "READY"),
        }
        for number in range(20):
            tensor = InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.array([[number, 1]], np.float32))
            result = connected.infer("same", [tensor], request_id=str(number))
            assert result.as_numpy("y").tolist() == [[number, 1]]
            assert result.get_response().id == str(number)
            assert result.get_response().parameters["carpool_batch"].int64_param >= 1

        def counted() -> int:  # behind the answer
            (model,) = connected.get_inference_statistics("same").model_stats
            return int(model.inference_stats.success.count)

        until(lambda: counted() == 20, counted)
        calm.until_metric(20, "nv_inference_request_success", model="same")


def test_a_stream_answers_everything(calm: Live) -> None:
    with client(calm) as connected:
        answers: list[tuple[Any, Any]] = []
        connected.start_stream(callback=lambda result, error: answers.append((result, error)))
        for number in range(600):  # more than are read unanswered
            tensor = InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.array([[number, 1]], np.float32))
            connected.async_stream_infer("model", [tensor], request_id=str(number))
        until(lambda: len(answers) == 600, "600 answers")
        connected.stop_stream()
        assert not [error for _, error in answers if error is not None]
        for result, _ in answers:
            assert result.as_numpy("y").tolist() == [[2 * float(result.get_response().id), 2]]


@pytest.fixture(params=["http", "grpc"])
def plain(request: pytest.FixtureRequest, calm: Live) -> Iterator[Wire]:
    """A client of a server with the settings that it has of itself."""
    made = Wire(request.param, calm)
    yield made
    made.client.close()


def test_control_that_is_not_allowed(plain: Wire) -> None:
    for call in (plain.client.load_model, plain.client.unload_model):
        said = plain.refusal(lambda call=call: call("same"))
        assert said.startswith("explicit model load / unload is not allowed if polling is enabled")


def test_shared_memory_that_is_not_allowed(plain: Wire) -> None:
    said = plain.refusal(lambda: plain.client.register_system_shared_memory("r", "/r", 12))
    assert said.startswith("Client shared memory is disabled")


def test_the_servers_name(plain: Wire) -> None:
    assert plain.server_name() == "carpool"


def test_a_front_end_that_is_killed_is_replaced_and_nothing_else_notices(tmp_path: Path) -> None:
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1)
    with serving(model, folder=tmp_path) as server:
        engine, (victim,) = server.engine_pid, server.grpc_pids
        http = set(server.frontend_pids) - {victim}
        held = in_background(server, 4)
        server.until_metric(3, "nv_inference_pending_request_count", model="model")
        os.kill(victim, signal.SIGKILL)
        for future in held:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, InferenceServerException)
            assert error.status() == "StatusCode.UNAVAILABLE"
        server.until_metric(0, "nv_inference_pending_request_count", model="model")
        go.touch()
        until_served(server)
        assert ask_alone(server, 3.0, 4.0) == [6.0, 8.0]
        assert server.engine_pid == engine
        assert http < set(server.frontend_pids)
        assert not is_alive(victim)
        assert server.metric("carpool_process_restarts_total", process="grpc") == 1
        assert server.metric("carpool_process_restarts_total", process="http") == 0


@pytest.mark.conformance  # with one it is replaced, as above
def test_with_two_front_ends_the_other_serves_on(tmp_path: Path) -> None:
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, grpc=2, folder=tmp_path) as server:
        until(lambda: len(server.grpc_pids) == 2, "two of them")
        victim, other = server.grpc_pids
        os.kill(victim, signal.SIGKILL)
        until(lambda: not is_alive(victim), "it is dead")
        until_served(server)
        assert is_alive(other)
        until(lambda: len(server.grpc_pids) == 2, "two again")


@pytest.mark.conformance
def test_an_engine_that_dies_is_unavailable_once(tmp_path: Path) -> None:
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1)
    with serving(model, folder=tmp_path) as server, client(server) as connected:
        held = in_background(server, 3)
        server.until_metric(2, "nv_inference_pending_request_count", model="model")
        (frontend,) = server.grpc_pids
        os.kill(server.engine_pid, signal.SIGKILL)
        for future in held:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, InferenceServerException)
            assert (error.status(), "engine" in error.message()) == ("StatusCode.UNAVAILABLE", True)
        go.touch()
        server.until_ready()
        until_served(server)
        assert ask(connected, 1.0, 2.0) == [2.0, 4.0]
        assert server.grpc_pids == [frontend]


def ask_over_http(server: Live, *values: float) -> list[float]:
    with server.connect() as connection:
        answer = connection.post(infer_path("model"), json_request(values, [1, len(values)]))
    found: list[float] = outputs_of(answer)["y"]
    return found


@pytest.mark.parametrize("frontends", LAYOUTS)
def test_the_end_finishes_what_was_accepted(tmp_path: Path, frontends: int) -> None:
    """Over HTTP and over gRPC."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1)
    with serving(model, frontends=frontends, folder=tmp_path, drain_s=PATIENCE_S) as server:
        idle = server.connect()
        assert idle.get("/v2/health/ready").status == 200
        with client(server) as connected:
            held = in_background(server, 3) + in_background(server, 3, ask_over_http)
            server.until_metric(5, "nv_inference_pending_request_count", model="model")  # and one runs
            server.signal(signal.SIGTERM)
            assert idle.is_closed(), "an idle connection outlived the signal"
            until(lambda: not is_ready(server), "it says that it stops over gRPC")
            until(lambda: not server.is_ready(), "it says that it stops over HTTP")
            with pytest.raises(InferenceServerException) as caught:
                ask(connected, 0.0, 0.0)
            assert caught.value.status() == "StatusCode.UNAVAILABLE"
            assert not any(future.done() for future in held)
            go.touch()
            assert [future.result(PATIENCE_S) for future in held] == [[2.0, 2.0 * n] for n in range(3)] * 2
        assert server.wait() == 0
        idle.socket.close()


@pytest.mark.conformance
def test_a_port_that_is_taken_is_told_before_anything_starts(tmp_path: Path) -> None:
    """Another server must not take half of the traffic without a word."""
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, folder=tmp_path) as server:
        arguments = list(server.arguments)
        for option in ("--http-port", "--metrics-port"):
            arguments[arguments.index(option) + 1] = "0"
        second = subprocess.run(arguments, capture_output=True, text=True, timeout=READY_S, check=False)
        assert second.returncode == 2
        assert f"cannot listen on 127.0.0.1 port {server.grpc_port}" in second.stdout + second.stderr


@pytest.mark.conformance
def test_without_grpc_nothing_listens(tmp_path: Path) -> None:
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, grpc=0, folder=tmp_path) as server:
        assert len(server.frontend_pids) == 1
        with (
            pytest.raises(OSError, match="refused"),
            socket.create_connection(("127.0.0.1", server.grpc_port), 1),
        ):
            pass
