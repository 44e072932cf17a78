"""`carpool simulate` and `carpool profile` of models that write, and a running server's profile of one."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from absent import in_whole_server
from carpool.extensions.text.generation_simulation import TextReport
from carpool.extensions.text.text_profile import TextProfileReport
from cli_run import CliResult, run_cli
from frontend.whole_server import whole_server


def run(*args: str) -> str:
    result = run_cli(args)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def as_json(*args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*args, "--json"))
    return found


def invoke(*args: str) -> CliResult:
    return run_cli(["profile", *args])


@in_whole_server
def test_every_json_key_of_a_simulation_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
    section = page.partition("\n## carpool simulate\n")[2].partition("\n## ")[0]
    assert all(f"`{field.name}`" in section for field in fields(TextReport))


def test_their_options_and_examples_follow_those_of_the_verb() -> None:
    page = run("simulate", "--help")
    assert (
        page.index("Fixed batching settings:")
        < page.index("Models that write text:")
        < page.index("--slots N")
    )
    assert page.index("carpool simulate --curve 4+1") < page.index("carpool simulate --encoder")
    assert "carpool profile models/reader" in run("profile", "--help")


TEXT = ("simulate", "--encoder", "0.6+0.05", "--step-curve", "0.3+0.0015", "--tokens", "lognormal:8,0.5")


def test_text_that_is_written_token_by_token() -> None:
    options = (*TEXT, "--slots", "8", "--seconds", "0.3", "--ttft-ms", "20", "--per-token-ms", "5")
    found = as_json(*options, "--load", "1.5")
    assert found["mode"] == "generation"
    assert found["gain"] == pytest.approx(found["capacity_rps"] / found["static_capacity_rps"], rel=1e-4)
    assert found["slots"]["first_p99_ms"] < 20 < found["static"]["first_p99_ms"]
    assert found["settings"]["load"] == pytest.approx(1.5)
    text = run(*options, "--rate", "500", "--decoder-instances", "2")
    assert "encoders apart: 1, decoders: 2 of 8 slots" in " ".join(text.split())
    assert "first token, p99" in text
    assert "static batches" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--encoder 1+1", "Missing option '--step-curve'"),
        ("--slots 4 --curve 4+1 --slo-ms 50", "--slots is for models that write text"),
        (" ".join(TEXT[1:]) + " --curve 4+1", "--curve is for models with one response"),
        (" ".join(TEXT[1:]) + " --mode knobs", "--mode is for models with one response"),
        (" ".join(TEXT[1:]) + " --ttft-ms 0.5", "--ttft-ms 0.5 is below the 0.9515 ms"),
        (" ".join(TEXT[1:]) + " --per-token-ms 0.1", "--per-token-ms 0.1 is below the 0.3015 ms"),
        (" ".join(TEXT[1:]) + " --slots 0", "--slots must be a whole number from 1"),
        (" ".join(TEXT[1:]) + " --load 2 --rate 5", "give one of them"),
        (" ".join(TEXT[1:]) + " --rate 1e9", "is more than 50,000,000 tokens"),
        ("--encoder x --step-curve 1+1 --tokens fixed:3", "--encoder: cannot read 'x'"),
        ("--encoder 1+1 --step-curve 1+1 --tokens many", "--tokens: cannot read 'many'"),
        ("--encoder 1+1 --step-curve 1+1 --tokens fixed:0", "a mean from 1 to 100000 tokens"),
    ],
)
def test_text_that_cannot_be(options: str, says: str) -> None:
    result = run_cli(["simulate", *options.split()])
    assert result.exit_code == 2
    assert says in result.stderr


def write_reader(folder: Path, more: str = "") -> str:
    """A model that writes, with curves that are told and not measured."""
    model = folder / "writer"
    model.mkdir()
    fake = '[fake]\ncurve = "1+0.5"\nstep_curve = "0.4+0.1"\n'
    (model / "model.toml").write_text(f"{more}\n[generate]\nslots = 4\nmax_tokens = 20\n{fake}")
    return str(model)


def test_of_a_model_that_writes_encoder_and_step_are_measured_apart(tmp_path: Path) -> None:
    model = write_reader(tmp_path)
    result = invoke(model, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found.keys() == {field.name for field in fields(TextProfileReport)}
    assert [(row["size"], row["ms"]) for row in found["encoder"]] == [(1, 1.5), (4, 3.0)]
    assert [(row["size"], row["ms"]) for row in found["step"]] == [(1, 0.5), (4, pytest.approx(0.8))]
    one = found["budgets"][0]
    assert (one["slots"], one["encoded"]) == (1, 1)
    assert one["per_token_ms"] == pytest.approx(1.1 * 2.0)
    assert one["ttft_ms"] == pytest.approx(2.2 * 2.0)
    said = invoke(model).stdout
    assert "Writes up to 20 tokens" in " ".join(said.split())
    assert "ttft_ms = 8.4, per_token_ms = 4.2" in said
    assert "--encoder 1:1.5,4:3 --step-curve 1:0.5,4:0.8" in said
    refused = invoke(model, "--slo-ms", "30")
    assert refused.exit_code != 0
    assert "--slo-ms is for models that answer with one response" in " ".join(refused.output.split())


@pytest.mark.parametrize(
    ("promise", "said"),
    [
        ("ttft_ms = 100\nper_token_ms = 50", "can be met with up to 4 concurrent responses"),
        ("per_token_ms = 3.1", "per_token_ms = 3.1 can be met with up to 2 concurrent responses"),
        ("ttft_ms = 3", "cannot be met here: even a single response needs ttft_ms = 4.4"),
    ],
)
def test_what_a_model_that_writes_can_promise(tmp_path: Path, promise: str, said: str) -> None:
    assert said in " ".join(invoke(write_reader(tmp_path, promise)).stdout.split())


def test_with_an_encoder_apart_tokens_wait_for_steps_only(tmp_path: Path) -> None:
    model = write_reader(tmp_path)
    with (Path(model) / "model.toml").open("a") as file:
        file.write("[decoder]\ninstances = 2\n")
    found = json.loads(invoke(model, "--json").stdout)
    assert (found["encoders"], found["decoders"]) == (1, 2)
    assert found["budgets"][0]["per_token_ms"] == pytest.approx(1.1 * 0.5)


def test_what_a_server_believes_of_a_model_that_writes(tmp_path: Path) -> None:
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "model.toml").write_text("ttft_ms = 90\n[generate]\nslots = 4\n[fake]\n")
    with whole_server(tmp_path) as server:
        result = invoke(f"http://{server.url}", "--name", "w")
    assert result.exit_code == 0, result.output
    assert "w version 1: ttft_ms = 90, 4 slots, up to 128 tokens." in result.stdout
    assert "--encoder 1:5,4:8 --step-curve 1:1.01,4:1.04" in result.stdout
