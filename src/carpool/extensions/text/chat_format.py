"""OpenAI's chat format, as far as a model that makes text of a picture has a use for it: what a request asks
for, and answers, pieces of them and errors in its words.

Pure functions. What is asked for and cannot be done is refused by name: an answer that looks right but leaves
out what was asked would be worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import orjson

from carpool.config.rules import nearest, shown
from carpool.errors import InvalidInput
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.wire.head import load_object

MOST_TOKENS = 1 << 20
_MOST_MESSAGES = 64
_MOST_PARTS = 64  # of a message
_MOST_PROMPT = 16 * 1024  # characters, of all messages
_ROLES = ("system", "developer", "user", "assistant")
_EITHER_ROLE = f"{', '.join(_ROLES[:-1])} or {_ROLES[-1]}"
_ONE_PICTURE = "data:image/png;base64,…"


class Chat(NamedTuple):
    """One request: a picture, what is said beside it, and how it is to be answered."""

    model: str
    picture: bytes
    prompt: str = ""
    max_tokens: int = 0  # 0: as many as the model writes
    stream: bool = False
    include_usage: bool = False
    limit_field: str = "max_tokens"  # the field of the request that limits the tokens


def read_chat(body: bytes | bytearray) -> Chat:
    """Raises `InvalidInput` that names the field at fault. A long body takes its time: safe in any thread."""
    document = load_object(body, "request", tensors=False)
    check_fields(document, _READ, _HARMLESS)
    model = read_model(document)
    stream = read_flag(document.get("stream"), "stream")
    include_usage = read_stream_options(document.get("stream_options"), stream, ("include_usage",))
    picture, prompt = _read_messages(document.get("messages"))
    return Chat(model, picture, prompt, read_limit(document, _LIMITS), stream, include_usage)


def wrong(field: str, message: str) -> InvalidInput:
    return InvalidInput(message, field=field)


def check_fields(document: Mapping[str, Any], read: Sequence[str], others: OtherFields) -> None:
    """Rejects fields that are not known, and values that ask for what is not done. `read` are the names of
    fields that are looked at elsewhere."""
    for name, value in document.items():
        if name in read:
            continue
        if name not in others:
            raise wrong(name[:64], f"unknown {shown(name)}; {nearest(name, (*read, *others))}")
        allowed, why = others[name]
        if value is not None and not allowed(value):
            raise wrong(name, f"{name}: {why}")


def read_model(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    if not isinstance(model, str) or not model:
        raise wrong("model", "model must be the name of a model: GET /v1/models lists them")
    return model


def read_flag(value: object, field: str) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    raise wrong(field, f"{field} must be true or false")


def read_stream_options(options: object, stream: bool, known: Sequence[str]) -> bool:
    """Returns whether the last event has the count of tokens. `include_obfuscation` has no effect."""
    if options is None:
        return False
    if not stream:
        raise wrong("stream_options", "stream_options go with stream: true")
    if not isinstance(options, dict):
        raise wrong("stream_options", "stream_options must be an object")
    known = (*known, "include_obfuscation")
    for name in options:
        if name not in known:
            raise wrong(f"stream_options.{name[:64]}", f"unknown {shown(name)}; {known[0]} is known")
    return read_flag(options.get("include_usage"), "stream_options.include_usage")


def read_limit(document: Mapping[str, Any], names: Sequence[str]) -> int:
    """Returns the limit of tokens, 0 for none. Where OpenAI has two names for it, both must agree."""
    given = {name: document[name] for name in names if document.get(name) is not None}
    for name, value in given.items():
        if type(value) is not int or not 1 <= value <= MOST_TOKENS:
            raise wrong(name, f"{name} must be a whole number from 1 to {MOST_TOKENS}")
    if len(set(given.values())) > 1:
        raise wrong(names[0], f"{' and '.join(names)} contradict each other: give one")
    return next(iter(given.values()), 0)


# ── messages ──


def _read_messages(messages: object) -> tuple[bytes, str]:
    """Returns the one picture, and all that is said."""
    url, at, prompt = one_image(messages, "messages", _read_part)
    if not at:
        raise wrong("messages", f"no message has an image: send one as image_url with the url {_ONE_PICTURE}")
    return read_url(url, f"{at}.image_url.url"), prompt


def one_image(messages: object, field: str, read_part: ReadPart) -> tuple[str, str, str]:
    """Returns the address of the one image in messages, the name of its part in errors, and all that is
    said. Without an image, both names are empty."""
    if not isinstance(messages, list) or not 1 <= len(messages) <= _MOST_MESSAGES:
        raise wrong(field, f"{field} must be a list of 1 to {_MOST_MESSAGES} messages")
    url, at, said = "", "", []
    for number, message in enumerate(messages):
        where = f"{field}[{number}]"
        role, content = _read_message(message, where)
        if isinstance(content, str):
            said.append(content)
            continue
        for inside, part in _parts(content, f"{where}.content"):
            text, found = read_part(part, inside)
            if not found:
                said.append(text)
                continue
            if role != "user":
                raise wrong(inside, f"{inside}: an image belongs in a message of the user, not of {role}")
            if at:
                raise wrong(inside, f"{inside} is a second image, but a request has one")
            url, at = found, inside
    return url, at, check_prompt("\n".join(said), field)


def check_prompt(prompt: str, field: str) -> str:
    if len(prompt) > _MOST_PROMPT:
        raise wrong(field, f"{field}: the text of all messages is over {_MOST_PROMPT} characters")
    return prompt


def _read_message(message: object, where: str) -> tuple[str, object]:
    if not isinstance(message, dict):
        raise wrong(where, f"{where} must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        given = f", not {shown(role)}" if isinstance(role, str) else ""
        raise wrong(f"{where}.role", f"{where}.role must be {_EITHER_ROLE}{given}")
    for name in ("tool_calls", "function_call", "audio"):
        if message.get(name):
            raise wrong(f"{where}.{name}", f"{where}.{name}: {TOOLS if name != 'audio' else SOUND}")
    return role, message.get("content")


def _parts(content: object, where: str) -> Sequence[tuple[str, object]]:
    """Returns them with their names in errors."""
    if content is None:
        return ()
    if not isinstance(content, list) or len(content) > _MOST_PARTS:
        raise wrong(where, f"{where} must be text, or a list of at most {_MOST_PARTS} parts")
    return [(f"{where}[{number}]", part) for number, part in enumerate(content)]


def _read_part(part: object, where: str) -> tuple[str, str]:
    """Returns its text, or the address of its picture."""
    text = text_of(part, where, ("text",), "image_url")
    if text is not None:
        return text, ""
    assert isinstance(part, dict)
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else None
    if not isinstance(url, str) or not url:
        raise wrong(
            f"{where}.image_url.url",
            f'{where}.image_url must be an object like {{"url": "{_ONE_PICTURE}"}}',
        )
    return "", url


def text_of(part: object, where: str, texts: Sequence[str], image: str) -> str | None:
    """Returns the text of a part, and nothing for an image. The types of both are given."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise wrong(f"{where}.type", f"{where} must be an object with a type: {texts[0]} or {image}")
    if kind in texts:
        text = part.get("text")
        if not isinstance(text, str):
            raise wrong(f"{where}.text", f"{where}.text must be a string")
        return text
    if kind != image:
        why = SOUND if "audio" in kind else f"it must be {texts[0]} or {image}"
        raise wrong(f"{where}.type", f"{where}.type is {shown(kind)}: {why}")
    return None


def read_url(url: str, where: str) -> bytes:
    if url[:5].lower() != "data:":
        raise wrong(
            where,
            f"{where} must be a data: URL: no image is fetched from {shown(url[:60])}",
        )
    picture = from_base64(url, where)
    if not picture:
        raise wrong(where, f"{where} holds no image")
    return picture


# ── what else a request may say ──

_LIMITS = ("max_completion_tokens", "max_tokens")
_READ = ("model", "messages", "stream", "stream_options", *_LIMITS)
_GREEDY = "decoding is greedy, without sampling: leave it out"
TOOLS = "tools are not supported: leave them out"
SOUND = "audio is not supported, only images and text"
_ONE = "there is one response per image: leave it out, or give 1"
_NO_NUMBERS = "probabilities of tokens are not reported: leave it out"
PLAIN = 'responses are plain text: leave it out, or give {"type": "text"}'
NOTHING_HELD = "responses are not stored: leave it out"

Allowed = Callable[[Any], bool]
OtherFields: TypeAlias = Mapping[str, tuple[Allowed, str]]
"""Fields that ask for nothing that is not done anyway, and what is said to any other value of them."""
ReadPart: TypeAlias = Callable[[object, str], tuple[str, str]]
"""Returns the text of a part of a message, or the address of its image."""


def _number(value: float) -> Allowed:
    return lambda given: not isinstance(given, bool) and given == value


def empty(given: object) -> bool:
    return given in ([], {}, "", False)


def _text(given: object) -> bool:
    return isinstance(given, str) and len(given) <= 512


IN_BOTH: OtherFields = {
    "temperature": (_number(0), _GREEDY),
    "top_p": (_number(1), _GREEDY),
    "top_logprobs": (_number(0), _NO_NUMBERS),
    "tools": (empty, TOOLS),
    "tool_choice": (lambda given: given in ("none", "auto"), TOOLS),
    "parallel_tool_calls": (lambda given: isinstance(given, bool), "must be true or false"),
    "store": (empty, NOTHING_HELD),
    "metadata": (lambda given: isinstance(given, dict), "must be an object"),
    "user": (_text, "must be a string of at most 512 characters"),
    "safety_identifier": (_text, "must be a string of at most 512 characters"),
    "prompt_cache_key": (_text, "must be a string of at most 512 characters"),
    "service_tier": (lambda given: given in ("auto", "default"), "there is one: leave it out"),
}
"""Fields of chats and of responses."""
_HARMLESS: OtherFields = {
    **IN_BOTH,
    "top_k": (_number(1), _GREEDY),
    "n": (_number(1), _ONE),
    "presence_penalty": (_number(0), _GREEDY),
    "frequency_penalty": (_number(0), _GREEDY),
    "logit_bias": (empty, _GREEDY),
    "seed": (lambda given: type(given) is int, "must be a whole number"),
    "stop": (empty, "stop sequences are not supported: leave it out"),
    "logprobs": (empty, _NO_NUMBERS),
    "functions": (empty, TOOLS),
    "function_call": (lambda given: given in ("none", "auto"), TOOLS),
    "response_format": (lambda given: given == {"type": "text"}, PLAIN),
    "modalities": (lambda given: given == ["text"], SOUND),
    "audio": (empty, SOUND),
}


# ── answers ──


class Head(NamedTuple):
    """Holds what the answer and every piece of it repeat."""

    id: str
    created: int  # seconds since 1970
    model: str


def completion(head: Head, text: str, finish: str, tokens: int) -> bytes:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    return orjson.dumps(_headed(head, "chat.completion", [choice], usage=_usage(tokens)))


def first_chunk(head: Head, *, include_usage: bool) -> bytes:
    """Says who speaks, before there is anything to say."""
    return _chunk(head, {"role": "assistant", "content": ""}, None, include_usage)


def text_chunk(head: Head, text: str, *, include_usage: bool) -> bytes:
    return _chunk(head, {"content": text}, None, include_usage)


def last_chunks(head: Head, finish: str, tokens: int, *, include_usage: bool) -> list[bytes]:
    """Returns the chunks that say why it ended, how much it was where that is wanted, and that nothing
    follows."""
    end = [_chunk(head, {}, finish, include_usage)]
    if include_usage:
        end.append(orjson.dumps(_headed(head, _CHUNK, [], usage=_usage(tokens))))
    return [*end, b"[DONE]"]


_CHUNK = "chat.completion.chunk"


def _chunk(head: Head, delta: Mapping[str, str], finish: str | None, include_usage: bool) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return orjson.dumps(_headed(head, _CHUNK, [choice], **({"usage": None} if include_usage else {})))


def _headed(head: Head, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    said = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
    return {**said, "choices": choices, **more}


def _usage(tokens: int) -> dict[str, int]:
    """A picture is no tokens: what is counted is what was written."""
    return {"prompt_tokens": 0, "completion_tokens": tokens, "total_tokens": tokens}


def model_document(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "carpool"}


# ── errors ──

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error"}
_TYPES |= {404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


def as_error(status: int, error: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Returns what is said elsewhere as `{"error": sentence, "reason": word, "field": …}`."""
    rest = {name: value for name, value in error.items() if name not in ("error", "field", "reason")}
    said = {
        "message": error["error"],
        "type": _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error"),
        "param": error.get("field"),
        "code": error.get("reason"),
    }
    return status, {"error": {**said, **rest}}
