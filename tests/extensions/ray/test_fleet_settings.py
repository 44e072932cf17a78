"""What a fleet is told, in Python, on a command line and in a file; and what cannot be right."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from absent import needs
from carpool.errors import ConfigError
from carpool.extensions.ray.fleet_settings import FleetSettings


def read(**given: Any) -> FleetSettings:
    return FleetSettings.read({"models": "/models", **given})


@needs("cache")
def test_as_python_says_it_and_as_a_command_line_does() -> None:
    told = read(slo_ms=50, replicas=(2, 8), port=0, cores=2, options={"cache_mb": 64})
    typed = read(slo_ms="50", replicas="2,8", port="0", cores="2", options={"cache-mb": "64"})
    assert told == typed
    assert (told.replicas, read(replicas=3).replicas) == ((2, 8), (3, 3))
    assert read(models=["/a", Path("/b")]).models == read(models="/a,/b").models == ("/a", "/b")
    assert read(models=Path("s3://bucket/models")).models == ("s3://bucket/models",)


@needs("cache")
def test_it_can_be_written_down() -> None:
    told = read(slo_ms=50, replicas=(2, 8), options={"cache_mb": 64})
    assert told.written() == {
        "models": "/models",
        "slo_ms": 50.0,
        "replicas": [2, 8],
        "options": {"cache_mb": "64"},
    }
    assert FleetSettings.read(told.written()) == told


def test_paths_are_made_whole_where_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert read(models="models").from_here().models == (str(tmp_path / "models"),)
    for kept in ("/elsewhere", "s3://bucket/models", "models:/detector@champion"):
        assert read(models=kept).from_here().models == (kept,)
    with pytest.raises(ConfigError, match="is not here"):
        read(models="modells").from_here()


@needs("cache")
def test_a_replica_runs_on_ports_of_its_own() -> None:
    words = read(slo_ms=50, drain_s=12).arguments("10.0.0.1")
    assert words[:2] == ["serve", "/models"]
    for pair in (("--http-port", "0"), ("--gate-status", "503"), ("--slo-ms", "50"), ("--drain-s", "12")):
        assert words[words.index(pair[0]) + 1] == pair[1]
    assert read(options={"cache_mb": 64}).environment() == {"CARPOOL_CACHE_MB": "64"}


def test_grpc_is_served_where_it_is_asked_for() -> None:
    def said(**given: Any) -> tuple[str, str]:
        words = read(**given).arguments("10.0.0.1")
        found = words[words.index("--grpc-frontends") + 1] if "--grpc-frontends" in words else ""
        return found, words[words.index("--grpc-port") + 1]

    assert said() == ("0", "0")
    assert said(grpc_port=8001) == said(grpc_port="0") == ("1", "0")
    assert said(grpc_port=8001, options={"grpc_frontends": 2}) == ("", "0"), "the variable says it"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"models": ""}, "models"),
        ({"models": 7}, "models"),
        ({"models": ["--config=x"]}, "models"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": (3, 2)}, "replicas"),
        ({"replicas": "a,b"}, "replicas"),
        ({"replicas": (1, 2, 3)}, "replicas"),
        ({"replicas": True}, "replicas"),
        ({"replicas": 1.5}, "replicas"),
        ({"replicas": 10**6}, "replicas"),
        ({"slo_ms": "soon"}, "slo_ms"),
        ({"slo_ms": -1}, "slo_ms"),
        ({"slo_ms": float("nan")}, "slo_ms"),
        ({"port": 70000}, "port"),
        ({"port": 80.5}, "port"),
        ({"grpc_port": -1}, "grpc_port"),
        ({"port": 8001, "grpc_port": 8001}, "grpc_port"),
        ({"grpc_port": 8001, "options": {"grpc_frontends": 0}}, "grpc_port"),
        ({"options": {"grpc_port": 8001}}, "options.grpc_port"),
        ({"name": "a b"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"target_load": 0}, "target_load"),
        ({"replica": 3}, "replica"),
        ({"options": "x"}, "options"),
        ({"options": {"http_port": 1}}, "options.http_port"),
        ({"options": {"tls_cert": "x"}}, "options.tls_cert"),
        ({"options": {"slotz": 1}}, "options.slotz"),
        ({"options": {"slots": "many"}}, "slots"),
    ],
)
def test_what_cannot_be_right_names_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as told:
        read(**given)
    assert told.value.field == field


@pytest.mark.parametrize(
    ("given", "had", "field"),
    [
        ({"port": 8100}, (8000, None), "port"),
        ({"port": 8000}, (0, None), "port"),
        ({"grpc_port": 8001}, (8000, None), "grpc_port"),
        ({"grpc_port": 0}, (8000, None), "grpc_port"),
        ({}, (8000, 8001), "grpc_port"),
    ],
)
def test_a_running_fleet_keeps_its_ports(
    given: dict[str, Any], had: tuple[int, int | None], field: str
) -> None:
    with pytest.raises(ConfigError, match="delete the fleet first") as told:
        read(**given).check_ports(*had)
    assert told.value.field == field


def test_a_running_fleet_has_the_ports_asked_for() -> None:
    read().check_ports(8000, None)
    read(port=0, grpc_port=0).check_ports(8000, 8001)  # any will do


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is here")
def test_without_ray_a_sentence_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install 'carpool\[ray\]'"):
        importlib.import_module("carpool.ray")
