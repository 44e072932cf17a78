"""Implements the endpoint of the Model Context Protocol, and uploads for its tools."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError, InvalidInput
from carpool.extensions.mcp import mcp_messages as mcp
from carpool.extensions.mcp.mcp_messages import McpError, Message, ServedTool
from carpool.extensions.mcp.uploads import Uploads
from carpool.frontend.documents import labels_of
from carpool.frontend.http.exchange import Collect, Exchange, HttpHead, Start
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.picture_question import Answer, PictureQuestion, ask, with_body
from carpool.frontend.http.read_aside import read_aside
from carpool.frontend.http.task_models import usable_tasks
from carpool.frontend.pictures.sent_pictures import from_base64
from carpool.vision.heads import sniff

_MOST_BODY = 32 << 20
_DONE = 202
_WEB = ("http://", "https://")


def start_message(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    def heard(exchange: Exchange, message: Message | McpError, at: float) -> None:
        if isinstance(message, McpError):
            answer_document(exchange, mcp.error(None, message.code, message.message), 400)
        elif message.id is None:
            exchange.respond(_DONE)
        else:
            _answer(service, exchange, message, at)

    return with_body(service, mcp.read_message, heard)


def _answer(service: HttpService, exchange: Exchange, message: Message, at: float) -> None:
    if message.method == "initialize":
        name = service.settings.server_name
        answer_document(exchange, mcp.result(message, mcp.initialized(message.params, name)))
    elif message.method == "ping":
        answer_document(exchange, mcp.result(message, {}))
    elif message.method == "tools/list":
        tools = [mcp.tool_document(one) for one in _tools(service, exchange)]
        answer_document(exchange, mcp.result(message, {"tools": tools}))
    elif message.method == "tools/call":
        _call(service, exchange, message, at)
    else:
        known = mcp.error(message.id, -32601, f"there is no method '{message.method[:80]}'")
        answer_document(exchange, known)


def _tools(service: HttpService, exchange: Exchange) -> list[ServedTool]:
    found: dict[str, dict[str, Any]] = {}
    catalog = service.engine.catalog
    for name, task in usable_tasks(catalog, exchange.who).items():
        if task not in ("", "raw"):
            entry = catalog.newest.get(name)  # none: it is loaded for its first request
            found.setdefault(task, {})[name] = () if entry is None else labels_of(entry)
    return [ServedTool(task, models) for task, models in found.items()]


def _call(service: HttpService, exchange: Exchange, message: Message, at: float) -> None:
    try:
        call = mcp.read_call(message.params, _tools(service, exchange))
    except McpError as error:
        answer_document(exchange, mcp.error(message.id, error.code, error.message))
        return
    except InvalidInput as error:
        answer_document(exchange, mcp.result(message, mcp.failed(error.message)))
        return
    is_web = call.image[:8].lower().startswith(_WEB)
    uploads = _uploads(service.settings)

    def read(_body: bytes) -> bytes | CarpoolError:
        try:
            return _image(call.image, uploads)
        except CarpoolError as error:
            return error

    def asked(found: bytes | CarpoolError) -> None:
        if isinstance(found, CarpoolError):
            answer_document(exchange, mcp.result(message, mcp.failed(found.message)))
            return
        question = PictureQuestion(
            pictures=() if is_web else [found],
            url=call.image if is_web else "",
            task=call.task,
            model=call.model,
            options=call.options,
            drawn="jpeg" if call.annotated else "",
        )
        ask(service, exchange, question, at, partial(_told, message), partial(_failed, message))

    read_aside(service, exchange, b"" if is_web else call.image.encode(), read, asked)


def _image(text: str, uploads: Uploads) -> bytes:
    if text[:8].lower().startswith(_WEB):
        return b""
    return uploads.get(text) if text.startswith(mcp.UPLOAD) else from_base64(text, "image")


def _told(message: Message, answer: Answer) -> object:
    return mcp.result(message, mcp.called(answer))


def _failed(message: Message, _status: int, error: Mapping[str, Any]) -> tuple[int, object]:
    """Returns what a tool could not do, with the time after which it may be able to."""
    wait = error.get("retry_after_s")
    more = f" Retry after {wait} s." if wait else ""
    return 200, mcp.result(message, mcp.failed(f"{error['error']}{more}"))


@cache
def _uploads(settings: ServerSettings) -> Uploads:
    return Uploads(settings)


def start_upload(service: HttpService, _head: HttpHead, _variables: Variables) -> Start:
    """Holds the image that is the body, and answers its handle."""
    uploads = _uploads(service.settings)

    def put(body: bytes | bytearray) -> str:
        sniff(body)
        return uploads.put(bytes(body))

    def start(exchange: Exchange) -> Collect:
        def received(body: bytes | bytearray, _at: float) -> None:
            read_aside(service, exchange, body, put, lambda handle: _held(exchange, handle))

        return Collect(min(service.max_body_bytes, _MOST_BODY), received)

    return start


def _held(exchange: Exchange, handle: str) -> None:
    answer_document(exchange, {"handle": handle})
