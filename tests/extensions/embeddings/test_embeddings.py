"""OpenAI's embeddings over real sockets, with a fake engine: requests as openai 3.51, vLLM's and Infinity's
clients send them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response
from frontend.picture_models import BLUE, RED, detector, embedder, picture, raw, writer

SETTINGS = ServerSettings(api=("embeddings",))
JSON = b"Content-Type: application/json\r\n"


def url(colour: tuple[int, int, int] = RED) -> str:
    return "data:image/jpeg;base64," + base64.b64encode(picture(colour)).decode()


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(embedder(), detector(), raw(), writer(), settings=SETTINGS) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def post(client: Client, fields: bytes = b"", **document: object) -> Response:
    return client.post("/v1/embeddings", orjson.dumps({"model": "vector", **document}), JSON + fields)


def said(response: Response, status: int = 200) -> Any:
    assert response.status == status, response.body
    return orjson.loads(response.body)


def test_lists_are_answered_in_their_order(client: Client) -> None:
    answer = said(post(client, input=[url(RED), url(BLUE)]))
    assert (answer["object"], answer["model"]) == ("list", "vector")
    assert [one["index"] for one in answer["data"]] == [0, 1]
    red, blue = (one["embedding"] for one in answer["data"])
    assert red[0] > red[2]
    assert blue[0] < blue[2]
    plain = said(client.post("/embed", picture(RED)))["embedding"]
    assert red == plain


def test_base64_is_of_little_endian_floats(client: Client) -> None:
    plain = said(post(client, input=url(), encoding_format="float"))["data"][0]["embedding"]
    packed = said(post(client, input=url(), encoding_format="base64"))["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == np.float32(plain).tolist()


@pytest.mark.parametrize(
    "document",
    [
        {"input": [url()], "modality": "image"},
        {"input": [{"image": url()}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url()}}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": url()},
                        {"type": "text", "text": " "},
                    ],
                }
            ]
        },
        {"input": url(), "dimensions": 3, "user": "me"},
    ],
)
def test_forms_of_an_image(client: Client, document: dict[str, Any]) -> None:
    assert len(said(post(client, **document))["data"]) == 1


@pytest.mark.parametrize(
    ("document", "status", "field"),
    [
        ({"input": "a cat"}, 400, "input"),
        ({"input": [url(), "a cat"]}, 400, "input[1]"),
        ({"input": [1, 2, 3]}, 400, "input[0]"),
        ({"input": []}, 400, "input"),
        ({}, 400, "input"),
        ({"input": url(), "messages": []}, 400, "input"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": "a cat"}]}, 400, "messages"),
        ({"input": url(), "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": url(), "modality": "audio"}, 400, "modality"),
        ({"input": url(), "dimensions": 0}, 400, "dimensions"),
        ({"input": url(), "dimensions": 7}, 400, "dimensions"),
        ({"input": url(), "inputs": 1}, 400, "inputs"),
        ({"input": url(), "model": "nobody"}, 404, None),
        ({"input": url(), "model": "finder"}, 400, "model"),
        ({"input": url(), "model": 3}, 400, "model"),
        ({"input": ["https://example.com/a.jpg"]}, 403, "url"),
        ({"input": "data:image/jpeg;base64,aGVsbG8="}, 400, None),
    ],
)
def test_errors_name_their_field(
    client: Client, document: dict[str, Any], status: int, field: str | None
) -> None:
    error = said(post(client, **document), status)["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert field is None or error["param"] == field


def test_all_models_are_listed(client: Client) -> None:
    names = [one["id"] for one in said(client.get("/v1/models"))["data"]]
    assert sorted(names) == ["finder", "plain", "vector", "writer"]
    assert said(client.get("/v1/models/finder"))["object"] == "model"
    assert said(client.get("/v1/models/nobody"), 404)["error"]["message"]


def test_without_it_only_those_that_write() -> None:
    with front_end(embedder(), writer()) as found, found.connect() as client:
        assert [one["id"] for one in said(client.get("/v1/models"))["data"]] == ["writer"]
        assert post(client, input=url()).status == 404


def test_keys(tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path))
    with front_end(embedder(), guard=guard, settings=SETTINGS) as found, found.connect() as client:
        assert said(post(client, input=url()), 401)["error"]["type"] == "authentication_error"
        said(post(client, b"Authorization: Bearer %b\r\n" % ALICE.encode(), input=url()))
