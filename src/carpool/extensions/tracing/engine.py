"""Holds the trace settings of the v2 protocol, which clients can change, for all front ends."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from carpool.config.rules import nearest
from carpool.engine.engine_parts import EnginePart, EngineServer
from carpool.errors import ConfigError, InvalidInput, NotFound, Unsupported
from carpool.extensions.tracing.settings import TIMESTAMPS
from carpool.observe.logs import logger
from carpool.wire.head import shorten

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


def engine(server: EngineServer) -> EnginePart:
    """Returns what tracing does in the engine."""
    return TraceSettings(server, server.settings.option("trace_file")).part


class TraceSettings:
    """Holds what is traced, for all models and for each, and how many traces may still be written."""

    def __init__(self, server: EngineServer, file: str) -> None:
        self._server = server
        self._fixed = {"trace_file": file, "trace_mode": "triton"}
        self._own: dict[str, dict[str, Any]] = {_GLOBAL: {}}
        self._left: dict[str, int] = {}  # of those whose number of traces is limited
        if file:
            _check_file(file)
            server.offer("trace")
        self.part = EnginePart(questions={"settings": self.update, "places": self.grant})

    async def update(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Change what is given, or nothing if some of it is wrong; the settings in force for the model."""
        model = str(arguments.get("model") or _GLOBAL)
        asked: Mapping[str, Any] = arguments.get("settings") or {}
        if model and not any(name == model for name, _ in self._server.catalog.entries):
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
            self._publish()  # so that front ends stop asking
        return granted

    def _in_force(self, model: str) -> dict[str, Any]:
        scope = model if self._own.get(model) else _GLOBAL
        settings = {**_DEFAULTS, **self._own[_GLOBAL], **self._own[scope], **self._fixed}
        if scope in self._left:
            settings["trace_count"] = str(self._left[scope])
        return settings

    def _count_anew(self, model: str) -> None:
        """Restarts the count: a number that was set is counted from now on, whatever was traced before."""
        for scope in self._own if model == _GLOBAL else (model,):
            count = int({**_DEFAULTS, **self._own[_GLOBAL], **self._own[scope]}["trace_count"])
            if count < 0:
                self._left.pop(scope, None)
            elif scope == model or "trace_count" not in self._own[scope]:
                self._left[scope] = count

    def _publish(self) -> None:
        scopes = [name for name, own in self._own.items() if own or name == _GLOBAL]
        self._server.publish({name: self._in_force(name) for name in scopes})

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
