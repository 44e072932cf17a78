"""Chats that are nearly right, or not at all: each is answered, or refused with what is wrong named."""

from __future__ import annotations

import base64
import copy
import json
import os
from random import Random
from time import monotonic
from typing import Any

import orjson

from carpool.wire.event_lines import EventReader
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Response
from frontend.picture_models import RED, detector, picture, writer

JPEG = picture(RED)
SECONDS = float(os.environ.get("CARPOOL_FUZZ_S", "0"))  # beyond the few that are always tried
ALWAYS = 400
FIELDS = [
    "model",
    "messages",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "user",
    "tools",
    "tool_choice",
    "response_format",
    "logprobs",
    "modalities",
    "store",
    "metadata",
    "audio",
    "functions",
    "role",
    "content",
    "type",
    "text",
    "image_url",
    "url",
    "detail",
    "name",
]
TEXTS = (
    *(
        "",
        " ",
        "writer",
        "teller",
        "nanodet",
        "no such model",
        "user",
        "assistant",
        "text",
        "image_url",
        "auto",
    ),
    *("\x00", "\ud800", "\u202e\u0000ﷺ", "😀" * 50, "a" * 70_000, "../../etc/passwd", "%00", "NaN"),
)
NUMBERS = (0, 1, -1, 2, 0.0, -0.0, 0.5, 1e308, -1e308, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 5e-324)


def url(random: Random) -> str:
    """Of a picture, or of what is none."""
    whole = base64.b64encode(JPEG).decode()
    cut = random.randrange(len(whole))
    data = random.choice(
        (
            whole,
            whole,
            whole[:cut],
            whole[:cut] + "!" + whole[cut:],
            "",
            "====",
            "A" * random.randrange(300_000),
        )
    )
    kind = random.choice(("image/jpeg", "image/png", "image/svg+xml", "text/html", "", "image/" + "x" * 5000))
    head = random.choice((f"data:{kind};base64,", f"data:{kind},", f"data:{kind};charset=utf-8;base64,"))
    others = ("http://127.0.0.1/x", "file:///etc/passwd", "data:", "data:,", "DATA:image/png;BASE64," + whole)
    return random.choice(others) if random.random() < 0.15 else head + data


def anything(random: Random, depth: int = 0) -> Any:
    choice = random.randrange(8 if depth < 4 else 5)
    if choice < 2:
        return random.choice((None, True, False, *NUMBERS))
    if choice < 4:
        return random.choice(TEXTS)
    if choice == 4:
        return url(random)
    several = range(random.choice((0, 1, 2, 70)) if depth < 2 else 1)
    if choice == 5:
        return [anything(random, depth + 1) for _ in several]
    return {random.choice((*FIELDS, *TEXTS[:10])): anything(random, depth + 1) for _ in several}


def sound(random: Random) -> dict[str, Any]:
    picture_part = {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,"}}
    picture_part["image_url"]["url"] += base64.b64encode(JPEG).decode()  # type: ignore[index]
    messages = [{"role": "user", "content": [{"type": "text", "text": "Read"}, picture_part]}]
    return {"model": "writer", "messages": messages, "stream": random.random() < 0.5, "max_tokens": 20}


def spoilt(random: Random, document: dict[str, Any]) -> dict[str, Any]:
    """Some places in it are something else."""
    for _ in range(random.choice((0, 1, 1, 2, 5))):
        place: Any = document
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys or random.random() < 0.2:
                if isinstance(place, dict):
                    place[random.choice(FIELDS)] = anything(random)
                break
            key = random.choice(keys)
            if not isinstance(place[key], dict | list) or random.random() < 0.3:
                if random.random() < 0.2:
                    del place[key]
                else:
                    place[key] = copy.deepcopy(anything(random))
                break
            place = place[key]
    return document


def body(random: Random) -> bytes:
    whole = json.dumps(spoilt(random, sound(random)) if random.random() < 0.8 else anything(random))
    sent = bytearray(whole.encode("utf-8", "surrogatepass"))
    odd = random.random()
    if odd < 0.05:
        del sent[random.randrange(len(sent) + 1) :]
    elif odd < 0.1 and sent:
        sent[random.randrange(len(sent))] = random.randrange(256)
    elif odd < 0.13:
        deep = random.choice((100, 5000, 100_000))
        sent[:] = random.choice((b"[", b'{"a":')) * deep
    return bytes(sent)


def is_object(sent: bytes) -> bool:
    try:
        return isinstance(orjson.loads(sent), dict)
    except ValueError:
        return False


def check(sent: bytes, answer: Response) -> None:
    what = (answer.status, answer.body[:300], sent[:2000])
    if answer.status == 200:
        if answer.fields["content-type"].startswith("text/event-stream"):
            *_, last = EventReader().feed(answer.body)
            assert last == b"[DONE]", what
        else:
            assert json.loads(answer.body)["choices"], what
        return
    assert 400 <= answer.status < 500, what
    error = json.loads(answer.body)["error"]
    if answer.status == 413:  # it was not read, and nobody knows what it was
        return
    assert error["message"], what
    if answer.status == 400 and is_object(sent):
        assert error["param"] is not None, what


def fuzz(found: FrontEnd, seed: int) -> int:
    """The status."""
    random = Random(seed)
    sent = body(random)
    with found.connect() as client:
        answer = client.post("/v1/chat/completions", sent, b"Content-Type: application/json\r\n")
    check(sent, answer)
    return answer.status


def test_every_chat_is_answered_or_refused() -> None:
    """CARPOOL_FUZZ_S=300 goes on for five minutes, from another seed each time."""
    with front_end(writer(), writer("teller", "caption"), detector()) as found:
        seen = [fuzz(found, seed) for seed in range(ALWAYS)]
        assert {200, 400, 404} <= set(seen)
        first, until = Random().randrange(1 << 30), monotonic() + SECONDS
        while monotonic() < until:
            first += 1
            fuzz(found, first)
        found.until_slots_are_back()
