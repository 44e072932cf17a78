"""Who is turned away and who is told later by a real front end, counted and not timed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from carpool.core.constants import CONSTANTS
from carpool.errors import CarpoolError, Refused
from carpool.frontend.http import fairness, http_service, openapi
from carpool.frontend.http.app import HttpApp
from carpool.frontend.http.fairness import Fairness, Unread
from carpool.frontend.http.http_service import SharedPage
from carpool.link.catalog import Batching, Catalog, ModelEntry
from carpool.link.senders import Sender
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from frontend.fake_door import FakeDoor
from frontend.http.front_end import FrontEnd, error_of, front_end, image_body, image_model, infer, infer_body
from frontend.http.harness import Client, post, serving
from waiting import until, until_in_loop

SLO = 0.05  # of the models here
TOO_LONG = SLO
LONG = 0.75 * CONSTANTS.most_unread * SLO  # for whoever is to blame, while it was too long just now


class Told:
    """How long requests lie unread, as a story wants it, and who was turned away for that."""

    def __init__(self) -> None:
        self.unread = Unread()
        self.turned_away: list[tuple[str, str]] = []
        self.front: FrontEnd

    def behind(self, entry: ModelEntry, _now: float, source: str, _waited: float) -> Refused:
        self.turned_away.append((entry.name, source))
        return Refused("behind", retry_after_s=1.0)

    def ask(self, client: Client, model: str, source: str, times: int) -> list[int]:
        named = b"X-Carpool-Source: %b\r\n" % source.encode() if source else b""
        return [infer(client, model, image_body(), named).status for _ in range(times)]


@contextmanager
def story() -> Iterator[Told]:
    table = Table(bytearray(table_bytes(1)))
    models = [image_model(name) for name in ("small", "flood")]
    door = FakeDoor(*models, image_model("eager", mode="eager"), slots=64, table=table)
    told = Told()
    page = SharedPage(Exposition(table, "test").pieces)
    fair = Fairness(told.unread, told.behind)
    app = HttpApp(door, table.block(0), page, table=table, max_body_bytes=1 << 20, fair=fair)
    with serving(app) as server:
        told.front = FrontEnd(server, door, app)
        yield told
        server.call(app.close)


def send_infer(client: Client, model: str) -> None:
    """Without waiting for the answer."""
    body, fields = image_body()
    client.send(post(f"/v2/models/{model}/infer", body, fields))


def pair_body() -> tuple[bytes, bytes]:
    inputs = [{"name": name, "datatype": "INT32", "shape": [1, 1], "data": [1]} for name in ("a", "b")]
    return infer_body(inputs)


def test_a_front_end_that_is_behind_turns_away_who_causes_it() -> None:
    with story() as told, told.front.connect() as client:
        told.ask(client, "flood", "", 200)
        told.ask(client, "small", "", 5)
        told.unread.seconds = TOO_LONG
        until(lambda: told.ask(client, "flood", "", 1) == [429])  # when it has stood
        told.unread.seconds = LONG
        told.ask(client, "flood", "", 20)
        assert told.ask(client, "small", "", 3) == [200, 200, 200]
        assert {model for model, _ in told.turned_away} == {"flood"}


def test_a_model_without_a_promise_is_turned_away_for_one_that_has_one() -> None:
    with story() as told, told.front.connect() as client:
        told.ask(client, "eager", "", 300)
        told.unread.seconds = TOO_LONG
        until(lambda: told.ask(client, "small", "", 1) == [200] and 429 in told.ask(client, "eager", "", 3))
        assert {model for model, _ in told.turned_away} == {"eager"}


def test_sources_of_one_model_are_told_apart() -> None:
    with story() as told, told.front.connect() as client:
        told.ask(client, "small", "loud", 200)
        told.ask(client, "small", "quiet", 5)
        told.unread.seconds = TOO_LONG
        until(lambda: told.ask(client, "small", "loud", 1) == [429])
        told.unread.seconds = LONG
        assert told.ask(client, "small", "quiet", 3) == [200, 200, 200]
        assert set(told.turned_away) == {("small", "loud")}


def test_who_asks_for_little_is_not_turned_away_for_what_documents_take() -> None:
    """They come from the same address, and are what the front end is late for."""
    told = Told()
    fair = Fairness(told.unread, told.behind)
    told.unread.seconds = TOO_LONG
    began = monotonic() - 20.0
    document = SimpleNamespace(has_body=True, content_length=0, who=None)
    body = SimpleNamespace(has_body=True, content_length=1000, who=None)
    entry: Any = SimpleNamespace(name="small", key=1, batching=Batching("promise", SLO))
    found = []
    for at in range(150):
        now = began + at / 100
        exchange: Any = SimpleNamespace(head=document, head_at=now, peer="::1", payer="::1", first=False)
        fair.document(exchange, lambda: None)
        if at % 2:
            exchange.head = body
            found.append(fair.judge(entry, exchange, Sender(), None))
    assert found == [None] * 75


def test_what_connections_take_is_no_lane_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, the one honest client would be all that the front end seems to work for."""
    told = Told()
    fair = Fairness(told.unread, told.behind)
    told.unread.seconds = TOO_LONG
    began = monotonic()
    body = SimpleNamespace(has_body=True, content_length=1000, who=None)
    entry: Any = SimpleNamespace(name="small", key=1, batching=Batching("promise", SLO))
    found = []
    for at in range(50):
        now = began + at / 50
        monkeypatch.setattr(fairness, "monotonic", lambda now=now: now)
        fair.charge("::1", 0.01)
        exchange: Any = SimpleNamespace(head=body, head_at=now, peer="::1", payer="::1", first=False)
        found.append(fair.judge(entry, exchange, Sender(), None))
    assert found == [None] * 50


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end() as running:
        yield running


class Refusing:
    """A gate that refuses one model, and counts how often it was asked."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.asked = 0

    def __call__(self, entry: ModelEntry, *_: object, **__: object) -> CarpoolError | None:
        if entry.name != self.model:
            return None
        self.asked += 1
        return Refused("full", retry_after_s=0.1)


def fair_of(front: FrontEnd) -> Fairness:
    return front.app._service.fair


def test_who_asks_again_at_once_is_told_later_and_nobody_else_is(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "_REFUSAL_S", 0.5)  # each is dear: the first uses up what there is
    gate = Refusing("image")
    monkeypatch.setattr(front.door, "refuses", gate)
    with ExitStack() as stack:
        clients = [stack.enter_context(front.connect()) for _ in range(8)]
        assert infer(clients[0], "image", image_body()).status == 429
        for client in clients[1:]:
            send_infer(client, "image")
        until(lambda: gate.asked == 8)
        with front.connect() as other:
            assert infer(other, "pair", pair_body()).status == 200
        for client in clients[1:]:
            answer = client.response()
            assert answer.status == 429
            assert error_of(answer)["reason"] == "overload"
    until(lambda: not fair_of(front).held)


def test_a_refusal_that_waits_leaves_its_connection_usable(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fairness, "_REFUSAL_S", 0.5)
    gate = Refusing("image")
    monkeypatch.setattr(front.door, "refuses", gate)
    with front.connect() as client:
        assert [infer(client, "image", image_body()).status for _ in range(4)] == [429] * 4
        gate.model = ""
        assert infer(client, "image", image_body()).status == 200


class Clock:
    """What waits for its turn waits until a test says that it is later."""

    def __init__(self) -> None:
        self.now = monotonic()

    def __call__(self) -> float:
        return self.now


def test_a_client_that_leaves_while_its_refusal_waits_is_forgotten(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(fairness, "monotonic", clock)
    monkeypatch.setattr(fairness, "_REFUSAL_S", 0.5)
    monkeypatch.setattr(front.door, "refuses", Refusing("image"))
    with front.connect() as client:
        infer(client, "image", image_body())
    with front.connect() as client:
        send_infer(client, "image")
        until(lambda: fair_of(front).held == 1)
    front.server.until_connections(0)
    assert fair_of(front).held == 1
    clock.now += CONSTANTS.paced_longest_s
    until(lambda: not fair_of(front).held)


def test_new_connections_are_not_all_kept_waiting(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes one for each request would take all there can be."""
    clock = Clock()
    monkeypatch.setattr(fairness, "monotonic", clock)
    monkeypatch.setattr(fairness, "_REFUSAL_S", 0.5)
    monkeypatch.setattr(fairness, "_MOST_NEW_ONES", 2)
    monkeypatch.setattr(front.door, "refuses", Refusing("image-eager"))
    with ExitStack() as stack:
        with front.connect() as client:
            assert infer(client, "image-eager", image_body()).status == 429
        waiting = [stack.enter_context(front.connect()) for _ in range(2)]
        for client in waiting:
            send_infer(client, "image-eager")
        until(lambda: fair_of(front).held == 2)
        with front.connect() as client:
            assert infer(client, "image-eager", image_body()).status == 429
        assert fair_of(front).held == 2
        clock.now += CONSTANTS.paced_longest_s
        assert [client.response().status for client in waiting] == [429, 429]


def test_documents_of_one_connection_wait_for_inference(front: FrontEnd) -> None:
    """Thousands of them are asked for at once: meanwhile others are answered, and in the end so are they."""
    with front.connect() as greedy, front.connect() as client:
        greedy.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 1000)
        until(lambda: fair_of(front).held > 0)
        assert infer(client, "pair", pair_body()).status == 200
        assert fair_of(front).held <= 1  # of a connection, one at a time; or none, just between two
        for _ in range(1000):
            assert greedy.response().status == 200


def test_the_metrics_page_is_written_once_for_all_who_wait() -> None:
    written = []

    def write() -> Iterator[bytes]:
        written.append(1)
        yield b"page %d" % len(written)

    async def main() -> None:
        page = SharedPage(write)
        pages: list[bytes | None] = []
        for _ in range(500):
            page.ask(pages.append)
        await until_in_loop(lambda: len(pages) == 500)
        assert len(written) <= 10
        assert pages == sorted(pages, key=lambda one: int((one or b"").split()[1]))

    asyncio.run(main())


def test_who_was_kept_from_writing_a_page_does_not_wait_for_that_before_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stalled_s = 0.0

    def write() -> Iterator[bytes]:
        nonlocal stalled_s
        stalled_s = 10.0  # as when the machine runs others
        yield b"page"

    monkeypatch.setattr(http_service, "monotonic", lambda: monotonic() + stalled_s)

    async def main() -> None:
        page = SharedPage(write)
        page.ask(lambda _page: None)
        assert page._due - http_service.monotonic() < stalled_s

    asyncio.run(main())


def test_a_page_that_cannot_be_written_is_answered_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(http_service, "monotonic", lambda: 100.0)  # writing takes no time

    def write() -> Iterator[bytes]:
        tries.append(1)
        if len(tries) == 1:
            raise OSError("no")
        yield b"page"

    async def main() -> None:
        page = SharedPage(write)
        pages: list[bytes | None] = []
        page.ask(pages.append)
        page.ask(pages.append)
        assert pages == [None, b"page"]

    asyncio.run(main())


def test_openapi_is_written_once_for_a_catalogue(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    made = openapi.openapi

    def counted(catalog: Catalog, *, with_keys: bool) -> dict[str, Any]:
        written.append(1)
        return made(catalog, with_keys=with_keys)

    monkeypatch.setattr(openapi, "openapi", counted)
    with front.connect() as client:
        pages = {client.get("/openapi.json").body for _ in range(5)}
    assert len(pages) == 1
    assert len(written) == 1


def test_an_answer_that_fails_in_its_turn_keeps_no_other_from_it() -> None:
    async def turn() -> list[str]:
        fair, said = Fairness(), list[str]()
        for act in (lambda: [].pop(), lambda: said.append("told")):
            fair._pacer.hold(("", "somebody"), act, 0.0, monotonic() - 10.0, 0.0, strict=False)
        fair._go_on()
        return said

    assert asyncio.run(turn()) == ["told"]


def test_the_more_answers_wait_the_more_leave_together() -> None:
    async def looks(waiting: int) -> tuple[float, float]:
        """Between which two delays the next look was planned."""
        fair, now = Fairness(), monotonic()
        fair._pacer.spend(("", "one"), 1.0, now)
        for _ in range(waiting):
            fair._pacer.hold(("", "one"), lambda: None, 1.0, now, 60.0, strict=False)
        loop = asyncio.get_running_loop()
        before = loop.time()
        fair._go_on()
        after = loop.time()
        assert fair._timer is not None
        at = fair._timer.when()
        fair.close()
        return at - after, at - before

    assert asyncio.run(looks(1))[0] <= 0.0021
    assert asyncio.run(looks(400))[1] >= 0.0099
