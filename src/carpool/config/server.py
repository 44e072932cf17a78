"""The server's own settings, from the command line, the environment and the defaults, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from carpool.config.rules import nearest, resembling, shown
from carpool.errors import ConfigError

PREFIX = "CARPOOL_"
LOCALHOST = "localhost"  # 127.0.0.1 and ::1: this machine alone
_EVERY_MODEL = "*"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_PORTS = ("http_port", "grpc_port", "metrics_port")
_HOST_NAME = re.compile(r"[0-9A-Za-z_.-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
_OF_CLIENTS = ("CARPOOL_API_KEY",)  # for `carpool models` and its like, not for the server


def usual_frontends(cores: int) -> int:
    """One for every four cores, up to four: what one can carry is soon less than what many cores, or a GPU,
    can answer, and what is idle costs its memory only."""
    return max(1, min(4, cores // 4))


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything `carpool serve` can be told about itself; a port of 0 takes any free one."""

    host: str = LOCALHOST
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    frontends: int = field(default_factory=lambda: usual_frontends(len(os.sched_getaffinity(0))))
    """Processes for HTTP; 0 keeps everything in one."""
    grpc_frontends: int = 1  # processes for gRPC; 0 serves none
    slo_ms: float | None = None  # replaces what the models' own settings say
    max_header_bytes: int = 64 << 10
    max_body_bytes: int = 64 << 20
    max_connections: int = 4096
    idle_timeout_s: float = 75.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 5.0
    slots: int = 256
    slot_bytes: int = 1 << 20
    drain_s: float = 30.0
    watchdog_s: float = 10.0  # a process that shows no sign of life for so long is killed; 0: never
    model_control_mode: str = "none"
    load_models: tuple[str, ...] = ()  # at the start, in explicit mode; * is all of them
    poll_s: float = 15.0  # between two looks at the model folders
    allow_client_shm: bool = False
    allowed_hosts: tuple[str, ...] = ()  # names besides localhost by which browsers and proxies may call it
    api_key_file: str = ""  # who may ask models; none: anybody
    admin_key_file: str = ""  # who may load, unload, and change settings
    metrics_key: bool = False  # the metrics need a key, too
    http_restricted_api: tuple[str, ...] = field(
        default=(), repr=False
    )  # as Triton spells them, with secrets
    grpc_restricted_protocol: tuple[str, ...] = field(default=(), repr=False)
    tls_cert: str = ""
    tls_key: str = ""
    tls_client_ca: str = ""  # only whom it has signed may connect
    server_name: str = "carpool"  # in the server's metadata
    metrics_config: tuple[str, ...] = ()  # Triton's switches for metrics, like histogram_latencies=true
    log_format: str = "text"
    log_level: str = "info"
    trace_file: str = ""  # where traces are written; none can be taken without
    record: str = ""  # where arrivals are written
    record_limit_mb: float = 256.0  # and how large that may get
    device_memory_gb: float | None = None  # of each GPU that models may take; None: most of what is free
    cache_dir: Path | None = None  # where measured profiles are kept; None keeps none

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{name} must be {low:g} to {high:g}, not {value}", field=name)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(f"{name} cannot be {shown(value)}; {nearest(value, choices)}", field=name)
        if self.load_models and self.model_control_mode != "explicit":
            raise ConfigError(
                f"load_models names models to start with, which needs model_control_mode explicit, not "
                f"{self.model_control_mode}",
                field="load_models",
            )
        if not 0 < len(self.server_name) <= _MAX_NAME or not self.server_name.isprintable():
            raise ConfigError(
                f"server_name must be 1 to {_MAX_NAME} printable characters, not {shown(self.server_name)}",
                field="server_name",
            )
        metrics_switches(self.metrics_config)
        if not self.host:
            raise ConfigError("host must not be empty", field="host")
        self._check_access()
        ports = [port for port in (getattr(self, name) for name in _PORTS) if port]
        if len(ports) != len(set(ports)):
            raise ConfigError(f"{', '.join(_PORTS)} must differ, not {', '.join(map(str, ports))}")

    def _check_access(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("tls_cert and tls_key go together", field="tls_cert")
        if self.tls_client_ca and not self.tls_cert:
            raise ConfigError("tls_client_ca needs tls_cert and tls_key", field="tls_client_ca")
        if self.metrics_key and not (self.api_key_file or self.admin_key_file):
            raise ConfigError(
                "metrics_key needs keys: give api_key_file or admin_key_file", field="metrics_key"
            )
        for name in self.allowed_hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ConfigError(
                    f"allowed_hosts takes names without a port, like carpool.example, not {shown(name)}",
                    field="allowed_hosts",
                )

    @property
    def metrics(self) -> Mapping[str, bool]:
        """Which of the metrics that can be switched are on the page."""
        return metrics_switches(self.metrics_config)

    @property
    def models_at_start(self) -> Collection[str] | None:
        """The models to start with; None is all of them."""
        everything = self.model_control_mode != "explicit" or _EVERY_MODEL in self.load_models
        return None if everything else self.load_models

    @property
    def needs_models(self) -> bool:
        """Whether an empty repository is a mistake: where nothing can come later."""
        return self.model_control_mode == "none"


_METRICS = {"counter_latencies": True, "histogram_latencies": False, "summary_latencies": False}
_MAX_NAME = 128


def metrics_switches(given: Collection[str]) -> dict[str, bool]:
    """Triton's `--metrics-config` settings, each `key=true` or `key=false`, and the defaults of the rest."""
    switches = dict(_METRICS)
    for setting in given:
        key, _, value = setting.partition("=")
        if key == "summary_quantiles" or (key == "summary_latencies" and value.lower() in _TRUE):
            raise ConfigError(
                f"metrics_config {shown(setting)}: summaries are not offered, since quantiles of several"
                " replicas cannot be added up; the histograms carpool_*_duration_seconds are always there",
                field="metrics_config",
            )
        if key not in switches:
            raise ConfigError(
                f"metrics_config has no {shown(key)}; {nearest(key, switches)}", field="metrics_config"
            )
        if value.lower() not in _TRUE + _FALSE:
            raise ConfigError(
                f"metrics_config {key} must be true or false, as in {key}=true, not {shown(value)}",
                field="metrics_config",
            )
        switches[key] = value.lower() in _TRUE
    return switches


_SECONDS = (0.001, 86400.0)
_RANGES: Mapping[str, tuple[float, float]] = {
    "http_port": (0, 65535),
    "grpc_port": (0, 65535),
    "metrics_port": (0, 65535),
    "frontends": (0, 256),
    "grpc_frontends": (0, 256),
    "slo_ms": (0.001, 3.6e6),
    "max_header_bytes": (1 << 10, 1 << 20),
    "max_body_bytes": (1, 1 << 40),
    "max_connections": (1, 1 << 20),
    "idle_timeout_s": _SECONDS,
    "header_timeout_s": _SECONDS,
    "body_timeout_s": _SECONDS,
    "slots": (1, 1 << 20),
    "slot_bytes": (1 << 12, 1 << 32),
    "drain_s": (0.0, 86400.0),
    "watchdog_s": (0.0, 86400.0),
    "device_memory_gb": (0.001, 1e6),
    "poll_s": (0.1, 86400.0),
    "record_limit_mb": (0.001, 1e6),
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "model_control_mode": ("none", "explicit", "poll"),
    "log_format": ("text", "json"),
    "log_level": ("debug", "info", "warning", "error"),
}


def variables() -> dict[str, str]:
    """The environment variable of each setting."""
    return {PREFIX + field.name.upper(): field.name for field in fields(ServerSettings)}


def server_settings(
    given: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[ServerSettings, list[str]]:
    """The settings and the warnings. `given` comes from the command line: None in it means not given.

    This is the one place that reads the environment.
    """
    environ = os.environ if environ is None else environ
    known = variables()
    values: dict[str, Any] = {"cache_dir": _cache_dir(environ)}
    for variable, name in known.items():
        if environ.get(variable, "") != "":
            values[name] = _value(variable, name, environ[variable])
    for name, value in (given or {}).items():
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    return replace(ServerSettings(), **values), _misspelt(environ, known)


def _cache_dir(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):  # the XDG rules ignore a relative one
        return Path(base) / "carpool"
    return Path(environ.get("HOME") or "/tmp") / ".cache" / "carpool"


def _value(variable: str, name: str, text: str) -> object:
    """The text of a variable in the type of its setting."""
    if name == "cache_dir":
        return Path(text)
    default = getattr(ServerSettings(), name)
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{variable} must be true or false, not {shown(text)}", field=name)
        return text.lower() in _TRUE
    if isinstance(default, str):
        return text
    if isinstance(default, tuple):
        return tuple(filter(None, (part.strip() for part in text.split(","))))
    kind = int if isinstance(default, int) else float
    try:
        return kind(text)
    except ValueError:
        hint = "; Kubernetes made it for a service of that name: set enableServiceLinks to false"
        raise ConfigError(
            f"{variable} must be a number, not {shown(text)}{hint if '://' in text else ''}", field=name
        ) from None


def _misspelt(environ: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """Kubernetes adds variables of its own under a service's name, so only a likely slip is worth a word."""
    warnings = []
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known and variable not in _OF_CLIENTS:
            close = resembling(variable.removeprefix(PREFIX).lower(), known.values(), 0.85)
            if close:
                warnings.append(f"{variable} is not a setting; did you mean {PREFIX}{close.upper()}?")
    return warnings
