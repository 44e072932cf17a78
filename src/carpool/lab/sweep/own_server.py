"""A server of the sweep's own: the model with other knobs, served on free loopback ports, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from carpool.config.repository import PBTXT, TOML, VERSION, ModelSource
from carpool.config.rules import read_settings
from carpool.errors import CarpoolError, InvalidInput
from carpool.lab.sweep.sweep_runs import Setting

_PLAIN = re.compile(r"[A-Za-z0-9_-]+")


def check_place(place: Path) -> None:
    """A single file of several versions could not be told from the others in a folder of links."""
    if place.is_file() and VERSION.fullmatch(place.parent.name):
        raise InvalidInput(f"{place} is one of a model's versions: name the model's folder instead")


def make_variant(source: ModelSource, place: Path, setting: Setting, under: Path) -> Path:
    """The folder to serve: `under`/…/NAME. Nothing of the model itself is touched or copied."""
    home = place if place.is_dir() else place.parent
    folder = under / source.config.name
    folder.mkdir(parents=True)
    for entry in home.iterdir():
        if entry.name not in (PBTXT, TOML):
            (folder / entry.name).symlink_to(entry.resolve())
    if (home / PBTXT).exists():
        text = pbtxt_with_knobs(read_settings(home / PBTXT), setting)
        (folder / PBTXT).write_text(text, "utf-8")
        return folder
    before = read_settings(home / TOML) if (home / TOML).exists() else ""
    settings = tomllib.loads(before)
    if place.is_file():
        settings["file"] = place.name
    (folder / TOML).write_text(toml_with_knobs(settings, setting), "utf-8")
    return folder


def toml_with_knobs(settings: dict[str, Any], setting: Setting) -> str:
    """Without the model's own promise and batching."""
    own = ("slo_ms", "slo_may_grow", "batching", "name")
    kept = {key: value for key, value in settings.items() if key not in own}
    kept["batching"] = {"max_delay_ms": setting.max_delay_ms}
    if setting.max_batch is not None:
        kept["max_batch"] = setting.max_batch
    return "".join(f"{_key(key)} = {_toml(value)}\n" for key, value in kept.items())


def _toml(value: Any) -> str:
    """On one line: tables are written inside."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _key(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else _toml(key)


def pbtxt_with_knobs(text: str, setting: Setting) -> str:
    from google.protobuf import text_format

    from carpool.config.triton_text import read_text

    config = read_text(text, PBTXT).message
    config.ClearField("dynamic_batching")
    config.dynamic_batching.max_queue_delay_microseconds = round((setting.max_delay_ms or 0.0) * 1e3)
    if setting.max_batch is not None:
        config.max_batch_size = setting.max_batch
    return str(text_format.MessageToString(config))


_CODE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
_ADDRESS = re.compile(r"Carpool serves .* at (http://\S+)")
_ERROR = re.compile(r"""^carpool: (.+)|\berror="(.+)"$""")
_STARTING_S = 900.0  # a model may be measured first
_LOOK_S = 0.05
_STOPPING_S = 20.0
_OURS = (
    "CARPOOL_SLO_MS",
    "CARPOOL_MODEL_CONTROL_MODE",
    "CARPOOL_LOAD_MODELS",
)  # would change what is measured


class NoServer(CarpoolError):
    """It did not start, or it ended too early."""

    reason = "server-died"


class OwnServer:
    """One process with its children, and its log beside the results."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = ()) -> None:
        self._log = log
        arguments = [sys.executable, "-P", "-c", _CODE, "serve", str(model), "--host", "127.0.0.1"]
        for port in ("--http-port", "--metrics-port"):
            arguments += [port, "0"]
        arguments += ["--grpc-frontends", "0", "--model-control-mode", "none", "--drain-s", "1", *options]
        kept = {name: value for name, value in os.environ.items() if name not in _OURS}
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=kept,
                start_new_session=True,  # Ctrl-C is ours to hear
            )

    async def address(self) -> str:
        """Where it serves, once it does."""
        give_up = time.monotonic() + _STARTING_S
        while time.monotonic() < give_up:
            found = _ADDRESS.search(self._said())
            if found:
                return found[1]
            self.check()
            await asyncio.sleep(_LOOK_S)
        raise NoServer(f"the server was not ready within {_STARTING_S:g} s; its log is {self._log}")

    def check(self) -> None:
        """Raises `NoServer` with its last words if it is gone."""
        if self._process.poll() is None:
            return
        raise NoServer(f"the server ended: {last_words(self._said())} (its log is {self._log})")

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait until it has; with those that were not asked, or do not listen, it is brought about."""
        try:
            self._process.wait(_STOPPING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_STOPPING_S)

    def _said(self) -> str:
        return self._log.read_text("utf-8", "replace")


def last_words(log: str) -> str:
    """The last error in it, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [found[1] or found[2] for line in lines if (found := _ERROR.search(line))]
    return (errors or lines or ["it said nothing"])[-1][:500]
