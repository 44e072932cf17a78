"""Roboflow's calls for vectors and text, with a fake engine: requests as inference-sdk sends them."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from carpool.config.server import ServerSettings
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client
from frontend.picture_models import BLUE, GREEN, RED, detector, embedder, picture, writer

SIDES = {"red": RED, "green": GREEN, "blue": BLUE}
PHOTOS = {
    name: {"type": "base64", "value": base64.b64encode(picture(colour, "PNG")).decode()}
    for name, colour in SIDES.items()
}


WITH_IMAGES = {"prompt_type": "image", "subject": PHOTOS["red"], "prompt": PHOTOS["red"]}
BOXES = "generate_bounding_boxes"
NAMED = {"trocr_version_id": "trocr-base-printed"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontEnd]:
    file = tmp_path_factory.mktemp("settings") / "apis.toml"
    file.write_text('[roboflow.aliases]\n"ViT-B-16" = "vector"\n"trocr-base-printed" = "writer"\n')
    settings = ServerSettings(api=("roboflow",), api_settings=str(file))
    with front_end(detector(), embedder(), writer(), settings=settings) as found:
        yield found


@pytest.fixture
def client(served: FrontEnd) -> Iterator[Client]:
    with served.connect() as found:
        yield found


def said(client: Client, path: str, document: object, status: int = 200) -> Any:
    asked = orjson.dumps(document)
    response = client.post(f"/roboflow{path}", asked, b"Content-Type: application/json\r\n")
    assert response.status == status, response.body
    return orjson.loads(response.body)


def vector(client: Client, name: str) -> list[float]:
    found: list[float] = orjson.loads(client.post("/embed", picture(SIDES[name], "PNG")).body)["embedding"]
    return found


@pytest.mark.parametrize("more", [{}, {"clip_version_id": "ViT-B-16"}, {"clip_version_id": "vector/1"}])
def test_vectors_of_images(client: Client, more: dict[str, Any]) -> None:
    document = said(client, "/clip/embed_image", {"api_key": "KEY", "image": PHOTOS["red"], **more})
    assert document["embeddings"] == [vector(client, "red")]
    assert set(document) >= {"frame_id", "time", "embeddings"}
    document = said(client, "/clip/embed_image", {"image": [PHOTOS["red"], PHOTOS["blue"]], **more})
    assert document["embeddings"] == [vector(client, "red"), vector(client, "blue")]


def test_images_are_compared_in_their_order_or_by_name(client: Client) -> None:
    asked = {"subject": PHOTOS["red"], "subject_type": "image", "prompt_type": "image"}
    listed = said(client, "/clip/compare", {**asked, "prompt": [PHOTOS["green"], PHOTOS["red"]]})
    one, other = vector(client, "red"), vector(client, "green")
    product = sum(a * b for a, b in zip(one, other, strict=True))
    similar = product / (math.hypot(*one) * math.hypot(*other))
    assert 0.1 < similar < 0.5
    assert listed["similarity"] == pytest.approx([similar, 1.0])
    assert said(client, "/clip/compare", {**asked, "prompt": PHOTOS["red"]})["similarity"] == [
        pytest.approx(1.0)
    ]
    named = said(client, "/clip/compare", {**asked, "prompt": {"a": PHOTOS["red"], "b": PHOTOS["blue"]}})
    assert named["similarity"] == pytest.approx({"a": 1.0, "b": similar})


@pytest.mark.parametrize(
    ("path", "document", "status", "field"),
    [
        ("/clip/embed_image", {"image": {"type": "url", "value": "http://a"}}, 400, "image"),
        ("/clip/embed_image", {"image": PHOTOS["red"], "clip_version_id": 7}, 400, "clip_version_id"),
        ("/clip/embed_image", {"image": PHOTOS["red"], "clip_version_id": "finder"}, 400, None),
        ("/clip/embed_image", {"image": PHOTOS["red"], "clip_version_id": "RN50"}, 404, None),
        (
            "/clip/compare",
            {"prompt_type": "image", "subject": [PHOTOS["red"]] * 2, "prompt": PHOTOS["red"]},
            400,
            "subject",
        ),
        ("/clip/compare", {**WITH_IMAGES, "prompt": {}}, 400, "prompt"),
        (
            "/clip/compare",
            {**WITH_IMAGES, "prompt": [PHOTOS["red"]] * 64},
            400,
            "prompt",
        ),
        (
            "/doctr/ocr",
            {"image": PHOTOS["red"], BOXES: True},
            400,
            "generate_bounding_boxes",
        ),
        ("/doctr/ocr", {"image": PHOTOS["red"], "doctr_version_id": "finder"}, 400, None),
    ],
)
def test_errors_have_a_message(
    client: Client, path: str, document: object, status: int, field: str | None
) -> None:
    error = said(client, path, document, status)
    assert error["message"]
    assert field is None or error["field"] == field


@pytest.mark.parametrize("path", ["/doctr/ocr", "/easy_ocr/ocr", "/ocr/trocr", "/ocr/pp-ocr"])
def test_text_of_images(client: Client, path: str) -> None:
    one = said(client, path, {"image": PHOTOS["red"]})
    assert one["result"] == "Red and blue…"
    both = said(
        client, path, {"image": [PHOTOS["red"], PHOTOS["blue"]], "trocr_version_id": "trocr-base-printed"}
    )
    assert [document["result"] for document in both] == ["Red and blue…"] * 2
