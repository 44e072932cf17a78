"""Which requests have spans and where those go: OpenTelemetry's own variables, and two options of the server.

The variables are read here, in every process that makes spans: their names and meanings are a standard's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from carpool.config.rules import nearest, shown
from carpool.config.server import FALSE, TRUE, ServerSettings
from carpool.errors import ConfigError

TIMESTAMPS = "TIMESTAMPS"  # a level of the trace settings
USUAL_SAMPLE = 0.01
_EXPORTER = "OTEL_EXPORTER_OTLP_"
_TRACES = "/v1/traces"
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_TEXT = re.compile(r"[\t -~\x80-\U0010ffff]{0,4096}")
_SAMPLERS: Mapping[str, float | None] = {"always_on": 1.0, "always_off": 0.0, "traceidratio": None}
"""Each also behind `parentbased_`; None: the ratio is in a variable of its own."""
_FOLLOWS = "parentbased_"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OtelSettings:
    """Holds all that is needed to make spans and to send them."""

    url: str = field(repr=False)
    sample: float = USUAL_SAMPLE  # of the requests whose callers have not decided
    follows: bool = True  # callers decide about theirs
    service: str = "carpool"
    resource: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = 10.0
    gzip: bool = False
    certificate: str = ""  # of the authority that signed the collector's, where that is not a well-known one
    client_certificate: str = ""
    client_key: str = ""
    most_waiting: int = 2048  # spans
    most_at_once: int = 512
    delay_s: float = 5.0


def package_is_missing() -> bool:
    return find_spec("opentelemetry") is None or find_spec("opentelemetry.proto") is None


def read_otel(settings: ServerSettings, environ: Mapping[str, str] | None = None) -> OtelSettings | None:
    """None: no spans are made. Raises `ConfigError` that names the variable or the setting at fault."""
    environ = os.environ if environ is None else environ
    url = _url(settings, environ)
    if not url or _value(environ, "OTEL_SDK_DISABLED", _switch, False):
        return None
    if package_is_missing():
        if not settings.option("otlp_endpoint"):
            return None  # variables that are set for all programs need not mean this one; see `otel_warning`
        raise ConfigError(
            "otlp_endpoint needs a package that is missing: pip install 'carpool[otel]'",
            field="otlp_endpoint",
        )
    follows, sample = _sampler(environ)
    resource: dict[str, str] = _value(environ, "OTEL_RESOURCE_ATTRIBUTES", _pairs, {})
    service = environ.get("OTEL_SERVICE_NAME") or resource.get("service.name") or settings.server_name
    _exporter(environ, "PROTOCOL", _protocol, "")
    return OtelSettings(
        url,
        sample if settings.option("trace_sample") is None else settings.option("trace_sample"),
        follows,
        service,
        resource,
        _exporter(environ, "HEADERS", _header_pairs, {}),
        _exporter(environ, "TIMEOUT", _number(1, 600_000), 10_000) / 1e3,
        _exporter(environ, "COMPRESSION", _compression, False),
        _exporter(environ, "CERTIFICATE", str, ""),
        _exporter(environ, "CLIENT_CERTIFICATE", str, ""),
        _exporter(environ, "CLIENT_KEY", str, ""),
        _value(environ, "OTEL_BSP_MAX_QUEUE_SIZE", _number(1, 1 << 20), 2048),
        _value(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _number(1, 1 << 16), 512),
        _value(environ, "OTEL_BSP_SCHEDULE_DELAY", _number(1, 600_000), 5000) / 1e3,
    )


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Checks the settings before anything is loaded, and returns them with a warning, or with nothing."""
    read_otel(settings)
    return settings, otel_warning(settings)


def otel_warning(settings: ServerSettings, environ: Mapping[str, str] | None = None) -> str:
    """Returns the warning for a server whose environment asks for spans that it cannot make; empty: none."""
    environ = os.environ if environ is None else environ
    if settings.option("otlp_endpoint") or not _url(settings, environ) or not package_is_missing():
        return ""
    return f"{_EXPORTER}ENDPOINT is set, and no spans are made: pip install 'carpool[otel]'"


def _url(settings: ServerSettings, environ: Mapping[str, str]) -> str:
    """Returns the URL of the collector, with the path for spans; empty: none is named."""
    whole = "" if settings.option("otlp_endpoint") else environ.get(f"{_EXPORTER}TRACES_ENDPOINT", "")
    base = settings.option("otlp_endpoint") or environ.get(f"{_EXPORTER}ENDPOINT", "")
    if not settings.option("otlp_endpoint") and environ.get("OTEL_TRACES_EXPORTER", "otlp") == "none":
        return ""
    at_fault = "otlp_endpoint" if settings.option("otlp_endpoint") else f"{_EXPORTER}ENDPOINT"
    url = whole or base
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if fits and parts.username is not None:
        raise ConfigError(
            f"{at_fault} has no room for a password: it goes to {_EXPORTER}HEADERS", field=at_fault
        )
    if not fits or not url.isascii() or not url.isprintable() or " " in url or parts.query or parts.fragment:
        # Not shown: it may hold a password.
        raise ConfigError(f"{at_fault} must be like http://localhost:4318", field=at_fault)
    return url if whole or parts.path.endswith(_TRACES) else url.rstrip("/") + _TRACES


def _sampler(environ: Mapping[str, str]) -> tuple[bool, float]:
    """Returns whether callers decide, and how many of the others have spans."""
    variable = "OTEL_TRACES_SAMPLER"
    name = environ.get(variable, "")
    if not name:
        return True, USUAL_SAMPLE
    kind = name.removeprefix(_FOLLOWS)
    if kind not in _SAMPLERS:
        known = [*_SAMPLERS, *(_FOLLOWS + one for one in _SAMPLERS)]
        raise ConfigError(f"{variable} cannot be {shown(name)}; {nearest(name, known)}", field=variable)
    share = _SAMPLERS[kind]
    if share is None:
        share = _value(environ, f"{variable}_ARG", _share, 1.0)
    return name.startswith(_FOLLOWS), share


def _exporter(environ: Mapping[str, str], name: str, read: Callable[[str], T], usual: T) -> T:
    """What holds for spans alone goes before what holds for all that is exported."""
    special = f"{_EXPORTER}TRACES_{name}"
    return _value(environ, special if environ.get(special) else _EXPORTER + name, read, usual)


def _value(environ: Mapping[str, str], variable: str, read: Callable[[str], T], usual: T) -> T:
    text = environ.get(variable, "").strip()
    if not text:
        return usual
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{variable} {error}", field=variable) from None


def _switch(text: str) -> bool:
    if text.lower() not in TRUE + FALSE:
        raise ValueError(f"must be true or false, not {shown(text)}")
    return text.lower() in TRUE


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"must be a number from 0 to 1, not {shown(text)}")
    return share


def _number(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or not text.isascii() or len(text) > 9 or not least <= int(text) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {shown(text)}")
        return int(text)

    return read


def _protocol(text: str) -> str:
    if text != "http/protobuf":
        raise ValueError(f"must be http/protobuf, often on port 4318, not {shown(text)}")
    return text


def _compression(text: str) -> bool:
    if text not in ("none", "gzip"):
        raise ValueError(f"must be gzip or none, not {shown(text)}")
    return text == "gzip"


def _pairs(text: str) -> dict[str, str]:
    pairs = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, found, value = part.partition("=")
        name, value = unquote(name.strip()), unquote(value.strip())
        if not found or not _NAME.fullmatch(name) or not _TEXT.fullmatch(value):
            raise ValueError("must be like name=value,name=value")  # which may be secret: it is not shown
        pairs[name] = value
    return pairs


def _header_pairs(text: str) -> dict[str, str]:
    pairs = _pairs(text)
    if not all(value.isascii() for value in pairs.values()):
        raise ValueError("must hold ASCII only")
    return pairs
