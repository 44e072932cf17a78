"""What `carpool serve` says at the start about who gets in."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.cli.command_line import read
from carpool.cli.serve_command import _begun, _Screen, _warn_if_open, _warn_of_folders
from carpool.config.repository import find_models
from carpool.config.server import ServerSettings
from carpool.errors import ConfigError, InvalidInput
from cli_run import params
from frontend.access.key_files import admin_keys, api_keys

PORTS = {"http": 8000, "grpc": 8001, "metrics": 8002}


@pytest.mark.parametrize(
    ("host", "mode", "told"),
    [
        ("0.0.0.0", "explicit", True),
        ("::", "explicit", True),
        ("0.0.0.0", "none", False),
        ("localhost", "explicit", False),
        ("127.0.0.1", "explicit", False),
        ("::1", "explicit", False),
    ],
)
def test_control_that_is_open_to_all_is_told(
    host: str, mode: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_if_open(ServerSettings(host=host, model_control_mode=mode))
    assert ("control-is-open" in caplog.text) == told


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["--exit-on-error=true", "m"], {"exit_on_error": True, "paths": [Path("m")]}),
        (["--exit-on-error=False"], {"exit_on_error": False}),
        (
            ["--allow-client-shm=1", "--on-demand=0"],
            {"allow_client_shm": True, "on_demand": False},
        ),
        (["--exit-on-error", "m"], {"exit_on_error": True, "paths": [Path("m")]}),
    ],
)
def test_flags_may_have_values_as_in_triton(given: list[str], found: dict[str, object]) -> None:
    assert read(params("serve"), given, "carpool serve") == found


def test_a_flag_is_true_or_false() -> None:
    with pytest.raises(InvalidInput, match="--exit-on-error must be true or false, not 'maybe'"):
        read(params("serve"), ["--exit-on-error=maybe"], "carpool serve")


def test_folders_that_all_can_write_to_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mode, said in ((0o755, False), (0o770, False), (0o777, True), (0o1777, True)):
        tmp_path.chmod(mode)
        caplog.clear()
        _warn_of_folders(ServerSettings(state_dir=tmp_path, cache_dir=tmp_path / "absent"))
        assert ("folder-is-open" in caplog.text) == said, oct(mode)
    tmp_path.chmod(0o700)


def test_keys_close_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for keys in ({"admin_key_file": admin_keys(tmp_path)}, {"api_key_file": api_keys(tmp_path)}):
        _warn_if_open(ServerSettings(host="0.0.0.0", model_control_mode="explicit", **keys))
    assert not caplog.text


def test_the_first_screen_names_the_versions_that_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.toml").write_text('backend = "fake"\n')
    sources, _ = find_models([tmp_path])
    _Screen(sources, ServerSettings()).show(PORTS, {}, {}, {}, {}, {"m": "7"})
    assert "version 7 " in capsys.readouterr().out
    _Screen(sources, ServerSettings()).show(PORTS, {}, {}, {})
    assert "version 1 " in capsys.readouterr().out


def test_the_first_screen_says_how_to_open_it(capsys: pytest.CaptureFixture[str]) -> None:
    _Screen([], ServerSettings()).show(PORTS, {}, {}, {"a": "it is broken"})
    assert "--host 0.0.0.0 opens it" in capsys.readouterr().out
    _Screen([], ServerSettings(host="0.0.0.0", tls_cert="c", tls_key="k")).show(
        PORTS, {}, {}, {"a": "it is broken"}
    )
    shown = capsys.readouterr().out
    assert "opens it" not in shown
    assert "https://localhost:8000" in shown
    assert "not served: it is broken" in shown


def test_what_extensions_are_asked_for_is_checked_before_anything_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _begun(ServerSettings(record=str(tmp_path / "r.jsonl")))
    assert found.record == str((tmp_path / "r.jsonl").absolute())
    assert (tmp_path / "r.jsonl").exists()
    with pytest.raises(ConfigError, match="cannot record to"):
        _begun(ServerSettings(record=str(tmp_path)))
    with pytest.raises(ConfigError) as wrong:
        _begun(ServerSettings(otlp_endpoint="nowhere"))
    assert wrong.value.field == "otlp_endpoint"
    monkeypatch.setattr("carpool.extensions.tracing.settings.package_is_missing", lambda: True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    _begun(ServerSettings())
    assert "no spans are made: pip install 'carpool[otel]'" in caplog.text
