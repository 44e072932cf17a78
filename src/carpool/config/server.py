"""Reads the server's own settings from the command line, the environment and the defaults, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.config.control_groups import within_limit
from carpool.config.model import task_names
from carpool.config.presets import PRESETS, PictureChoice
from carpool.config.rules import nearest, resembling, shown
from carpool.config.usable_cores import usable_cores
from carpool.errors import ConfigError
from carpool.extension import ServerOption
from carpool.extensions import installed

PREFIX = "CARPOOL_"
LOCALHOST = "localhost"  # 127.0.0.1 and ::1: this machine alone
_EVERY_MODEL = "*"

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
_PORTS = ("http_port", "grpc_port", "metrics_port")
_HOST_NAME = re.compile(r"[0-9A-Za-z_.-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
_PICTURE_HOST = re.compile(r"[0-9A-Za-z_.-]{1,253}(:[1-9][0-9]{0,4})?")
_OF_CLIENTS = ("CARPOOL_API_KEY", "CARPOOL_URL")  # for `carpool models` and its like, not for the server


def _is_picture_host(given: str) -> bool:
    name, equals, address = given.partition("=")
    with suppress(ValueError):
        one_host = not equals or not (ip_address(address).is_multicast or ip_address(address).is_unspecified)
        return one_host and _PICTURE_HOST.fullmatch(name) is not None
    return False


def usual_frontends(cores: int) -> int:
    """One for every four cores, up to four: what one can carry is soon less than what many cores, or a GPU,
    can answer, and what is idle costs its memory only."""
    return max(1, min(4, cores // 4))


_SIZE = re.compile(r"([1-9]\d{0,4})(?:[,x]([1-9]\d{0,4}))?")
_DAY = 86400.0
_SECONDS = (0.001, _DAY)
_PORT = (0, 65535)


def _setting(
    default: Any,
    words: str = "",
    *,
    within: tuple[float, float] | None = None,
    choices: tuple[str, ...] = (),
    secret: bool = False,
    **option: Any,
) -> Any:
    """`words` make it an option of `carpool serve`; `option` is what else the command line needs of that."""
    said = {"words": words, "within": within, "choices": choices, "option": option}
    if callable(default):
        return field(default_factory=default, metadata=said)
    return field(default=default, repr=not secret, metadata=said)


@dataclass(frozen=True, slots=True)
class OwnSettings:
    """Holds the settings of `carpool serve` that no extension declares."""

    slo_ms: float | None = _setting(
        None,
        "Latency SLO of every model, in ms, in place of the models' own.",
        within=(0.001, 3.6e6),
        min=0.001,
    )
    task: str = _setting(
        "",
        "Task of the one model that is served, if it is not recognised.",
        metavar="TASK",
    )
    labels: str = _setting("", "File with the class names, one per line.", metavar="FILE")
    size: str = _setting(
        "", "Size of its input, if the model takes any: 640, or height,width.", metavar="PIXELS"
    )
    preset: str = _setting(
        "",
        "Preprocessing of the library that it was trained with, if it is not recognised: torchvision, "
        "timm, clip, keras-tf, keras-caffe, ultralytics or plain.",
        choices=("", *PRESETS),
        metavar="PRESET",
    )
    strict_models: bool = _setting(
        False,
        "Do not load models whose preprocessing is not known. Default: serve them with a warning.",
        name="--strict-models",
    )
    host: str = _setting(
        LOCALHOST,
        "Address to listen on; 0.0.0.0 accepts other machines.",
        show_default="localhost: this machine",
    )
    http_port: int = _setting(8000, "Port for HTTP; 0 takes a free one.", within=_PORT)
    grpc_port: int = _setting(8001, "Port for gRPC; 0 takes a free one.", within=_PORT)
    metrics_port: int = _setting(8002, "Port for the metrics; 0 takes a free one.", within=_PORT)
    server_name: str = _setting("carpool", "Name in the server's metadata; some clients expect triton.")
    frontends: int = _setting(
        lambda: usual_frontends(usable_cores()),
        "Number of front-end processes for HTTP; 0 runs everything in one process.",
        within=(0, 256),
        show_default="one for every 4 cores, 1 to 4",
    )
    grpc_frontends: int = _setting(
        1, "Number of front-end processes for gRPC; 0 turns gRPC off.", within=(0, 256)
    )
    max_header_bytes: int = _setting(64 << 10, within=(1 << 10, 1 << 20))
    max_body_bytes: int = _setting(64 << 20, within=(1, 1 << 40))
    max_connections: int = _setting(4096, within=(1, 1 << 20))
    idle_timeout_s: float = _setting(75.0, within=_SECONDS)
    header_timeout_s: float = _setting(10.0, within=_SECONDS)
    body_timeout_s: float = _setting(5.0, within=_SECONDS)
    slots: int = _setting(256, within=(1, 1 << 20))
    slot_bytes: int = _setting(1 << 20, within=(1 << 12, 1 << 32))
    drain_s: float = _setting(
        30.0, "Time to finish accepted requests when stopping, in seconds.", within=(0.0, _DAY)
    )
    lame_duck_s: float = _setting(
        0.0,
        "Time before that in which the server answers but is not ready, in seconds, for balancers.",
        within=(0.0, _DAY),
    )
    gate_status: str = _setting(
        "429",
        "HTTP status of rejections: 503 if the balancer retries only those at another replica.",
        choices=("429", "503"),
    )
    load_report: str = _setting(
        "off",
        "Report the load to balancers in responses (ORCA): off, asked (if a request's header asks for it), "
        "or always.",
        choices=("off", "asked", "always"),
    )
    watchdog_s: float = _setting(
        10.0,
        "Time without a heartbeat after which a process is restarted, in seconds; 0: never.",
        within=(0.0, _DAY),
    )
    model_control_mode: str = _setting(
        "none",
        "Model control: none (fixed at start), explicit (load and unload by request) or poll (follow the "
        "folders).",
        choices=("none", "explicit", "poll"),
    )
    load_models: tuple[str, ...] = _setting(
        (), "With explicit: a model to load at start; * for all. Repeatable.", name="--load-model"
    )
    poll_s: float = _setting(
        15.0,
        "Time between two checks of the model folders, in seconds.",
        within=(0.1, _DAY),
        name="--repository-poll-secs",
    )
    on_demand: bool = _setting(
        False,
        "Load each model at its first request, and unload the least recently used ones for others.",
        name="--on-demand",
    )
    memory_gb: float | None = _setting(
        None,
        "With --on-demand: memory for models, in GB. Default: 0.8 of the free memory.",
        within=(0.001, 1e6),
    )
    device_memory_gb: float | None = _setting(
        None, "Memory of each GPU for models, in GB. Default: 0.9 of the free memory.", within=(0.001, 1e6)
    )
    exit_on_error: bool = _setting(
        False, "Exit if a model does not load. Otherwise the other models are served.", name="--exit-on-error"
    )
    strict_readiness: str = _setting(
        "true",
        "Ready when (true) every model is warm or has failed, (false) the first is warm, (all) all are warm.",
        choices=("true", "false", "all"),
    )
    shared_profiles: str = _setting(
        "",
        "Where replicas share measured profiles: file:/mnt/shared, redis://HOST:6379 or s3://…",
        secret=True,
        name="--shared-profiles",
        metavar="WHERE",
    )
    allow_client_shm: bool = _setting(
        False, "Accept tensors in shared memory from clients on this machine.", name="--allow-client-shm"
    )
    allowed_hosts: tuple[str, ...] = _setting(
        (),
        "Host name besides localhost by which a local proxy calls the server. Repeatable.",
        name="--allowed-host",
        metavar="NAME",
    )
    picture_hosts: tuple[str, ...] = _setting(
        (),
        "Host, with its port if unusual, from which images may be fetched by URL; NAME=ADDRESS for a host "
        "with a private address. Repeatable.",
        name="--allow-picture-host",
        metavar="NAME",
    )
    api: tuple[str, ...] = _setting(
        (),
        "Protocols of other tools to answer: their names, with commas. Repeatable.",
        metavar="NAMES",
    )
    api_settings: str = _setting(
        "", "TOML file with a table of settings for each of these protocols.", metavar="FILE"
    )
    api_key_file: str = _setting("", "File with keys for inference, 'name key' per line.", metavar="FILE")
    admin_key_file: str = _setting(
        "", "File with keys for loading models and changing settings.", metavar="FILE"
    )
    metrics_key: bool = _setting(
        False, "Require a key for the metrics, of either file.", name="--metrics-key"
    )
    http_restricted_api: tuple[str, ...] = _setting(
        (),
        "As in Triton: these APIs require this header. It is visible to other users: prefer key files.",
        secret=True,
        metavar="APIS:HEADER=VALUE",
    )
    grpc_restricted_protocol: tuple[str, ...] = _setting(
        (),
        "The same over gRPC, with triton-grpc-protocol- before the header's name.",
        secret=True,
        metavar="APIS:HEADER=VALUE",
    )
    http_header_forward_pattern: str = _setting(
        "",
        "As in Triton: pattern of HTTP headers passed to the model as parameters.",
        metavar="REGEX",
    )
    grpc_header_forward_pattern: str = _setting(
        "", "The same for the metadata of gRPC calls.", metavar="REGEX"
    )
    tls_cert: str = _setting(
        "", "File with the certificate and its chain, for TLS on all ports.", metavar="FILE"
    )
    tls_key: str = _setting("", "File with the certificate's private key.", metavar="FILE")
    tls_client_ca: str = _setting(
        "", "Accept only clients with a certificate of this authority.", metavar="FILE"
    )
    metrics_config: tuple[str, ...] = _setting(
        (),
        "As in Triton, like histogram_latencies=true or counter_latencies=false. Repeatable.",
        metavar="KEY=VALUE",
    )
    record: str = _setting(
        "",
        "Record the arrival of each request in this file, for carpool simulate --arrivals trace:FILE.",
        metavar="FILE",
    )
    record_limit_mb: float = _setting(256.0, "Largest size of that file, in MB.", within=(0.001, 1e6))
    cache_secret: str = _setting("", secret=True)
    quiet: bool = _setting(False, "Print nothing at start, and log only warnings and errors.", name="--quiet")
    log_format: str = _setting("text", "Format of the log: text or json.", choices=("text", "json"))
    log_level: str = _setting(
        "info",
        "Lowest level of the log: debug, info, warning or error.",
        choices=("debug", "info", "warning", "error"),
    )
    models: tuple[str, ...] = _setting((), secret=True)  # paths and addresses, where none are given by name
    cache_dir: Path | None = None  # where measured profiles are kept; None keeps none
    state_dir: Path | None = None  # what must survive a restart; None keeps nothing

    def option(self, name: str) -> Any:
        """Returns a setting that an extension declares in its manifest, of the type of its default."""
        return getattr(self, name)

    @property
    def apis(self) -> frozenset[str]:
        """Returns the names of the protocols of other tools that are answered."""
        names = (name.strip().replace("-", "_") for given in self.api for name in given.split(","))
        return frozenset(filter(None, names))

    @property
    def front_ends(self) -> int:
        """Returns the number of front ends of both protocols: memory that is bounded for the server is
        divided by it."""
        return max(1, self.frontends) + self.grpc_frontends

    @property
    def arena_bytes(self) -> int:
        """Returns the size of a front end's memory for requests: all slots, unless the container's limit of
        memory leaves less. One slot is left in any case."""
        part = within_limit(self.front_ends * self.slots * self.slot_bytes) // self.front_ends
        return max(self.slot_bytes, part // self.slot_bytes * self.slot_bytes)

    def __post_init__(self) -> None:
        for setting in fields(self):
            name, value = setting.name, getattr(self, setting.name)
            within, choices = setting.metadata.get("within"), setting.metadata.get("choices")
            if within is not None and value is not None and not within[0] <= value <= within[1]:
                raise ConfigError(f"{name} must be {within[0]:g} to {within[1]:g}, not {value}", field=name)
            if choices and value not in choices:
                raise ConfigError(f"{name} cannot be {shown(value)}; {nearest(value, choices)}", field=name)
        metrics_switches(self.metrics_config)
        _ = self.pictures
        for field_at_fault, sentence in self._mistakes():
            raise ConfigError(sentence, field=field_at_fault)
        ports = [port for port in (getattr(self, name) for name in _PORTS) if port]
        if len(ports) != len(set(ports)):
            raise ConfigError(f"{', '.join(_PORTS)} must differ, not {', '.join(map(str, ports))}")

    def _pattern_mistakes(self) -> Iterator[tuple[str, str]]:
        for name in ("http_header_forward_pattern", "grpc_header_forward_pattern"):
            try:
                re.compile(getattr(self, name))
            except re.error as error:
                yield name, f"{name} is no regular expression: {error}"

    def _mistakes(self) -> Iterator[tuple[str, str]]:
        """Yields what does not go together: the field, and what is wrong with it."""
        yield from self._mistakes_of_models()
        if not self.host:
            yield "host", "host must not be empty"
        yield from self._pattern_mistakes()
        if bool(self.tls_cert) != bool(self.tls_key):
            yield "tls_cert", "tls_cert and tls_key go together"
        if self.tls_client_ca and not self.tls_cert:
            yield "tls_client_ca", "tls_client_ca needs tls_cert and tls_key"
        if self.metrics_key and not (self.api_key_file or self.admin_key_file):
            yield "metrics_key", "metrics_key needs keys: give api_key_file or admin_key_file"
        if self.shared_profiles:
            yield from self._shared_profiles_mistakes()
        yield from self._name_mistakes()

    def _name_mistakes(self) -> Iterator[tuple[str, str]]:
        known = apis()
        for name in sorted(self.apis - known.keys()):
            yield "api", f"api cannot be {shown(name)}; {nearest(name, sorted(known))}"
        for name in (name for name in self.allowed_hosts if not _HOST_NAME.fullmatch(name)):
            form = "names without a port, like carpool.example"
            yield "allowed_hosts", f"allowed_hosts takes {form}, not {shown(name)}"
        for name in (name for name in self.picture_hosts if not _is_picture_host(name)):
            form = "names like images.example, images.example:8080 or labels.lan:8080=192.168.1.20"
            yield "picture_hosts", f"picture_hosts takes {form}, not {shown(name)}"

    def _mistakes_of_models(self) -> Iterator[tuple[str, str]]:
        if self.on_demand and self.model_control_mode != "none":
            mode = self.model_control_mode
            yield "on_demand", f"on_demand needs model_control_mode none, not {mode}: it loads by itself"
        if self.memory_gb is not None and not self.on_demand:
            yield "memory_gb", "memory_gb limits models that are loaded on demand: give on_demand"
        if self.load_models and self.model_control_mode != "explicit":
            needs = "which needs model_control_mode explicit"
            yield (
                "load_models",
                f"load_models names models to start with, {needs}, not {self.model_control_mode}",
            )
        name = self.server_name
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            yield (
                "server_name",
                f"server_name must be 1 to {_MAX_NAME} printable characters, not {shown(name)}",
            )

    def _shared_profiles_mistakes(self) -> Iterator[tuple[str, str]]:
        kind, _, folder = self.shared_profiles.partition(":")
        if kind == "file":
            if not folder.startswith("/") or "\0" in folder:
                yield "shared_profiles", "shared_profiles names a folder from the root, like file:/mnt/shared"
            return
        from carpool.config.redis_url import read_redis_url
        from carpool.config.remote_address import remote_address

        if remote_address(self.shared_profiles) is None:
            read_redis_url(self.shared_profiles, "shared_profiles")
            yield from self.redis_mistakes("shared_profiles")

    def redis_mistakes(self, name: str) -> Iterator[tuple[str, str]]:
        """Yields what is missing where this setting has the address of a Redis server."""
        if len(self.cache_secret) < _SHORTEST_SECRET:
            yield (
                "cache_secret",
                f"{name} needs a cache_secret of {_SHORTEST_SECRET} characters or more, the same for all "
                "servers that share. Otherwise any client that can write to that Redis server could "
                "impersonate them",
            )

    @property
    def pictures(self) -> PictureChoice:
        """Returns what is said about the pictures of the model that is served."""
        if self.task and self.task not in task_names():
            raise ConfigError(
                f"task cannot be {shown(self.task)}; {nearest(self.task, task_names())}", field="task"
            )
        labels = Path(self.labels) if self.labels else None
        sides = _SIZE.fullmatch(self.size)
        if self.size and sides is None:
            raise ConfigError(f"size must be like 640 or 480,640, not {shown(self.size)}", field="size")
        height = int(sides[1]) if sides else 0
        size = (height, int(sides[2] or height)) if sides else None
        return PictureChoice(self.task or None, labels, size, self.preset or None, self.strict_models)

    @property
    def metrics(self) -> Mapping[str, bool]:
        """Returns which of the metrics that can be switched are on the page."""
        return metrics_switches(self.metrics_config)

    @property
    def models_at_start(self) -> Collection[str] | None:
        everything = self.model_control_mode != "explicit" or _EVERY_MODEL in self.load_models
        return None if everything else self.load_models

    @property
    def needs_models(self) -> bool:
        """Returns whether an empty repository is a mistake: where nothing can come later."""
        return self.model_control_mode == "none"


def _kind_of(option: ServerOption) -> Any:
    return float | None if option.default is None else type(option.default)


def _setting_of(option: ServerOption) -> Any:
    written: dict[str, Any] = {"name": f"--{option.name.replace('_', '-')}"}
    if option.metavar:
        written["metavar"] = option.metavar
    return _setting(option.default, option.words, within=option.within, secret=option.secret, **written)


if TYPE_CHECKING:
    ServerSettings = OwnSettings
else:
    ServerSettings = make_dataclass(
        "ServerSettings",
        [
            (one.name, _kind_of(one), _setting_of(one))
            for extension in installed().values()
            for one in extension.options
        ],
        bases=(OwnSettings,),
        namespace={"__doc__": "Holds all settings of `carpool serve`.", "__module__": __name__},
        frozen=True,
        slots=True,
    )


def settings_in_order() -> list[Field[Any]]:
    """Returns the fields of `ServerSettings` as the help lists them: an option of an extension is behind the
    setting that it names."""
    of_all = {setting.name: setting for setting in fields(ServerSettings)}
    names = [setting.name for setting in fields(OwnSettings)]
    for option in (option for one in installed().values() for option in one.options):
        names.insert(names.index(option.after) + 1 if option.after in names else len(names), option.name)
    return [of_all[name] for name in names]


def apis() -> Mapping[str, str]:
    """Returns the protocols of other tools by name, each with the address that is typed into the tool."""
    return {one.name: one.api for one in installed().values() if one.api}


_METRICS = {"counter_latencies": True, "histogram_latencies": False, "summary_latencies": False}
_MAX_NAME = 128
_SHORTEST_SECRET = 16


def metrics_switches(given: Collection[str]) -> dict[str, bool]:
    """Reads Triton's `--metrics-config` settings, each `key=true` or `key=false`, and the defaults of the
    rest."""
    switches = dict(_METRICS)
    for setting in given:
        key, _, value = setting.partition("=")
        wrong = ""
        if key == "summary_quantiles" or (key == "summary_latencies" and value.lower() in TRUE):
            wrong = (
                f" {shown(setting)}: summaries are not offered, since quantiles of several replicas cannot be"
                " added up; the histograms carpool_*_duration_seconds are always there"
            )
        elif key not in switches:
            wrong = f" has no {shown(key)}; {nearest(key, switches)}"
        elif value.lower() not in TRUE + FALSE:
            wrong = f" {key} must be true or false, as in {key}=true, not {shown(value)}"
        if wrong:
            raise ConfigError(f"metrics_config{wrong}", field="metrics_config")
        switches[key] = value.lower() in TRUE
    return switches


def variables() -> dict[str, str]:
    return {PREFIX + setting.name.upper(): setting.name for setting in settings_in_order()}


_FOLDERS = {"cache": ("XDG_CACHE_HOME", ".cache"), "state": ("XDG_STATE_HOME", ".local/state")}


def usual_folder(of: str, environ: Mapping[str, str] | None = None) -> Path:
    """Returns the folder of what can be made again (`cache`) or of what must survive a restart (`state`),
    unless a variable names another."""
    environ = os.environ if environ is None else environ
    chosen = environ.get(f"{PREFIX}{of.upper()}_DIR")
    if chosen:
        return Path(chosen)
    variable, folder = _FOLDERS[of]
    base = environ.get(variable, "")  # whose rules ignore a relative one
    return (Path(base) if base.startswith("/") else Path(environ.get("HOME") or "/tmp") / folder) / "carpool"


def server_settings(
    given: Mapping[str, object] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[ServerSettings, list[str]]:
    """Returns the settings and the warnings. `given` comes from the command line: None in it means not given.

    This file reads the environment, and an extension what a standard has put there: no other code does.
    """
    environ = os.environ if environ is None else environ
    known = variables()
    values: dict[str, Any] = {f"{of}_dir": usual_folder(of, environ) for of in _FOLDERS}
    for variable, name in known.items():
        if environ.get(variable, "") != "":
            values[name] = _value(variable, name, environ[variable])
    for name, value in (given or {}).items():
        if value is not None:
            values[name] = tuple(value) if isinstance(value, list) else value
    warnings = []  # only of a likely slip: Kubernetes adds variables of its own under a service's name
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in known and variable not in _OF_CLIENTS:
            close = resembling(variable.removeprefix(PREFIX).lower(), known.values(), 0.85)
            if close:
                warnings.append(f"{variable} is not a setting; did you mean {PREFIX}{close.upper()}?")
    return replace(ServerSettings(), **values), warnings


def _value(variable: str, name: str, text: str) -> object:
    if name in ("cache_dir", "state_dir"):
        return Path(text)
    default = getattr(ServerSettings(), name)
    if isinstance(default, bool):
        if text.lower() not in TRUE + FALSE:
            raise ConfigError(f"{variable} must be true or false, not {shown(text)}", field=name)
        return text.lower() in TRUE
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
