"""OpenAI's format of responses, `/v1/responses`, as far as a model that makes text of an image has a use for
it: what a request asks for, and the answer, whole or as events.

Pure functions. As for chats, what is asked for and cannot be done is rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from carpool.config.rules import shown
from carpool.extensions.text.chat_format import (
    IN_BOTH,
    NOTHING_HELD,
    PLAIN,
    TOOLS,
    Chat,
    OtherFields,
    check_fields,
    check_prompt,
    empty,
    one_image,
    read_flag,
    read_limit,
    read_model,
    read_stream_options,
    read_url,
    text_of,
    wrong,
)
from carpool.wire.head import load_object

_LIMIT = "max_output_tokens"
_READ = ("model", "input", "instructions", "stream", "stream_options", _LIMIT)
_ONE_TURN = "a request stands alone: leave it out"
_OTHERS: OtherFields = {
    **IN_BOTH,
    "background": (empty, "responses are not stored: leave it out"),
    "context_management": (empty, _ONE_TURN),
    "conversation": (empty, NOTHING_HELD),
    "include": (empty, "there is nothing more to include: leave it out"),
    "max_tool_calls": (lambda given: type(given) is int, TOOLS),
    "previous_response_id": (empty, NOTHING_HELD),
    "prompt": (empty, "prompts are not stored: leave it out"),
    "prompt_cache_retention": (lambda given: isinstance(given, str), "must be a string"),
    "reasoning": (empty, "models do not reason: leave it out"),
    "text": (
        lambda given: given in ({}, {"format": {"type": "text"}}),
        PLAIN.replace('{"type": "text"}', '{"format": {"type": "text"}}'),
    ),
    "truncation": (lambda given: given in ("auto", "disabled"), "it must be auto or disabled"),
}
_TEXTS = ("input_text", "output_text")
FIRST = 4
"""Events before the first piece of a text."""


class AskedResponse(NamedTuple):
    """Describes one request: what is asked of the model, and what the answer repeats."""

    chat: Chat
    instructions: str | None
    metadata: Mapping[str, Any]


def read_response(body: bytes | bytearray) -> AskedResponse:
    """Raises `InvalidInput` that names the field at fault. A long body takes its time: safe in any thread."""
    document = load_object(body, "request", tensors=False)
    check_fields(document, _READ, _OTHERS)
    model = read_model(document)
    stream = read_flag(document.get("stream"), "stream")
    read_stream_options(document.get("stream_options"), stream, ())
    instructions = document.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", "instructions must be a string")
    picture, prompt = _read_input(document.get("input"))
    prompt = check_prompt("\n".join(filter(None, (instructions, prompt))), "instructions")
    limit = read_limit(document, (_LIMIT,))
    chat = Chat(model, picture, prompt, limit, stream, limit_field=_LIMIT)
    return AskedResponse(chat, instructions, document.get("metadata") or {})


def _read_input(given: object) -> tuple[bytes, str]:
    """Returns the one image, and all that is said."""
    if isinstance(given, list):
        for number, item in enumerate(given):
            kind = item.get("type", "message") if isinstance(item, dict) else "message"
            if kind != "message":
                where = f"input[{number}].type"
                raise wrong(where, f"{where} is {shown(str(kind)[:64])}: only messages are read")
    url, at, prompt = ("", "", "") if isinstance(given, str) else one_image(given, "input", _read_part)
    if not at:
        raise wrong("input", "input has no image: send one as input_image with a data: URL in image_url")
    return read_url(url, f"{at}.image_url"), prompt


def _read_part(part: object, where: str) -> tuple[str, str]:
    """Returns its text, or the address of its image."""
    text = text_of(part, where, _TEXTS, "input_image")
    if text is not None:
        return text, ""
    assert isinstance(part, dict)
    url = part.get("image_url")
    if not isinstance(url, str) or not url:
        why = "files are not stored: send a data: URL" if part.get("file_id") else "it must be a data: URL"
        raise wrong(f"{where}.image_url", f"{where}.image_url is missing: {why}")
    return "", url


# ── answers ──


class ResponseHead(NamedTuple):
    """Holds what the answer and every event of it repeat."""

    number: str  # of the response and of its message, after `resp_` and `msg_`
    created: int  # seconds since 1970
    model: str
    asked: AskedResponse

    @property
    def item(self) -> str:
        return f"msg_{self.number}"


def response(
    head: ResponseHead, status: str, text: str | None, tokens: int, error: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the whole answer; without a text, as it is before the first piece."""
    asked = head.asked
    cut = {"reason": _LIMIT} if status == "incomplete" else None
    counted = {"output_tokens": tokens, "output_tokens_details": {"reasoning_tokens": 0}}
    usage = {"input_tokens": 0, "input_tokens_details": {"cached_tokens": 0}, **counted}
    return {
        "id": f"resp_{head.number}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": cut,
        "instructions": asked.instructions,
        _LIMIT: asked.chat.max_tokens or None,
        "model": head.model,
        "output": [] if text is None else [message(head, status, text)],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 0.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None if text is None else usage | {"total_tokens": tokens},
        "metadata": asked.metadata,
    }


def message(head: ResponseHead, status: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [part(text)]
    return {"id": head.item, "type": "message", "status": status, "role": "assistant", "content": content}


def part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def event(kind: str, number: int, document: Mapping[str, Any]) -> bytes:
    """Returns a whole event, whose name stands in its data, too. `number` counts those of one answer."""
    data = orjson.dumps({"type": kind, "sequence_number": number, **document})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def begin_events(head: ResponseHead) -> list[bytes]:
    """Returns the FIRST events, before the first piece."""
    about = {"response": response(head, "in_progress", None, 0)}
    item = {"output_index": 0, "item": message(head, "in_progress", None)}
    return [
        event("response.created", 0, about),
        event("response.in_progress", 1, about),
        event("response.output_item.added", 2, item),
        event("response.content_part.added", 3, {**_place(head), "part": part("")}),
    ]


def text_event(head: ResponseHead, text: str, number: int) -> bytes:
    return event("response.output_text.delta", number, {**_place(head), "delta": text, "logprobs": []})


def end_events(head: ResponseHead, status: str, text: str, tokens: int, number: int) -> list[bytes]:
    """Returns the events behind the last piece: the whole text, and the whole answer."""
    item = {"output_index": 0, "item": message(head, status, text)}
    ended = {"response": response(head, status, text, tokens)}
    return [
        event("response.output_text.done", number, {**_place(head), "text": text, "logprobs": []}),
        event("response.content_part.done", number + 1, {**_place(head), "part": part(text)}),
        event("response.output_item.done", number + 2, item),
        event(f"response.{status}", number + 3, ended),
    ]


def error_events(head: ResponseHead, error: Mapping[str, Any], number: int) -> list[bytes]:
    """Returns the events for an error after the first piece: OpenAI's form of one, and the failed answer."""
    said = {"code": error.get("code"), "message": error["message"], "param": error.get("param")}
    failed = {"code": "server_error", "message": error["message"]}
    ended = {"response": response(head, "failed", None, 0, failed)}
    return [event("error", number, said), event("response.failed", number + 1, ended)]


def _place(head: ResponseHead) -> dict[str, Any]:
    return {"item_id": head.item, "output_index": 0, "content_index": 0}
