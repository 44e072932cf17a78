"""What breaks, with real processes: front ends, the engine and models that die, hang, raise or lie; clients
that leave; signals. Nothing is answered twice, and nothing waits for ever: every wait here has a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pytest

from backends import onnx_models
from engine import repositories
from frontend.http.harness import Client, Response, post
from live.server import (
    LAYOUTS,
    PATIENCE_S,
    READY_S,
    Live,
    error_of,
    infer_path,
    is_alive,
    json_request,
    outputs_of,
    serving,
    start,
    until_gone,
)
from waiting import until

# Holds every batch that carries a positive number until the file `go` is there; then answers twice the input.
HELD = """
import os, time

def predict(x):
    if x.any():
        open({go!r} + ".asked", "w").close()
    while x.any() and not os.path.exists({go!r}):
        time.sleep(0.002)
    return 2 * x
"""
DOUBLE = """
def predict(x):
    return 2 * x
"""
MOODY = """
import os, time
import numpy as np

def predict(x):
    if (x == 13).any():
        raise ValueError("thirteen is unlucky")
    if (x == 14).any():
        return np.zeros((len(x), 7), np.float32)
    if (x == 15).any():
        time.sleep(600)
    if (x == 16).any():
        os._exit(3)
    if (x == 17).any():
        return np.where(x == 17, np.nan, x)
    if (x == 18).any():
        return x.astype(np.float64)
    return 2 * x
"""


_REST_S = 0.005


def ask(server: Live, model: str, *values: float, path: str | None = None) -> Response:
    """One image of two numbers, on a connection of its own."""
    with server.connect() as client:
        return client.post(path or infer_path(model), json_request(values, [1, 2]))


@dataclass
class Load:
    """Clients that ask again and again, each on its own connection, and count what comes.

    Each rests for about as long as an answer takes: at any time some requests are on their way, and the cores
    are left to the processes that are to come up again.
    """

    server: Live
    model: str
    clients: int = 4
    statuses: Counter[int] = field(default_factory=Counter)
    broken: int = 0
    wrong: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self._threads), "a client waits for ever"
        assert not self.wrong, self.wrong[:3]

    def _ask(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            try:
                with self.server.connect() as client:
                    while not self._stop.is_set():
                        count += 1
                        self._once(client, number, count)
                        self._stop.wait(_REST_S)
            except (OSError, AssertionError, ValueError):
                with self._lock:
                    self.broken += 1
                self._stop.wait(0.01)

    def _once(self, client: Client, number: int, count: int) -> None:
        """Numbers that no other request has, so that an answer of another's would show."""
        body = json_request([number, count], [1, 2], id=f"{number}-{count}")
        response = client.post(infer_path(self.model), body)
        with self._lock:
            self.statuses[response.status] += 1
            if response.status == 200 and outputs_of(response)["y"] != [2 * number, 2 * count]:
                self.wrong.append(repr(response))

    def until_more(self, status: int = 200, count: int = 20) -> None:
        target = self.statuses[status] + count
        until(lambda: self.statuses[status] >= target, f"{count} more answers of {status}")


def until_held(go: Path) -> None:
    until(go.with_name(f"{go.name}.asked").exists, "the model has it")


def in_background(count: int, call: Callable[[int], Response]) -> list[Future[Response]]:
    pool = ThreadPoolExecutor(count)
    futures = [pool.submit(call, number) for number in range(count)]
    pool.shutdown(wait=False)
    return futures


# ---- front ends and the engine


def test_kill_a_front_end_under_load_and_at_last_the_supervisor(tmp_path: Path) -> None:
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, frontends=2, folder=tmp_path) as server:
        with Load(server, "model", clients=8) as load:
            kill_front_ends(server, load)
        server.until_metric(0, "nv_inference_pending_request_count", model="model")
        assert len(server.all_pids()) == 6  # with the zygote, the engine and its model's worker
        nothing_outlives_its_end(server)


def kill_front_ends(server: Live, load: Load) -> None:
    load.until_more()
    victim, other = server.frontend_pids
    engine = server.engine_pid
    for round_ in (1, 2):
        broken = load.broken
        os.kill(victim, signal.SIGKILL)
        until(lambda pid=victim: not is_alive(pid), "it is dead")
        load.until_more()
        until(lambda: len(server.frontend_pids) == 2, "two front ends again")
        assert other in server.frontend_pids, "the other one was harmed"
        assert server.engine_pid == engine
        assert load.broken - broken <= 8, "connections broke that were not its own"
        until(lambda n=round_: len(server.events("process-up")) == 3 + n, "the new one is up")
        (victim,) = set(server.frontend_pids) - {other}
    load.until_more(count=100)
    assert set(load.statuses) == {200}
    assert server.metric("carpool_process_restarts_total", process="http") == 2


def nothing_outlives_its_end(server: Live) -> None:
    pids = server.all_pids()
    server.signal(signal.SIGKILL)
    server.wait()
    assert until_gone(pids) == []


@pytest.mark.conformance
def test_nothing_outlives_one_process_that_is_killed(tmp_path: Path) -> None:
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, frontends=0, folder=tmp_path) as server:
        assert len(server.all_pids()) == 3  # with the one that watches it, and the model's worker
        nothing_outlives_its_end(server)


@pytest.mark.parametrize(
    "batching",
    [pytest.param("", id="eager", marks=pytest.mark.conformance), pytest.param("[batching]", id="knobs")],
)
def test_a_front_end_that_dies_with_requests_in_the_queue_leaves_nothing(
    tmp_path: Path, batching: str
) -> None:
    """With knobs, some of the queue is set aside as the next batches already: they must not block others."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1, head=batching)
    with serving(model, frontends=1, folder=tmp_path) as server:
        held = in_background(6, lambda n: ask(server, "model", 1, n))
        server.until_metric(5, "nv_inference_pending_request_count", model="model")
        os.kill(server.frontend_pids[0], signal.SIGKILL)
        for future in held:
            assert isinstance(future.exception(PATIENCE_S), OSError | AssertionError)  # closed, no answer
        server.until_ready()
        server.until_metric(0, "nv_inference_pending_request_count", model="model")
        go.touch()
        assert outputs_of(ask(server, "model", 3, 4))["y"] == [6, 8]
        # What was never run was not run later either.
        server.until_metric(1, "nv_inference_request_success", model="model")
        assert server.metric("nv_inference_exec_count", model="model") <= 2


def test_kill_the_engine_with_requests_waiting(tmp_path: Path) -> None:
    """Each waiting request gets one clear error on a connection that stays; then all is well again."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1)
    with serving(model, frontends=2, folder=tmp_path) as server:
        clients = [server.connect() for _ in range(8)]
        for number, client in enumerate(clients):
            client.send(post(infer_path("model"), json_request([1, number], [1, 2])))
        server.until_metric(7, "nv_inference_pending_request_count", model="model")  # and one runs
        frontends, engine = server.frontend_pids, server.engine_pid
        workers = server.worker_pids
        os.kill(engine, signal.SIGKILL)
        for client in clients:
            document = error_of(client.response(), 503)
            assert "engine" in document["error"], document
        assert until_gone(workers) == [], "the dead engine's models live on"
        go.touch()
        server.until_ready()
        assert server.engine_pid != engine
        assert server.frontend_pids == frontends
        for number, client in enumerate(clients):
            # The next thing on the connection is the answer to the next request: nothing came twice.
            response = client.post(infer_path("model"), json_request([number, 5], [1, 2]))
            assert outputs_of(response)["y"] == [2 * number, 10]
            client.socket.close()
        assert server.metric("carpool_process_restarts_total", process="engine") == 1
        server.until_metric(8, "nv_inference_request_success", model="model")
        server.until_metric(8, "nv_inference_request_failure", model="model")


@pytest.mark.conformance
def test_kill_the_engine_under_load(tmp_path: Path) -> None:
    model = repositories.python(tmp_path / "models", DOUBLE)
    with serving(model, folder=tmp_path) as server, Load(server, "model") as load:
        for _ in range(2):
            load.until_more()
            os.kill(server.engine_pid, signal.SIGKILL)
            load.until_more(503, 1)
        load.until_more(count=100)
        assert set(load.statuses) == {200, 503}
        assert load.broken == 0, "the engine's end broke connections"


@pytest.mark.conformance
def test_an_engine_that_cannot_start_again_is_tried_until_it_can(tmp_path: Path) -> None:
    """Meanwhile the front ends live, and say what is the matter."""
    weights = tmp_path / "weights"
    weights.touch()
    code = f"""
    def setup(config):
        open({str(weights)!r}).close()

    def predict(x):
        return 2 * x
    """
    with serving(repositories.python(tmp_path / "models", code), folder=tmp_path) as server:
        weights.unlink()
        os.kill(server.engine_pid, signal.SIGKILL)
        until(lambda: len(server.events("process-died")) >= 2, "the new one has failed as well")
        assert server.get("/v2/health/live").status == 200
        assert server.get("/v2/health/ready").status == 400
        assert server.get("/health").status == 503
        assert int(ask(server, "model", 1, 2).fields["retry-after"]) >= 1
        error_of(ask(server, "model", 1, 2), 503)
        error_of(server.get("/v2/models/model/stats"), 503)
        assert server.metric("carpool_up") == 0
        weights.touch()
        server.until_ready()
        assert outputs_of(ask(server, "model", 1, 2))["y"] == [2, 4]
        assert server.metric("carpool_up") == 1


@pytest.mark.conformance
def test_an_engine_that_hangs_is_told_of_and_replaced(tmp_path: Path) -> None:
    """Stopped, not dead: no link closes, and nobody but a watch can know."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=1)
    patience = {"CARPOOL_WATCHDOG_S": "6"}
    with serving(model, folder=tmp_path, environment=patience) as server:
        engine, frontends = server.engine_pid, server.frontend_pids
        held = in_background(3, lambda n: ask(server, "model", 1, n))
        server.until_metric(2, "nv_inference_pending_request_count", model="model")
        os.kill(engine, signal.SIGSTOP)
        for future in held:
            error_of(future.result(PATIENCE_S), 503, "engine-stalled")
        assert server.get("/v2/health/live").status == 200
        assert server.get("/v2/health/ready").status == 400
        assert server.get("/v2/models/model/ready").status == 400
        assert server.get("/health").status == 503
        server.until_metric(0, "carpool_up")
        refused = ask(server, "model", 1, 2)
        assert int(refused.fields["retry-after"]) >= 1
        error_of(refused, 503, "not-serving")
        error_of(server.get("/v2/models/model/stats"), 503)
        go.touch()
        server.until_ready()
        assert server.engine_pid != engine
        assert server.frontend_pids == frontends
        assert outputs_of(ask(server, "model", 1, 2))["y"] == [2, 4]
        assert len(server.events("process-hangs")) == 1


@pytest.mark.conformance
def test_a_model_whose_instances_are_gone_is_not_ready_until_one_is_back(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.touch()
    code = f"""
    def setup(config):
        open({str(weights)!r}).close()

    def predict(x):
        return 2 * x
    """
    models = tmp_path / "models"
    repositories.python(models, code, name="mortal")
    repositories.python(models, DOUBLE, name="calm")
    with serving(models, folder=tmp_path) as server:
        assert server.get("/v2/models/mortal/ready").status == 200
        weights.unlink()
        for worker in server.worker_pids:
            os.kill(worker, signal.SIGKILL)
        until(lambda: server.get("/v2/models/mortal/ready").status == 400, "it is not ready")
        until(lambda: server.get("/v2/models/calm/ready").status == 200, "the other one is")
        assert server.is_ready(), "one of two models can run"
        error_of(ask(server, "mortal", 1, 2), 503, "restarting")
        with server.connect() as client:
            index = orjson.loads(client.post("/v2/repository/index", b"{}").body)
        assert {line["name"]: line["state"] for line in index} == {"mortal": "UNAVAILABLE", "calm": "READY"}
        weights.touch()
        until(lambda: server.get("/v2/models/mortal/ready").status == 200, "it is ready again")
        assert outputs_of(ask(server, "mortal", 1, 2))["y"] == [2, 4]


# ---- models


@pytest.fixture(scope="module", params=LAYOUTS)
def moody(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("moody")
    models = folder / "models"
    batching = "[batching]\nmax_delay_ms = 400\npreferred = [4]"
    repositories.python(models, MOODY, name="moody", head=f"execution_timeout_ms = 3000\n{batching}")
    repositories.python(models, DOUBLE, name="calm")
    with serving(models, frontends=request.param, folder=folder) as server:
        yield server


def together(server: Live, *first: float) -> list[Response]:
    """Four requests that ride in one batch, whose first numbers are these."""
    return [f.result(PATIENCE_S) for f in in_background(4, lambda n: ask(server, "moody", first[n], n))]


@pytest.mark.conformance
def test_a_model_that_raises_costs_one_error(moody: Live) -> None:
    responses = together(moody, 1, 2, 13, 4)
    assert [response.status for response in responses] == [200, 200, 500, 200]
    document = error_of(responses[2], 500, "model-error")
    assert "thirteen is unlucky" in document["error"]
    assert [outputs_of(responses[n])["y"] for n in (0, 1, 3)] == [[2, 0], [4, 2], [8, 6]]


@pytest.mark.parametrize(("mood", "what"), [(14, r"[1, 7]"), (18, "float64")])
def test_a_model_that_answers_wrongly_is_named_with_its_output(moody: Live, mood: int, what: str) -> None:
    responses = together(moody, 1, 2, mood, 4)
    assert [response.status for response in responses] == [200, 200, 500, 200]
    error = error_of(responses[2], 500, "model-error")["error"]
    assert '"y"' in error
    assert what in error


def test_a_model_that_hangs_is_replaced(moody: Live) -> None:
    before = moody.worker_pids
    response = ask(moody, "moody", 15, 0)
    assert "3000 ms" in error_of(response, 504, "execution-timeout")["error"]
    assert outputs_of(ask(moody, "calm", 1, 2))["y"] == [2, 4]
    assert outputs_of(ask(moody, "moody", 1, 2))["y"] == [2, 4]
    assert len(set(before) & set(moody.worker_pids)) == 1, "the process that hung was replaced, and no other"


def test_a_model_that_dies_is_restarted(moody: Live) -> None:
    responses = together(moody, 1, 2, 16, 4)
    assert {response.status for response in responses} <= {200, 500, 503}
    assert "exit status 3" in error_of(responses[2], 500, "model-died")["error"]
    assert outputs_of(ask(moody, "calm", 1, 2))["y"] == [2, 4]
    assert outputs_of(ask(moody, "moody", 1, 2))["y"] == [2, 4]


def test_models_whose_processes_are_killed_while_idle_are_restarted(moody: Live) -> None:
    victims = moody.worker_pids
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    until(lambda: not any(map(is_alive, victims)), "they are dead")
    for model in ("moody", "calm"):
        until(lambda name=model: ask(moody, name, 1, 2).status == 200, f"{model} answers again")


@pytest.mark.conformance
def test_kill_a_model_under_load(tmp_path: Path) -> None:
    """Who rode in its last batch hears so; everybody else is answered, by its successor."""
    model = repositories.python(tmp_path / "models", DOUBLE, max_batch=2)
    with serving(model, folder=tmp_path) as server, Load(server, "model", clients=6) as load:
        for round_ in (1, 2):
            load.until_more()
            (victim,) = server.worker_pids
            os.kill(victim, signal.SIGKILL)
            until(lambda n=round_: len(server.events("instance-replaced")) == n, "it was replaced")
            load.until_more()
        assert set(load.statuses) <= {200, 500}
        assert load.statuses[500] <= 4
        assert load.broken == 0
        assert server.metric("carpool_process_restarts_total", process="worker") == 2


def test_nan_passes_as_bytes_and_is_named_in_json(moody: Live) -> None:
    in_json = error_of(ask(moody, "moody", 17, 1), 500)
    assert "y" in in_json["error"]
    body = json_request([17, 1], [1, 2], parameters={"binary_data_output": True})
    with moody.connect() as client:
        response = client.post(infer_path("moody"), body)
    assert response.status == 200, response
    start_of_data = int(response.fields["inference-header-content-length"])
    values = np.frombuffer(response.body[start_of_data:], np.float32)
    assert np.isnan(values[0])
    assert values[1] == 1


# ---- clients that leave


@pytest.mark.parametrize("frontends", LAYOUTS)
def test_clients_that_leave_give_their_slots_back(tmp_path: Path, frontends: int) -> None:
    """The whole arena is 16 slots: if those of 40 clients that left were kept, nothing would fit."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)), max_batch=2)
    small = {"CARPOOL_SLOTS": "16", "CARPOOL_SLOT_BYTES": "4096"}
    with serving(model, frontends=frontends, folder=tmp_path, environment=small) as server:
        for _ in range(10):
            gone = [server.connect() for _ in range(4)]
            for number, client in enumerate(gone):
                client.send(post(infer_path("model"), json_request([1, number], [1, 2])))
            # Those in the batch that runs keep their slots until it ends.
            until(lambda: server.metric("nv_inference_pending_request_count", model="model") >= 2, "queued")
            for client in gone:
                client.reset()
            server.until_metric(0, "nv_inference_pending_request_count", model="model")
        go.touch()
        for _ in range(2):  # four at a time fit beside the batch that was held, should it not be over yet
            answers = in_background(4, lambda n: ask(server, "model", 1, n))
            assert [outputs_of(f.result(PATIENCE_S))["y"] for f in answers] == [[2, 2 * n] for n in range(4)]
        server.until_metric(8, "nv_inference_request_success", model="model")
        server.until_metric(40, "nv_inference_request_failure", model="model", reason="CANCELED")


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_bodies_and_answers_larger_than_the_arena(tmp_path: Path, frontends: int) -> None:
    """What can never fit is not told to come back; what fits by itself leaves room for its answer or not."""
    onnx_models.identity(tmp_path / "models" / "same" / "1" / "model.onnx", "UINT8", ("batch", "length"))
    small = {"CARPOOL_SLOTS": "8", "CARPOOL_SLOT_BYTES": "16384"}
    with serving(tmp_path / "models", frontends=frontends, folder=tmp_path, environment=small) as server:
        for size, status in ((200_000, 413), (90_000, 200), (60_000, 200), (1, 200)):
            tensor = {"name": "x", "datatype": "UINT8", "shape": [1, size]}
            inputs = [{**tensor, "parameters": {"binary_data_size": size}}]
            head = orjson.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
            data = np.arange(size).astype(np.uint8).tobytes()
            with server.connect() as client:
                field = b"Inference-Header-Content-Length: %d\r\n" % len(head)
                response = client.post(infer_path("same"), head + data, field)
            assert response.status == status, (size, response.status, response.body[:200])
            if status == 200:
                assert response.body[int(response.fields["inference-header-content-length"]) :] == data


# ---- the end: tests/live/test_grpc.py has the one that goes well, for both protocols


@pytest.mark.conformance
def test_while_it_drains_open_connections_hear_that_it_is_not_ready(tmp_path: Path) -> None:
    """A request that was half sent when the signal came is one of the new ones."""
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)))
    with serving(model, folder=tmp_path, drain_s=PATIENCE_S) as server:
        held = in_background(1, lambda n: ask(server, "model", 1, n))
        until_held(go)
        late = server.connect().send(b"GET /v2/health/ready HTT")
        until(lambda: server.metric("carpool_connections") >= 2, "it is there")
        server.signal(signal.SIGTERM)
        until(lambda: not server.is_ready(), "not ready")
        response = late.send(b"P/1.1\r\nHost: localhost\r\n\r\n").response()
        assert response.status == 400
        late.socket.close()
        go.touch()
        assert held[0].result(PATIENCE_S).status == 200
        assert server.wait() == 0


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_the_bound_on_draining_holds(tmp_path: Path, frontends: int) -> None:
    """A model that never comes back: the client hears of it, and the exit code says that it was cut off."""
    never = tmp_path / "never"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(never)))
    with serving(model, frontends=frontends, folder=tmp_path, drain_s=1) as server:
        held = in_background(1, lambda n: ask(server, "model", 1, n))
        until_held(never)
        server.signal(signal.SIGTERM)
        assert server.wait() != 0
        error = held[0].exception(PATIENCE_S)
        assert error is not None or held[0].result().status == 503


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_a_second_signal_stops_at_once(tmp_path: Path, frontends: int) -> None:
    never = tmp_path / "never"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(never)))
    with serving(model, frontends=frontends, folder=tmp_path, drain_s=600) as server:
        held = in_background(1, lambda n: ask(server, "model", 1, n))
        until_held(never)
        pids = server.all_pids()
        server.signal(signal.SIGTERM)
        until(lambda: not server.is_ready(), "not ready")
        server.signal(signal.SIGTERM)
        assert server.wait() != 0
        assert until_gone(pids) == []
        assert held[0].exception(PATIENCE_S) is not None or held[0].result().status == 503


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_sigterm_while_a_model_loads(tmp_path: Path, frontends: int) -> None:
    code = "import time\ndef setup(config):\n    time.sleep(600)\ndef predict(x):\n    return x\n"
    model = repositories.python(tmp_path / "models", code)
    server = start(model, frontends=frontends, folder=tmp_path, drain_s=600)
    try:
        until(lambda: bool(server.worker_pids), "it loads", READY_S)
        until(server.is_live, "live")
        assert server.get("/v2/health/ready").status == 400
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    finally:
        left = server.end()
    assert left == []


BROKEN = {
    "was never closed": ("def predict(x:\n", "max_batch"),
    "no weights": (
        "def setup(config):\n    raise RuntimeError('no weights')\ndef predict(x):\n    return x\n",
        "max_batch",
    ),
    "did you mean": (DOUBLE, "max_bach"),
}


@pytest.mark.parametrize("frontends", LAYOUTS)
@pytest.mark.parametrize(
    "why",
    [
        "no weights",
        *(pytest.param(why, marks=pytest.mark.conformance) for why in BROKEN if why != "no weights"),
    ],
)
def test_a_broken_model_at_start_is_one_clear_line(tmp_path: Path, frontends: int, why: str) -> None:
    code, key = BROKEN[why]
    model = repositories.python(tmp_path / "models", code, name="broken")
    settings = model / "model.toml"
    settings.write_text(settings.read_text().replace("max_batch", key))
    server = start(model, frontends=frontends, folder=tmp_path)
    try:
        status = server.wait(READY_S)
    finally:
        left = server.end()
    assert status not in (0, None)
    assert left == []
    lines = server.log().splitlines()
    told = [line for line in lines if line.startswith("carpool: ") or '"cannot-serve"' in line]
    assert len(told) == 1, lines
    assert "broken" in told[0]
    assert why in told[0]


@pytest.mark.conformance
@pytest.mark.parametrize("frontends", LAYOUTS)
def test_a_port_in_use_is_one_clear_line(tmp_path: Path, frontends: int) -> None:
    model = repositories.fake(tmp_path / "models")
    with serving(model, frontends=frontends, folder=tmp_path) as first:
        second = subprocess.run(first.arguments, capture_output=True, text=True, timeout=READY_S, check=False)
        assert second.returncode not in (0, None)
        told = [line for line in (second.stdout + second.stderr).splitlines() if "cannot listen" in line]
        assert len(told) == 1, second
        assert str(first.port) in told[0]
        assert "Traceback" not in second.stderr
