"""The seam of features: one that nobody has heard of is a wrapper in one file, and every answer has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from absent import needs
from carpool.frontend.calls.front_part import FrontPart
from carpool.frontend.calls.request import (
    Infer,
    Listener,
    Request,
)
from carpool.frontend.front_service import FrontService
from carpool.frontend.http.app import HttpApp
from carpool.frontend.http.http_service import SharedPage
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from carpool.types import Datatype
from frontend.fake_door import FakeDoor, FakeModel, echo
from frontend.http.harness import Client, serving
from frontend.picture_models import classifier, picture
from waiting import until

# ── the whole feature: an answer header that counts the requests of each source ──


class CountsSources:
    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.part = FrontPart(around=self.around)

    def around(self, inner: Infer, _entry: ModelEntry) -> Infer:
        def infer(request: Request) -> None:
            self.counts[request.sender.named] += 1
            request.listen(Counted(self.counts[request.sender.named]))
            inner(request)

        return infer


class Counted(Listener):
    def __init__(self, number: int) -> None:
        self._number = number

    def answered(self, request: Request, answer: Answer) -> Answer:
        request.more_fields += b"X-Of-Its-Source: %d\r\n" % self._number
        return answer


# ── the test of it ──

CACHED = {"exact": True, "min_uses": 1}


@contextmanager
def served(*parts: FrontPart) -> Iterator[Client]:
    models: tuple[FakeModel, ...] = (
        echo("echo", Datatype.FP32, (4,)),
        classifier(),
        classifier("kept", cache=CACHED),
    )
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(*models, table=table)
    page = SharedPage(Exposition(table, "test").pieces)
    app = HttpApp(door, table.block(0), page, table=table, parts=parts)
    with serving(app) as server, server.connect() as client:
        yield client
        until(lambda: not door.slots_in_use)  # an answer is out before its slot is back


def ask(client: Client, path: str, source: str) -> str | None:
    raw = path.endswith("infer")
    fields = b"X-Carpool-Source: %b\r\n" % source.encode()
    fields += b"Inference-Header-Content-Length: 0\r\n" if raw else b""
    answer = client.post(path, bytes(16) if raw else picture(), fields)
    assert answer.status == 200, answer.body
    return answer.fields.get("x-of-its-source")


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/models/namer/predict", "/models/kept/predict"])
def test_a_feature_is_one_wrapper_in_one_file(path: str) -> None:
    """Of tensors, of pictures, and of answers that are kept."""
    with served(CountsSources().part) as client:
        sources = ("gate", "door", "gate", "gate")
        assert [ask(client, path, source) for source in sources] == ["1", "1", "2", "3"]


def test_what_is_not_wrapped_says_nothing() -> None:
    with served() as client:
        assert ask(client, "/v2/models/echo/infer", "gate") is None


@needs("cache")
def test_only_what_is_switched_on_is_wrapped() -> None:
    """The lane of a version without any extension has no wrapper: its requests place themselves."""
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(classifier(), classifier("kept", cache=CACHED), table=table)
    service = FrontService("test", door, table.block(0), 1 << 20, 1)
    try:
        lanes = [service.lane(entry) for entry in door.catalog.entries.values()]
        assert {lane.entry.name for lane in lanes if lane.infer is not None} == {"kept"}
        assert all(lane is service.lane(lane.entry) for lane in lanes)
    finally:
        service.close()
