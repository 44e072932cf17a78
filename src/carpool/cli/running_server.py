"""A running server, for a few short questions: how it is reached, and how the two know each other."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from carpool.cli.verb_options import KEY_VARIABLE
from carpool.errors import CarpoolError, InvalidInput

if TYPE_CHECKING:
    from carpool.lab.load.facts import Trust

ANSWER_S = 30.0
_KEY = re.compile(r"[!-~]{1,512}")


class Failed(CarpoolError):
    """The server is not there, or said no."""

    exit_code = 1


def trust(
    api_key_file: Path | None, ca: Path | None, insecure: bool, environ: Mapping[str, str] | None = None
) -> Trust:
    """A key is never an option: other users of the machine see those."""
    from carpool.lab.load.facts import Trust  # not needed to show the help

    key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "").strip()
    if api_key_file is not None:
        key = _read_key(api_key_file)
    if key and not _KEY.fullmatch(key):
        where = api_key_file or KEY_VARIABLE
        raise InvalidInput(f"the key in {where} must be up to 512 printable characters")
    return Trust("" if ca is None else str(ca), insecure, key)


def _read_key(file: Path) -> str:
    """The key alone, or the first line 'name key …' of a file as the server has it."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(f"--api-key-file {file} cannot be read") from None
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0] if len(words) == 1 else words[1]
    raise InvalidInput(f"--api-key-file {file} holds no key")


class RunningServer:
    """Every question has a connection of its own."""

    def __init__(self, url: str, trust: Trust) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise InvalidInput(f"--url must be like http://localhost:8000, not {url!r}")
        self._url = url
        self._tls = trust.context() if parts.scheme == "https" else None
        self._headers = dict(trust.headers())
        self._address = (parts.hostname, port)
        self._prefix = parts.path.rstrip("/")

    def get(self, path: str) -> Any:
        return self._document("GET", path, None, ANSWER_S)

    def post(self, path: str, document: dict[str, Any], seconds: float = ANSWER_S) -> Any:
        return self._document("POST", path, json.dumps(document), seconds)

    def ask(
        self, method: str, path: str, body: bytes | str | None, seconds: float, **headers: str
    ) -> tuple[int, bytes]:
        """Status and body; `headers` with underscores for hyphens."""
        from http.client import HTTPException

        from carpool.lab.load.facts import connection

        opened = connection(*self._address, self._tls, seconds)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            opened.request(method, self._prefix + path, body, self._headers | named)
            response = opened.getresponse()
            return response.status, response.read()
        except OSError as error:
            why = error.strerror or str(error) or type(error).__name__
            raise Failed(f"{self._url}: no answer: {why}; is the server running there?") from None
        except HTTPException:  # its words would be those of whatever is there
            raise Failed(f"{self._url}: what answers there does not speak HTTP") from None
        finally:
            opened.close()

    def _document(self, method: str, path: str, body: str | None, seconds: float) -> Any:
        status, answer = self.ask(method, path, body, seconds)
        if status != 200:
            raise Failed(f"{self._url}: {_error(answer) or f'HTTP status {status}'}")
        try:
            return json.loads(answer or b"{}")
        except ValueError:
            raise Failed(f"{self._url}: not an answer of a model server") from None


def _error(body: bytes) -> str:
    try:
        message = str(json.loads(body)["error"])
        return message if message.isprintable() else repr(message)
    except (ValueError, KeyError, TypeError):
        return ""
