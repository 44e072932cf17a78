"""Routes of another package: found by its entry point, with its own words of errors and places of keys."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from carpool.extensions import installed
from carpool.frontend.access.guard import Guard
from frontend.access.key_files import ALICE, BOB, api_keys
from frontend.http.front_end import FrontEnd, front_end
from frontend.http.harness import Client, Response

SAMPLE = Path(__file__).parent / "sample"
NAME = "carpool_counting"


def forget() -> None:
    installed.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(SAMPLE)
    forget()
    yield
    forget()


@pytest.fixture
def served(package: None) -> Iterator[FrontEnd]:
    with front_end() as found:
        yield found


@pytest.fixture
def guarded(package: None, tmp_path: Path) -> Iterator[Client]:
    with front_end(guard=Guard(api_key_file=api_keys(tmp_path))) as found, found.connect() as client:
        yield client


def said(response: Response) -> Any:
    return orjson.loads(response.body)


def test_its_module_is_imported_for_the_first_request(served: FrontEnd) -> None:
    with served.connect() as client:
        assert client.get("/v2").status == 200
        assert f"{NAME}.front" not in sys.modules
        assert said(client.get("/counting/models"))["count"] > 1
    assert f"{NAME}.front" in sys.modules


def test_all_errors_below_its_prefix_are_in_its_words(served: FrontEnd) -> None:
    with served.connect() as client:
        for response, status, why in (
            (client.get("/counting/nothing"), 404, "there is nothing at '/counting/nothing'"),
            (client.post("/counting/models", b"{}"), 405, "POST is not allowed here"),
            (client.post("/counting/words", b"{}"), 400, "text must be a string"),
            (client.post("/counting/words", b" " * 70_000), 413, "the body is over 65536 bytes"),
            (client.post("/counting/words", b"["), 400, "the request is not valid JSON"),
        ):
            assert response.status == 200
            answer = said(response)
            assert (answer["ok"], answer["status"]) == (False, status)
            assert re.match(why, answer["why"])
    with served.connect() as client:
        client.send(b"POST /counting/words HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n")
        assert said(client.response())["status"] == 413


def test_errors_elsewhere_are_the_servers(served: FrontEnd) -> None:
    with served.connect() as client:
        assert client.get("/counted").status == 404


def test_without_it_there_is_no_such_route() -> None:
    with front_end() as found, found.connect() as client:
        response = client.get("/counting/models")
    assert (response.status, said(response)["reason"]) == (404, "not-found")


def test_a_key_in_the_query(guarded: Client) -> None:
    assert said(guarded.get("/counting/models"))["status"] == 401
    assert said(guarded.get("/counting/models?token=wrong"))["status"] == 401
    assert said(guarded.get(f"/counting/models?token={ALICE}"))["ok"]
    assert guarded.get(f"/v2?token={ALICE}").status == 401


def test_a_key_in_the_body_is_of_one_request_alone(guarded: Client) -> None:
    """Though all of them have the same head."""
    for key, by in ((ALICE, "alice"), (BOB, "bob"), ("wrong", None), (ALICE, "alice")):
        body = orjson.dumps({"text": "one two", "token": key}).ljust(80)
        assert said(guarded.post("/counting/words", body)).get("by") == by


def test_a_body_without_a_known_key_may_not_be_long(guarded: Client) -> None:
    head = b"POST /counting/words HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n"
    guarded.send(head % (5 << 20, b""))
    assert said(guarded.response())["status"] == 413
