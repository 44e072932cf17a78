"""Answers in pieces that nobody reads, chats whose pictures are none, and sequences that never end."""

import base64
import contextlib
import io
import json
import time
from functools import cache, partial
from itertools import count

from PIL import Image

from attacks.attacker import Attack, Pace, Ports, ask, connected, post, read_answer

_CHAT = "/v1/chat/completions"
_MANY = 60 << 20  # characters
_BEFORE = b'{"model":"writer","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"'
_AFTER = b'"}}]}],"stream":%b}'
_URL = b"data:image/png;base64,"
_numbers = count(1)


def _file(side: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (side, side)).save(file, "PNG")
    return file.getvalue()


@cache
def _chat(kind: str) -> bytes:
    """With a picture, with one of many pixels in few bytes, or with what only looks like one."""
    pictures = {"picture": 64, "bomb": 7000}
    if kind in pictures:
        url = base64.b64encode(_file(pictures[kind]))
    else:
        piece = {"long": b"AAAA", "blanks": b"AA A "}[kind]
        url = piece * (_MANY // len(piece) // (3 if kind == "long" else 1))
    return _BEFORE + _URL + url + _AFTER % (b"true" if kind == "picture" else b"false")


def unread_events(ports: Ports, pace: Pace) -> None:
    """Streams of a hundred connections, none of which is read."""
    request = post(_CHAT, len(_chat("picture"))) + _chat("picture")
    with contextlib.ExitStack() as held:
        for _ in range(100):
            client = held.enter_context(connected(ports.http))
            client.sendall(request)
            pace.rest()
        time.sleep(1.0)


def left_events(ports: Ports, pace: Pace) -> None:
    """Whoever gets the first event leaves."""
    request = post(_CHAT, len(_chat("picture"))) + _chat("picture")
    for _ in range(20):
        with connected(ports.http) as client:
            client.sendall(request)
            client.recv(256)
        pace.rest()


def chats(kind: str, ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        ask(client, post(_CHAT, len(_chat(kind))), _chat(kind), pace)


@cache
def _lists() -> bytes:
    return b'{"x":[' + b"[0]," * 15_000_000 + b"0]}"


def lists(ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        ask(client, post("/v2/models/free/generate", len(_lists())), _lists(), pace)


def open_sequences(ports: Ports, pace: Pace) -> None:
    """Each is started and none is ended. Whoever has no place waits; the next round has other names."""
    with contextlib.ExitStack() as held:
        clients = []
        for _ in range(200):
            parameters = {"sequence_id": next(_numbers), "sequence_start": True}
            tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [0, 0]}
            body = json.dumps({"parameters": parameters, "inputs": [tensor]}).encode()
            clients.append(held.enter_context(connected(ports.http)))
            clients[-1].sendall(post("/v2/models/tracker/infer", len(body)) + body)
            pace.rest()
        clients[0].settimeout(0.5)
        read_answer(clients[0])


ATTACKS = {
    "events that nobody reads": Attack(unread_events, partial(_chat, "picture")),
    "events that are left": Attack(left_events, partial(_chat, "picture")),
    "chats with 20 MB of nothing": Attack(partial(chats, "long"), partial(_chat, "long")),
    "chats with 60 MB of blanks": Attack(partial(chats, "blanks"), partial(_chat, "blanks")),
    "chats with PNG bombs": Attack(partial(chats, "bomb"), partial(_chat, "bomb")),
    "generate: 60 MB of JSON lists": Attack(lists, _lists),
    "sequences that never end": Attack(open_sequences),
}
