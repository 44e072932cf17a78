"""Shares settings that the protocol can change between all front ends: of the log, and of traces."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from carpool.config.rules import nearest
from carpool.errors import ConfigError, Forbidden, InvalidInput, NotFound, Unsupported
from carpool.frontend.traces.tracing import TIMESTAMPS
from carpool.observe import logs
from carpool.observe.logs import logger
from carpool.wire.head import shorten

if TYPE_CHECKING:
    from carpool.engine.engine_host import EngineHost  # front ends have none

Settings = Mapping[str, Any]

_LEVELS = ("debug", "info", "warning", "error")
_SWITCHES = ("log_info", "log_warning", "log_error")
_MOST_VERBOSE = 1 << 31
_FORMATS = ("default", "ISO8601")


def log_settings(level: str) -> dict[str, Any]:
    """Returns what the server starts with."""
    rank = _LEVELS.index(level)
    return {
        "log_file": "",
        "log_info": rank <= 1,
        "log_warning": rank <= 2,
        "log_error": True,
        "log_verbose_level": int(rank == 0),
        "log_format": _FORMATS[0],
    }


def apply_log_settings(settings: Settings) -> None:
    """Applies them in this process, from now on; an engine that says nothing of them changes nothing."""
    if settings:
        logs.switch(
            verbose=settings["log_verbose_level"] > 0,
            info=settings["log_info"],
            warning=settings["log_warning"],
            error=settings["log_error"],
        )


class LogSettings:
    """Answers "log-settings", in the engine."""

    def __init__(self, host: EngineHost, level: str) -> None:
        self._host = host
        self._settings = log_settings(level)
        host.extra["logging"] = self._settings
        host.on_question("log-settings", self.update)

    async def update(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Change what is given, or nothing if some of it is wrong; the settings in force.

        `admin`: it came with an admin key. `by`: whose.
        """
        asked: Settings = arguments.get("settings") or {}
        for name, value in asked.items():
            _check(name, value, self._settings)
        if self._settings["log_error"] and asked.get("log_error") is False and not arguments.get("admin"):
            raise Forbidden(
                "log_error can be turned off only with an admin key: an attacker would turn it off first",
                field="log_error",
            )
        if asked:
            changed = {name: value for name, value in asked.items() if value != self._settings[name]}
            if changed:
                logs.tell("engine", "log-settings-changed", **changed, by=arguments.get("by", "anybody"))
            self._settings = {**self._settings, **asked}
            apply_log_settings(self._settings)
            self._host.extra["logging"] = self._settings
            self._host.publish()
        return self._settings


def _check(name: str, value: object, now: Settings) -> None:
    if name not in now:
        raise InvalidInput(f"unknown log setting {shorten(name)}; {nearest(name, now)}", field=name[:80])
    if name in _SWITCHES:
        if type(value) is not bool:
            raise InvalidInput(f"{name} must be true or false", field=name)
    elif name == "log_verbose_level":
        if type(value) is not int or not 0 <= value < _MOST_VERBOSE:
            raise InvalidInput(f"{name} must be an integer of 0 or more; above 0 is verbose", field=name)
    elif name == "log_format":
        # Each line gives its time by ISO 8601 in both: clients that write back what they read change nothing.
        if value not in _FORMATS:
            raise InvalidInput(
                f"invalid argument for log_format, got: {str(value)[:80]}; known are {', '.join(_FORMATS)}."
                " Text or JSON is chosen with --log-format when the server starts",
                field=name,
            )
    elif value != now[name]:
        raise Unsupported(
            "log file location can not be updated through network protocol: the log goes where the server's"
            " stderr goes",
            field=name,
        )


_GLOBAL = ""
_DEFAULTS: Mapping[str, Any] = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
}
_FIXED = ("trace_file", "trace_mode")
_MOST = 1 << 31
_NUMBER = re.compile(r"-?[0-9]{1,10}", re.ASCII)

_log = logger("trace")


class TraceSettings:
    """Answers "trace-settings" and "trace-places"."""

    def __init__(self, host: EngineHost, file: str) -> None:
        self._host = host
        self._fixed = {"trace_file": file, "trace_mode": "triton"}
        self._own: dict[str, dict[str, Any]] = {_GLOBAL: {}}
        self._left: dict[str, int] = {}  # of those whose number of traces is limited
        if file:
            _check_file(file)
            host.extra["extensions"] = (*host.extra.get("extensions", ()), "trace")
        host.extra["tracing"] = {_GLOBAL: self._in_force(_GLOBAL)}
        host.on_question("trace-settings", self.update)
        host.on_question("trace-places", self.grant)

    async def update(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Change what is given, or nothing if some of it is wrong; the settings in force for the model."""
        model = str(arguments.get("model") or _GLOBAL)
        asked: Mapping[str, Any] = arguments.get("settings") or {}
        if model and not any(name == model for name, _ in self._host.catalog.entries):
            raise NotFound(
                f"Request for unknown model: {shorten(model)} is not found", reason="unknown-model"
            )
        read = {name: self._read(name, value) for name, value in asked.items()}
        if read:
            own = {**self._own.get(model, {}), **read}
            self._own[model] = {name: value for name, value in own.items() if value is not None}
            self._count_anew(model)
            self._publish()
            _log.info(
                "trace-settings", model=model or "all", **{name: str(value) for name, value in read.items()}
            )
        return self._in_force(model)

    async def grant(self, arguments: Mapping[str, Any]) -> int:
        """Returns how many of the traces that a front end has may be written."""
        model, wanted = str(arguments["model"]), int(arguments["wanted"])
        scope = model if self._own.get(model) else _GLOBAL
        left = self._left.get(scope)
        if left is None:
            return wanted
        granted = min(wanted, left)
        self._left[scope] = left - granted
        if granted and left == granted:
            self._publish()  # so that nobody asks any more
        return granted

    def _in_force(self, model: str) -> dict[str, Any]:
        scope = model if self._own.get(model) else _GLOBAL
        settings = {**_DEFAULTS, **self._own[_GLOBAL], **self._own[scope], **self._fixed}
        if scope in self._left:
            settings["trace_count"] = str(self._left[scope])
        return settings

    def _count_anew(self, model: str) -> None:
        """Whoever sets a number gets so many from now on, whatever was traced before."""
        for scope in self._own if model == _GLOBAL else (model,):
            count = int({**_DEFAULTS, **self._own[_GLOBAL], **self._own[scope]}["trace_count"])
            if count < 0:
                self._left.pop(scope, None)
            elif scope == model or "trace_count" not in self._own[scope]:
                self._left[scope] = count

    def _publish(self) -> None:
        scopes = [name for name, own in self._own.items() if own or name == _GLOBAL]
        self._host.extra["tracing"] = {name: self._in_force(name) for name in scopes}
        self._host.publish()

    def _read(self, name: str, value: object) -> Any:
        """A setting as it is kept; None clears it."""
        if name in _FIXED:
            if value in (self._fixed[name], [self._fixed[name]]):
                return None
            raise Unsupported(f"{name} cannot be changed over the network", field=name)
        if name not in _DEFAULTS:
            raise InvalidInput(
                f"unknown trace setting {shorten(name)}; {nearest(name, _DEFAULTS)}", field=name[:80]
            )
        if value is None or value == []:
            return None
        if name == "trace_level":
            return self._read_level(value)
        return _read_number(name, value)

    def _read_level(self, value: object) -> list[str]:
        levels = value if type(value) is list else [value]
        for level in levels:
            if level == "TENSORS":
                raise Unsupported(
                    "trace_level can be TIMESTAMPS or OFF; tensors are not traced", field="trace_level"
                )
            if level not in ("OFF", TIMESTAMPS):
                raise InvalidInput("trace_level must be TIMESTAMPS or OFF", field="trace_level")
        if TIMESTAMPS not in levels:
            return ["OFF"]
        if not self._fixed["trace_file"]:
            raise Unsupported(
                "there is no file for traces: start the server with --trace-file FILE", field="trace_level"
            )
        return [TIMESTAMPS]


def _read_number(name: str, value: object) -> str:
    """A decimal number, as text or not, perhaps alone in a list: gRPC knows only lists of texts."""
    text = str(value[0] if type(value) is list and len(value) == 1 else value)
    number = int(text) if _NUMBER.fullmatch(text) else _MOST
    least = {"trace_rate": 1, "trace_count": -1, "log_frequency": 0}[name]
    if not least <= number < _MOST:
        raise InvalidInput(f"{name} must be an integer of {least} or more", field=name)
    if name == "log_frequency" and number:
        raise Unsupported("log_frequency can only be 0: all traces go to one file, each at once", field=name)
    return str(number)


def _check_file(file: str) -> None:
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644))
    except OSError as error:
        raise ConfigError(
            f"traces cannot be written to {file}: {error.strerror}", field="trace_file"
        ) from None
