"""`carpool registry`: what an address means, its files, and whether what was fetched is still that."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_run import CliResult, run_cli
from extensions.registry.stand_in import StandIn, standing_in

CHAMPION = "models:/detector@champion"


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    with standing_in() as found:
        found.register(1, b"one")
        found.register(2, b"two")
        found.aliases["champion"] = 1
        yield found


def registry(*arguments: object) -> CliResult:
    done = run_cli(["registry", *map(str, arguments)])
    assert "s3cret" not in done.output
    return done


def test_resolve_pull_and_status(mlflow: StandIn) -> None:
    where = ("--registry", mlflow.url)
    resolved = registry("resolve", CHAMPION, *where)
    assert resolved.exit_code == 0, resolved.output
    for word in ("version", "model.onnx", "MLmodel"):
        assert word in resolved.stdout
    before = registry("status", CHAMPION, *where, "--json")
    assert before.exit_code == 1
    assert json.loads(before.stdout)["serves"] == []
    pulled = json.loads(registry("pull", CHAMPION, *where, "--json").stdout)
    assert pulled["version"] == 1
    assert (Path(pulled["folder"]) / "1" / "model.onnx").read_bytes() == b"one"
    status = registry("status", CHAMPION, *where)
    assert status.exit_code == 0, status.output
    assert "fresh" in status.stdout
    mlflow.aliases["champion"] = 2
    moved = registry("status", CHAMPION, *where, "--json")
    assert moved.exit_code == 1
    assert json.loads(moved.stdout)["fresh"] is False


def test_a_folder_with_the_table_does_as_well(
    mlflow: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow.url)
    folder = tmp_path / "detector"
    folder.mkdir()
    (folder / "model.toml").write_text(f'[registry]\nstable = "{CHAMPION}"\n')
    assert registry("pull", folder).exit_code == 0
    assert (folder / "1" / "model.onnx").read_bytes() == b"one"
    assert registry("resolve", folder).exit_code == 0
    (folder / "model.toml").write_text("")
    plain = registry("status", folder)
    assert plain.exit_code == 2
    assert "[registry]" in plain.stderr


def test_what_goes_wrong_is_one_line(mlflow: StandIn) -> None:
    for arguments, code, said in (
        (("resolve", CHAMPION), 2, "--registry (or MLFLOW_TRACKING_URI)"),
        (("resolve", "models:/detector", "--registry", mlflow.url), 2, "models:/detector@champion"),
        (("resolve", "models:/absent@x", "--registry", mlflow.url), 1, "absent"),
        (("pull", CHAMPION, "--registry", "http://127.0.0.1:1"), 1, "no response"),
    ):
        done = registry(*arguments)
        assert done.exit_code == code, done.output
        assert said in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
