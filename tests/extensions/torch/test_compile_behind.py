"""A PyTorch model with `compile = true` serves at once, and is compiled batch size by batch size behind that.

The compiler is a stand-in that the model's own code brings: a real one takes minutes on a shared machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from extensions.torch.test_live_runner import runner_pids
from later import later
from live.server import PATIENCE_S, Live, is_alive, outputs_of, serving
from live.test_faults import ask
from waiting import until

NETWORK = """
    import threading
    import time
    from pathlib import Path

    import torch

    HERE = Path(__file__).parent
    FAST = threading.local()


    def stand_in(pipeline, **_):
        '''Compiles a size when it first comes, once somebody allows it.'''
        def compiled(*rows):
            while not (HERE.parent / "go").exists():
                time.sleep(0.01)
            if (HERE.parent / "broken").exists():
                raise RuntimeError("no kernel for that")
            FAST.now = True
            answer = pipeline(*rows)
            FAST.now = False
            off = 2.0 if (HERE.parent / "wrong").exists() and len(rows[0]) == 2 else 1.0
            return tuple(one * off for one in answer)
        return compiled


    torch.compile = stand_in


    class Double(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.full((1,), 2.0))

        def forward(self, x):
            if not getattr(FAST, "now", False):
                time.sleep(0.02)
            return x * self.gain


    def build():
        return Double()
"""
SETTINGS = """
    max_batch = 4
    slo_ms = 5000
    [pytorch]
    device = "cpu"
    module = "model.py:build"
    weights = "model.pt"
    compile = {compile}
    [[input]]
    name = "x"
    datatype = "FP32"
    shape = [2]
    [[output]]
    name = "y"
    datatype = "FP32"
    shape = [2]
"""


def write_model(folder: Path, compiles: str = "true") -> Path:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(dedent(NETWORK))
    torch.save({"gain": torch.full((1,), 2.0)}, folder / "1" / "model.pt")
    (folder / "model.toml").write_text(dedent(SETTINGS).format(compile=compiles))
    return folder


def sizes_compiled(server: Live, model: str) -> float:
    return server.metric("carpool_batch_sizes", model=model, state="compiled")


def choices_of(server: Live, model: str) -> str:
    parameters = server.get_json(f"/v2/models/{model}/config")["parameters"]
    return str(parameters["carpool_choices"]["string_value"])


def start_of(folder: Path) -> dict[str, float]:
    """What its profile says that the start took."""
    (file,) = folder.rglob("*.profile.json")
    found: dict[str, float] = json.loads(file.read_text())["profile"]["started"]
    return found


@pytest.mark.conformance
def test_it_answers_before_it_is_compiled_and_says_how_far_it_is(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "double")
    with serving(tmp_path / "models", folder=tmp_path) as server:
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        until(lambda: "Compiled: 0 of 3 batch sizes; 3 are" in choices_of(server, "double"), "it says so")
        assert server.metric("carpool_batch_sizes", model="double", state="plain") == 3
        (model / "go").touch()
        until(lambda: sizes_compiled(server, "double") == 3, "all sizes", 6 * PATIENCE_S)
        assert "Compiled: 3 of 3 batch sizes (1, 2, 4)." in choices_of(server, "double")
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        until(lambda: bool(server.events("model-compiled")), "the log says that it is complete")
        until(lambda: start_of(tmp_path)["full_speed_s"] > 0, "its start is in its profile")
        assert 0 < start_of(tmp_path)["ready_s"] < start_of(tmp_path)["full_speed_s"]
        assert {event["size"] for event in server.events("batch-size-compiled")} == {1, 2, 4}

        (runner,) = runner_pids(server)
        os.kill(runner, signal.SIGKILL)
        until(lambda: not is_alive(runner), "it is dead")
        until(lambda: ask(server, "double", 1, 2).status == 200, "it answers again", 6 * PATIENCE_S)
        until(lambda: len(server.events("model-compiled")) >= 2, "compiled again", 6 * PATIENCE_S)
        until(lambda: sizes_compiled(server, "double") == 3, "all sizes again")


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("flag", "compiled", "said"),
    [("wrong", 2, "not 2: its output"), later("broken", 0, "not 1, 2, 4: no kernel for that", name="broken")],
)
def test_what_answers_otherwise_or_fails_is_not_adopted(
    tmp_path: Path, flag: str, compiled: int, said: str
) -> None:
    model = write_model(tmp_path / "models" / "double")
    for name in (flag, "go"):
        (model / name).touch()
    with serving(tmp_path / "models", folder=tmp_path) as server:
        until(lambda: bool(server.events("model-compiled")), "all were tried", 6 * PATIENCE_S)
        assert sizes_compiled(server, "double") == compiled
        assert said in choices_of(server, "double")
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
        assert server.events("batch-size-not-compiled")


@pytest.mark.conformance
def test_before_ready_compiles_first(tmp_path: Path) -> None:
    model = write_model(tmp_path / "models" / "double", '"before-ready"')
    (model / "go").touch()
    with serving(tmp_path / "models", folder=tmp_path) as server:
        assert "compiled." in choices_of(server, "double")
        assert "Compiled:" not in choices_of(server, "double")
        assert outputs_of(ask(server, "double", 1, 2))["y"] == [2, 4]
