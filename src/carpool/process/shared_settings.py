"""Shares settings of the log, which the protocol can change, between all front ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from carpool.config.rules import nearest
from carpool.errors import Forbidden, InvalidInput, Unsupported
from carpool.observe import logs
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
        host.published = replace(host.published, logging=self._settings)
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
            self._host.published = replace(self._host.published, logging=self._settings)
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
