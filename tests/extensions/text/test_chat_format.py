"""OpenAI's chat format without a server: what is read, what is refused and how, and what is answered."""

from __future__ import annotations

import base64
import json
from typing import Any

import orjson
import pytest

from carpool.errors import InvalidInput
from carpool.extensions.text.chat_format import (
    Head,
    as_error,
    completion,
    first_chunk,
    last_chunks,
    read_chat,
    text_chunk,
)

PICTURE = b"\x89PNG no picture, and nobody looks here"
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": URL}}
TEXT: dict[str, Any] = {"type": "text", "text": "What does it say?"}
HEAD = Head("chatcmpl-1", 1794873600, "reader")


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def request(*messages: Any, **more: Any) -> bytes:
    return orjson.dumps({"model": "reader", "messages": list(messages) or [user(IMAGE)], **more})


def refused(body: bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as found:
        read_chat(body)
    return found.value


def test_a_picture_alone_is_enough() -> None:
    chat = read_chat(request())
    assert chat == ("reader", PICTURE, "", 0, False, False, "max_tokens")


def test_what_is_said_beside_it() -> None:
    messages = [{"role": "system", "content": "You read lines."}, user(TEXT, IMAGE)]
    chat = read_chat(request(*messages, max_completion_tokens=20, stream=True, stream_options={}))
    assert (chat.prompt, chat.max_tokens, chat.stream) == ("You read lines.\nWhat does it say?", 20, True)


def test_usage_can_be_asked_for() -> None:
    assert read_chat(request(stream=True, stream_options={"include_usage": True})).include_usage


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": None, "n": 1, "top_p": 1.0, "seed": 7, "user": "somebody"},
        {"tools": [], "tool_choice": "none", "stop": None, "response_format": {"type": "text"}},
        {"max_tokens": 5, "max_completion_tokens": 5, "logprobs": False, "metadata": {"a": "b"}},
    ],
)
def test_what_asks_for_nothing_else_passes(more: dict[str, Any]) -> None:
    assert read_chat(request(**more)).picture == PICTURE


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"temperature": 0.7}, "temperature"),
        ({"temperature": "0"}, "temperature"),
        ({"top_p": 0.9}, "top_p"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_completion_tokens": 1 << 21}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["."]}, "stop"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"model": ""}, "model"),
        ({"model": 7}, "model"),
        ({"temprature": 0}, "temprature"),
        ({"messages": []}, "messages"),
        ({"messages": "read this"}, "messages"),
        ({"messages": [user(IMAGE)] * 65}, "messages"),
    ],
)
def test_what_cannot_be_done_is_named(more: dict[str, Any], field: str) -> None:
    error = refused(request(**more))
    assert error.field == field
    assert field.split(".")[-1] in error.message


@pytest.mark.parametrize(
    ("messages", "field", "says"),
    [
        ([user(TEXT)], "messages", "no message has an image"),
        ([user(IMAGE, IMAGE)], "messages[0].content[1]", "second image"),
        ([user(IMAGE), user(IMAGE)], "messages[1].content[0]", "second image"),
        ([{"role": "system", "content": [IMAGE]}], "messages[0].content[0]", "message of the user"),
        ([{"role": "tool", "content": "x"}, user(IMAGE)], "messages[0].role", '"tool"'),
        ([{"role": None, "content": "x"}], "messages[0].role", "must be"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "must be"),
        (["hello"], "messages[0]", "must be an object"),
        (
            [user({"type": "input_audio", "input_audio": {}})],
            "messages[0].content[0].type",
            "audio is not supported",
        ),
        ([user({"type": "video_url"})], "messages[0].content[0].type", "video_url"),
        ([user({"text": "x"})], "messages[0].content[0].type", "with a type"),
        ([user("hello")], "messages[0].content[0].type", "with a type"),
        ([user({"type": "text"})], "messages[0].content[0].text", "string"),
        ([user({"type": "image_url", "image_url": URL})], "messages[0].content[0].image_url.url", "object"),
        ([{"role": "user", "content": 7}], "messages[0].content", "text, or a list"),
        ([user(*[TEXT] * 65)], "messages[0].content", "at most 64"),
        ([user({"type": "text", "text": "a" * 20_000}, IMAGE)], "messages", "16384"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls", "tools"),
    ],
)
def test_messages_that_cannot_be_read(messages: list[Any], field: str, says: str) -> None:
    error = refused(request(*messages))
    assert error.field == field
    assert says in error.message


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://example.org/line.png", "no image is fetched"),
        ("http://127.0.0.1:1/x", "no image is fetched"),
        ("file:///etc/passwd", "no image is fetched"),
        ("data:image/png,plain", "not in base64"),
        ("data:image/png;base64", "not in base64"),
        ("data:image/png;base64,", "holds no image"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,ab=c", "not valid base64"),
        ("data:image/png;base64,äöü", "not valid base64"),
    ],
)
def test_addresses_that_are_no_picture(url: str, says: str) -> None:
    error = refused(request(user({"type": "image_url", "image_url": {"url": url}})))
    assert error.field == "messages[0].content[0].image_url.url"
    assert says in error.message


def test_lines_that_an_encoder_broke_are_joined() -> None:
    url = URL[:40] + "\r\n" + URL[40:]
    assert read_chat(request(user({"type": "image_url", "image_url": {"url": url}}))).picture == PICTURE


def test_of_two_values_with_one_name_the_last_is_read_and_checked() -> None:
    body = request(n=3)
    assert read_chat(body[:-1] + b',"n":1}').picture == PICTURE
    assert refused(request(n=1)[:-1] + b',"n":3}').field == "n"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000, b'{"a":' * 2000]
)
def test_what_is_no_json(body: bytes) -> None:
    assert refused(body).field == "body"


def test_a_list_of_lists_is_not_read_for_long() -> None:
    assert refused(b'{"model":"m","messages":[' + b"[]," * 2_000_000 + b"0]}").field == "body"


def test_an_answer() -> None:
    document = json.loads(completion(HEAD, "Total 207.15", "length", 12))
    [choice] = document["choices"]
    assert document["object"] == "chat.completion"
    assert choice["message"]["content"] == "Total 207.15"
    assert choice["finish_reason"] == "length"
    assert document["usage"] == {"prompt_tokens": 0, "completion_tokens": 12, "total_tokens": 12}


@pytest.mark.parametrize("usage", [True, False])
def test_the_pieces_of_an_answer(usage: bool) -> None:
    pieces = [first_chunk(HEAD, include_usage=usage), text_chunk(HEAD, "Total", include_usage=usage)]
    pieces += last_chunks(HEAD, "stop", 5, include_usage=usage)
    assert pieces.pop() == b"[DONE]"
    documents = list(map(json.loads, pieces))
    assert {one["id"] for one in documents} == {"chatcmpl-1"}
    assert {one["object"] for one in documents} == {"chat.completion.chunk"}
    deltas = [one["choices"][0]["delta"] for one in documents if one["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "Total"}, {}]
    finishes = [one["choices"][0]["finish_reason"] for one in documents if one["choices"]]
    assert finishes == [None, None, "stop"]
    assert ("usage" in documents[0]) is usage
    assert (documents[-1]["choices"] == []) is usage
    if usage:
        assert documents[0]["usage"] is None
        assert documents[-1]["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (429, "rate_limit_error"),
        (503, "server_error"),
        (504, "server_error"),
    ],
)
def test_errors(status: int, kind: str) -> None:
    said = {"error": "no", "reason": "overload", "field": "n", "predicted_ms": 40.0, "retry_after_s": 0.5}
    same, document = as_error(status, said)
    assert same == status
    error = document["error"]
    assert error["type"] == kind
    assert (error["message"], error["code"], error["param"]) == ("no", "overload", "n")
    assert error["predicted_ms"] == 40.0
