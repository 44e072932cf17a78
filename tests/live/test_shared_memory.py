"""Clients' shared memory with real processes: registered on one connection, used on all, abused on some."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.utils.shared_memory as shm
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from backends import onnx_models
from frontend.client_files import ClientFile, client_file
from frontend.http.harness import Client, Response
from live.server import Live, error_of, infer_path, serving
from waiting import until

FEATURES = 3
ROW = 4 * FEATURES


@contextlib.contextmanager
def memory_server(folder: Path, frontends: int) -> Iterator[Live]:
    onnx_models.arithmetic(folder / "models" / "numbers" / "1" / "model.onnx")
    onnx_models.identity(folder / "models" / "large" / "1" / "model.onnx", "FP32", ("n", 1 << 21))
    allowed = {"CARPOOL_ALLOW_CLIENT_SHM": "1"}
    with serving(folder / "models", frontends=frontends, folder=folder, environment=allowed) as running:
        yield running


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(n, marks=pytest.mark.conformance) for n in (0, 1)), 2],
    ids=lambda n: f"{n} front ends",
)
def running(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with memory_server(tmp_path_factory.mktemp("memory"), request.param) as server:
        yield server
        assert not server.events("process-died")


@pytest.fixture
def server(running: Live) -> Iterator[Live]:
    yield running
    with InferenceServerClient(running.url) as client:
        client.unregister_system_shared_memory()
        assert client.get_system_shared_memory_status() == []


def register(server: Live, name: str, file: ClientFile, size: int, offset: int = 0) -> None:
    with InferenceServerClient(server.url) as client:
        client.register_system_shared_memory(name, file.key, size, offset)


def unregister(server: Live, name: str) -> None:
    with InferenceServerClient(server.url) as client:
        client.unregister_system_shared_memory(name)


def request(region: str, row: int, out: str | None = None) -> bytes:
    """Row `row` of one region as input, its double into the same row of another."""
    place = {
        "shared_memory_region": region,
        "shared_memory_byte_size": ROW,
        "shared_memory_offset": ROW * row,
    }
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, FEATURES], "parameters": place}
    wanted = [{"name": "double", "parameters": {**place, "shared_memory_region": out} if out else {}}]
    return orjson.dumps({"inputs": [tensor], "outputs": wanted})


def ask(client: Client, region: str, row: int, out: str | None = None) -> Response:
    return client.post(infer_path("numbers"), request(region, row, out))


def numbers(rows: int, start: int = 0) -> Any:
    return np.arange(start, start + rows * FEATURES, dtype=np.float32).reshape(rows, FEATURES)


def test_registered_once_used_on_every_connection(server: Live) -> None:
    """The answer to the registration waits until every front end can use it."""
    rows = 64
    with client_file(numbers(rows).tobytes()) as given, client_file(bytes(rows * ROW)) as taken:
        for _ in range(5):
            register(server, "in", given, rows * ROW)
            register(server, "out", taken, rows * ROW)
            for row in range(rows):
                with server.connect() as client:  # the kernel chooses the front end
                    assert ask(client, "in", row, "out").status == 200
            found = np.frombuffer(taken.read(), np.float32).reshape(rows, FEATURES)
            assert found.tolist() == (2 * numbers(rows)).tolist()
            unregister(server, "")
            for _ in range(8):
                with server.connect() as client:
                    error_of(ask(client, "in", 0), 400, "invalid-input")
            taken.write(bytes(rows * ROW))


def test_tritons_client_and_a_large_tensor(server: Live) -> None:
    """8 MiB: more than is copied in the loop."""
    size = 8 << 20
    values = np.random.default_rng(3).random((1, 1 << 21), np.float32)
    handles = [
        shm.create_shared_memory_region(n, f"/carpool-test-{os.getpid()}-{n}", size) for n in ("i", "o")
    ]
    try:
        with InferenceServerClient(server.url) as client:
            for name in ("i", "o"):
                client.register_system_shared_memory(name, f"/carpool-test-{os.getpid()}-{name}", size)
            shm.set_shared_memory_region(handles[0], [values])
            tensor = InferInput("x", [1, 1 << 21], "FP32").set_shared_memory("i", size)
            output = InferRequestedOutput("y")
            output.set_shared_memory("o", size)
            client.infer("large", [tensor], outputs=[output])
            assert (shm.get_contents_as_numpy(handles[1], np.float32, [1, 1 << 21]) == values).all()
    finally:
        for handle in handles:
            shm.destroy_shared_memory_region(handle)


def test_a_region_may_be_removed_once_it_is_registered(server: Live) -> None:
    with client_file(numbers(8).tobytes()) as given:
        register(server, "in", given, 8 * ROW)
        given.path.unlink()
        for row in range(8):
            with server.connect() as client:
                answer = orjson.loads(ask(client, "in", row).body)
                assert answer["outputs"][0]["data"] == (2 * numbers(8)[row]).tolist()


def test_regions_that_shrink_and_go_under_traffic(server: Live) -> None:
    """One client misuses its memory in every way it has, while others, in the same batches, are served."""
    rows, rounds = 16, 60
    with (
        client_file(numbers(rows).tobytes()) as good,
        client_file(bytes(rows * ROW)) as answers,
        client_file(numbers(rows).tobytes()) as bad,
        ThreadPoolExecutor(4) as pool,
    ):
        register(server, "good", good, rows * ROW)
        register(server, "answers", answers, rows * ROW)
        register(server, "bad", bad, rows * ROW)
        over = threading.Event()

        def well(row: int) -> int:
            done = 0
            with server.connect() as client:
                while not over.is_set():
                    assert ask(client, "good", row, "answers").status == 200
                    found = np.frombuffer(answers.read()[ROW * row :][:ROW], np.float32)
                    assert found.tolist() == (2 * numbers(rows)[row]).tolist()
                    done += 1
            return done

        def badly() -> Counter[int]:
            seen: Counter[int] = Counter()
            with server.connect() as client:
                while not over.is_set():
                    for row in range(rows):
                        seen[ask(client, "bad", row, "bad").status] += 1
            return seen

        serving_well = [pool.submit(well, row) for row in (0, 7, 15)]
        misusing = pool.submit(badly)
        try:
            for turn in range(rounds):
                bad.shrink(turn * 7 % (rows * ROW))
                unregister(server, "bad")
                os.truncate(bad.path, rows * ROW)
                register(server, "bad", bad, rows * ROW)
            bad.path.unlink()
        finally:
            over.set()
        assert all(done.result() > 10 for done in serving_well)
        assert set(misusing.result()) <= {200, 400}
        assert misusing.result()[200]


def test_unregistering_under_traffic(server: Live) -> None:
    """Every request is answered well, or told that the region is not registered."""
    with client_file(numbers(4).tobytes()) as given, ThreadPoolExecutor(3) as pool:
        over = threading.Event()

        def traffic(row: int) -> Counter[int]:
            seen: Counter[int] = Counter()
            with server.connect() as client:
                while not over.is_set():
                    response = ask(client, "in", row)
                    seen[response.status] += 1
                    if response.status == 200:
                        answer = orjson.loads(response.body)["outputs"][0]["data"]
                        assert answer == (2 * numbers(4)[row]).tolist()
                    else:
                        assert "Unable to find shared memory region: 'in'" in error_of(response, 400)["error"]
            return seen

        running = [pool.submit(traffic, row) for row in range(3)]
        try:
            for _ in range(50):
                register(server, "in", given, 4 * ROW)
                unregister(server, "in")
            register(server, "in", given, 4 * ROW)
            with server.connect() as client:
                assert ask(client, "in", 3).status == 200
        finally:
            over.set()
        for done in running:
            done.result()


def test_nothing_stays_open(server: Live) -> None:
    def opened() -> int:
        found = 0
        for link in [link for pid in server.all_pids() for link in Path(f"/proc/{pid}/fd").iterdir()]:
            with contextlib.suppress(OSError):  # closed meanwhile
                found += str(link.readlink()).startswith("/dev/shm/carpool-test")
        return found

    with client_file(numbers(4).tobytes()) as given:
        for name in "abc":
            register(server, name, given, 4 * ROW)
        assert opened() == 3 * (len(server.frontend_pids) + 1)  # and the engine
        with server.connect() as client:
            assert ask(client, "a", 0, "b").status == 200
            unregister(server, "")
            until(lambda: opened() == 0, "the files are closed")


@pytest.mark.conformance
def test_a_front_end_and_an_engine_that_die(tmp_path: Path) -> None:
    """A front end that comes later opens what is still there; an engine that comes later knows of nothing."""
    with (
        client_file(numbers(4).tobytes()) as given,
        client_file(numbers(4).tobytes()) as gone,
        memory_server(tmp_path, frontends=2) as server,
    ):
        register(server, "in", given, 4 * ROW)
        register(server, "gone", gone, 4 * ROW)
        gone.path.unlink()
        for pid in server.frontend_pids:
            os.kill(pid, signal.SIGKILL)
        server.until_metric(2, "carpool_process_restarts_total", process="http")
        server.until_ready()
        for _ in range(6):
            with server.connect() as client:
                assert ask(client, "in", 1).status == 200
                assert "must be registered again" in error_of(ask(client, "gone", 1), 400)["error"]
        os.kill(server.engine_pid, signal.SIGKILL)
        server.until_metric(1, "carpool_process_restarts_total", process="engine")
        server.until_ready()
        with server.connect() as client:
            assert "not registered" in error_of(ask(client, "in", 1), 400)["error"]
        register(server, "in", given, 4 * ROW)
        with server.connect() as client:
            assert ask(client, "in", 1).status == 200
