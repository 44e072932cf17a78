"""Which modules of the package each process of a server has loaded: none that no request passes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import carpool.demo
from backends import onnx_models
from extensions.torch.test_live_runner import runner_pids, write_model
from later import later
from live.server import Live, infer_path, json_request, outputs_of, serving
from live.test_faults import ask
from live.test_grpc import ask as ask_over_grpc
from live.test_grpc import client as grpc_client
from live.test_pictures import plainly
from measures import LINES_UNSAID, LOADED, file_of
from test_shape import is_of_the_lab

NOTING = """
import os
import sys


class Noting:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("carpool."):
            with open(os.path.join(os.environ["NOTED_IN"], str(os.getpid())), "a") as file:
                file.write(name + chr(10))


sys.meta_path.insert(0, Noting())
"""
ELSEWHERE = ("carpool.client", "carpool.sim")  # no lab, and for no request either


@dataclass(frozen=True)
class Noted:
    """Which modules each process has imported, in a file of its pid."""

    folder: Path
    environment: Mapping[str, str]  # of what is to note them

    def by(self, pid: int) -> set[str]:
        file = self.folder / str(pid)
        return set(file.read_text().split()) if file.exists() else set()

    def each(self) -> list[set[str]]:
        return [set(file.read_text().split()) for file in self.folder.iterdir()]


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    """`sitecustomize` is what every interpreter runs first: it notes each import, by process."""
    folder, first = tmp_path / "noted", tmp_path / "first"
    folder.mkdir()
    first.mkdir()
    (first / "sitecustomize.py").write_text(NOTING)
    path = os.pathsep.join(filter(None, (str(first), os.environ.get("PYTHONPATH"))))
    state = str(tmp_path / "state")  # no rollout of another server, whose state would load the extension
    return Noted(folder, {"PYTHONPATH": path, "NOTED_IN": str(folder), "CARPOOL_STATE_DIR": state})


@pytest.mark.conformance
def test_no_process_of_a_server_has_loaded_what_no_request_passes(tmp_path: Path, noted: Noted) -> None:
    torch_model = write_model(tmp_path / "models" / "calm", tmp_path / "go")
    demos = Path(carpool.demo.__file__).parent / "models"
    (tmp_path / "demos").mkdir()
    pictures = [plainly(demos / name, tmp_path / "demos") for name in ("efficientnet_lite0", "nanodet")]
    models = [*pictures, torch_model]
    with serving(*models, grpc=1, folder=tmp_path, environment=noted.environment) as server:
        assert outputs_of(ask(server, "calm", 1, 2))["y"] == [2, 4]
        for role, (pid, own) in processes(server).items():
            loaded = noted.by(pid)
            if role != "supervisor":  # it was forked, with all that its zygote has loaded
                named = "carpool.extensions.torch.zygote" if role == "runner" else "carpool.process.children"
                loaded = loaded.union(*(one for one in noted.each() if named in one))
            assert own in loaded, role
            wrong = {name for name in loaded if is_of_the_lab(name) or name.startswith(ELSEWHERE)}
            assert not wrong, f"{role} has loaded {sorted(wrong)}"


@pytest.mark.parametrize("grpc", [0, later(1)])
def test_a_plain_model_loads_so_many_files(tmp_path: Path, noted: Noted, grpc: int) -> None:
    """Counts what all processes together have loaded for 20 requests, imports in functions included."""
    model = onnx_models.identity(tmp_path / "plain" / "1" / "model.onnx").parents[1]
    body = json_request([1, 2, 3], [1, 3])
    with serving(model, grpc=grpc, folder=tmp_path, environment=noted.environment) as server:
        with server.connect() as client:
            for _ in range(20):
                assert outputs_of(client.post(infer_path("plain"), body))["y"] == [1, 2, 3]
        if grpc:  # its first request waits until everything behind the port is imported
            with grpc_client(server) as connected:
                assert ask_over_grpc(connected, 1, 2, 3, model="plain") == [1, 2, 3]
    names = set().union(*noted.each())  # once all have ended: the last imports may come behind the answers
    files = {path for path in map(file_of, names) if path is not None}
    lines = sum(path.read_text("utf-8").count("\n") for path in files)
    said_files, said_lines = LOADED["HTTP and gRPC" if grpc else "HTTP"]
    assert len(files) == said_files, f"{len(files)} files with {lines} lines"
    assert said_lines - LINES_UNSAID < lines <= said_lines, f"{len(files)} files with {lines} lines"


def processes(server: Live) -> dict[str, tuple[int, str]]:
    """Each with a module that it cannot do without."""
    [grpc] = server.grpc_pids
    [http] = set(server.frontend_pids) - {grpc}
    return {
        "supervisor": (server.pid, "carpool.process.supervisor"),
        "engine": (server.engine_pid, "carpool.engine.run.driver"),
        "http": (http, "carpool.frontend.http.protocol"),
        "grpc": (grpc, "carpool.frontend.grpc.h2_connection"),
        "runner": (runner_pids(server)[0], "carpool.extensions.torch.runner_process"),
    }
