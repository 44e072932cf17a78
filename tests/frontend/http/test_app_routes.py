"""Which path and which verb leads where, and what the small routes answer."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pytest

from absent import in_whole_server
from carpool.errors import NotFound
from carpool.frontend.documents import EXTENSIONS
from carpool.frontend.http.app import MetricsApp, all_routes
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_service import SharedPage
from carpool.link.catalog import IndexEntry
from doc_pages import part_of
from frontend.http.front_end import FrontEnd, error_of, front_end, image_body, infer
from frontend.http.harness import Client, Response, serving
from waiting import until

DOCS = part_of("protocols.md", "HTTP")


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


@pytest.fixture
def client(front: FrontEnd) -> Iterator[Client]:
    with front.connect() as connected:
        yield connected


def request(client: Client, method: str, path: str) -> Response:
    client.send(b"%b %b HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n" % (method.encode(), path.encode()))
    return client.response(head_only=method == "HEAD")


def document(response: Response) -> Any:
    assert response.status == 200, response.body
    assert response.fields["content-type"] == "application/json"
    return orjson.loads(response.body)


def test_front_page(client: Client) -> None:
    response = client.get("/")
    assert response.status == 200
    assert response.fields["content-type"].startswith("text/plain")
    assert b"/v2/health/ready" in response.body


@pytest.mark.parametrize("path", ["/v2/", "/v2/models/image/", "/v2/models/image/versions/1/", "/health/"])
def test_a_trailing_slash_does_not_matter(client: Client, path: str) -> None:
    assert document(client.get(path)) == document(client.get(path[:-1]))


@pytest.mark.parametrize("path", ["/", "/v2", "/health", "/v2/health/live", "/metrics", "/v2/models/stats"])
def test_head_is_get_without_the_body(client: Client, path: str) -> None:
    size = int(client.get(path).fields["content-length"])
    response = request(client, "HEAD", path)
    assert (response.status, response.body) == (200, b"")
    if path != "/metrics":  # that page counts its own readers
        assert int(response.fields["content-length"]) == size
    assert client.get(path).status == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/v2", "GET, HEAD"),
        ("DELETE", "/", "GET, HEAD"),
        ("PUT", "/v2/models/image", "GET, HEAD"),
        ("GET", "/v2/models/image/infer", "POST"),
        ("HEAD", "/v2/models/image/versions/1/infer", "POST"),
        ("GET", "/v2/repository/index", "POST"),
        ("PATCH", "/v2/logging", "GET, HEAD, POST"),
        ("OPTIONS", "*", "GET, HEAD"),
    ],
)
def test_the_wrong_verb(client: Client, method: str, path: str, allow: str) -> None:
    response = request(client, method, path)
    assert (response.status, response.fields["allow"]) == (405, allow)
    if method != "HEAD":
        assert error_of(response)["reason"] == "method-not-allowed"
    assert client.get("/v2").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v2/model",
        "/v2/models",
        "/v2/models//infer",
        "/v2//models",
        "//v2",
        "/v2/models/image/versions",
        "/x" * 99,
    ],
)
def test_nothing_there(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status == 404
    assert error_of(response)["reason"] == "not-found"
    assert len(response.body) < 300


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("..", 404),
        ("%2e%2e", 404),
        ("..%2f..%2fetc%2fpasswd", 404),
        ("image%2f", 404),
        ("image%5c..", 404),
        ("%00", 400),
        ("image%00", 400),
        ("image%0d%0aX-Evil:%201", 400),
        ("%ff", 400),
        ("%zz", 400),
        ("im%61ge", 200),
        ("a" * 4000, 404),
        ("a" * 9000, 414),
    ],
)
def test_tricks_in_a_models_name(front: FrontEnd, name: str, status: int) -> None:
    for way in ("get", "post"):
        with front.connect() as client:
            path = f"/v2/models/{name}"
            response = client.get(path) if way == "get" else infer(client, name, image_body())
            assert response.status == status
            if status != 200:
                assert error_of(response)["error"]
            assert len(response.body) < 1000


def test_live_is_not_ready(front: FrontEnd, client: Client) -> None:
    def statuses() -> list[int]:
        paths = ("/v2/health/live", "/v2/health/ready", "/health", "/v2/models/image/ready")
        return [client.get(path).status for path in paths]

    assert statuses() == [200, 200, 200, 200]
    catalog = front.door.catalog
    front.door.catalog = replace(catalog, ready=False)  # some model is still warming up
    assert statuses() == [200, 400, 503, 200]
    front.door.catalog = catalog
    front.door.serving = False
    assert statuses() == [200, 400, 503, 400]
    assert error_of(client.get("/v2/health/ready"))["reason"] == "not-serving"
    assert orjson.loads(client.get("/health").body)["ready"] is False


def test_health(front: FrontEnd, client: Client) -> None:
    assert document(client.get("/health")) == {"ready": True, "models": sorted(front.door.catalog.newest)}


def test_documents_stay_readable_while_the_engine_restarts(front: FrontEnd, client: Client) -> None:
    front.door.serving = False
    assert client.get("/v2/models/image").status == 200
    response = client.get("/v2/models/nothing")
    assert response.status == 503, "it may be there when the engine is back"
    assert error_of(response)["reason"] == "not-serving"


def test_what_is_not_there_yet_while_models_load_is_not_called_unknown(
    front: FrontEnd, client: Client
) -> None:
    front.door.catalog = replace(front.door.catalog, ready=False)
    response = client.get("/v2/models/nothing")
    assert (response.status, error_of(response)["reason"]) == (503, "not-serving")


def test_repository_index(front: FrontEnd, client: Client) -> None:
    front.door.catalog = replace(
        front.door.catalog,
        index=(
            IndexEntry("a", "1", "READY"),
            IndexEntry("b", "2", "UNAVAILABLE", "no such file"),
            IndexEntry("c", "1", "LOADING"),
        ),
    )
    lines = [
        {"name": "a", "version": "1", "state": "READY"},
        {"name": "b", "version": "2", "state": "UNAVAILABLE", "reason": "no such file"},
        {"name": "c", "version": "1", "state": "LOADING"},
    ]
    path = "/v2/repository/index"
    assert document(client.post(path, b"")) == lines
    assert document(client.post(path, b"{}")) == lines
    assert document(client.post(path, b'{"ready": false}')) == lines
    assert document(client.post(path, b'{"ready": true}')) == lines[:1]
    response = client.get("/v2/models/b")
    assert response.status == 503
    assert error_of(response)["error"] == (
        "Request for unknown model: 'b' has no available versions; it is unavailable: no such file"
    )


@pytest.mark.parametrize("body", [b"[]", b"{", b'{"ready": 1}', b"null", b"[" * 5000])
def test_a_bad_index_request(client: Client, body: bytes) -> None:
    response = client.post("/v2/repository/index", body)
    assert response.status == 400
    assert error_of(response)["field"] in ("body", "ready")


def test_an_index_request_that_is_too_long(client: Client) -> None:
    response = client.post("/v2/repository/index", b" " * 100_000)
    assert response.status == 413
    error_of(response)


def test_a_repository_with_a_name(client: Client) -> None:
    assert client.post("/v2/repository/main/index", b"").status == 501


def test_statistics_that_fail(front: FrontEnd, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    front.door.answers["statistics"] = lambda _arguments: 1 / 0
    response = client.get("/v2/models/stats")
    assert response.status == 500
    assert error_of(response)["reason"] == "internal"
    assert "request-failed" in caplog.text


def test_statistics_of_a_model_that_has_just_gone(front: FrontEnd, client: Client) -> None:
    def gone(_arguments: Any) -> None:
        raise NotFound("it was unloaded")

    front.door.answers["statistics"] = gone
    response = client.get("/v2/models/image/stats")
    assert (response.status, error_of(response)["error"]) == (404, "it was unloaded")


def test_the_profile_of_a_model(front: FrontEnd, client: Client) -> None:
    front.door.answers["profile"] = lambda arguments: {"asked": dict(arguments)}
    newest = front.door.catalog.newest["versions"].version
    found = document(client.get("/v2/models/versions/profile"))
    assert found == {"asked": {"name": "versions", "version": newest}}
    assert document(client.get("/v2/models/versions/versions/10/profile"))["asked"]["version"] == "10"
    for path, status, reason in [
        ("/v2/models/nobody/profile", 404, "unknown-model"),
        ("/v2/models/image/versions/7/profile", 404, "unknown-version"),
        ("/v2/models/coming/profile", 503, "model-not-ready"),
    ]:
        front.run(lambda: front.door.renew(index=[IndexEntry("coming", "1", "LOADING")]))
        response = client.get(path)
        assert (response.status, error_of(response)["reason"]) == (status, reason)


def test_questions_end_with_the_app() -> None:
    asked: list[asyncio.Future[None]] = []

    def never(_arguments: Any) -> asyncio.Future[None]:
        asked.append(asyncio.get_running_loop().create_future())
        return asked[0]

    with front_end() as front, front.connect() as client:
        front.door.answers["statistics"] = never
        client.send(b"GET /v2/models/stats HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: bool(asked))
        front.run(front.app.close)
        until(lambda: asked[0].cancelled())


def test_metrics(front: FrontEnd, client: Client) -> None:
    assert infer(client, "image", image_body()).status == 200
    response = client.get("/metrics")
    assert response.fields["content-type"].startswith("text/plain; version=0.0.4")
    assert b'nv_inference_request_success{model="image",version="1"} 1\n' in response.body


def test_a_port_for_metrics_alone() -> None:
    app = MetricsApp(SharedPage(lambda: iter([b"page\n"])), Fairness())
    with serving(app) as server, server.connect() as client:
        assert client.get("/metrics").body == b"page\n"
        assert error_of(client.get("/v2"))["reason"] == "not-found"
        assert client.post("/metrics", b"x").status == 405
        assert client.get("/%zz").status == 400


def test_the_example_in_json(client: Client) -> None:
    (sent,) = re.findall(r"-d '(.*?)'", DOCS, re.DOTALL)
    (answer,) = re.findall(r'^(\{"model_name".*)$', DOCS, re.MULTILINE)
    assert client.post("/v2/models/image/infer", sent.encode()).body == answer.encode()


def test_the_example_in_python(front: FrontEnd, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    exec(code.replace("localhost:8000", front.url), {})
    assert capsys.readouterr().out == "[[15.  1.  2.  3.]]\n"


@in_whole_server
def test_the_reference_lists_every_route_and_extension() -> None:
    rows = set(re.findall(r"^\| `(GET|POST|PUT|DELETE) (/[^`]*)`", DOCS, re.MULTILINE))
    rows |= {("POST", path) for path in re.findall(r"^\| `GET, POST (/[^`]*)`", DOCS, re.MULTILINE)}
    rows |= {("GET", path) for path in re.findall(r"^\| `GET, POST (/[^`]*)`", DOCS, re.MULTILINE)}
    assert rows == {(route.method, route.pattern) for route in all_routes()}
    assert all(f"`{extension}`" in DOCS for extension in EXTENSIONS)
