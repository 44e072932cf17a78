"""A cascade on a whole server: real schedulers decide whether its big model has time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from frontend.picture_models import picture
from frontend.whole_server import WholeServer, whole_server

MODEL = """
backend = "fake"
slo_ms = {slo_ms}
task = "classify"
max_batch = 8
[fake]
curve = "{curve}"
[[input]]
name = "image"
datatype = "FP32"
shape = [3, 16, 16]
[[output]]
name = "scores"
datatype = "FP32"
shape = [4]
"""
CASCADE = """
slo_ms = {slo_ms}
[[step]]
name = "quick"
model = "small"
[[step]]
name = "sure"
model = "{big}"
escalate = {{ from = "quick", by = "margin", below = {below} }}
[answer]
from = "sure or quick"
under_load = "quick"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """What the pretended models say has no margin at all: with a threshold of 0 all is kept."""
    folder = tmp_path_factory.mktemp("models")
    for name, ms in (("small", 0.5), ("large", 0.5), ("slow", 60_000)):
        (folder / name).mkdir()
        (folder / name / "model.toml").write_text(MODEL.format(curve=f"{ms}+0", slo_ms=20_000 + 3 * ms))
    for name, big, below in (("kept", "large", 0.0), ("hard", "large", 0.5), ("late", "slow", 0.5)):
        (folder / name).mkdir()
        text = CASCADE.format(slo_ms=20_000, big=big, below=below)
        (folder / name / "pipeline.toml").write_text(text)
    with whole_server(folder) as server:
        yield server


def classified(served: WholeServer, query: str) -> tuple[int, Any, Any]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("POST", f"/classify?{query}", picture(), {"Content-Type": "image/jpeg"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read()), answer.headers
    connection.close()
    return found


@pytest.mark.parametrize(
    ("query", "by", "degraded"),
    [
        ("model=kept", "quick", False),
        ("model=hard", "sure", False),
        ("model=late", "quick", True),
        ("model=kept&step=sure", "sure", False),
        ("model=late&step=quick", "quick", False),
    ],
)
def test_who_answered_is_said(served: WholeServer, query: str, by: str, degraded: bool) -> None:
    status, document, headers = classified(served, query)
    assert status == 200, document
    assert document["answered_by"] == by
    assert document["escalated"] == (by == "sure")
    assert document["degraded"] is degraded
    assert headers["X-Carpool-Degraded"] == ("overload" if degraded else None)
    assert len(document["classes"]) == 4
    timing = ", ".join(headers.get_all("Server-Timing"))
    assert "quick.infer" in timing
    assert ("sure.infer" in timing) == (by == "sure")


def test_who_insists_is_refused_where_there_is_no_time(served: WholeServer) -> None:
    status, document, _ = classified(served, "model=late&step=sure")
    assert status == 429
    assert "in step 'sure'" in document["error"]


def test_what_is_wrong_with_the_option_is_said(served: WholeServer) -> None:
    status, document, _ = classified(served, "model=hard&step=slow")
    assert status == 400
    assert "step must be quick or sure" in document["error"]
