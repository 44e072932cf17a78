"""OpenAI's format of responses without a server: what is read, and what is rejected and how."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest

from carpool.errors import InvalidInput
from carpool.extensions.text.responses_format import read_response

PICTURE = b"\x89PNG no picture, and it is not decoded here"
URL = "data:image/png;base64," + base64.b64encode(PICTURE).decode()
IMAGE: dict[str, Any] = {"type": "input_image", "image_url": URL, "detail": "auto"}
TEXT: dict[str, Any] = {"type": "input_text", "text": "What does it say?"}


def user(*parts: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(parts)}


def request(*messages: Any, **more: Any) -> bytes:
    return orjson.dumps({"model": "reader", "input": list(messages) or [user(IMAGE)], **more})


def rejected(body: bytes) -> InvalidInput:
    with pytest.raises(InvalidInput) as found:
        read_response(body)
    return found.value


def test_all_that_is_said_is_the_prompt() -> None:
    earlier = {"role": "assistant", "content": [{"type": "output_text", "text": "Yes."}]}
    asked = read_response(
        request({"role": "developer", "content": "Lines."}, earlier, user(TEXT, IMAGE), instructions="Read.")
    )
    assert asked.chat.picture == PICTURE
    assert asked.chat.prompt == "Read.\nLines.\nYes.\nWhat does it say?"
    assert asked.instructions == "Read."


def test_what_asks_for_nothing_else_passes() -> None:
    asked = read_response(
        request(
            store=False,
            temperature=0,
            reasoning=None,
            text={"format": {"type": "text"}},
            truncation="disabled",
            include=[],
            metadata={"a": "b"},
            stream=True,
            stream_options={"include_obfuscation": False},
            max_output_tokens=7,
        )
    )
    assert (asked.chat.max_tokens, asked.chat.stream, asked.metadata) == (7, True, {"a": "b"})


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"temperature": 1}, "temperature"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"instructions": [IMAGE]}, "instructions"),
        ({"instructions": "a" * 20_000}, "instructions"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": "What is this?"}, "input"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"model": None}, "model"),
    ],
)
def test_what_cannot_be_done_is_named(more: dict[str, Any], field: str) -> None:
    error = rejected(request(**more))
    assert error.field == field
    assert field.split(".")[-1] in error.message


@pytest.mark.parametrize(
    ("items", "field", "says"),
    [
        ([user(TEXT)], "input", "no image"),
        ([user(IMAGE, IMAGE)], "input[0].content[1]", "second image"),
        ([{"role": "system", "content": [IMAGE]}], "input[0].content[0]", "message of the user"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].type", "only messages"),
        ([{"type": 7}], "input[0].type", "only messages"),
        (["hello"], "input[0]", "must be an object"),
        ([user({"type": "input_image", "file_id": "file_1"})], "input[0].content[0].image_url", "not stored"),
        (
            [user({"type": "input_image", "image_url": {"url": URL}})],
            "input[0].content[0].image_url",
            "data:",
        ),
        ([user({"type": "input_file"})], "input[0].content[0].type", "input_image"),
        ([user({"type": "input_text"})], "input[0].content[0].text", "string"),
        ([user({"type": "image_url"})], "input[0].content[0].type", "input_image"),
    ],
)
def test_items_that_cannot_be_read(items: list[Any], field: str, says: str) -> None:
    error = rejected(request(*items))
    assert error.field == field
    assert says in error.message


def test_no_image_is_fetched() -> None:
    error = rejected(request(user({"type": "input_image", "image_url": "https://example.org/a.png"})))
    assert error.field == "input[0].content[0].image_url"
    assert "no image is fetched" in error.message
