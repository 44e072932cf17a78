"""The messages of the Model Context Protocol that a server of tools needs, and how tools are described.

Pure functions. A message that is wrong is an error of the protocol; what a tool cannot do is a result with
`isError`, which the language model reads.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from carpool import __version__
from carpool.config.rules import nearest
from carpool.errors import CarpoolError, InvalidInput
from carpool.wire.head import load_object

VERSION = "2025-11-25"
UPLOAD = "upload:"
_LONGEST_ID = 512
_MOST_LABELS = 200  # in the description of a tool
_DOES: Mapping[str, str] = {
    "detect": "Find objects in an image: their labels, scores and boxes in pixels.",
    "classify": "Name what an image shows: labels with scores, the best first.",
    "segment": "Find the regions of an image: their labels, scores, boxes and areas.",
    "pose": "Find people or things in an image with their keypoints.",
    "obb": "Find objects in an image with rotated boxes.",
    "depth": "Estimate the distance of each pixel of an image.",
    "embed": "Represent an image as a vector.",
    "text_regions": "Find where an image has text.",
    "read": "Read the text of an image.",
    "caption": "Describe an image in words.",
}
_DRAWN = ("detect", "classify", "segment", "pose", "obb", "depth", "text_regions", "read")


class McpError(CarpoolError):
    """Describes a message that is wrong, with the number that JSON-RPC has for it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message, reason="bad-message")
        self.code = code


class Message(NamedTuple):
    """One message. A notification has no id."""

    method: str
    params: Mapping[str, Any]
    id: str | int | float | None = None


class ServedTool(NamedTuple):
    """Describes a task as a tool: its models, and the labels of each."""

    task: str
    models: Mapping[str, Sequence[str]]


class ToolCall(NamedTuple):
    """Describes what is asked of a tool."""

    task: str
    image: str
    model: str
    options: Mapping[str, str]
    annotated: bool


def read_message(body: bytes | bytearray) -> Message | McpError:
    """Returns what is wrong with a message rather than raising it: that is answered, too."""
    try:
        document = load_object(body, "message", tensors=False)
    except InvalidInput as error:
        return McpError(-32600 if "object" in error.message else -32700, error.message)
    method, params, said = document.get("method"), document.get("params"), document.get("id")
    known = said is None or (isinstance(said, str) and len(said) <= _LONGEST_ID)
    if not known and (isinstance(said, bool) or not isinstance(said, int | float)):
        return McpError(-32600, "id must be a string or a number")
    if document.get("jsonrpc") != "2.0" or not isinstance(method, str):
        return McpError(-32600, "a message must have jsonrpc 2.0 and a method")
    if not isinstance(params, dict | None):
        return McpError(-32602, "params must be an object")
    return Message(method, params or {}, said)


def result(message: Message, document: object) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message.id, "result": document}


def error(said: str | int | float | None, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": said, "error": {"code": code, "message": message}}


def words(status: int, known: Mapping[str, Any]) -> tuple[int, object]:
    """Returns an error that is of no message: of keys, of paths, of a body that is too long."""
    return status, error(None, -32000, known["error"])


def initialized(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    wanted = params.get("protocolVersion")
    version = wanted if isinstance(wanted, str) and len(wanted) <= 32 else VERSION
    return {
        "protocolVersion": version,
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": {"name": name, "version": __version__},
        "instructions": "Tools look at images. An image is an https address of an allowed host, base64, a "
        f"data: URL, or the handle that a POST of the file to /mcp/upload answers ({UPLOAD}…).",
    }


# ---- tools -------------------------------------------------------------------------------------------------


def tool_document(tool: ServedTool) -> dict[str, Any]:
    names = list(tool.models)
    labels = {label: None for listed in tool.models.values() for label in listed}
    about = _DOES.get(tool.task, f"Run a model for {tool.task} on an image.")
    shown = ", ".join(list(labels)[:_MOST_LABELS])
    more = " and others" if len(labels) > _MOST_LABELS else ""
    return {
        "name": tool.task,
        "description": f"{about} Labels: {shown}{more}." if shown else about,
        "inputSchema": {
            "type": "object",
            "properties": {
                "image": {
                    "type": "string",
                    "description": f"https address, base64, data: URL, or {UPLOAD}… handle of an image",
                },
                "model": {"type": "string", "enum": names, "default": names[0]},
                **_option_schemas(tool.task),
            },
            "required": ["image"],
            "additionalProperties": False,
        },
        "annotations": {"readOnlyHint": True, "openWorldHint": False},
    }


def _option_schemas(task: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if task in _SCORED:
        found["min_score"] = {"type": "number", "minimum": 0, "maximum": 1}
    if task == "classify":
        found["top_k"] = {"type": "integer", "minimum": 1, "maximum": 1000, "default": 5}
    if task in _DRAWN:
        about = "answer with the image, with what was found drawn into it, instead of numbers"
        found["annotated"] = {"type": "boolean", "default": False, "description": about}
    return found


_SCORED = ("detect", "classify", "segment", "pose", "obb", "text_regions")


def read_call(params: Mapping[str, Any], tools: Sequence[ServedTool]) -> ToolCall:
    """Raises `McpError` for a tool that is not there, and `InvalidInput` for wrong arguments."""
    name, given = params.get("name"), params.get("arguments")
    tool = next((one for one in tools if one.task == name), None)
    if tool is None:
        there = nearest(str(name)[:80], [one.task for one in tools])
        raise McpError(-32602, f"unknown tool '{str(name)[:80]}'; {there}")
    if not isinstance(given, dict):
        raise InvalidInput("arguments must be an object with an image", field="arguments")
    known = ("image", "model", *_option_schemas(tool.task))
    for key in given:
        if key not in known:
            raise InvalidInput(f"unknown argument '{key[:80]}'; {nearest(key[:80], known)}", field=key[:64])
    image, model = given.get("image"), given.get("model", next(iter(tool.models)))
    if not isinstance(image, str) or not image:
        raise InvalidInput("image must be an address, base64, a data: URL or a handle", field="image")
    if model not in tool.models:
        raise InvalidInput(f"model must be one of {', '.join(tool.models)}", field="model")
    annotated = given.get("annotated", False)
    if not isinstance(annotated, bool):
        raise InvalidInput("annotated must be true or false", field="annotated")
    return ToolCall(tool.task, image, str(model), _options(given), annotated)


def _options(given: Mapping[str, Any]) -> dict[str, str]:
    found = {"format": "rle"}
    for name, option in (("min_score", "score"), ("top_k", "top_k")):
        if name in given:
            value = given[name]
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidInput(f"{name} must be a number", field=name)
            found[option] = str(value)[:32]
    return found


def called(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the result of a tool: numbers for programs, and the same as text for language models."""
    if "drawn" in answer:
        data = base64.b64encode(answer["drawn"]).decode()
        return {"content": [{"type": "image", "data": data, "mimeType": "image/jpeg"}], "isError": False}
    document = {name: value for name, value in answer.items() if name != "depth"}
    if "masks" in answer:
        document["masks"] = [_region(one) for one in answer["masks"]]
    if "depth" in answer:
        document["depth"] = {name: answer["depth"][name] for name in ("low", "high")}
    said = document
    if "embedding" in answer:
        said = {**document, "embedding": f"{len(answer['embedding'])} numbers, as structured content"}
    text = orjson.dumps(said).decode()
    return {"content": [{"type": "text", "text": text}], "structuredContent": document, "isError": False}


def _region(mask: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mask without its pixels, which no language model reads, but with how many there are."""
    area = sum(mask["rle"]["counts"][1::2]) if "rle" in mask else None
    return {**{name: mask[name] for name in ("label", "class_id", "score", "box")}, "area": area}


def failed(sentence: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": sentence}], "isError": True}
