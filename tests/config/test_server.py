"""The server's settings: order of sources, types, ranges."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.server import ServerSettings, apis, server_settings, usual_frontends, variables
from carpool.errors import ConfigError


def read(environ: dict[str, str], **given: object) -> ServerSettings:
    return server_settings(given, environ)[0]


def test_defaults() -> None:
    found = read({"HOME": "/home/me"})
    folders = {"cache_dir": ".cache", "state_dir": ".local/state"}
    places = {name: Path("/home/me") / folder / "carpool" for name, folder in folders.items()}
    assert found == ServerSettings(**places)  # type: ignore[arg-type]
    assert (found.http_port, found.grpc_port, found.metrics_port) == (8000, 8001, 8002)
    assert (found.max_header_bytes, found.max_body_bytes) == (64 * 1024, 64 * 1024 * 1024)
    assert not found.allow_client_shm


def test_command_line_wins_over_environment_over_default() -> None:
    environ = {"CARPOOL_HTTP_PORT": "9000", "CARPOOL_HOST": "::1", "CARPOOL_LOG_LEVEL": ""}
    found = read(environ, http_port=9100, grpc_port=None)
    assert (found.http_port, found.grpc_port, found.host, found.log_level) == (9100, 8001, "::1", "info")


def test_every_variable_reaches_its_setting() -> None:
    texts = {
        "api": ",".join(apis()),
        "model_control_mode": "explicit",
        "load_models": " detector,, classifier ",
        "log_format": "json",
        "log_level": "debug",
        "allow_client_shm": "Yes",
        "allow_rollouts": "1",
        "exit_on_error": "on",
        "strict_models": "on",
        "preset": "timm",
        "strict_readiness": "false",
        "gate_status": "503",
        "load_report": "asked",
        "cache_dir": "/c",
        "state_dir": "/s",
        "host": "h",
        "metrics_key": "yes",
        "quiet": "yes",
        "task": "pose",
        "metrics_config": "histogram_latencies=true",
        "cache_url": "redis://localhost",
        "rollout_state": "file:/r",
        "shared_profiles": "file:/r",
        "cache_secret": "known to all that share",
    }
    numbers = {
        "http_port": 1,
        "grpc_port": 2,
        "metrics_port": 3,
        "slot_bytes": 8192,
        "max_header_bytes": 2048,
        "trace_sample": 0.5,
    }
    environ = {
        variable: texts.get(name, str(numbers.get(name, 7)))
        for variable, name in variables().items()
        if name not in ("on_demand", "memory_gb")  # which do not go with explicit control
        and (name != "api" or apis())
    }
    found = read(environ)
    default = ServerSettings()
    for name in (variables()[variable] for variable in environ):
        assert getattr(found, name) != getattr(default, name), name
    assert found.cache_dir == Path("/c")
    assert (found.slo_ms, found.allow_client_shm) == (7.0, True)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"CARPOOL_HTTP_PORT": "http"}, 'CARPOOL_HTTP_PORT must be a number, not "http"'),
        ({"CARPOOL_HTTP_PORT": "tcp://10.0.0.1:80"}, "enableServiceLinks"),
        ({"CARPOOL_HTTP_PORT": "70000"}, "http_port must be 0 to 65535, not 70000"),
        ({"CARPOOL_HTTP_PORT": "8001"}, "must differ"),
        ({"CARPOOL_SLO_MS": "0"}, "slo_ms must be"),
        ({"CARPOOL_SLO_MS": "nan"}, "slo_ms must be"),
        ({"CARPOOL_FRONTENDS": "-1"}, "frontends must be 0 to 256"),
        ({"CARPOOL_MAX_BODY_BYTES": "1.5"}, "must be a number"),
        ({"CARPOOL_ALLOW_CLIENT_SHM": "maybe"}, "must be true or false"),
        ({"CARPOOL_LOG_FORMAT": "jsn"}, 'log_format cannot be "jsn"; did you mean "json"?'),
        ({"CARPOOL_MODEL_CONTROL_MODE": "auto"}, "model_control_mode cannot be"),
    ],
)
def test_mistakes(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(environ)
    assert words in str(error.value)


def test_values_from_the_command_line_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="host must not be empty"):
        read({}, host="")
    assert read({}, http_port=0, grpc_port=0).http_port == 0


def test_a_likely_slip_is_worth_a_warning() -> None:
    environ = {"CARPOOL_HTTP_PRT": "1", "CARPOOL_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    warnings = server_settings({}, environ)[1]
    assert warnings == ["CARPOOL_HTTP_PRT is not a setting; did you mean CARPOOL_HTTP_PORT?"]


def test_loading_on_demand() -> None:
    found = read({"CARPOOL_ON_DEMAND": "true", "CARPOOL_MEMORY_GB": "1.5"})
    assert (found.on_demand, found.memory_gb) == (True, 1.5)
    with pytest.raises(ConfigError, match="on_demand needs model_control_mode none"):
        read({}, on_demand=True, model_control_mode="poll")
    with pytest.raises(ConfigError, match="give on_demand"):
        read({}, memory_gb=1.0)


def test_cache_directory() -> None:
    assert read({"XDG_CACHE_HOME": "/x", "HOME": "/h"}).cache_dir == Path("/x/carpool")
    assert read({"XDG_CACHE_HOME": "x", "HOME": "/h"}).cache_dir == Path("/h/.cache/carpool")


def test_state_directory() -> None:
    assert read({"XDG_STATE_HOME": "/x", "HOME": "/h"}).state_dir == Path("/x/carpool")
    assert read({"XDG_STATE_HOME": "x", "HOME": "/h"}).state_dir == Path("/h/.local/state/carpool")


def test_models_to_start_with_need_explicit_control() -> None:
    assert read({"CARPOOL_LOAD_MODELS": "a, b"}, model_control_mode="explicit").load_models == ("a", "b")
    assert read({}, model_control_mode="explicit", load_models=["*"]).load_models == ("*",)
    with pytest.raises(ConfigError, match="needs model_control_mode explicit, not poll"):
        read({}, model_control_mode="poll", load_models=["a"])
    with pytest.raises(ConfigError, match=r"poll_s must be 0\.1 to 86400"):
        read({}, poll_s=0.0)


@pytest.mark.parametrize(("cores", "frontends"), [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4), (128, 4)])
def test_front_ends_grow_with_the_cores(cores: int, frontends: int) -> None:
    assert usual_frontends(cores) == frontends


@pytest.mark.parametrize(
    ("given", "switches"),
    [
        ((), {"counter_latencies": True, "histogram_latencies": False, "summary_latencies": False}),
        (
            ("histogram_latencies=true", "counter_latencies=false", "summary_latencies=false"),
            {"counter_latencies": False, "histogram_latencies": True, "summary_latencies": False},
        ),
    ],
)
def test_switches_for_metrics(given: tuple[str, ...], switches: dict[str, bool]) -> None:
    assert ServerSettings(metrics_config=given).metrics == switches


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("summary_latencies=true", "summaries are not offered"),
        ('summary_quantiles="0.5:0.05"', "summaries are not offered"),
        ("histogram_latency=true", 'did you mean "histogram_latencies"'),
        ("histogram_latencies", "must be true or false, as in histogram_latencies=true"),
        ("histogram_latencies=often", "must be true or false"),
    ],
)
def test_switches_for_metrics_that_cannot_be(given: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerSettings(metrics_config=(given,))
    assert words in caught.value.message


@pytest.mark.parametrize("name", ["", "a\nb", "n" * 129])
def test_names_that_a_server_cannot_have(name: str) -> None:
    with pytest.raises(ConfigError, match="server_name must be 1 to 128 printable characters"):
        ServerSettings(server_name=name)


def test_a_host_of_images_may_have_its_address() -> None:
    texts = "images.example,labels.lan:8080=192.168.1.20,labels.lan=fd00::5"
    assert read({"CARPOOL_PICTURE_HOSTS": texts}).picture_hosts == tuple(texts.split(","))
    for wrong in (
        "a=",
        "=10.0.0.1",
        "a=b",
        "a=10.0.0.0/8",
        "a=0.0.0.0",
        "a=::",
        "a=224.0.0.1",
        "a=1.2.3.4:80",
    ):
        with pytest.raises(ConfigError, match="picture_hosts takes names like"):
            read({"CARPOOL_PICTURE_HOSTS": wrong})
