"""`carpool profile` against a server in this process, and against none."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.core.curve import BatchCurve
from cli_run import CliResult, run_cli
from engine import repositories
from frontend.whole_server import WholeServer, whole_server


def profile(*arguments: str) -> CliResult:
    return run_cli(["profile", *arguments])


@pytest.fixture(name="server", scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    folder: Path = tmp_path_factory.mktemp("models")
    repositories.fake(folder, curve="1+0.5", name="a")
    repositories.fake(folder, curve="1+0.5", name="b", head="")
    with whole_server(folder) as running:
        yield running


def test_what_a_running_server_believes(server: WholeServer) -> None:
    result = profile(f"http://{server.url}", "--name", "a")
    assert result.exit_code == 0
    assert "a version 1: SLO 200 ms" in result.stdout
    assert "t(B) = 1 ms + B × 0.5 ms" in result.stdout
    curve = re.search(r"--curve (\S+)", result.stdout)
    assert curve is not None
    assert BatchCurve.parse(curve[1]).max_batch == 8
    found = json.loads(profile(f"http://{server.url}/", "--name", "b", "--json").stdout)
    assert (found["name"], found["promise"]) == ("b", None)
    assert "no SLO (eager)" in profile(f"http://{server.url}", "--name", "b").stdout


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "--name is missing: the server has a, b"),
        (("--name", "c"), 1, "unknown model: 'c'"),
        (("--name", "a", "--sizes", "1"), 2, "--sizes is for measuring"),
        (("--name", "a", "--repeats", "3"), 2, "--repeats is for measuring"),
    ],
)
def test_what_is_wrong(server: WholeServer, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = profile(f"http://{server.url}", *arguments)
    assert result.exit_code == code
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


def test_nobody_there() -> None:
    result = profile("http://127.0.0.1:9", "--name", "a")
    assert result.exit_code == 1
    assert "is the server running?" in result.stderr
