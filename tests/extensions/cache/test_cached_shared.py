"""Answers that servers share, with a store of the test's own: who asks it, and who waits for it how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import orjson
import pytest

from carpool.extensions.cache.front_caches import CacheParts
from extensions.cache.caching import caches_of, caching_front_end
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, image_body, image_model, infer
from frontend.http.harness import Client, Response, post
from frontend.picture_models import RED, classifier, device_classifier, picture
from waiting import until

SECRET = "a secret of all servers"
EXACT = {"exact": True}


class FakeStore:
    """`silent`: it never says anything. `rest`: seconds that everything in it still lives."""

    up = True
    is_prompt = True

    def __init__(self, *, silent: bool = False, rest: float | None = 60.0) -> None:
        self.timeouts = 3
        self.silent = silent
        self.rest = rest
        self.values: dict[bytes, bytes] = {}
        self.marks: dict[str, bytes] = {}
        self.asked = 0
        self.closed = False

    def get(self, key: bytes, then: Callable[[bytes | None], None]) -> None:
        self.asked += 1
        if not self.silent:
            asyncio.get_running_loop().call_soon(then, self.values.get(key))

    def put(self, key: bytes, value: bytes, ttl_s: float) -> None:
        assert ttl_s == 60.0
        self.values[key] = value

    def lasts(self, _key: bytes, then: Callable[[float | None], None]) -> None:
        then(self.rest)

    def mark(self, name: str, then: Callable[[bytes | None], None]) -> None:
        then(self.marks.get(name, b"") if self.up else None)

    def set_mark(self, name: str, word: bytes, then: Callable[[bytes | None], None]) -> None:
        if not self.silent:
            self.marks[name] = word
        then(None if self.silent else word)

    def close(self) -> None:
        self.closed = True


def sharing(store: FakeStore, secret: str = SECRET) -> AbstractContextManager[FrontEnd]:
    models: list[FakeModel] = [
        image_model("image", mode="eager", cache=EXACT),  # a promise would wait for a millisecond alone
        classifier(cache=EXACT),
        device_classifier(cache=EXACT),
    ]
    return caching_front_end(*models, parts=CacheParts(1 << 20, secret, store))


def words(answer: Response) -> str:
    assert answer.status == 200, answer.body
    return answer.fields["x-carpool-cache"].partition("; age")[0]


def test_what_one_server_kept_another_has() -> None:
    store = FakeStore()
    with sharing(store) as front, front.connect() as client:
        first = [infer(client, "image", image_body()) for _ in range(2)][-1]
        assert len(store.values) == 1
        assert "carpool_cache_shared_up 1" in front.metrics()
        assert "carpool_cache_shared_timeouts_total 3" in front.metrics()
    assert store.closed
    with sharing(store) as front, front.connect() as client:
        answer = infer(client, "image", image_body(id="mine"))
        assert words(answer) == "hit; kind=shared"
        assert b'"id":"mine"' in answer.body
        assert answer.body.replace(b'"id":"mine",', b"") == first.body
        assert not front.door.calls
        assert words(infer(client, "image", image_body(bytes(6)))) == "miss"
    with sharing(store, "the secret of somebody else") as front, front.connect() as client:
        assert words(infer(client, "image", image_body())) == "miss"


def test_pictures_are_decoded_meanwhile() -> None:
    store = FakeStore()
    with sharing(store) as front, front.connect() as client:
        bodies = {client.post("/models/namer/predict", picture(RED)).body for _ in range(2)}
    with sharing(store) as front, front.connect() as client:
        front.door.admits = False  # the engine takes its time: the store answers first
        answer = client.post("/models/namer/predict", picture(RED))
        assert words(answer) == "hit; kind=shared"
        assert {answer.body} == bodies
        until(lambda: [call.cancelled for call in front.door.calls] == [True])


@pytest.mark.parametrize("value", [b"", b"x", b"\xff" * 40, b"\x01" + (1000).to_bytes(8, "big") + b"{}"])
def test_what_is_no_answer_is_a_miss(value: bytes) -> None:
    store = FakeStore()
    with sharing(store) as front, front.connect() as client:
        for _ in range(2):
            infer(client, "image", image_body())
        store.values = dict.fromkeys(store.values, value)
        clear = {"extra": {"cache": {"cleared": {"image": 1}}}}
        front.run(lambda: front.door.renew(**clear))
        assert words(infer(client, "image", image_body())) == "miss"


@pytest.mark.parametrize("path", ["tensor", "picture"])
def test_nobody_waits_for_one_that_is_silent(path: str) -> None:
    store = FakeStore(silent=True)
    with sharing(store) as front, front.connect() as client:
        if path == "tensor":
            answer = infer(client, "image", image_body())
        else:
            answer = client.post("/models/namer/predict", picture(RED))
        assert words(answer) == "miss"
        assert store.asked == 1


def twice(store: FakeStore, model: str = "image") -> None:
    """Another server asks it twice, and so shares it."""
    with sharing(store) as front, front.connect() as client:
        for _ in range(2):
            ask(client, model)
        assert store.values


def ask(client: Client, model: str = "image", extra: bytes = b"") -> Response:
    if model == "image":
        return infer(client, model, image_body(), extra)
    return client.post(f"/models/{model}/predict", picture(RED), extra)


@pytest.mark.parametrize("model", ["image", "namer", "chip"])
def test_what_came_from_others_is_known_here_from_then_on(model: str) -> None:
    store = FakeStore(rest=7.0)
    twice(store, model)
    with sharing(store) as front, front.connect() as client:
        front.door.admits = False  # a picture is decoded all the time
        first = ask(client, model)
        assert words(first) == "hit; kind=shared"
        until(lambda: len(caches_of(front.app._service).store) == 1)
        asked, again = store.asked, ask(client, model)
        assert words(again) == "hit; kind=exact"
        assert again.body == first.body
        assert store.asked == asked
        assert 50.0 < float(again.fields["x-carpool-cache"].partition("age=")[2]) <= 60.0, "it is old already"
        assert int(again.fields["cache-status"].partition("ttl=")[2]) <= 7


@pytest.mark.parametrize(("rest", "extra"), [(None, b""), (60.0, b"Cache-Control: no-store\r\n")])
def test_what_is_gone_or_must_not_be_kept_is_not(rest: float | None, extra: bytes) -> None:
    store = FakeStore(rest=rest)
    twice(store)
    with sharing(store) as front, front.connect() as client:
        assert words(ask(client, extra=extra)) == ("off" if extra else "hit; kind=shared")
        assert len(caches_of(front.app._service).store) == 0


def test_who_wants_a_new_answer_does_not_ask_others() -> None:
    store = FakeStore()
    twice(store)
    with sharing(store) as front, front.connect() as client:
        asked = store.asked
        assert words(ask(client, extra=b"Cache-Control: max-age=59\r\n")) == "miss"
        assert store.asked == asked
        assert words(ask(client, extra=b"Cache-Control: max-age=60\r\n")) == "hit; kind=shared"


def clearing(front: FrontEnd) -> None:
    def clear(arguments: Mapping[str, Any]) -> dict[str, Any]:
        front.door.renew(extra={"cache": {"cleared": {arguments["name"]: 1}}})
        return {}

    front.door.answers["cache/clear"] = clear


def look_again(front: FrontEnd, store: FakeStore) -> None:
    """What is done once a second."""
    front.run(lambda: caches_of(front.app._service)._note(store))


def test_clearing_reaches_all_that_share() -> None:
    store = FakeStore()
    with sharing(store) as one, sharing(store) as other, one.connect() as here, other.connect() as there:
        clearing(one)
        assert [words(ask(here)) for _ in range(3)] == ["miss", "miss", "hit; kind=exact"]
        assert words(ask(there)) == "hit; kind=shared"
        assert words(ask(there)) == "hit; kind=exact"
        assert orjson.loads(here.ask("DELETE", "/v2/models/image/cache").body) == {"shared": True}
        look_again(other, store)
        assert words(ask(there)) == "miss"
        assert words(ask(here)) in ("miss", "hit; kind=shared"), "of what was computed since"
        status = orjson.loads(there.get("/v2/models/image/cache").body)
        assert status["evicted"] == {"cleared": 1}
        assert status["shared"] == {"front_ends_up": 1, "timeouts": 3}


def test_a_mark_that_was_dropped_is_told_again() -> None:
    """Else what was cleared would be back."""
    store = FakeStore()
    with sharing(store) as front, front.connect() as client:
        clearing(front)
        for _ in range(2):
            ask(client)
        client.ask("DELETE", "/v2/models/image/cache")
        assert words(ask(client)) == "miss"
        [word] = store.marks.values()
        store.marks.clear()
        look_again(front, store)
        assert store.marks == {"image": word}
        assert word


def test_clearing_says_when_it_does_not_reach_others() -> None:
    store = FakeStore(silent=True)
    with sharing(store) as front, front.connect() as client:
        clearing(front)
        assert orjson.loads(client.ask("DELETE", "/v2/models/image/cache").body) == {"shared": False}


def test_while_the_store_is_down_nothing_is_known_of_it() -> None:
    store = FakeStore()
    twice(store)
    with sharing(store) as front, front.connect() as client:
        ask(client, "namer")  # the first that keeps answers
        assert set(caches_of(front.app._service).marks) == {"image", "namer", "chip"}
        store.up = False
        look_again(front, store)
        asked = store.asked
        assert words(ask(client)) == "miss"
        assert store.asked == asked
        store.up = True
        look_again(front, store)
        front.run(
            lambda: front.door.renew(extra={"cache": {"cleared": {"image": 1}}})
        )  # what is kept here meanwhile
        assert words(ask(client)) == "hit; kind=shared"


def test_what_was_asked_before_a_clear_is_not_kept_after_it() -> None:
    with sharing(FakeStore()) as front, front.connect() as client:
        ask(client)
        front.door.held = True
        client.send(post("/v2/models/image/infer", *image_body()))
        until(lambda: len(front.door.calls) == 2)
        call = front.wait_for_call()
        front.run(lambda: front.door.renew(extra={"cache": {"cleared": {"image": 1}}}))
        front.run(call.finish)
        assert client.response().fields["cache-status"] == "carpool; fwd=miss"
        assert len(caches_of(front.app._service).store) == 0
