"""PyTorch models in the process beside the engine: what breaks there costs that process, and is mended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import orjson
import pytest
import torch

from carpool.extensions.torch.zygote_start import RUNNER_MODULE
from later import later
from live.server import (
    PATIENCE_S,
    Live,
    command,
    descendants,
    error_of,
    infer_path,
    is_alive,
    json_request,
    outputs_of,
    serving,
)
from live.test_faults import Load, ask, in_background
from waiting import until

NETWORK = """
    import os
    import time

    import torch


    class Moody(torch.nn.Module):
        '''Twice the input, but for some numbers.'''

        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            first = x[:, 0]
            if (first == 13).any():
                raise ValueError("thirteen is unlucky")
            while (first == 15).any() and not os.path.exists("GO"):
                open("GO.waited-for", "w").close()
                time.sleep(0.002)
            if (first == 16).any():
                os._exit(3)
            if (first == 17).any():
                raise RuntimeError("CUDA error: pretended")
            return 2 * x * self.gain


    def build():
        return Moody()
"""
SETTINGS = """
    max_batch = 4
    execution_timeout_ms = {timeout_ms}
    [batching]
    max_delay_ms = {delay_ms}
    preferred = [4]
    [pytorch]
    device = "cpu"
    module = "model.py:build"
    weights = "model.pt"
    [[input]]
    name = "x"
    datatype = "FP32"
    shape = [2]
    [[output]]
    name = "y"
    datatype = "FP32"
    shape = [2]
"""


def write_model(folder: Path, go: Path, *, timeout_ms: int = 120_000, delay_ms: int = 0) -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(dedent(NETWORK).replace("GO", str(go)))
    torch.save({"gain": torch.ones(1)}, folder / "1" / "model.pt")
    (folder / "model.toml").write_text(dedent(SETTINGS).format(timeout_ms=timeout_ms, delay_ms=delay_ms))
    return folder


def runner_pids(server: Live) -> list[int]:
    """Those that serve; the zygote, from which they are forked, has no part in that."""
    return [pid for pid in every_runner(server) if has_slots(pid)]


def zygote_pids(server: Live) -> list[int]:
    return [pid for pid in every_runner(server) if "zygote" in command(pid) and not has_slots(pid)]


def every_runner(server: Live) -> list[int]:
    below = descendants(server.pid)
    return [pid for pid in below if RUNNER_MODULE in command(pid) and is_alive(pid)]


def whole_of(server: Live, pid: int) -> list[str]:
    """The models that this runner has prepared in full behind instances that were opened in a hurry."""
    return [event["model"] for event in server.events("instance-whole") if event["pid"] == pid]


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def has_slots(pid: int) -> bool:
    """It has mapped the memory of a front end."""
    try:
        return "carpool-slots" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def until_answered(server: Live, model: str = "moody") -> None:
    """By an instance that was loaded again."""
    until(lambda: ask(server, model, 1, 2).status == 200, "it answers again", 6 * PATIENCE_S)
    assert outputs_of(ask(server, model, 1, 2))["y"] == [2, 4]


@pytest.fixture(scope="module")
def go(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("signals") / "go"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, go: Path) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("runner")
    write_model(folder / "models" / "moody", go, timeout_ms=4000, delay_ms=400)
    write_model(folder / "models" / "calm", go)
    with serving(folder / "models", frontends=2, folder=folder) as running:
        yield running


def test_models_of_one_engine_share_a_process_and_the_engine_never_loads_torch(server: Live) -> None:
    assert len(runner_pids(server)) == 1
    assert outputs_of(ask(server, "moody", 1, 2))["y"] == [2, 4]
    assert outputs_of(ask(server, "calm", 3, 4))["y"] == [6, 8]
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (server.engine_pid, *runner_pids(server))}
    assert "libtorch" not in maps.pop(server.engine_pid)
    assert all("libtorch" in text for text in maps.values())
    until(
        lambda: server.metric("nv_inference_count", model="calm") >= 1, "it is counted"
    )  # behind the answer


def test_a_model_that_raises_costs_one_error(server: Live) -> None:
    first = (1, 2, 13, 4)
    answers = [
        future.result(PATIENCE_S) for future in in_background(4, lambda n: ask(server, "moody", first[n], n))
    ]
    assert [answer.status for answer in answers] == [200, 200, 500, 200]
    assert "thirteen is unlucky" in error_of(answers[2], 500)["error"]
    assert [outputs_of(answers[n])["y"] for n in (0, 1, 3)] == [[2, 0], [4, 2], [8, 6]]


def test_outputs_in_another_form_come_whole(server: Live) -> None:
    """Chosen outputs, in JSON, and a whole batch in one request."""
    body = orjson.dumps(
        {
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 2], "data": [1, 2, 3, 4, 5, 6]}],
            "outputs": [{"name": "y"}],
        }
    )
    with server.connect() as client:
        assert outputs_of(client.post(infer_path("calm"), body))["y"] == [2, 4, 6, 8, 10, 12]


def test_a_model_that_hangs_is_given_up_and_its_memory_is_left_alone(server: Live, go: Path) -> None:
    """The batch goes on in its thread; when it ends at last, nothing of it reaches later requests."""
    (runner,) = runner_pids(server)
    replaced = len(server.events("instance-replaced"))
    assert "4000 ms" in error_of(ask(server, "moody", 15, 0), 504, "execution-timeout")["error"]
    until_answered(server)
    with Load(server, "moody") as load:
        load.until_more()
        go.touch()
        load.until_more()
    go.unlink()
    assert runner_pids(server) == [runner], "a model that hangs is no reason to end the others"
    assert len(server.events("instance-replaced")) > replaced


@pytest.mark.parametrize(
    ("mood", "said"),
    [
        later(16, "process that runs it died", name="exit"),
        pytest.param(17, "CUDA error: pretended", id="device"),
    ],
)
def test_what_breaks_the_process_is_mended(server: Live, mood: int, said: str) -> None:
    """Also for the model that had no part in it."""
    (runner,) = runner_pids(server)
    restarts = server.metric("carpool_process_restarts_total", process="worker")
    answer = ask(server, "moody", mood, 0)
    assert said in error_of(answer, answer.status)["error"]
    until(lambda: not is_alive(runner), "it is gone")
    until_answered(server)
    until_answered(server, "calm")
    assert len(runner_pids(server)) == 1
    assert server.metric("carpool_process_restarts_total", process="worker") == restarts + 1


@pytest.mark.conformance
def test_a_runner_is_forked_from_the_zygote_and_outlives_it(server: Live) -> None:
    until(lambda: len(zygote_pids(server)) == 1, "there is a zygote", 3 * PATIENCE_S)
    (zygote,), (runner,) = zygote_pids(server), runner_pids(server)
    assert "libtorch" in Path(f"/proc/{zygote}/maps").read_text()
    os.kill(runner, signal.SIGKILL)
    until_answered(server, "calm")
    until_answered(server)
    (forked,) = runner_pids(server)
    assert "zygote" in command(forked), "it is a fork"
    assert parent_of(forked) == server.engine_pid, "and the engine's child"
    os.kill(zygote, signal.SIGKILL)
    until(lambda: not is_alive(zygote), "it is gone")
    until(lambda: len(set(zygote_pids(server)) - {zygote}) == 1, "there is another", 3 * PATIENCE_S)
    assert runner_pids(server) == [forked], "nobody who serves needed it"
    assert outputs_of(ask(server, "calm", 1, 2))["y"] == [2, 4]


@pytest.mark.conformance
def test_a_runner_that_is_stopped_is_told_of_and_replaced(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "model", tmp_path / "go")
    with serving(tmp_path / "models", folder=tmp_path, environment={"CARPOOL_WATCHDOG_S": "4"}) as server:
        (runner,) = runner_pids(server)
        os.kill(runner, signal.SIGSTOP)
        until(lambda: server.get("/v2/models/model/ready").status == 400, "not ready")
        until(lambda: not is_alive(runner), "it was killed")
        until_answered(server, "model")
        assert server.get("/v2/models/model/ready").status == 200
        assert len(server.events("runner-hangs")) == 1


def test_kill_the_process_under_load(server: Live) -> None:
    """Who rode in its last batches hears so, who came meanwhile too; nobody waits for ever."""
    with Load(server, "calm", clients=6) as load:
        load.until_more()
        (runner,) = runner_pids(server)
        os.kill(runner, signal.SIGKILL)
        until(lambda: not is_alive(runner), "it is dead")
        target = load.statuses[200] + 20
        until(lambda: load.statuses[200] >= target, "answers again", 6 * PATIENCE_S)
    assert set(load.statuses) <= {200, 500, 503}
    assert load.broken == 0
    server.until_metric(0, "nv_inference_pending_request_count", model="calm")


def test_a_front_end_that_dies_is_followed_by_one_whose_memory_is_known(server: Live) -> None:
    with Load(server, "calm", clients=4) as load:
        load.until_more()
        before = server.frontend_pids
        os.kill(before[0], signal.SIGKILL)
        until(lambda: len(set(server.frontend_pids) - set(before)) == 1, "a new one", 3 * PATIENCE_S)
        load.until_more(count=60)
    assert set(load.statuses) <= {200, 503}
    for _ in range(16):  # the kernel spreads connections over both
        assert outputs_of(ask(server, "calm", 1, 2))["y"] == [2, 4]


@pytest.fixture(scope="module")
def controlled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    """A server that loads models when it is told to, and the folder of its one model."""
    folder = tmp_path_factory.mktemp("controlled")
    model = write_model(folder / "models" / "model", folder / "go")
    explicit = {"CARPOOL_MODEL_CONTROL_MODE": "explicit", "CARPOOL_LOAD_MODELS": "*"}
    with serving(folder / "models", folder=folder, environment=explicit) as running:
        yield running, model


@pytest.mark.conformance
def test_loading_again_under_load_fails_nobody(controlled: tuple[Live, Path]) -> None:
    server, model = controlled
    freed = len(server.events("model-unloaded"))
    with Load(server, "model") as load, server.connect() as client:
        load.until_more()
        for _ in range(3):
            (model / "1" / "model.py").touch()
            assert client.post("/v2/repository/models/model/load", b"{}").status == 200
            load.until_more()
        assert set(load.statuses) == {200}
        assert client.post("/v2/repository/models/model/unload", b"{}").status == 200
        until(lambda: len(server.events("model-unloaded")) == freed + 4, "all are freed")
        (model / "1" / "model.py").write_text("import nothing_of_that_name\n")
        refused = client.post("/v2/repository/models/model/load", b"{}")
        assert "nothing_of_that_name" in error_of(refused, refused.status)["error"]
        (model / "1" / "model.py").write_text(dedent(NETWORK))
        assert client.post("/v2/repository/models/model/load", b"{}").status == 200
        load.until_more()


@pytest.mark.conformance
def test_log_settings_reach_the_process(controlled: tuple[Live, Path]) -> None:
    """Loading says what it chose, in the process where it happens; one that is started later knows it too."""
    server, model = controlled
    with server.connect() as client:

        def load_again() -> int:
            (model / "1" / "model.py").touch()
            assert client.post("/v2/repository/models/model/load", b"{}").status == 200
            return len(server.events("choice"))

        assert client.post("/v2/logging", b'{"log_verbose_level": 1}').status == 200
        chosen = load_again()
        assert chosen > 0
        assert client.post("/v2/logging", b'{"log_verbose_level": 0}').status == 200
        assert load_again() == chosen
        (runner,) = runner_pids(server)
        os.kill(runner, signal.SIGKILL)
        until(lambda: not is_alive(runner), "it is dead")
        until_answered(server, "model")
        assert load_again() == chosen
        assert client.post("/v2/logging", b'{"log_verbose_level": 1}').status == 200
        assert load_again() > chosen


@pytest.mark.conformance
def test_everything_in_one_process_needs_no_other(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "model", tmp_path / "go")
    with serving(model, frontends=0, folder=tmp_path) as server:
        assert outputs_of(ask(server, "model", 1, 2))["y"] == [2, 4]
        assert runner_pids(server) == []


@pytest.mark.conformance
def test_the_process_ends_with_its_engine(server: Live) -> None:
    (runner,) = runner_pids(server)
    os.kill(server.engine_pid, signal.SIGKILL)
    until(lambda: not is_alive(runner), "it is gone")
    until_answered(server, "calm")  # front ends may not have heard yet that the engine is gone
    with server.connect() as client:
        assert outputs_of(client.post(infer_path("calm"), json_request([5, 6], [1, 2])))["y"] == [10, 12]
