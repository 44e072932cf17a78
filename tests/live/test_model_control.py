"""Models that change under traffic, with real processes: no request fails, and each answer is from a version
that was current between its question and its answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orjson
import pytest
import tritonclient.grpc
from onnx import helper

from backends import onnx_models
from frontend.http.harness import Client, Response
from live.server import PATIENCE_S, READY_S, Live, serving, start
from waiting import until

EXPLICIT = {"CARPOOL_MODEL_CONTROL_MODE": "explicit", "CARPOOL_LOAD_MODELS": "m"}
BODY = np.zeros(4, np.float32).tobytes()
HEAD = (
    b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16\r\nInference-Header-Content-Length: 0\r\n\r\n"
)


def write_version(home: Path, version: int, value: float) -> None:
    """A model that adds this value to its input; the file is replaced as a whole."""
    folder = home / "m" / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    part = onnx_models.write(
        folder / ".part",
        [helper.make_node("Add", ["x", "value"], ["y"])],
        [("x", "FP32", ("batch", 4))],
        [("y", "FP32", ("batch", 4))],
        {"value": np.array([value], np.float32)},
    )
    part.rename(folder / "model.onnx")


def write_policy(home: Path, policy: str) -> None:
    part = home / "m" / ".part"
    part.write_text(f'name: "m" max_batch_size: 8 version_policy {{ {policy} }} dynamic_batching {{ }}')
    part.rename(home / "m" / "config.pbtxt")


def path_of(version: str = "") -> bytes:
    return b"/v2/models/m/versions/%b/infer" % version.encode() if version else b"/v2/models/m/infer"


def read(response: Response) -> tuple[str, float]:
    """The version that answered, and the value that it adds."""
    assert response.status == 200, response
    length = int(response.fields["inference-header-content-length"])
    values = np.frombuffer(response.body[length:], np.float32)
    assert len(set(values.tolist())) == 1
    return orjson.loads(response.body[:length])["model_version"], float(values[0])


def order(server: Live, what: str, parameters: Mapping[str, object] | None = None) -> Response:
    body = b"" if parameters is None else orjson.dumps({"parameters": parameters})
    with server.connect() as client:
        return client.post(f"/v2/repository/models/m/{what}", body)


@dataclass
class Truth:
    """Which answers were right at which time: from each change on, until the next."""

    changes: list[tuple[float, frozenset[tuple[str, float]]]] = field(default_factory=list)

    def now(self, *right: tuple[str, float]) -> None:
        self.changes.append((time.monotonic(), frozenset(right)))

    def between(self, start: float, end: float) -> set[tuple[str, float]]:
        right: set[tuple[str, float]] = set()
        ends = [at for at, _ in self.changes[1:]] + [float("inf")]
        for (begin, answers), over in zip(self.changes, ends, strict=True):
            if begin <= end and over >= start:
                right |= answers
        return right


@dataclass
class Traffic:
    """Clients that ask without a pause, some of them slowly, and keep what they were told."""

    server: Live
    clients: int
    grpc_clients: int = 0
    asked: list[tuple[float, float, tuple[str, float]]] = field(default_factory=list)
    asked_over_grpc: int = 0  # by all clients, which is exact enough to see that they were there
    failures: list[str] = field(default_factory=list)
    turned: threading.Condition = field(default_factory=threading.Condition)
    turns: int = 0
    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Traffic:
        ways = [self._quick] * self.clients + [self._slow] * 2
        self.threads = [threading.Thread(target=self._live, args=(way,)) for way in ways]
        self.threads += [threading.Thread(target=self._over_grpc) for _ in range(self.grpc_clients)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.turn()
        for thread in self.threads:
            thread.join(PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads)

    def turn(self) -> None:
        """Something was loaded: slow clients finish what they were saying."""
        with self.turned:
            self.turns += 1
            self.turned.notify_all()

    def _live(self, way: object) -> None:
        try:
            with self.server.connect() as client:
                while not self.stop.is_set():
                    way(client)  # type: ignore[operator]
        except Exception as error:
            self.failures.append(repr(error))

    def _over_grpc(self) -> None:
        tensor = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 4), np.float32))
        try:
            with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}") as client:
                until(lambda: _is_ready(client), "gRPC")
                while not self.stop.is_set():
                    start = time.monotonic()
                    result = client.infer("m", [tensor])
                    answer = result.get_response().model_version, float(result.as_numpy("y")[0, 0])
                    self.asked.append((start, time.monotonic(), answer))
                    self.asked_over_grpc += 1
        except Exception as error:
            self.failures.append(repr(error))

    def _quick(self, client: Client) -> None:
        start = time.monotonic()
        client.send(HEAD % path_of() + BODY)
        answer = read(client.response())
        self.asked.append((start, time.monotonic(), answer))

    def _slow(self, client: Client) -> None:
        """Its last byte comes when what it began to ask has been replaced: the newer one is right."""
        client.send(HEAD % path_of() + BODY[:-1])
        with self.turned:
            turns = self.turns
            # Well before the server gives up on a body that stands still.
            self.turned.wait_for(lambda: self.turns > turns, timeout=4.0)
        start = time.monotonic()
        client.send(BODY[-1:])
        answer = read(client.response())
        self.asked.append((start, time.monotonic(), answer))


def _is_ready(client: tritonclient.grpc.InferenceServerClient) -> bool:
    try:
        return bool(client.is_server_ready())
    except tritonclient.grpc.InferenceServerException:
        return False  # nobody listens yet


@pytest.mark.parametrize(
    ("frontends", "requests"),
    [
        (2, 300),
        *(pytest.param(*given, marks=pytest.mark.conformance) for given in ((2, 10_000), (0, 2_000))),
    ],
)
def test_no_request_fails_and_none_is_answered_by_what_was_not_current(
    tmp_path: Path, frontends: int, requests: int
) -> None:
    home = tmp_path / "models"
    values = {1: 1000.0, 2: 2000.0, 3: 3000.0}
    for version, value in values.items():
        write_version(home, version, value)
    write_policy(home, "latest { num_versions: 1 }")
    policies = {
        "latest { num_versions: 1 }": 3,
        "specific { versions: [1, 2] }": 2,
        "specific { versions: 1 }": 1,
        "all { }": 3,
    }
    truth = Truth()
    newest = ("3", values[3])
    truth.now(newest)
    with serving(home, frontends=frontends, grpc=1, folder=tmp_path, environment=EXPLICIT) as server:
        with Traffic(server, clients=6, grpc_clients=3) as traffic:
            for reload in range(20):
                if reload % 2:
                    policy = list(policies)[reload // 2 % len(policies)]
                    write_policy(home, policy)
                    version = policies[policy]
                else:
                    version = int(newest[0])
                    values[version] += 1
                    write_version(home, version, values[version])
                coming = (str(version), values[version])
                truth.now(newest, coming)
                response = order(server, "load")
                assert response.status == 200, response
                truth.now(coming)
                newest = coming
                traffic.turn()
                more = len(traffic.asked) + requests // 25
                until(lambda more=more: len(traffic.asked) >= more or traffic.failures, "traffic")  # type: ignore[misc]
            until(lambda: len(traffic.asked) >= requests or traffic.failures, "the rest", READY_S)
        assert traffic.failures == []
        assert traffic.asked_over_grpc > requests // 100
        wrong = [(s, e, a) for s, e, a in traffic.asked if a not in truth.between(s, e)]
        assert not wrong, wrong[:3]
        assert {answer for _, _, answer in traffic.asked} == set().union(
            *(right for _, right in truth.changes)
        )
        until(lambda: server.metric("nv_inference_pending_request_count") == 0, "an empty queue")
        index = orjson.loads(_index(server).body)
        assert all(line["state"] in ("READY", "UNAVAILABLE") for line in index)


def _index(server: Live) -> Response:
    with server.connect() as client:
        return client.post("/v2/repository/index", b"")


@pytest.mark.conformance
def test_memory_comes_back_when_models_go(tmp_path: Path) -> None:
    """Threads are counted: each instance has one, and they end with it."""
    home = tmp_path / "models"
    write_version(home, 1, 1.0)
    write_policy(home, "latest { num_versions: 1 }")
    with serving(home, folder=tmp_path, environment=EXPLICIT) as server:

        def threads() -> int:
            return len(list(Path(f"/proc/{server.engine_pid}/task").iterdir()))

        pool = 4 + len(os.sched_getaffinity(0))  # threads that the loop keeps for whatever blocks
        before = threads()
        for turn in range(2 * pool):
            write_version(home, 1, 2.0 + turn)
            assert order(server, "load").status == 200
            until(lambda: "UNLOADING" not in _index(server).body.decode(), "the old one freed")
        until(lambda: threads() <= before + pool, "the threads of what was freed ended")
        assert order(server, "unload").status == 200
        until(lambda: "unloaded" in _index(server).body.decode(), "freed")
        with server.connect() as client:
            client.send(HEAD % path_of() + BODY)
            assert client.response().status == 404


@pytest.mark.conformance
def test_an_engine_that_is_killed_comes_back_with_what_was_loaded_by_request(tmp_path: Path) -> None:
    home = tmp_path / "models"
    write_version(home, 1, 7.0)
    write_policy(home, "latest { num_versions: 1 }")
    only = {"CARPOOL_MODEL_CONTROL_MODE": "explicit"}
    with serving(home, folder=tmp_path, environment=only) as server:
        assert orjson.loads(_index(server).body) == [{"name": "m"}]
        assert order(server, "load").status == 200
        os.kill(server.engine_pid, signal.SIGKILL)

        def answered() -> bool:
            with server.connect() as client:
                response = client.send(HEAD % path_of() + BODY).response()
                return response.status == 200 and read(response) == ("1", 7.0)

        until(answered, "the model is back", READY_S)
        assert order(server, "unload").status == 200


@pytest.mark.conformance
def test_polling_with_several_front_ends(tmp_path: Path) -> None:
    home = tmp_path / "models"
    write_version(home, 1, 1.0)
    write_policy(home, "latest { num_versions: 1 }")
    environment = {"CARPOOL_MODEL_CONTROL_MODE": "poll", "CARPOOL_POLL_S": "0.1"}
    with (
        serving(home, frontends=2, folder=tmp_path, environment=environment) as server,
        server.connect() as client,
    ):

        def answer() -> tuple[str, float]:
            return read(client.send(HEAD % path_of() + BODY).response())

        assert answer() == ("1", 1.0)
        write_version(home, 2, 2.0)
        until(lambda: answer() == ("2", 2.0), "the new version")
        (home / "m" / "2" / "model.onnx").write_bytes(b"not a model")
        until(lambda: b'"reason"' in _index(server).body, "the reason")
        assert answer() == ("2", 2.0)
        refused = order(server, "load")
        assert (refused.status, b"--model-control-mode explicit" in refused.body) == (503, True)


def test_a_server_whose_model_failed_is_not_ready_where_all_must_serve(tmp_path: Path) -> None:
    write_version(tmp_path / "models", 1, 1.0)
    (tmp_path / "models" / "torn" / "1").mkdir(parents=True)
    (tmp_path / "models" / "torn" / "1" / "model.onnx").write_bytes(b"half of a file")
    everything = {"CARPOOL_STRICT_READINESS": "all"}
    server = start(tmp_path / "models", folder=tmp_path, environment=everything)
    try:
        until(lambda: "not-ready" in server.log(), "it says why", READY_S)
        with Client("127.0.0.1", server.port) as client:  # front ends hear of the models a moment later
            until(lambda: client.send(HEAD % path_of() + BODY).response().status == 200, "it is served")
        assert not server.is_ready()
        assert server.metric("carpool_model_state", model="torn", state="failed") == 1
        assert server.metric("carpool_model_state", model="m", state="ready") == 1
    finally:
        assert not server.end()
