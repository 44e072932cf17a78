"""What a model that is compiled behind its traffic meets: it is unloaded, loaded with other settings, cached,
rolled out and loaded on demand, its compiler is killed, and the server stops, all while it compiles."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from extensions.torch.test_compile_behind import choices_of, sizes_compiled, write_model
from extensions.torch.test_live_runner import every_runner, has_slots
from live.server import PATIENCE_S, Live, is_alive, outputs_of, serving
from live.test_faults import ask
from waiting import until

ROLLED = (
    "[rollout]\nshadow = 0\ncanary = [0.5]\ncanary_h = 24\nstandby_h = 24\nleast = 20\n"
    "[rollout.guards]\ndisagreement = false\n"
)
CACHED = "[cache]\nmin_uses = 1\naudit = 0.0\n"


def compilers(server: Live) -> list[int]:
    """Forks of the zygote that map no front end's memory."""
    zygotes = {event["pid_"] for event in server.events("runner-stands-by")}
    return [pid for pid in every_runner(server) if pid not in zygotes and not has_slots(pid)]


def control(server: Live, what: str) -> int:
    with server.connect() as client:
        return client.post(f"/v2/repository/models/double/{what}", b"{}").status


@pytest.mark.conformance
def test_it_is_unloaded_and_loaded_with_other_settings_and_its_compiler_is_killed(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "double")
    environment = {"CARPOOL_MODEL_CONTROL_MODE": "explicit"}
    with serving(tmp_path / "models", folder=tmp_path, environment=environment) as server:
        assert control(server, "load") == 200
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        until(lambda: bool(compilers(server)), "it is being compiled", 6 * PATIENCE_S)
        first = compilers(server)

        assert control(server, "unload") == 200
        until(lambda: not any(map(is_alive, first)), "nobody compiles what is gone", 6 * PATIENCE_S)
        assert ask(server, "double", 1, 2).status != 200

        settings = model / "model.toml"
        settings.write_text(settings.read_text().replace("max_batch = 4", "max_batch = 2"))
        assert control(server, "load") == 200
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        until(lambda: "of 2 batch sizes" in choices_of(server, "double"), "its settings are the new ones")
        until(lambda: bool(compilers(server)), "the other one is compiled", 6 * PATIENCE_S)

        while not server.events("compiler-failed"):
            for pid in compilers(server):
                os.kill(pid, signal.SIGKILL)
            until(lambda: bool(compilers(server) or server.events("compiler-failed")), "what comes of it")
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        (model / "go").touch()
        until(lambda: sizes_compiled(server, "double") == 2, "the runner compiles itself", 6 * PATIENCE_S)
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]


@pytest.mark.conformance
def test_it_is_cached_rolled_out_and_loaded_on_demand_and_the_server_stops_meanwhile(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name, more in (("cached", CACHED), ("rolled", ROLLED)):
        folder = write_model(models / name)
        (folder / "model.toml").write_text((folder / "model.toml").read_text() + more)
    shutil.copytree(models / "rolled" / "1", models / "rolled" / "2")
    (models / "rolled" / "go").touch()  # now: a file that comes later changes the model
    environment = {"CARPOOL_ON_DEMAND": "1", "CARPOOL_STATE_DIR": str(tmp_path / "state")}
    with serving(models, folder=tmp_path, environment=environment) as server:
        until(lambda: ask(server, "rolled", 1, 2).status == 200, "it is loaded on demand", 6 * PATIENCE_S)
        until(
            lambda: {event["version"] for event in server.events("model-compiled")} == {"1", "2"},
            "both are compiled, each for itself",
            9 * PATIENCE_S,
        )
        assert outputs_of(ask(server, "rolled", 1, 2))["y"] == [2, 4]

        until(lambda: ask(server, "cached", 1, 2).status == 200, "it is loaded on demand", 6 * PATIENCE_S)
        until(lambda: bool(compilers(server)), "it is being compiled", 6 * PATIENCE_S)
        answers = [ask(server, "cached", 3, 4) for _ in range(3)]
        assert [outputs_of(answer)["y"] for answer in answers] == [[6, 8]] * 3
        assert "hit" in answers[-1].fields["x-carpool-cache"]
        assert sizes_compiled(server, "cached") == 0  # and the server stops now
