"""The description of the picture routes is valid, true, and readable without scripts or other hosts."""

from __future__ import annotations

import html.parser
import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from carpool.frontend.http.app import all_routes
from carpool.frontend.http.openapi import openapi
from carpool.frontend.http.url_routes import expanded
from carpool.link.catalog import Catalog
from carpool.vision import tasks
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.test_app_images import FORM
from frontend.http.test_multipart import file_part, form
from frontend.picture_models import models, picture, segmenter


@pytest.fixture(scope="module")
def served() -> Iterator[FrontEnd]:
    with front_end(*models(), segmenter()) as found:
        yield found


@pytest.fixture(scope="module")
def document(served: FrontEnd) -> dict[str, Any]:
    with served.connect() as client:
        response = client.get("/openapi.json")
    assert response.fields["content-type"] == "application/json"
    found: dict[str, Any] = orjson.loads(response.body)
    return found


@pytest.mark.filterwarnings("ignore")  # its own, about its dependencies
def test_the_document_is_valid(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()
    assert not document["security"]


@pytest.mark.conformance
@pytest.mark.filterwarnings("ignore")
def test_the_document_of_a_server_with_keys_is_valid() -> None:
    with_keys = openapi(Catalog(), with_keys=True)
    OpenAPIV31SpecValidator(orjson.loads(orjson.dumps(with_keys))).validate()
    assert with_keys["security"]


def test_it_has_every_picture_route(document: dict[str, Any]) -> None:
    """And Triton's generate and the history; the rest of the v2 protocol is described by it."""
    others = re.compile(r"/(v2(?!.*/generate|/history)|console|health|metrics|openapi|docs|$)")
    routes = {
        (path, route.method.lower())
        for route in all_routes()
        for path in expanded(route.pattern)
        if not others.match(path)
    }
    assert {(path, verb) for path, item in document["paths"].items() for verb in item} == routes
    named = [one["operationId"] for item in document["paths"].values() for one in item.values()]
    assert len(set(named)) == len(named)


def test_it_has_every_option(document: dict[str, Any]) -> None:
    listed = {
        parameter["name"] for parameter in document["paths"]["/models/{model}/predict"]["post"]["parameters"]
    }
    assert set(tasks.options_of()) <= listed


def test_streams_are_described(document: dict[str, Any]) -> None:
    for path in (
        "/read",
        "/caption",
        "/v1/chat/completions",
        "/v1/responses",
        "/v2/models/{model}/generate_stream",
    ):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"], path


def schema_of(document: dict[str, Any], path: str) -> Draft202012Validator:
    answer = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**answer, "components": document["components"]})


@pytest.mark.parametrize("path", ["/detect", "/classify", "/segment", "/embed", "/models/{model}/predict"])
def test_answers_are_as_described(served: FrontEnd, document: dict[str, Any], path: str) -> None:
    with served.connect() as client:
        one = client.post(path.format(model="plain"), picture())
        several = client.post(path.format(model="plain"), form(file_part(picture()), file_part(b"bad")), FORM)
    for response in (one, several):
        assert response.status == 200
        schema_of(document, path).validate(orjson.loads(response.body))
    assert not schema_of(document, path).is_valid({"model": "m"})


def test_errors_are_as_described(served: FrontEnd, document: dict[str, Any]) -> None:
    with served.connect() as client:
        response = client.post("/detect", b"bad")
    described = document["paths"]["/detect"]["post"]["responses"]
    assert str(response.status) in described
    Draft202012Validator(document["components"]["schemas"]["Error"]).validate(orjson.loads(response.body))


class Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on")
            if name in ("href", "src", "action"):
                self.links.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_sound_and_needs_nothing_else(served: FrontEnd) -> None:
    with served.connect() as client:
        response = client.get("/docs")
    assert response.fields["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in response.fields["content-security-policy"]
    page = Page()
    page.feed(response.body.decode())
    page.close()
    assert not page.open
    assert not {"iframe", "img", "object"} & set(page.seen)
    assert all(not re.match(r"[a-z]+:|//", link) for link in page.links)
    with served.connect() as client:
        assert [client.get(link).status for link in page.links] == [200] * len(page.links)
