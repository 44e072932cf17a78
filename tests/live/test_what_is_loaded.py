"""Which modules of the package each process of a server has loaded: none that no request passes."""

from __future__ import annotations

import os
from pathlib import Path

import carpool.demo
from live.server import Live, outputs_of, serving
from live.test_faults import ask
from live.test_pictures import plainly
from live.test_runner import runner_pids, write_model
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


def test_no_process_of_a_server_has_loaded_what_no_request_passes(tmp_path: Path) -> None:
    """`sitecustomize` is what every interpreter runs first: it notes each import, by process."""
    noted = tmp_path / "noted"
    noted.mkdir()
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(NOTING)
    path = os.pathsep.join(filter(None, (str(tmp_path / "first"), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "NOTED_IN": str(noted)}
    torch_model = write_model(tmp_path / "models" / "calm", tmp_path / "go")
    demos = Path(carpool.demo.__file__).parent / "models"
    (tmp_path / "demos").mkdir()
    pictures = [plainly(demos / name, tmp_path / "demos") for name in ("efficientnet_lite0", "nanodet")]
    models = [*pictures, torch_model]
    with serving(*models, grpc=1, folder=tmp_path, environment=environment) as server:
        assert outputs_of(ask(server, "calm", 1, 2))["y"] == [2, 4]
        for role, (pid, own) in processes(server).items():
            own_file = noted / str(pid)
            loaded = set(own_file.read_text().split()) if own_file.exists() else set()
            if role != "supervisor":  # it was forked, with all that its zygote has loaded
                named = "carpool.runner.zygote" if role == "runner" else "carpool.process.children"
                zygotes = [set(file.read_text().split()) for file in noted.iterdir()]
                loaded = loaded.union(*(one for one in zygotes if named in one))
            assert own in loaded, role
            wrong = {name for name in loaded if is_of_the_lab(name) or name.startswith(ELSEWHERE)}
            assert not wrong, f"{role} has loaded {sorted(wrong)}"


def processes(server: Live) -> dict[str, tuple[int, str]]:
    """Each with a module that it cannot do without."""
    [grpc] = server.grpc_pids
    [http] = set(server.frontend_pids) - {grpc}
    return {
        "supervisor": (server.pid, "carpool.process.supervisor"),
        "engine": (server.engine_pid, "carpool.engine.run.driver"),
        "http": (http, "carpool.frontend.http.protocol"),
        "grpc": (grpc, "carpool.frontend.grpc.h2_connection"),
        "runner": (runner_pids(server)[0], "carpool.runner.runner_process"),
    }
