"""Sends requests that were mutated from recorded ones to a front end, and looks at what is answered.

Whatever is sent, the answer is one of the protocol, the server has no failure of its own, and no key stands
in the log.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from later import later

KEY = ALICE
NOW, ALL = 250, 5000
"""Requests for each protocol in `make test`, and in `make conformance`."""

_VALUES: Sequence[Any] = (
    *(None, True, False, 0, -1, 1e308, 2**53, "", " ", "\0", "é" * 50, "a" * 5000, [], {}, [[]], {"a": {}}),
    *("data:", "data:image/png;base64,", "http://", "https://[::1", "upload:", "../..", KEY, 10**30),
)
_BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b"]",
    b'"',
    b"\r\n",
    b"--",
    b"\\u",
    b"%",
    b"\x89PNG",
    b"\xff\xd8\xff",
)


class Recorded(NamedTuple):
    """One request of a client."""

    method: str
    target: str
    body: bytes = b""
    fields: Mapping[str, str] = {}


def mutated(recorded: Recorded, chance: random.Random) -> Recorded:
    """Returns the request with one to three changes: of a value in its JSON, or of bytes anywhere."""
    for _ in range(chance.randint(1, 3)):
        recorded = chance.choice((_json, _json, _json, _bytes, _target, _fields))(recorded, chance)
    return recorded


def _json(recorded: Recorded, chance: random.Random) -> Recorded:
    try:
        document = json.loads(recorded.body)
    except ValueError:
        return _bytes(recorded, chance)
    places = list(_places(document))
    if not places:
        return recorded._replace(body=json.dumps(chance.choice(_VALUES)).encode())
    holder, key = chance.choice(places)
    action = chance.randrange(4)
    if action == 0:
        del holder[key]
    elif action == 1 and isinstance(holder, list):
        holder += [holder[key]] * chance.choice((1, 70))
    elif action == 1:
        holder[chance.choice(("x", "", KEY, str(key) * 2))] = chance.choice(_VALUES)
    elif action == 2 and isinstance(holder[key], str):
        holder[key] = _cut(holder[key], chance)
    else:
        holder[key] = chance.choice(_VALUES)
    return recorded._replace(body=json.dumps(document).encode())


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    if not isinstance(document, dict | list):
        return
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(inside):
        yield document, key
        yield from _places(value)


def _cut(text: str, chance: random.Random) -> str:
    place = chance.randrange(len(text) + 1)
    return text[:place] + chance.choice(("", "=", "\n", "%", "é", text)) + text[place + chance.randrange(4) :]


def _bytes(recorded: Recorded, chance: random.Random) -> Recorded:
    place = chance.randrange(len(recorded.body) + 1)
    rest = recorded.body[place + chance.choice((0, 1, 100)) :]
    return recorded._replace(body=recorded.body[:place] + chance.choice(_BYTES) + rest)


def _target(recorded: Recorded, chance: random.Random) -> Recorded:
    path, _, query = recorded.target.partition("?")
    parts = path.split("/")
    if chance.random() < 0.5 and len(parts) > 2:
        parts[-1] = chance.choice(("nobody", "%20", "a%2Fb", "-1", parts[-1] * 2))
    more = chance.choice(("a=1", "confidence=-1", "confidence=x", "model=finder&model=x", "é".encode().hex()))
    return recorded._replace(
        target=f"{'/'.join(parts)}?{query}&{more}" if query else f"{'/'.join(parts)}?{more}"
    )


def _fields(recorded: Recorded, chance: random.Random) -> Recorded:
    name = chance.choice((*recorded.fields, "Content-Type", "Accept"))
    value = chance.choice(("", "text/plain", "application/json", "multipart/form-data", "image/png", "a;b=c"))
    return recorded._replace(fields={**recorded.fields, name: value})


def send(client: Client, recorded: Recorded) -> Response:
    fields = "".join(f"{name}: {value}\r\n" for name, value in recorded.fields.items())
    length = f"Content-Length: {len(recorded.body)}\r\n" if recorded.method != "GET" else ""
    head = f"{recorded.method} {recorded.target} HTTP/1.1\r\nHost: localhost\r\n{length}{fields}\r\n"
    client.send(head.encode("utf-8") + (recorded.body if recorded.method != "GET" else b""))
    return client.response()


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.getMessage()} {record.__dict__}")


@contextmanager
def log_lines() -> Iterator[list[str]]:
    """Gathers what is logged meanwhile, with all fields."""
    handler, root = _Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield handler.lines
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


COUNTS = [NOW, later(ALL)]
JSON = {"Content-Type": "application/json"}


def check_mutations(
    api: str,
    recorded: Sequence[Recorded],
    is_answer: Callable[[int, Any], bool],
    count: int,
    folder: Path,
    *models: FakeModel,
    answers: Mapping[str, Any] | None = None,
) -> None:
    """`api` is empty for routes that are always on. `is_answer` is given the status and the document of each
    answer; `answers` are of the engine. Keys are asked for; each recorded request is sent as it is first, and
    then has to be answered well."""
    settings = ServerSettings(api=(api,) if api else (), cache_dir=folder / "cache")
    with front_end(*models, guard=Guard(api_key_file=api_keys(folder)), settings=settings) as served:
        served.door.answers.update(answers or {})
        _check(served, recorded, is_answer, count)


def _check(
    served: FrontEnd, recorded: Sequence[Recorded], is_answer: Callable[[int, Any], bool], count: int
) -> None:
    chance = random.Random(1)
    with log_lines() as lines:
        client = served.connect()
        for number in range(-len(recorded), count):
            asked = recorded[number] if number < 0 else mutated(chance.choice(recorded), chance)
            try:
                response = send(client, asked)
            except TimeoutError as error:
                raise AssertionError(f"{number}: {asked} got no answer") from error
            what = f"{number}: {asked} got {response.status} {response.body[:300]!r}"
            assert response.status < (300 if number < 0 else 500), what
            document = orjson.loads(response.body) if response.body else None
            assert is_answer(response.status, document), what
            if response.fields.get("connection", "") == "close":
                client.socket.close()
                client = served.connect()
        client.socket.close()
    assert not [line for line in lines if KEY in line]
    assert not [line for line in lines if "Traceback" in line or "failed on" in line]
