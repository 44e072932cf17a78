"""`carpool cache` against a server in this process, and against none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from carpool.extensions.cache.counted import AUDITS, SOURCES_OFF
from cli_run import CliResult, run_cli
from frontend.http.front_end import FrontEnd, front_end, image_body, image_model, infer


def cache(front: FrontEnd, *arguments: str) -> CliResult:
    return run_cli(["cache", *arguments, "--url", f"http://{front.url}"])


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    settings = {"exact": True, "similar": True}
    with front_end(image_model("image", cache=settings), image_model("plain")) as running:

        def clear(arguments: Mapping[str, Any]) -> dict[str, Any]:
            running.door.renew(extra={"cache": {"cleared": {arguments["name"]: 1}}})
            return {}

        running.door.answers["cache/clear"] = clear
        with running.connect() as client:
            for _ in range(4):
                infer(client, "image", image_body())
        yield running


def test_status_and_clear(front: FrontEnd) -> None:
    told = cache(front, "status", "image")
    assert told.exit_code == 0, told.output
    lines = [line.split() for line in told.stdout.splitlines()]
    assert lines[0][:6] == ["image", "version", "1:", "exact", "and", "similar;"]
    assert ["the", "same", "request", "2", "50.0%"] in lines
    assert ["computed", "2", "50.0%"] in lines
    cleared = json.loads(cache(front, "clear", "image", "--json").stdout)
    assert (cleared["entries"], cleared["evicted"]) == (0, {"cleared": 1})


def test_what_the_audit_found(front: FrontEnd) -> None:
    row = front.run(lambda: front.app._service.row(front.door.catalog.newest["image"]))
    row.add(AUDITS["same"], 99)
    row.add(AUDITS["differs"], 1)
    row.add(SOURCES_OFF, 2)
    told = cache(front, "status", "image").stdout
    assert "of 100 similar hits that were also computed 1 differed" in told
    assert "2 sources differed too often" in told


def test_a_model_without_one_and_one_that_is_not_there(front: FrontEnd) -> None:
    assert "responses are not cached" in cache(front, "status", "plain").stdout
    missing = cache(front, "status", "nobody")
    assert missing.exit_code == 1
    assert "nobody" in missing.output
