"""Answers that servers share, with a store of the test's own: who asks it, and who waits for it how long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from carpool.frontend.front_caches import CacheParts
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, front_end, image_body, image_model, infer
from frontend.http.harness import Response, until
from frontend.picture_models import RED, classifier, picture

SECRET = "a secret of all servers"
EXACT = {"exact": True}


class FakeStore:
    """`silent`: it never says anything."""

    up = True

    def __init__(self, *, silent: bool = False) -> None:
        self.timeouts = 3
        self.silent = silent
        self.values: dict[bytes, bytes] = {}
        self.asked = 0
        self.closed = False

    def get(self, key: bytes, then: Callable[[bytes | None], None]) -> None:
        self.asked += 1
        if not self.silent:
            asyncio.get_running_loop().call_soon(then, self.values.get(key))

    def put(self, key: bytes, value: bytes, ttl_s: float) -> None:
        assert ttl_s == 60.0
        self.values[key] = value

    def close(self) -> None:
        self.closed = True


def sharing(store: FakeStore, secret: str = SECRET) -> AbstractContextManager[FrontEnd]:
    models: list[FakeModel] = [image_model("image", cache=EXACT), classifier(cache=EXACT)]
    return front_end(*models, cache=CacheParts(1 << 20, secret, store))


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
        bodies = {client.post("/classify", picture(RED)).body for _ in range(2)}
    with sharing(store) as front, front.connect() as client:
        front.door.admits = False  # the engine takes its time: the store answers first
        answer = client.post("/classify", picture(RED))
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
        clear = {"cleared": {"image": 1}}
        front.run(lambda: front.door.renew(**clear))
        assert words(infer(client, "image", image_body())) == "miss"


@pytest.mark.parametrize("path", ["tensor", "picture"])
def test_nobody_waits_for_one_that_is_silent(path: str) -> None:
    store = FakeStore(silent=True)
    with sharing(store) as front, front.connect() as client:
        if path == "tensor":
            answer = infer(client, "image", image_body())
        else:
            answer = client.post("/classify", picture(RED))
        assert words(answer) == "miss"
        assert store.asked == 1
