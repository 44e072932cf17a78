"""Reads the settings of a fleet on a cluster: from Python, from `serve run … key=value`, or from a file of
Ray Serve."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from carpool.config.remote_address import remote_address
from carpool.config.rules import nearest, shown
from carpool.config.server import PREFIX, server_settings, variables
from carpool.core.scaling import TARGET_LOAD
from carpool.errors import ConfigError

PORT = 8000
"""Where Ray Serve's own proxies would listen: KubeRay's services and probes look there."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,62})")
_MOST_REPLICAS = 1000
_OURS = {
    **dict.fromkeys(("host", "http_port", "metrics_port", "frontends"), "chosen on each node"),
    **dict.fromkeys(("log_format", "log_level", "metrics_key"), "needed by what watches the replica"),
    **dict.fromkeys(
        ("tls_cert", "tls_key", "tls_client_ca"), "not spoken between a balancer and its replicas"
    ),
    **dict.fromkeys(("models", "slo_ms", "drain_s", "lame_duck_s", "grpc_port"), "an argument of its own"),
    "gate_status": "503, so that a rejection is retried at another replica",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    models: tuple[str, ...]  # as on every node
    name: str = "carpool"  # of the application
    slo_ms: float | None = None
    replicas: tuple[int, int] = (1, 1)  # the least and the most
    port: int = PORT  # of the balancer on each node; 0 takes a free one
    grpc_port: int | None = None  # of the balancer too; None: no gRPC there
    cores: float = 1.0  # of a replica, by Ray's account
    gpus: float = 0.0
    per_node: int | None = None  # replicas on a node, at most
    target_load: float = TARGET_LOAD
    cold_start_s: float = 20.0  # until a new replica answers
    patience_s: float = 300.0  # before fewer are wanted
    ready_s: float = 300.0  # a replica that takes longer has failed
    lame_duck_s: float = 3.0
    drain_s: float = 30.0
    options: Mapping[str, str] = field(default_factory=dict)  # more settings of `carpool serve`

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> FleetSettings:
        """Numbers and lists may be text, as a command line has them."""
        known = {one.name for one in fields(cls)}
        for key in given:
            if key not in known:
                raise ConfigError(
                    f"{shown(str(key))} is not an argument: {nearest(str(key), known)}", field=str(key)
                )
        values = {key: _READ[key](key, value) for key, value in given.items() if value is not None}
        if not values.get("models"):
            raise ConfigError("models: name a folder, a file or an address to serve", field="models")
        made = cls(**values)
        if made.grpc_port is not None and made.options.get("grpc_frontends") == "0":
            raise ConfigError("grpc_port needs options.grpc_frontends of 1 or more", field="grpc_port")
        if made.grpc_port and made.grpc_port == made.port:
            raise ConfigError("grpc_port must be another than port", field="grpc_port")
        return made

    def written(self) -> dict[str, Any]:
        """As `read` takes it, for a configuration: what is not as usual."""
        usual = asdict(FleetSettings(models=()))
        plain = {key: value for key, value in asdict(self).items() if value != usual[key] and key != "name"}
        plain["models"] = self.models[0] if len(self.models) == 1 else list(self.models)
        if "replicas" in plain:
            plain["replicas"] = list(self.replicas)
        return plain

    def from_here(self) -> FleetSettings:
        """Returns the same with absolute paths: relative ones mean something only where they were written."""
        return replace(self, models=tuple(map(_absolute, self.models)))

    def arguments(self, host: str) -> list[str]:
        """Returns the arguments of `carpool serve`, on ports that it chooses itself."""
        given = ["serve", *self.models, "--host", host, "--http-port", "0", "--metrics-port", "0"]
        if "grpc_frontends" not in self.options:
            given += ["--grpc-frontends", "0" if self.grpc_port is None else "1"]
        given += ["--grpc-port", "0"]
        given += ["--gate-status", "503", "--log-format", "json", "--log-level", "info"]
        given += ["--lame-duck-s", f"{self.lame_duck_s:g}", "--drain-s", f"{self.drain_s:g}"]
        return given if self.slo_ms is None else [*given, "--slo-ms", f"{self.slo_ms:g}"]

    def environment(self) -> dict[str, str]:
        return {PREFIX + name.upper(): value for name, value in self.options.items()}

    def check_ports(self, port: int, grpc_port: int | None) -> None:
        """Compares them with those that the balancers of a running fleet were given, which keep them."""
        for name, wanted, had in (("port", self.port, port), ("grpc_port", self.grpc_port, grpc_port)):
            if wanted != had and (wanted != 0 or had is None):
                raise ConfigError(
                    f"{name}: the balancers of {self.name} have {'none' if had is None else had} and "
                    f"keep it, so it cannot be {wanted}: leave it as it is, or delete the fleet first",
                    field=name,
                )

    @property
    def stop_s(self) -> float:
        """Returns the seconds within which a replica that was stopped has ended, with a margin."""
        return self.lame_duck_s + self.drain_s + 5.0


def _absolute(path: str) -> str:
    if path.startswith("/") or ":/" in path:  # an address, or a name of a registry
        return path
    if not Path(path).exists():
        raise ConfigError(
            f"models: {shown(path)} is not here; name a path as it is on every node, from / on",
            field="models",
        )
    return str(Path(path).resolve())


def _models(key: str, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, Path) else value
    if not isinstance(parts, Sequence) or not all(isinstance(part, str | Path) for part in parts):
        raise ConfigError(f"{key} must be a path or several, not {shown(str(value))}", field=key)
    paths = tuple(remote_address(part) or str(part) for part in parts if str(part))
    for path in paths:
        if path.startswith("-") or "\0" in path:
            raise ConfigError(f"{key}: {shown(path)} is no path", field=key)
    return paths


def _replicas(key: str, value: Any) -> tuple[int, int]:
    """Returns 3, (2, 8), [2, 8], "2,8"."""
    parts = value.split(",") if isinstance(value, str) else value
    parts = list(parts) if isinstance(parts, Sequence) else [parts]
    try:
        numbers = [_whole(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 2) or not 1 <= numbers[0] <= numbers[-1] <= _MOST_REPLICAS:
        raise ConfigError(
            f"{key} must be a number, or the least and the most of them, 1 to {_MOST_REPLICAS}, "
            f"not {shown(str(value))}",
            field=key,
        )
    return numbers[0], numbers[-1]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
        raise ValueError(value)
    return int(value)


def _name(key: str, value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{key} must be letters, digits, - and _, not {shown(str(value))}", field=key)
    return value


def _number(least: float, most: float, *, whole: bool = False) -> Any:
    def read(key: str, value: Any) -> float | int:
        try:
            number = _whole(value) if whole else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if isinstance(value, bool) or not isfinite(number) or not least <= number <= most:
            kind = "a whole number" if whole else "a number"
            raise ConfigError(
                f"{key} must be {kind} from {least:g} to {most:g}, not {shown(str(value))}", field=key
            )
        return number

    return read


def _options(key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be settings by name, not {shown(str(value))}", field=key)
    known = set(variables().values())
    texts = {}
    for name, one in _flat(value):
        where = f"{key}.{name}"
        if name not in known:
            raise ConfigError(
                f"{where} is not a setting of carpool serve: {nearest(name, known)}", field=where
            )
        if name in _OURS:
            raise ConfigError(f"{where} cannot be given here: it is {_OURS[name]}", field=where)
        texts[name] = one
    server_settings(environ={PREFIX + name.upper(): one for name, one in texts.items()})
    return texts


def _flat(value: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for name, one in value.items():
        text = ",".join(map(str, one)) if isinstance(one, list | tuple) else str(one)
        yield str(name).removeprefix("--").replace("-", "_"), text


_SECONDS = _number(0.0, 86_400.0)
_READ: Mapping[str, Any] = {
    "models": _models,
    "name": _name,
    "slo_ms": _number(0.001, 3.6e6),
    "replicas": _replicas,
    "port": _number(0, 65_535, whole=True),
    "grpc_port": _number(0, 65_535, whole=True),
    "cores": _number(0.0, 4096.0),
    "gpus": _number(0.0, 64.0),
    "per_node": _number(1, 100, whole=True),
    "target_load": _number(0.05, 1.0),
    "cold_start_s": _SECONDS,
    "patience_s": _SECONDS,
    "ready_s": _number(0.1, 86_400.0),
    "lame_duck_s": _number(0.0, 600.0),
    "drain_s": _number(0.0, 3600.0),
    "options": _options,
}
