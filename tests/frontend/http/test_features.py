"""The seam of features: one that nobody has heard of is a wrapper in one file, and every answer has it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from carpool.frontend.calls.asking import Feature, Infers, Made
from carpool.frontend.front_service import FrontService
from carpool.frontend.http.app import HttpApp
from carpool.frontend.http.http_service import SharedPage
from carpool.link.door import Answer, Ask, Call, Hears, ModelEntry
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

    def around(self, inner: Infers, _entry: ModelEntry) -> Infers:
        return CountingDoor(self, inner)


class CountingDoor:
    def __init__(self, feature: CountsSources, inner: Infers) -> None:
        self._feature = feature
        self._inner = inner

    def infer(self, ask: Ask, hears: Hears) -> Call:
        counts = self._feature.counts
        counts[ask.sender.named] += 1
        return self._inner.infer(ask, Counted(hears, counts[ask.sender.named]))


class Counted:
    def __init__(self, hears: Hears, number: int) -> None:
        self._hears = hears
        self._number = number
        self.admitted, self.part = hears.admitted, hears.part

    def done(self, answer: Answer) -> None:
        if isinstance(answer, Made):
            answer.fields += b"X-Of-Its-Source: %d\r\n" % self._number
        self._hears.done(answer)


# ── the test of it ──

CACHED = {"exact": True, "min_uses": 1}


@contextmanager
def served(*features: Feature) -> Iterator[Client]:
    models: tuple[FakeModel, ...] = (
        echo("echo", Datatype.FP32, (4,)),
        classifier(),
        classifier("kept", cache=CACHED),
    )
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(*models, table=table)
    page = SharedPage(Exposition(table, "test").pieces)
    app = HttpApp(door, table.block(0), page, table=table, features=features)
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
    with served(CountsSources()) as client:
        sources = ("gate", "door", "gate", "gate")
        assert [ask(client, path, source) for source in sources] == ["1", "1", "2", "3"]


def test_what_is_not_wrapped_says_nothing() -> None:
    with served() as client:
        assert ask(client, "/v2/models/echo/infer", "gate") is None


def test_only_what_is_switched_on_is_wrapped() -> None:
    """A version without any feature has no entry in the table of wrappers: its requests pass none."""
    table = Table(bytearray(table_bytes(1)))
    door = FakeDoor(classifier(), classifier("kept", cache=CACHED), table=table)
    service = FrontService("test", door, table.block(0), 1 << 20, 1)
    try:
        wrapped = {entry.name for entry in door.catalog.entries.values() if entry.key in service.features}
        assert wrapped == {"kept"}
    finally:
        service.close()
