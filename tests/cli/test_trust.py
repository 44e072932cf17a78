"""Verbs that ask a running server, over TLS and with a key."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.cli.sweep_command import Sweep, order_of
from carpool.cli.verb_options import KEY_VARIABLE, trust
from carpool.errors import InvalidInput, Unreachable
from carpool.lab.load.aim import Aim, take_aim
from carpool.lab.load.facts import Trust
from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.sweep import conduct
from carpool.lab.sweep.sweep_prediction import ask_server
from cli_run import CliResult, run_cli
from engine.scripted import Stage, model, scripted_stage
from frontend.access.key_files import ALICE, ROOT, admin_keys, api_keys, write
from frontend.grpc.front_end import front_end as grpc_front_end
from frontend.whole_server import WholeServer, whole_server

__all__ = ["scripted_stage"]

MADE = Path(__file__).parents[1] / "frontend" / "access" / "certificates"
CA = str(MADE / "server.pem")
TLS = {"tls_cert": CA, "tls_key": str(MADE / "server-key.pem")}


@pytest.fixture(name="server")
def secure_server(tmp_path: Path, stage: Stage) -> Iterator[WholeServer]:
    model(tmp_path / "models", v1=1.0)
    keys = {"api_key_file": api_keys(tmp_path), "admin_key_file": admin_keys(tmp_path)}
    with whole_server(tmp_path / "models", model_control_mode="explicit", **keys, **TLS) as server:
        yield server


def models(server: WholeServer, *arguments: str, key: str = "") -> CliResult:
    url = f"https://localhost:{server.port}"
    return run_cli(["models", *arguments, "--url", url], env={KEY_VARIABLE: key})


def test_models_over_tls_with_a_key(server: WholeServer, tmp_path: Path) -> None:
    assert "certificate verify failed" in models(server, "list", key=ALICE).stderr
    assert "a key is needed" in models(server, "list", "--ca", CA).stderr
    assert models(server, "list", "--ca", CA, key=ALICE).exit_code == 0
    assert models(server, "list", "--insecure", key=ALICE).exit_code == 0
    refused = models(server, "load", "m", "--ca", CA, key=ALICE)
    assert refused.exit_code == 1
    assert "alice is for inference" in refused.stderr
    file = write(tmp_path / "mine", f"{ROOT}\n")
    assert models(server, "load", "m", "--ca", CA, "--api-key-file", file).exit_code == 0
    assert "is not a certificate" in str(models(server, "list", "--ca", file, key=ALICE).output)


def test_sweep_over_tls_with_a_key(server: WholeServer, tmp_path: Path) -> None:
    assert models(server, "load", "m", "--ca", CA, key=ROOT).exit_code == 0
    url = f"https://localhost:{server.port}"
    key_file = Path(write(tmp_path / "alice", f"{ALICE}\n"))
    with pytest.raises(Unreachable, match="a key is needed"):
        conduct._aim(order_of(Sweep(target=url, ca=Path(CA))), url)
    aim = conduct._aim(order_of(Sweep(target=url, ca=Path(CA), api_key_file=key_file)), url)
    assert aim.trust == Trust(CA, key=ALICE)
    assert ask_server(aim) is not None
    with pytest.raises(InvalidInput, match="running server"):
        order_of(Sweep(api_key_file=key_file))


def test_load_over_tls_with_a_key(server: WholeServer) -> None:
    assert models(server, "load", "m", "--ca", CA, key=ROOT).exit_code == 0
    url = f"https://localhost:{server.port}"
    with pytest.raises(Unreachable, match="verify failed"):
        take_aim(Aim(url))
    with pytest.raises(Unreachable, match="a key is needed"):
        take_aim(Aim(url, trust=Trust(CA)))
    aim = Aim(url, trust=Trust(CA, key=ALICE))
    assert ALICE not in repr(aim)
    target = take_aim(aim)
    report = asyncio.run(run(Plan(Closed(1, requests=3)), target))
    assert report.total.answered == 3


def test_load_over_grpc_with_tls_and_a_key(tmp_path: Path) -> None:
    with grpc_front_end(api_key_file=api_keys(tmp_path), **TLS) as front:
        url = f"grpcs://localhost:{front.port}"
        with pytest.raises(Unreachable, match="a key is needed"):
            take_aim(Aim(url, "image", trust=Trust(CA)))
        take_aim(Aim(url, "image", trust=Trust(CA, key=ALICE)))
        with pytest.raises(InvalidInput, match="--insecure goes with https"):
            take_aim(Aim(url, "image", trust=Trust(insecure=True)))


def test_where_a_key_comes_from(tmp_path: Path) -> None:
    assert trust(None, None, False, {}).key == ""
    assert trust(None, None, False, {KEY_VARIABLE: "abc\n"}).key == "abc"
    line = tmp_path / "line"
    line.write_text("# mine\nalice secret-1 models=a\n")
    assert trust(line, None, False, {KEY_VARIABLE: "abc"}).key == "secret-1"
    line.write_text("\n")
    for bad in (line, tmp_path / "none"):
        with pytest.raises(InvalidInput, match="--api-key-file"):
            trust(bad, None, False, {})
    with pytest.raises(InvalidInput) as raised:
        trust(None, None, False, {KEY_VARIABLE: "a secret"})
    assert "secret" not in raised.value.message
