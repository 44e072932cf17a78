"""A whole front end and a real Redis server that fails in every way: no request does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import orjson
import pytest

from carpool.extensions.cache.front_caches import CacheParts
from carpool.link import circuit_breaker
from carpool.link.redis_client import SharedStore, shared_store
from extensions.cache.caching import caches_of, caching_front_end
from frontend.http.front_end import FrontEnd, image_body, image_model, infer
from frontend.http.harness import Client, Response
from frontend.picture_models import classifier, picture
from link.redis_server import RedisServer, redis_server
from waiting import until

SECRET = "a secret of all servers"
EXACT = {"exact": True}
WAIT_S = 0.05
REQUESTS = 40  # while it is away; half of them pictures


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch, redis: RedisServer) -> None:
    """Pauses as they are, but shorter; and nothing from the test before."""
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE_S", 0.3)
    redis.ask("FLUSHALL")


@dataclass
class Sharing:
    front: FrontEnd
    store: SharedStore
    client: Client
    number: int = 0

    def word(self, number: int) -> str:
        answer = infer(self.client, "image", image_body(self._bytes(number)))
        assert outputs(answer) == [float(self._bytes(number)[0] * 6), 1.0, 2.0, 3.0]
        return answer.fields["x-carpool-cache"].partition("; age")[0]

    def picture(self, number: int) -> str:
        answer = self.client.post("/classify", picture((number % 256, 0, 0)))
        assert answer.status == 200, answer.body
        return answer.fields["x-carpool-cache"].partition(";")[0]

    @staticmethod
    def _bytes(number: int) -> bytes:
        return bytes([number % 40]) * 6

    def all_are_answered(self, begin: int) -> None:
        """Each of them twice, so that it would be shared, and rightly."""
        for number in range(begin, begin + REQUESTS // 4):
            for _ in range(2):
                self.word(number)
                self.picture(number)

    def is_up(self) -> bool:
        caches = caches_of(self.front.app._service)
        return self.store.up and set(caches.marks) == {"image", "namer"}

    def clear_here(self) -> None:
        """What is kept in this process alone."""
        caches = caches_of(self.front.app._service)
        self.front.run(lambda: caches.store.clear(lambda _owner: True, "cleared"))


def outputs(answer: Response) -> list[float]:
    assert answer.status == 200, answer.body
    found: list[float] = orjson.loads(answer.body)["outputs"][0]["data"]
    return found


@contextmanager
def sharing(redis: RedisServer) -> Iterator[Sharing]:
    """One server of those that share."""
    store = shared_store(f"redis://127.0.0.1:{redis.port}", SECRET, WAIT_S, setting="cache_url")
    models = [image_model("image", mode="eager", cache=EXACT), classifier(cache=EXACT)]
    with (
        caching_front_end(*models, parts=CacheParts(1 << 20, SECRET, store)) as front,
        front.connect() as client,
    ):
        one = Sharing(front, store, client)
        one.word(0)  # the first that keeps answers connects
        until(one.is_up)
        yield one


def comes_back(one: Sharing, other: Sharing) -> None:
    """By itself, for both, and all of it."""
    until(one.is_up)
    until(other.is_up)
    for number in (38, 39):
        one.word(number)

    def is_shared() -> bool:
        """A reply that is late, on a machine with much to do, is a miss."""
        one.clear_here()
        other.clear_here()
        one.word(39)
        return other.word(39) == "hit; kind=shared"

    until(is_shared)


def killed(redis: RedisServer) -> Callable[[], None]:
    redis.end()
    return redis.start


def stopped(redis: RedisServer) -> Callable[[], None]:
    redis.signal(signal.SIGSTOP)
    return lambda: redis.signal(signal.SIGCONT)


def wrong_password(redis: RedisServer) -> Callable[[], None]:
    redis.ask("CONFIG", "SET", "requirepass", "another")
    redis.password = "another"
    redis.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def right() -> None:
        redis.ask("CONFIG", "SET", "requirepass", "")
        redis.password = ""

    return right


def little_memory(redis: RedisServer) -> Callable[[], None]:
    """Less than it takes for itself: whatever is written is refused."""
    redis.ask("CONFIG", "SET", "maxmemory", "1mb")
    return lambda: redis.ask("CONFIG", "SET", "maxmemory", "0")


def little_memory_for_the_newest(redis: RedisServer) -> Callable[[], None]:
    """Whatever is written is dropped again, marks too."""
    redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    again = little_memory(redis)

    def much() -> None:
        again()
        redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")

    return much


def garbage(redis: RedisServer) -> Callable[[], None]:
    for number, key in enumerate(redis.ask("KEYS", "carpool:*")):
        redis.ask("SET", key, (b"", b"x", bytes(range(256)), b"cpl1" + bytes(900))[number % 4])
    return lambda: redis.ask("FLUSHALL")


def other_types(redis: RedisServer) -> Callable[[], None]:
    for key in redis.ask("KEYS", "carpool:*"):
        redis.ask("DEL", key)
        redis.ask("RPUSH", key, "no", "string")
    return lambda: redis.ask("FLUSHALL")


def restarted(redis: RedisServer) -> Callable[[], None]:
    redis.end()
    redis.start()
    return lambda: None


FAULTS = (
    *(killed, stopped, wrong_password, little_memory, little_memory_for_the_newest, garbage, other_types),
    restarted,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_no_request_fails_and_sharing_comes_back(
    fault: Callable[[RedisServer], Callable[[], None]], redis: RedisServer
) -> None:
    with sharing(redis) as one, sharing(redis) as other:
        one.all_are_answered(0)
        mend = fault(redis)
        try:
            one.all_are_answered(10)
            other.all_are_answered(10)
            other.all_are_answered(0)
        finally:
            mend()
        comes_back(one, other)


def test_clearing_one_clears_the_other(redis: RedisServer) -> None:
    with sharing(redis) as one, sharing(redis) as other:

        def clear(_arguments: object) -> dict[str, object]:
            one.front.door.renew(extra={"cache": {"cleared": {"image": 1}}})
            return {}

        one.front.door.answers["cache/clear"] = clear
        for _ in range(2):
            one.word(7)

        def comes_from_the_one() -> bool:
            other.clear_here()
            return other.word(7) == "hit; kind=shared"

        until(comes_from_the_one)
        until(lambda: other.word(7) == "hit; kind=exact")  # kept once Redis has said for how long
        assert orjson.loads(one.client.ask("DELETE", "/v2/models/image/cache").body) == {"shared": True}
        assert one.word(7) == "miss"
        until(lambda: caches_of(other.front.app._service).marks["image"] != b"")
        assert other.word(7) in ("miss", "hit; kind=shared"), "what it had itself is gone"
        keys = [key for key in redis.ask("KEYS", "carpool:*") if b"mark" not in key]
        assert all(redis.ask("TTL", key) != -1 for key in keys), "everything ends by itself"
