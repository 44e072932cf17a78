from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from carpool.lab import batch_profile
from carpool.lab.batch_profile import ProfileQuestion, ProfileReport, profile
from cli_run import CliResult, run_cli
from engine import repositories


def invoke(*args: str) -> CliResult:
    return run_cli(["profile", *args])


@pytest.fixture(name="model")
def a_fast_model(tmp_path: Path) -> str:
    return str(repositories.fake(tmp_path, curve="0.2+0.05"))


def test_json_has_every_key(model: str) -> None:
    result = invoke(model, "--sizes", "1,2,8", "--slo-ms", "5,50", "--repeats", "2", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found.keys() == {field.name for field in fields(ProfileReport)}
    assert [row["batch"] for row in found["rows"]] == [1, 2, 8]
    assert [budget["slo_ms"] for budget in found["budgets"]] == [5, 50]
    assert isinstance(found["noisy"], bool)


def test_the_table_and_the_picture(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "p.png"
    result = invoke(model, "--repeats", "2", "--plot", str(picture), "--instances", "2", "--threads", "1")
    assert result.exit_code == 0
    assert "fake on fake, 2 instances × 1 thread" in result.stdout
    assert "← knee" in result.stdout
    assert "--curve 1:" in result.stdout
    assert picture.stat().st_size > 5000


def test_doubts_are_a_warning_and_no_failure(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubtful(question: ProfileQuestion, *_: object) -> ProfileReport:
        return replace(profile(question), noisy=True, notes=("Too noisy to tell.",))

    monkeypatch.setattr(batch_profile, "profile", doubtful)
    result = invoke(model, "--sizes", "1", "--repeats", "2", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["noisy"] is True
    assert "unreliable" in result.stderr
    shown = invoke(model, "--sizes", "1", "--repeats", "2").stdout
    assert (
        "· Unreliable, so that plans would be wrong; measure again on a quiet machine. For simulate" in shown
    )


def test_a_disturbed_curve_is_marked_and_not_planned_with(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_profile, "doubts", lambda *_: ["Other work was running."])
    shown = invoke(model, "--sizes", "1,2", "--repeats", "2").stdout
    found = re.search(r"--curve (\S+)", shown)
    assert found is not None
    assert found[1].endswith(",disturbed")
    for verb in ("plan", "simulate"):
        refused = run_cli([verb, "--curve", found[1], "--slo-ms", "50", "--rate", "10"])
        assert refused.exit_code != 0
        assert "--curve: it was measured on a disturbed machine" in refused.stderr
    plain = found[1].removesuffix(",disturbed")
    assert run_cli(["plan", "--curve", plain, "--slo-ms", "50", "--rate", "10"]).exit_code == 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--sizes", "2,1"), "--sizes must be rising"),
        (("--sizes", "x"), "--sizes must be batch sizes"),
        (("--slo-ms", "fast"), "--slo-ms must be ms like 30,50,100"),
        (("--slo-ms", "0"), "--slo-ms must be above 0"),
        (("--slo-ms", ",".join(["50"] * 17)), "16 SLOs at most"),
        (("--repeats", "1"), "--repeats must be"),
        (("--instances", "0"), "--instances must be"),
        (("--threads", "0"), "--threads must be"),
        (("--plot", "p.txt"), "--plot must name"),
        (("--backend", "abacus"), 'there is no backend "abacus"'),
    ],
)
def test_what_is_wrong_is_said_in_one_line(model: str, args: tuple[str, ...], said: str) -> None:
    result = run_cli(["profile", model, *args])
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_such_model(tmp_path: Path) -> None:
    result = run_cli(["profile", str(tmp_path / "nothing.onnx")])
    assert result.exit_code == 2
    assert "no such file or folder" in result.stderr
