"""What `carpool doctor` finds: each kind of trouble on its own, and a report that can be read by programs."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from carpool.compiling import form, other_form
from carpool.config.backend_kinds import BackendKind
from carpool.config.server import apis
from carpool.lab import machine_check
from carpool.lab.machine_check import Finding, State, check_machine
from cli_run import run_cli


@pytest.fixture(autouse=True)
def _few_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing all of them takes seconds."""
    kind = BackendKind(name="quick", home="somewhere", package="orjson", imports="orjson")
    monkeypatch.setattr(machine_check, "kinds", lambda: {"quick": kind})


def one(found: list[Finding], name: str) -> Finding:
    return next(finding for finding in found if finding.name == name)


def place(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"CARPOOL_CACHE_DIR": str(tmp_path / "c"), "CARPOOL_STATE_DIR": str(tmp_path / "s"), **more}


def test_nothing_is_wrong_and_nothing_is_made(tmp_path: Path) -> None:
    found = check_machine(place(tmp_path))
    assert not [finding for finding in found if finding.state is State.WRONG]
    assert one(found, "quick").says.startswith("orjson ")
    assert one(found, "form").says.startswith(f"{form()}; {other_form().split(':')[0]}: pip install")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "schemes", "state"),
    [
        ("'--prefix=/opt' '--enable-shared'", ("posix_prefix",), State.NOTE),
        ("'--enable-optimizations' '--with-lto'", ("posix_prefix",), State.FINE),
        ("'--prefix=/usr'", ("deb_system", "posix_prefix"), State.FINE),
        (None, ("posix_prefix",), State.FINE),
    ],
)
def test_a_python_that_was_built_without_optimizations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str | None, schemes: tuple[str, ...], state: State
) -> None:
    built = SimpleNamespace(get_config_var=lambda _name: flags, get_scheme_names=lambda: schemes)
    monkeypatch.setattr(machine_check, "sysconfig", built)
    finding = one(check_machine(place(tmp_path)), "python")
    assert finding.state is state
    assert ("--enable-optimizations" in finding.advice) is (state is State.NOTE)


def test_a_package_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("raise ImportError('libmissing.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    kind = BackendKind(
        name="broken", home="x", package="half-installed", imports="half_installed", extra="more"
    )
    monkeypatch.setattr(machine_check, "kinds", lambda: {"broken": kind})
    finding = one(check_machine(place(tmp_path)), "broken")
    assert finding.state is State.WRONG
    assert "libmissing.so" in finding.says
    assert "carpool[more]" in finding.advice


def test_a_package_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = BackendKind(name="other", home="x", package="other", imports="no_such_package_here")
    monkeypatch.setattr(machine_check, "kinds", lambda: {"other": kind})
    assert one(check_machine(place(tmp_path)), "other").state is State.ABSENT


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    finding = one(check_machine(place(tmp_path, CARPOOL_CACHE_DIR=str(tmp_path / "file" / "below"))), "cache")
    assert finding.state is State.WRONG
    assert "CARPOOL_CACHE_DIR" in finding.advice


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        finding = one(check_machine(place(tmp_path, CARPOOL_HTTP_PORT=str(port))), "--http-port")
    assert finding.state is State.NOTE
    assert str(port) in finding.says


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [("CARPOOL_HTTP_PORT", "tcp://10.0.0.1:80", State.WRONG), ("CARPOOL_HTPT_PORT", "1", State.NOTE)],
)
def test_settings_that_cannot_be_right(tmp_path: Path, name: str, value: str, state: State) -> None:
    found = check_machine(place(tmp_path, **{name: value}))
    assert any(name in finding.says and finding.state is state for finding in found)


def test_the_command(tmp_path: Path) -> None:
    good, bad = place(tmp_path), place(tmp_path, CARPOOL_SLO_MS="soon")
    clean = {name: None for name in os.environ if name.startswith("CARPOOL_")}
    done = run_cli(["doctor"], env={**clean, **good})
    assert done.exit_code == 0, done.output
    assert "Nothing is wrong" in done.output
    done = run_cli(["doctor", "--json"], env={**clean, **bad})
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["wrong"] == 1
    assert {"area", "name", "state", "says", "advice"} == set(report["findings"][0])


def test_protocols_of_other_tools_with_the_address_to_type(tmp_path: Path) -> None:
    name, address = next(iter(apis().items()))
    found = one(check_machine(place(tmp_path, CARPOOL_API=name, CARPOOL_HTTP_PORT="18000")), name)
    assert found.area == "apis"
    assert address.format(url="http://localhost:18000") in found.says
