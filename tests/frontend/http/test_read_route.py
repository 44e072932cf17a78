"""/read on a whole server with the demo's models: text and lines, as the models say when asked by hand."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
from collections.abc import Iterator
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from PIL import Image

from carpool import AsyncClient, Client
from carpool.demo import ocr_models
from carpool.demo.ocr_repository import ocr_page
from carpool.vision.decode import decode
from frontend.whole_server import PATIENCE_S, WholeServer, whole_server
from vision.ocr_models import ByHand, read_page, unspaced
from vision.schemas import complaints

SAYS = (
    "HARBOUR CYCLE WORKS",
    "Invoice 2041-07, 16.11.2026",
    "Chain and two sprockets 64.90",
    "Brake cable, 1.8 m 7.25",
    "Labour, 3 hours 135.00",
    "Total 207.15",
    "Please pay within 14 days. Thank you for your visit.",
    "Order AKT-5518 / stand 12",
    "Open 08:30 to 17:45, closed on Sunday",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """Without promises, which take long to measure, and which a busy machine would break."""
    folder = tmp_path_factory.mktemp("ocr") / "models"
    shutil.copytree(ocr_models(), folder)
    for settings in (*folder.glob("*/model.toml"), folder / "ocr" / "pipeline.toml"):
        lines = settings.read_text().splitlines(keepends=True)
        settings.write_text("".join(line for line in lines if not line.startswith("slo")))
    with whole_server(folder, model_control_mode="explicit", load_models=("*",)) as running:
        yield running


def post(server: WholeServer, path: str, body: bytes) -> tuple[bytes, Any]:
    request = Request(f"http://{server.url}{path}", body, {"Content-Type": "image/x"})
    with urlopen(request, timeout=PATIENCE_S) as answer:
        return answer.read(), answer.headers


def ask(server: WholeServer, path: str, body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(post(server, path, body)[0])
    return found


def png(pixels: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_the_page_of_the_demo_is_read(server: WholeServer) -> None:
    answer = ask(server, "/read", ocr_page().read_bytes())
    assert answer["model"] == "ocr"
    assert [unspaced(row) for row in answer["text"].split("\n")] == [unspaced(row) for row in SAYS]
    assert len(answer["lines"]) == 13
    schema = openapi(server)["components"]["schemas"]["ReadText"]
    assert complaints(answer, schema) == []


def openapi(server: WholeServer) -> Any:
    with urlopen(f"http://{server.url}/openapi.json", timeout=PATIENCE_S) as answer:
        document = json.loads(answer.read())
    assert "/read" in document["paths"]
    return document


def test_a_client_reads(server: WholeServer) -> None:
    with Client(f"http://{server.url}") as client:
        page = client.read(ocr_page(), explain=True)
        line = client.read(decode(ocr_page().read_bytes()).pixels[385:425, 40:580], model="line_reader")
    assert [unspaced(row) for row in page.text.split("\n")] == [unspaced(row) for row in SAYS]
    assert page.texts == [one["text"] for one in page.lines]
    assert (page.polygons.shape, page.boxes.shape, page.scores.shape) == ((13, 4, 2), (13, 4), (13,))
    assert [step["step"] for step in page["steps"]] == ["find", "read"]
    assert complaints(dict(page), openapi(server)["components"]["schemas"]["ReadText"]) == []
    assert (line.text, line.lines, line.polygons.shape) == (SAYS[6], [], (0, 4, 2))

    async def ask_too() -> str:
        async with AsyncClient(f"http://{server.url}") as client:
            return (await client.read(ocr_page())).text

    assert asyncio.run(ask_too()) == page.text


def test_explain_is_described_where_a_pipeline_answers(server: WholeServer) -> None:
    paths = openapi(server)["paths"]
    described = {
        path: "explain" in [one["name"] for one in operation["post"]["parameters"]]
        for path, operation in paths.items()
        if "post" in operation and not path.startswith("/v1/")
    }
    assert described["/read"]
    assert described["/models/{model}/predict"]
    assert not described["/text_regions"]


def test_it_is_what_the_models_say_when_asked_by_hand(server: WholeServer) -> None:
    page = ocr_page().read_bytes()
    finder, reader = (ByHand(ocr_models() / name) for name in ("text_finder", "line_reader"))
    expected = read_page(finder, reader, decode(page).pixels)
    answer = ask(server, "/read?model=ocr", page)
    assert answer["text"] == expected["text"]
    for line, other in zip(answer["lines"], expected["lines"], strict=True):
        assert (line["text"], line["polygon"], line["box"]) == (other["text"], other["polygon"], other["box"])
        assert line["score"] == pytest.approx(other["score"], abs=1e-3)


def test_a_page_without_text_is_answered_at_once(server: WholeServer) -> None:
    body, headers = post(server, "/read", png(np.full((240, 320, 3), 255, np.uint8)))
    answer = json.loads(body)
    assert (answer["text"], answer["lines"]) == ("", [])
    times = ", ".join(headers.get_all("Server-Timing"))
    assert "find.queue" in times
    assert "read.queue" not in times


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (3, 2)])
def test_the_smallest_pictures(server: WholeServer, size: tuple[int, int]) -> None:
    assert ask(server, "/read", png(np.zeros((*size, 3), np.uint8)))["lines"] == []


def test_a_drawing_has_the_page_and_what_it_says(server: WholeServer) -> None:
    body, headers = post(server, "/read?overlay=1", ocr_page().read_bytes())
    assert headers["Content-Type"] == "image/jpeg"
    assert Image.open(io.BytesIO(body)).size == (2 * 760, 560)
    body, _ = post(server, "/text_regions?overlay=1", ocr_page().read_bytes())
    assert Image.open(io.BytesIO(body)).size == (760, 560)


def test_a_reader_reads_one_line(server: WholeServer) -> None:
    pixels = decode(ocr_page().read_bytes()).pixels
    answer = ask(server, "/read?model=line_reader", png(pixels[385:425, 40:580]))
    assert answer["text"] == SAYS[6]
    assert answer["score"] > 0.9
    regions = ask(server, "/text_regions", ocr_page().read_bytes())["regions"]
    assert len(regions) == 13


def test_options_are_the_finders(server: WholeServer) -> None:
    answer = ask(server, "/read?max_detections=2", ocr_page().read_bytes())
    assert len(answer["lines"]) == 2
    with pytest.raises(HTTPError) as refused:
        post(server, "/read?top_k=2", ocr_page().read_bytes())
    assert refused.value.code == 400
    refused.value.close()
