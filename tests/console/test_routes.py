"""The console over HTTP: what is served, with which fields, and what is not served."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

import carpool.console
from carpool.console import page_files
from carpool.frontend.access.guard import Guard
from carpool.frontend.http.http_service import site
from carpool.link.catalog import IndexEntry
from carpool.observe.columns import SHED_WORDS
from console.stage import EVIL, TASKS, Stage, stage
from frontend.access.key_files import ALICE, ROOT, admin_keys, api_keys
from frontend.http.front_end import error_of
from frontend.http.harness import Client, Response
from waiting import until

HTML = b"Accept: text/html,application/xhtml+xml,*/*;q=0.8\r\n"
FOLDER = Path(carpool.console.__file__).parent


@pytest.fixture(scope="module")
def running() -> Iterator[Stage]:
    with stage() as found:
        yield found


@pytest.fixture
def client(running: Stage) -> Iterator[Client]:
    with running.front.connect() as connected:
        yield connected


def document(response: Response) -> Any:
    assert response.status == 200
    assert response.fields["content-type"] == "application/json"
    return orjson.loads(response.body)


# ---- the page and its files


def test_a_browser_gets_the_page_and_curl_a_text(client: Client) -> None:
    page = client.get("/", HTML)
    assert page.fields["content-type"] == "text/html; charset=utf-8"
    assert page.body.startswith(b"<!doctype html>")
    text = client.get("/", b"Accept: */*\r\n")
    assert text.fields["content-type"] == "text/plain; charset=utf-8"
    assert b"/v2/health/ready" in text.body
    assert page.fields["vary"] == text.fields["vary"] == "accept"
    assert client.get("/").body == text.body


def test_every_file_is_served_as_what_it_is(client: Client) -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name, body in page_files().items():
        response = client.get(f"/console/{name}")
        assert response.body == body
        assert response.fields["content-type"].partition(";")[0] == types[name.rpartition(".")[2]]


def test_files_may_do_little(client: Client) -> None:
    for path, extra in (("/", HTML), ("/console/app.js", b""), ("/console/icon.svg", b"")):
        fields = client.get(path, extra).fields
        policy = dict(
            part.strip().partition(" ")[::2] for part in fields["content-security-policy"].split(";")
        )
        assert policy["default-src"] == "'self'"
        assert not {"script-src", "style-src", "connect-src"} & set(policy), "these stay the default"
        assert policy["img-src"] == "'self' blob:"
        assert policy["frame-ancestors"] == policy["object-src"] == policy["base-uri"] == "'none'"
        assert "unsafe" not in fields["content-security-policy"]
        assert fields["x-content-type-options"] == "nosniff"
        assert fields["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("form", ["{}", "W/{}", '"other", {}', ' {} , "x"'])
def test_a_file_that_is_known_is_not_sent_again(client: Client, form: str) -> None:
    first = client.get("/console/style.css")
    assert first.fields["cache-control"] == "no-cache"
    tag = first.fields["etag"]
    client.send(
        b"GET /console/style.css HTTP/1.1\r\nHost: x\r\nIf-None-Match: %b\r\n\r\n" % form.format(tag).encode()
    )
    again = client.response(head_only=True)
    assert again.status == 304
    assert again.fields["etag"] == tag
    assert client.get("/console/style.css", b'If-None-Match: "old"\r\n').status == 200


def test_tags_differ_from_file_to_file() -> None:
    assert len({asset.tag for asset in site().values()}) == len(site())


def test_head(client: Client) -> None:
    for path in ("/", "/console/app.js", "/console/live"):
        client.send(b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode())
        response = client.response(head_only=True)
        assert response.status == 200
        assert int(response.fields["content-length"]) > 0


@pytest.mark.parametrize(
    "name",
    [
        "nothing.js",
        "..",
        "../__init__.py",
        "..%2f__init__.py",
        "%2e%2e%2f__init__.py",
        "__init__.py",
        "page",
        "app.js%2f",
        "APP.JS",
        "/etc/passwd",
        "%2fetc%2fpasswd",
        "..%5c..%5cwin.ini",
        EVIL.replace(" ", "%20").replace("<", "%3c").replace(">", "%3e").replace('"', "%22"),
    ],
)
def test_nothing_else_is_served(client: Client, name: str) -> None:
    response = client.get(f"/console/{name}")
    assert response.status == 404
    assert error_of(response)["reason"] == "not-found"
    assert b"import" not in response.body
    assert b"<" not in response.body


def test_the_page_cannot_be_written_to(client: Client) -> None:
    for path in ("/", "/console/app.js", "/console/live"):
        assert client.post(path, b"x").status == 405


def test_the_sample_picture_is_there_if_the_demo_has_it(client: Client) -> None:
    sample = FOLDER.parent / "demo" / "pictures" / "astronaut.jpg"
    response = client.get("/console/sample.jpg")
    if sample.exists():
        assert response.status == 200
        assert response.fields["content-type"] == "image/jpeg"
    else:
        assert response.status == 404


def test_the_page_names_only_files_that_exist_here() -> None:
    files = page_files()
    html = files["index.html"].decode()
    for name in re.findall(r'(?:src|href)="/console/([^"]+)"', html):
        assert name in files
    for name, body in files.items():
        text = body.decode()
        assert not re.search(r"(?<!www\.w3\.org)//(?!www\.w3\.org)[a-z0-9-]+\.[a-z]{2,}/", text), name
        for other in re.findall(r'from "\./([^"]+)"', text):
            assert other in files, f"{name} imports {other}"


def test_scripts_are_small_and_make_no_markup() -> None:
    for name, body in page_files().items():
        text = body.decode()
        assert len(text.splitlines()) <= 300, name
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text
            )
            assert not re.search(r"\bwindow\.|globalThis", text), f"{name} uses a global"
    html = page_files()["index.html"].decode()
    assert not re.search(r"<script>|<style>|style=|\son[a-z]+=", html), "the policy forbids what is inline"


# ---- the live document


def test_the_live_document(running: Stage, client: Client) -> None:
    running.count("detector", 8, 0.02, cannot_finish=2)
    running.gauge("detector", 3, 0.25)
    found = fresh(running)
    assert found["server"]["ready"] is True
    assert set(found["bounds"]) == {"seconds", "batch"}
    models = {(line["name"], line["version"]): line for line in found["models"]}
    line = models["detector", "1"]
    assert line["state"] == "READY"
    assert (line["task"], line["platform"], line["mode"], line["slo_ms"]) == (
        "detect",
        "fake",
        "promise",
        50.0,
    )
    assert (line["max_batch"], line["newest"], line["reason"]) == (16, True, "")
    counts = line["counts"]
    assert counts["ok"] >= 8
    assert counts["sheds"]["cannot-finish"] >= 2
    assert (counts["pending"], counts["saturation"]) == (3, 0.25)
    assert models["tensors", "1"]["task"] is None
    assert models["tensors", "1"]["slo_ms"] is None
    assert models["sleeper", "2"] == {
        "name": "sleeper",
        "version": "2",
        "state": "LOADING",
        "reason": "",
        "counts": None,
    }
    assert models[EVIL, "1"]["reason"].startswith("the file is no model")
    assert set(TASKS) < {name for name, _version in models}
    assert document(client.get("/console/live"))["left_out"] == 0


def fresh(running: Stage) -> Any:
    """The document made now, not one of half a second ago."""
    service = running.front.app._service
    return orjson.loads(
        orjson.dumps(running.front.run(lambda: service.live.document(running.front.door, 1.0)))
    )


def test_it_is_never_cached_and_asks_the_engine_nothing(running: Stage, client: Client) -> None:
    def refuse(_arguments: object) -> None:
        raise AssertionError("a question to the engine")

    running.front.door.answers["statistics"] = refuse
    response = client.get("/console/live")
    assert response.fields["cache-control"] == "no-store"
    assert len(response.body) < 16_000


def test_the_profile_comes_for_who_looks_at_a_model(running: Stage, client: Client) -> None:
    def look(query: str) -> Any:
        return document(client.get(f"/console/live?{query}"))

    until(lambda: look("model=detector&version=1")["profile"] is not None)
    found = look("model=detector&version=1")
    assert found["profile"]["name"] == "detector"
    assert found["profile"]["believed"] == [[1, 8.0], [16, 38.0]]
    assert len(found["models"]) == len(look("")["models"])
    assert "profile" not in look("")
    for query in ("model=nobody", "model=sleeper&version=2", "model=", f"model={'x' * 3000}"):
        assert look(query)["profile"] is None
    response = client.get("/console/live?model=detector&model=x")
    assert (response.status, error_of(response)["field"]) == (400, "model")


def test_every_word_of_the_counters_is_explained() -> None:
    files = page_files()
    page, script = files["refusals.html"].decode(), files["refusals.js"].decode()
    sheds = script[script.index("const SHEDS") :]
    for word in SHED_WORDS:
        assert f'id="{word}"' in page
        assert re.search(rf'"?{word}"?: "', sheds), word


def test_the_state_of_the_server_is_told(running: Stage) -> None:
    running.front.door.serving = False
    server = fresh(running)["server"]
    running.front.door.serving = True
    assert (server["ready"], server["serving"]) == (False, False)


def test_it_stays_bounded_with_many_models() -> None:
    with stage() as crowded:
        table = crowded.front.door.table
        index = list(crowded.front.door.catalog.index)
        for number in range(400):
            name = f"model-{number:03d}"
            index.append(IndexEntry(name, "1", "UNAVAILABLE", "x" * 5000))
            if number < 200:
                table.directory.assign(name, "1")
        crowded.front.run(lambda: crowded.front.door.renew(index=index))
        with crowded.front.connect() as client:
            response = client.get("/console/live")
            found = document(response)
            assert len(found["models"]) == 256
            assert found["left_out"] == len(index) - 256
            assert len(response.body) < 400_000
            packed = client.get("/console/live", b"Accept-Encoding: gzip, br\r\n")
            assert packed.fields["content-encoding"] == "gzip"
            assert len(packed.body) < 40_000
            assert orjson.loads(zlib.decompress(packed.body, 31))["left_out"] == found["left_out"]


def test_who_sends_is_for_administrators_where_keys_are_asked_for(tmp_path: Path) -> None:
    guard = Guard(api_key_file=api_keys(tmp_path), admin_key_file=admin_keys(tmp_path))
    with stage(guard) as running:
        running.front.door.table.history.tell_senders(b'[{"source":"gate"}]')
        until(lambda: bool(running.front.door.table.history.read()))
        with running.front.connect() as client:

            def sees(key: str) -> bool:
                answer = client.get("/v2/history", b"X-API-Key: %b\r\n" % key.encode())
                assert answer.status == 200
                return "senders" in orjson.loads(answer.body)["points"][-1]

            assert client.get("/v2/history").status == 401
            assert not sees(ALICE)
            assert sees(ROOT)
