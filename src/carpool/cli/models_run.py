"""What `carpool models` does once it knows its options."""

from __future__ import annotations

import json
import sys
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from carpool.cli.models_command import Action, ModelsVerb
from carpool.cli.running_server import trust
from carpool.config.rules import read_settings
from carpool.errors import CarpoolError, InvalidInput
from carpool.lab.load.facts import TRUSTING, Trust

_ANSWER_S = 30.0
_LOADING_S = 3600.0  # a large model takes its time, and whoever waits can stop waiting

Line = dict[str, str]


class Failed(CarpoolError):
    """The server is not there, or said no."""


def run(asked: ModelsVerb) -> bool:
    """Whether it worked."""
    if asked.action is not Action.list and not asked.name:
        raise InvalidInput(f"{asked.action} needs the name of a model: carpool models {asked.action} NAME")
    if asked.config is not None and asked.action is not Action.load:
        raise InvalidInput(f"--config goes with load, not with {asked.action}")
    server = Server(asked.url, trust(asked.api_key_file, asked.ca, asked.insecure))
    try:
        if asked.action is not Action.list:
            server.post(_path(asked), _body(asked), _LOADING_S)
        lines = server.post("/v2/repository/index", {}, _ANSWER_S)
    except Failed as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return False
    shown = [line for line in lines if asked.name in (None, line["name"])]
    if asked.as_json:
        print(json.dumps(shown, indent=2))
    elif asked.name and not shown:
        print(f"carpool: the server has no model {asked.name}", file=sys.stderr)
    else:
        _show(shown)
    return bool(shown) or not asked.name


def _path(asked: ModelsVerb) -> str:
    return f"/v2/repository/models/{quote(asked.name or '', safe='')}/{asked.action}"


def _body(asked: ModelsVerb) -> dict[str, Any]:
    return {} if asked.config is None else {"parameters": {"config": read_settings(asked.config)}}


class Server:
    """A running server, for a few short questions."""

    def __init__(self, url: str, trust: Trust = TRUSTING) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidInput(f"--url must be like http://localhost:8000, not {url!r}", field="--url")
        self._url = url
        self._tls = trust.context() if parts.scheme == "https" else None
        self._headers = dict(trust.headers())
        self._address = (parts.hostname, port)
        self._prefix = parts.path.rstrip("/")

    def connection(self, seconds: float) -> HTTPConnection:
        if self._tls is None:
            return HTTPConnection(*self._address, timeout=seconds)
        return HTTPSConnection(*self._address, timeout=seconds, context=self._tls)

    def get(self, path: str) -> Any:
        return self._document("GET", path, None, _ANSWER_S)

    def post(self, path: str, document: dict[str, Any], seconds: float) -> Any:
        return self._document("POST", path, json.dumps(document), seconds)

    def _document(self, method: str, path: str, body_text: str | None, seconds: float) -> Any:
        connection = self.connection(seconds)
        try:
            connection.request(method, self._prefix + path, body_text, self._headers)
            response = connection.getresponse()
            body = response.read()
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise Failed(f"{self._url}: no answer: {why}; is the server running there?") from None
        except HTTPException:  # its words would be those of whatever is there
            raise Failed(f"{self._url}: what answers there does not speak HTTP") from None
        finally:
            connection.close()
        if response.status != 200:
            raise Failed(f"{self._url}: {_error(body) or f'HTTP status {response.status}'}")
        try:
            return json.loads(body or b"{}")
        except ValueError:
            raise Failed(f"{self._url}: not an answer of a model server") from None


def _error(body: bytes) -> str:
    try:
        message = str(json.loads(body)["error"])
        return message if message.isprintable() else repr(message)
    except (ValueError, KeyError, TypeError):
        return ""


def _show(lines: list[Line]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("model", "version", "state", "reason"):
        table.add_column(title)
    for line in lines:
        state = line.get("state") or "not loaded"
        cells = (line["name"], line.get("version", ""), state, line.get("reason", ""))
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
