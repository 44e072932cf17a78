"""`carpool models` against a server in this process, and against none."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli_run import CliResult, run_cli
from engine.scripted import Stage, model, scripted_stage, weights
from frontend.whole_server import WholeServer, whole_server

__all__ = ["scripted_stage"]


def models(*arguments: str) -> CliResult:
    return run_cli(["models", *arguments])


@pytest.fixture(name="server")
def explicit_server(tmp_path: Path, stage: Stage) -> Iterator[WholeServer]:
    model(tmp_path, v1=1.0)
    model(tmp_path, "other", v1=2.0)
    with whole_server(tmp_path, model_control_mode="explicit", load_models=("other",)) as server:
        yield server


def test_list_load_and_unload(server: WholeServer, tmp_path: Path) -> None:
    url = ("--url", f"http://{server.url}")
    listed = models("list", *url)
    assert listed.exit_code == 0
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["model", "version", "state", "reason"],
        ["m", "not", "loaded"],
        ["other", "1", "READY"],
    ]
    loaded = models("load", "m", *url, "--json")
    assert loaded.exit_code == 0
    assert json.loads(loaded.stdout) == [{"name": "m", "version": "1", "state": "READY"}]
    weights(tmp_path, "m", 1, "broken")
    failed = models("load", "m", "--url", server.url)  # the scheme goes without saying
    assert failed.exit_code == 1
    assert failed.stderr == f"carpool: {server.url}: load failed for model 'm': m: broken weights\n"
    shown = models("list", "m", *url)
    assert "m: broken weights" in " ".join(shown.stdout.split())
    assert models("unload", "m", *url).exit_code == 0
    assert all(line["state"] != "READY" for line in json.loads(models("list", "m", *url, "--json").stdout))


def test_settings_from_a_file(server: WholeServer, tmp_path: Path) -> None:
    config = tmp_path / "override.json"
    config.write_text('{"max_batch_sise": 3}')
    refused = models("load", "m", "--url", server.url, "--config", str(config))
    assert refused.exit_code == 1
    assert 'did you mean "max_batch_size"' in refused.stderr
    missing = models("load", "m", "--url", server.url, "--config", str(tmp_path / "none.json"))
    assert missing.exit_code != 0


def test_a_name_that_is_not_there(server: WholeServer) -> None:
    refused = models("load", "nobody/at home", "--url", server.url)
    assert refused.exit_code == 1
    assert "invalid model name 'nobody/at home'" in refused.stderr
    absent = models("load", "nobody at home", "--url", server.url)
    assert absent.exit_code == 1
    assert "there is no model 'nobody at home'" in absent.stderr
    for action in ("list", "unload"):
        result = models(action, "nobody", "--url", server.url)
        assert (result.exit_code, result.stderr) == (1, "carpool: the server has no model nobody\n")


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = models("list", "--url", url)
    assert result.exit_code == 1
    assert f"{url}: no response: Connection refused; is the server running?" in result.stderr


def test_something_else_that_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"\x1b[2J\x00\x07 who is there?\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        result = models("list", "--url", f"127.0.0.1:{other.getsockname()[1]}")
        thread.join(10.0)
    assert result.exit_code == 1
    assert "does not speak HTTP" in result.stderr
    assert result.stderr.strip().isprintable()


def test_a_server_that_refuses_says_what_to_do(tmp_path: Path, stage: Stage) -> None:
    model(tmp_path, v1=1.0)
    with whole_server(tmp_path) as server:
        result = models("load", "m", "--url", server.url)
        assert result.exit_code == 1
        assert "--model-control-mode explicit" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["load"], "load needs the name of a model"),
        (["unload"], "unload needs the name of a model"),
        (["list", "--config", "x.json"], "--config goes with load"),
        (["list", "--url", "ftp://localhost"], "--url must be like"),
        (["list", "--url", "http://localhost:http"], "--url must be like"),
        (["list", "--url", "http://"], "--url must be like"),
        (["drop", "m"], "drop"),
    ],
)
def test_mistakes_on_the_command_line(arguments: list[str], words: str) -> None:
    result = models(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.splitlines()) == 1
