"""A real browser at the door: pages of other sites, foreign names, and the console's question for a key."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import orjson
import pytest
from playwright.sync_api import Browser, expect

from carpool.frontend.access.guard import Guard, Names
from console.conftest import ELSEWHERE, PATIENCE_MS, watched
from console.stage import stage
from frontend.access.key_files import ALICE, api_keys
from frontend.http.harness import Client
from frontend.whole_server import WholeServer, whole_server

MODEL = """
from pathlib import Path

Path(r"{mark}").write_text("code ran")

class Model:
    def __call__(self, x):
        return x
"""
SETTINGS = """name = "evil"
backend = "python"
max_batch = 1

[[input]]
name = "x"
datatype = "FP32"
shape = [1]

[[output]]
name = "y"
datatype = "FP32"
shape = [1]
"""
SEND = """async (base) => {
  const sent = [];
  for (const [path, body] of [
    ["/v2/repository/models/evil/load", "{}"],
    ["/v2/logging", '{"log_info":false,"log_warning":false}'],
    ["/v2/trace/setting", '{"trace_rate":"1"}'],
    ["/v2/systemsharedmemory/unregister", ""],
  ]) {
    await fetch(base + path, { method: "POST", mode: "no-cors", body });
    try {
      await fetch(base + path, { method: "POST", headers: { "content-type": "application/json" }, body });
      sent.push(path);
    } catch {}
  }
  return sent;
}"""


ASKED = b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}'
USE = """async (base) => {
  for (const path of ["/v2/models/evil/infer", "/v2/models/evil/generate", "/models/evil/predict"]) {
    await fetch(base + path, { method: "POST", mode: "no-cors", body: "{}" });
  }
  await fetch(base + "/v2/models/evil", { mode: "no-cors" });
}"""
"""Requests that a page may send to another site, and whose answers it cannot read."""


class Elsewhere(BaseHTTPRequestHandler):
    """A page of another site: a form that sends itself when told to."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title><form id=f method=post enctype=text/plain>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://localhost:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def models(tmp_path: Path, mark: Path) -> Path:
    folder = tmp_path / "models" / "evil"
    (folder / "1").mkdir(parents=True)
    (folder / "model.toml").write_text(SETTINGS)
    (folder / "1" / "model.py").write_text(MODEL.format(mark=mark))
    return tmp_path / "models"


@pytest.fixture
def server(models: Path) -> Iterator[WholeServer]:
    with whole_server(models, model_control_mode="explicit", cache_dir=None) as running:
        yield running


def log_settings(client: Client) -> object:
    return orjson.loads(client.get("/v2/logging").body)


@pytest.mark.conformance
def test_a_page_of_another_site_can_neither_load_a_model_nor_change_a_setting(
    browser: Browser, server: WholeServer, elsewhere: str, mark: Path
) -> None:
    base = f"http://127.0.0.1:{server.port}"
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    with server.connect() as client:
        before = log_settings(client)
        page.goto(elsewhere)
        assert page.evaluate(SEND, base) == []
        for path in ("/v2/repository/models/evil/load", "/v2/logging"):
            page.goto(elsewhere)
            with page.expect_navigation(url=base + path) as gone:
                page.evaluate("(to) => { f.action = to; f.submit(); }", base + path)
            assert gone.value.status == 403
        context.close()
        assert log_settings(client) == before
        assert not mark.exists()
        # What is no browser sends neither field, and the server's own pages are its own.
        assert client.post("/v2/repository/models/evil/load", b"{}").status != 403
        assert mark.exists()


def test_a_page_of_another_site_uses_no_model(
    browser: Browser, models: Path, elsewhere: str, mark: Path
) -> None:
    with whole_server(models, on_demand=True, cache_dir=None) as server:
        base = f"http://127.0.0.1:{server.port}"
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(elsewhere)
        page.evaluate(USE, base)
        with page.expect_navigation(url=f"{base}/v2/models/evil/infer") as gone:
            page.evaluate("(to) => { f.action = to; f.submit(); }", f"{base}/v2/models/evil/infer")
        assert gone.value.status == 403
        page.close()
        with server.connect() as client:
            for wrong in (b"{}", b"no JSON", b'{"inputs": [{"name": "x"}]}'):
                assert client.post("/v2/models/evil/infer", wrong).status == 400
            assert client.post("/models/evil/predict", b"no image").status == 400
            assert not mark.exists(), "nothing was loaded"
            client.post("/v2/models/evil/infer", ASKED)
            assert mark.exists()


def test_a_page_of_the_server_itself_may(browser: Browser, server: WholeServer) -> None:
    page = browser.new_page()
    page.goto(f"http://127.0.0.1:{server.port}/")
    asked = "async () => (await fetch('/v2/logging', { method: 'POST', body: '{\"log_info\":true}' })).status"
    assert page.evaluate(asked) == 200
    page.close()


def test_a_name_that_was_made_to_point_here_gets_nothing(browser: Browser, server: WholeServer) -> None:
    """DNS rebinding: to the browser it is the page's own site."""
    page = browser.new_page()
    page.set_default_timeout(PATIENCE_MS)
    for path in ("/", "/v2", "/console/live", "/v2/health/ready"):
        answer = page.goto(f"http://{ELSEWHERE}:{server.port}{path}")
        assert answer is not None
        assert answer.status == 403
    page.close()


def test_the_console_asks_for_a_key_and_keeps_it_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    guard = Guard(Names(loopback=True), api_key_file=api_keys(tmp_path))
    with stage(guard) as staged:
        shown = watched(browser, staged)
        shown.expected.append("401")
        page = shown.page
        page.goto(f"{staged.url}/")
        state = page.locator("#server-state")
        expect(state).to_have_text("The server asks for a key")
        field = page.get_by_label("This server asks for a key.")
        field.fill("not-a-key-of-anybody")
        page.get_by_role("button", name="Use this key").click()
        expect(state).to_have_text("The server does not know this key")
        field.fill(ALICE)
        page.get_by_role("button", name="Use this key").click()
        page.get_by_role("radio", name="detector").wait_for(state="attached")
        expect(field).to_be_hidden()
        expect(page.locator("#curl")).to_contain_text("$CARPOOL_API_KEY")
        assert ALICE not in page.content()
        page.reload()
        page.get_by_role("radio", name="detector").wait_for(state="attached")
        page.get_by_role("radio", name="detector").check(force=True)
        page.locator("#sample").click()
        expect(page.locator("#answer-status")).not_to_contain_text("key")
        other = page.context.new_page()
        other.goto(f"{staged.url}/")
        expect(other.locator("#server-state")).to_have_text("The server asks for a key")
        shown.close()
