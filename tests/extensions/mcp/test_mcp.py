"""The endpoint of the Model Context Protocol over real sockets, with a fake engine: messages as mcp 2.3.0
sends them."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator

from carpool.config.server import ServerSettings
from carpool.errors import InvalidInput
from carpool.extensions.mcp.mcp_messages import called
from carpool.extensions.mcp.uploads import Uploads
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import LABELS, RED, classifier, detector, embedder, picture, raw, segmenter

ACCEPT = b"Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n"
PHOTO = base64.b64encode(picture(RED)).decode()


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> ServerSettings:
    return ServerSettings(api=("mcp",), cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def served(settings: ServerSettings) -> Iterator[FrontEnd]:
    with front_end(detector(), classifier(), embedder(), segmenter(), raw(), settings=settings) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def post(client: Client, document: object, fields: bytes = b"") -> Response:
    return client.post("/mcp", orjson.dumps(document), ACCEPT + fields)


def ask(client: Client, method: str, params: object = None, fields: bytes = b"") -> Any:
    sent = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    response = post(client, sent, fields)
    assert response.status == 200, response.body
    document = orjson.loads(response.body)
    assert (document["jsonrpc"], document["id"]) == ("2.0", 7)
    return document


def call(client: Client, name: str, **arguments: object) -> Any:
    return ask(client, "tools/call", {"name": name, "arguments": arguments})["result"]


def test_initialize_echoes_the_version(client: Client) -> None:
    asked = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a", "version": "1"}}
    found = ask(client, "initialize", asked)["result"]
    assert (found["protocolVersion"], found["serverInfo"]["name"]) == ("2025-06-18", "carpool")
    assert ask(client, "initialize", {})["result"]["protocolVersion"] == "2025-11-25"


def test_a_notification_is_accepted_without_a_body(client: Client) -> None:
    response = post(client, {"jsonrpc": "2.0", "method": "notifications/initialized"})
    assert (response.status, response.body) == (202, b"")


def test_other_methods_are_named(client: Client) -> None:
    assert ask(client, "ping")["result"] == {}
    assert ask(client, "server/discover")["error"]["code"] == -32601
    assert client.get("/mcp").status == 405


def test_tools_are_tasks_with_their_models_and_labels(client: Client) -> None:
    tools = {one["name"]: one for one in ask(client, "tools/list")["result"]["tools"]}
    assert tools.keys() == {"detect", "classify", "embed", "segment"}
    assert ", ".join(LABELS) in tools["detect"]["description"]
    for tool in tools.values():
        Draft202012Validator.check_schema(tool["inputSchema"])
        Draft202012Validator(tool["inputSchema"]).validate({"image": "https://a/b.jpg"})
    assert tools["detect"]["inputSchema"]["properties"]["model"]["enum"] == ["finder"]


@pytest.mark.parametrize("head", ["", "data:image/jpeg;base64,"])
def test_a_tool_answers_numbers_and_the_same_text(client: Client, head: str) -> None:
    found = call(client, "detect", image=head + PHOTO, min_score=0.5)
    [box] = found["structuredContent"]["detections"]
    assert (box["label"], box["box"], found["isError"]) == ("red", [0.0, 0.0, 16.0, 24.0], False)
    assert orjson.loads(found["content"][0]["text"]) == found["structuredContent"]
    assert call(client, "detect", image=PHOTO, min_score=0.9999)["structuredContent"]["detections"] == []


def test_other_tasks(client: Client) -> None:
    assert len(call(client, "classify", image=PHOTO, top_k=2)["structuredContent"]["classes"]) == 2
    vector = call(client, "embed", image=PHOTO)
    assert len(vector["structuredContent"]["embedding"]) == 3
    assert "3 numbers" in vector["content"][0]["text"]
    [mask] = call(client, "segment", image=PHOTO)["structuredContent"]["masks"]
    assert mask["area"] == 32 * 24
    assert "rle" not in mask
    assert called({"depth": {"low": 1.0, "high": 2.0, "png": "…"}})["structuredContent"] == {
        "depth": {"low": 1.0, "high": 2.0}
    }


def test_an_annotated_image(client: Client) -> None:
    [content] = call(client, "detect", image=PHOTO, annotated=True)["content"]
    assert (content["type"], content["mimeType"]) == ("image", "image/jpeg")
    assert base64.b64decode(content["data"]).startswith(b"\xff\xd8\xff")


def test_an_uploaded_image_is_used_by_its_handle(client: Client) -> None:
    handle = orjson.loads(client.post("/mcp/upload", picture(RED)).body)["handle"]
    assert call(client, "detect", image=handle)["structuredContent"]["detections"]
    refused = client.post("/mcp/upload", b"no image")
    assert (refused.status, orjson.loads(refused.body)["error"]["code"]) == (400, -32000)


def test_uploads_end(tmp_path: Path) -> None:
    uploads = Uploads(ServerSettings(cache_dir=tmp_path))
    handle = uploads.put(b"image")
    assert uploads.get(handle) == b"image"
    file = tmp_path / "uploads" / handle.removeprefix("upload:")
    assert file.stat().st_mode & 0o777 == 0o600
    os.utime(file, (0, time.time() - 700))
    with pytest.raises(InvalidInput):
        uploads.get(handle)
    uploads.put(b"other")
    assert not file.exists()
    for wrong in ("upload:", "upload:../../etc/passwd", f"upload:{'0' * 32}"):
        with pytest.raises(InvalidInput):
            uploads.get(wrong)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"image": "!!"}, "base64"),
        ({"image": "aGVsbG8="}, "not an image"),
        ({"image": "upload:0"}, "no image is held"),
        ({"image": "https://example.com/a.jpg"}, "fetches no images"),
        ({"image": 3}, "image must be"),
        ({}, "image must be"),
        ({"image": PHOTO, "model": "namer"}, "model must be one of finder"),
        ({"image": PHOTO, "picture": 1}, "unknown argument"),
        ({"image": PHOTO, "min_score": "high"}, "min_score must be"),
        ({"image": PHOTO, "min_score": 7}, "score must be"),
        ({"image": PHOTO, "annotated": 1}, "annotated must be"),
    ],
)
def test_what_a_tool_cannot_do_is_a_result(client: Client, arguments: dict[str, Any], says: str) -> None:
    found = call(client, "detect", **arguments)
    assert found["isError"]
    assert says in found["content"][0]["text"]


@pytest.mark.parametrize("params", [{"name": "nothing", "arguments": {}}, {}, {"name": ["detect"]}])
def test_an_unknown_tool_is_an_error(client: Client, params: object) -> None:
    assert ask(client, "tools/call", params)["error"]["code"] == -32602


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"[]", -32600),
        (b"{}", -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', -32602),
    ],
)
def test_messages_that_are_wrong(client: Client, body: bytes, code: int) -> None:
    response = client.post("/mcp", body, ACCEPT)
    assert (response.status, orjson.loads(response.body)["error"]["code"]) == (400, code)


def test_keys(settings: ServerSettings, tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(detector(), guard=guard, settings=settings) as found, found.connect() as client:
        refused = post(client, {"jsonrpc": "2.0", "id": 1, "method": "ping"})
        assert (refused.status, orjson.loads(refused.body)["error"]["code"]) == (401, -32000)
        assert ask(client, "ping", fields=b"Authorization: Bearer %b\r\n" % ALICE.encode())["result"] == {}
