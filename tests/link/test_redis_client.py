"""Answers shared through a real Redis server: what comes back, and what happens when the server does not."""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from carpool.errors import ConfigError
from carpool.link.redis_client import SharedStore, shared_store
from link.redis_server import CERTIFICATES, RedisServer, redis_server
from live.server import PATIENCE_S
from waiting import until_in_loop as until

SECRET = "known to all that share"
LONG_S = 30.0  # far more than a reply takes, also where most of the machine is stolen
SHORT_S = 0.002
ANSWER = b'{"detections":[]}' * 60


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as running:
        yield running


def in_loop(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await work()

    uvloop.run(run())


class Told:
    """Who asked, and what came: exactly once each."""

    def __init__(self) -> None:
        self.values: list[list[bytes | None]] = []

    def ask(self, store: SharedStore, key: bytes) -> None:
        got: list[bytes | None] = []
        self.values.append(got)
        store.get(key, got.append)
        assert not got, "not before a later turn of the loop"

    async def all(self) -> list[bytes | None]:
        await until(lambda: all(self.values))
        await asyncio.sleep(0)
        assert {len(got) for got in self.values} <= {1}
        return [got[0] for got in self.values]


async def fetch(store: SharedStore, key: bytes) -> bytes | None:
    told = Told()
    told.ask(store, key)
    [value] = await told.all()
    return value


async def opened(url: str, wait_s: float = LONG_S, secret: str = SECRET) -> SharedStore:
    store = shared_store(url, secret, wait_s, setting="cache_url")
    await until(lambda: store.up)
    return store


# ---- while all is well


def test_what_one_puts_another_gets(server: RedisServer) -> None:
    async def work() -> None:
        one, other = await opened(server.url), await opened(server.url)
        assert await fetch(one, b"key") is None
        one.put(b"key", ANSWER, 60.0)
        assert await fetch(one, b"key") == ANSWER
        assert await fetch(other, b"key") == ANSWER
        assert await fetch(other, b"kex") is None
        one.put(b"key", b"", 60.0)
        assert await fetch(other, b"key") == b""
        stranger = await opened(server.url, secret="another secret altogether")
        assert await fetch(stranger, b"key") is None
        assert (one.timeouts, other.timeouts) == (0, 0)
        for store in (one, other, stranger):
            store.close()

    in_loop(work)
    [name] = server.ask("KEYS", "*")
    assert b"key" not in name.removeprefix(b"carpool:")
    assert 0 < server.ask("PTTL", name) <= 60_000


def test_an_answer_ends_with_its_time(server: RedisServer) -> None:
    async def work() -> None:
        store = await opened(server.url)
        store.put(b"key", ANSWER, 0.05)
        give_up = time.monotonic() + PATIENCE_S
        while await fetch(store, b"key") is not None:
            assert time.monotonic() < give_up
        store.close()

    in_loop(work)


def test_a_thousand_at_once_in_order(server: RedisServer) -> None:
    async def work() -> None:
        store, told = await opened(server.url), Told()
        for number in range(500):
            store.put(b"%d" % number, b"answer %d" % number, 60.0)
        for number in range(1000):
            told.ask(store, b"%d" % number)
        expected = [b"answer %d" % number if number < 500 else None for number in range(1000)]
        assert await told.all() == expected
        store.close()

    in_loop(work)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_commands_of_one_turn_leave_in_one_write(loop: str) -> None:
    async def work() -> None:
        fake = await FakeServer.started(b"+PONG\r\n")
        store, told = await opened(fake.url), Told()
        for number in range(20):
            told.ask(store, b"%d" % number)
        store.put(b"key", ANSWER, 1.0)
        await until(lambda: len(fake.received) > 1)
        assert fake.received[1].count(b"GET") == 20
        assert fake.received[1].count(b"SET") == 1
        store.close()
        assert await told.all() == [None] * 20, "whoever waits is told when it closes"
        await fake.stop()

    (uvloop.run if loop == "uvloop" else asyncio.run)(work())  # type: ignore[operator]


def test_a_password_a_user_a_database_and_a_socket(tmp_path: Path) -> None:
    with redis_server(tmp_path, "user camera on >p%ss ~* +@all", password="of-the-house") as server:

        async def work() -> None:
            urls = (
                f"redis://camera:p%25ss@127.0.0.1:{server.port}/3",
                f"unix://:{server.password}@{server.socket_file}?db=3",
                f"redis://:{server.password}@localhost:{server.port}/3",
            )
            stores = [await opened(url) for url in urls]
            stores[0].put(b"key", ANSWER, 60.0)
            assert await fetch(stores[0], b"key") == ANSWER
            for store in stores[1:]:
                assert await fetch(store, b"key") == ANSWER
            elsewhere = await opened(server.url)
            assert await fetch(elsewhere, b"key") is None
            for store in (*stores, elsewhere):
                store.close()

        in_loop(work)


def test_tls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = f"tls-cert-file {CERTIFICATES}/server.pem\ntls-key-file {CERTIFICATES}/server-key.pem\n"
    files += f"tls-ca-cert-file {CERTIFICATES}/ca.pem\ntls-auth-clients no\n"
    from live.server import free_ports

    [port] = free_ports(1)
    with redis_server(tmp_path, f"{files}tls-port {port}\n"):

        async def work() -> None:
            store = await opened(f"rediss://localhost:{port}?ssl_ca_certs={CERTIFICATES}/server.pem")
            store.put(b"key", ANSWER, 60.0)
            assert await fetch(store, b"key") == ANSWER
            store.close()
            doubtful = shared_store(f"rediss://localhost:{port}", SECRET, SHORT_S, setting="cache_url")
            await until(lambda: "CERTIFICATE_VERIFY_FAILED" in caplog.text)
            assert not doubtful.up
            doubtful.close()

        in_loop(work)


# ---- values that nobody here has written


def test_a_foreign_value_is_a_miss(server: RedisServer) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return (pytest.fail, ("unpickled",))

    async def work() -> None:
        store = await opened(server.url)
        store.put(b"one", ANSWER, 60.0)
        assert await fetch(store, b"one") == ANSWER
        [name] = server.ask("KEYS", "*")
        whole = server.ask("GET", name)
        store.put(b"two", b"of two", 60.0)
        assert await fetch(store, b"two") == b"of two"
        [second] = [other for other in server.ask("KEYS", "*") if other != name]
        changed = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in range(60)]
        garbage = [
            *(b"", b"\x00", b"x" * 27, b"x" * 28, ANSWER, pickle.dumps(Evil()), b"\xff" * 100_000),
            *(whole[:length] for length in range(0, len(whole), 7)),
            *(whole + b"x", server.ask("GET", second), *changed),
        ]
        for value in garbage:
            assert server.ask("SET", name, value) == b"OK"
            assert await fetch(store, b"one") is None
        server.ask("DEL", name)
        server.ask("RPUSH", name, "a", "list")
        assert await fetch(store, b"one") is None
        server.ask("SET", name, whole)
        assert await fetch(store, b"one") == ANSWER
        assert store.up
        store.close()

    in_loop(work)


def test_a_value_put_back_long_after_its_end_is_a_miss(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        store = await opened(server.url)
        store.put(b"one", ANSWER, 60.0)
        assert await fetch(store, b"one") == ANSWER
        today = time.time()
        for later, found in ((3600.0, ANSWER), (3700.0, None)):
            monkeypatch.setattr("carpool.link.redis_client.time.time", lambda later=later: today + later)
            assert await fetch(store, b"one") == found
        store.close()

    in_loop(work)


# ---- a server that is slow, wrong or gone


def test_killed_and_restarted_it_is_back_by_itself(server: RedisServer) -> None:
    async def work() -> None:
        store, told = await opened(server.url), Told()
        store.put(b"key", ANSWER, 60.0)
        assert await fetch(store, b"key") == ANSWER
        server.end()
        for number in range(100):
            told.ask(store, b"%d" % number)
            store.put(b"key", ANSWER, 60.0)
            await asyncio.sleep(0)
        assert await told.all() == [None] * 100
        await until(lambda: not store.up)
        server.start()
        await until(lambda: store.up)
        assert await fetch(store, b"key") is None
        store.put(b"key", ANSWER, 60.0)
        assert await fetch(store, b"key") == ANSWER
        assert store.timeouts == 0, "that the connection is lost is seen at once"
        store.close()

    in_loop(work)


def test_stopped_nobody_waits_for_it_after_a_while(server: RedisServer) -> None:
    async def work() -> None:
        store, told = await opened(server.url, SHORT_S), Told()
        server.signal(signal.SIGSTOP)
        for _ in range(200):
            told.ask(store, b"key")
            store.put(b"key", bytes(50_000), 60.0)
            await asyncio.sleep(0)
        assert await told.all() == [None] * 200
        while store.up:
            assert await fetch(store, b"key") is None
        waited = store.timeouts
        assert waited >= 3
        for _ in range(50):
            assert await fetch(store, b"key") is None
        assert store.timeouts == waited
        server.signal(signal.SIGCONT)
        await until(lambda: store.up)
        store.close()
        patient = await opened(server.url)
        patient.put(b"key", ANSWER, 60.0)
        assert await fetch(patient, b"key") == ANSWER
        patient.close()

    in_loop(work)


def test_a_hundred_who_wait_at_once_are_one_timeout(server: RedisServer) -> None:
    async def work() -> None:
        store, told = await opened(server.url, SHORT_S), Told()
        server.signal(signal.SIGSTOP)
        for _ in range(100):
            told.ask(store, b"key")
        assert await told.all() == [None] * 100
        assert (store.up, store.timeouts) == (True, 100)
        server.signal(signal.SIGCONT)
        store.close()

    in_loop(work)


def test_at_most_a_megabyte_waits_to_be_written(server: RedisServer) -> None:
    async def work() -> None:
        store = await opened(server.url)
        server.signal(signal.SIGSTOP)
        link = store._link
        assert link is not None
        for number in range(400):
            store.put(b"%d" % number, bytes(100_000), 60.0)
            assert link.unsent <= (1 << 20) + 1000
            await asyncio.sleep(0)
        server.signal(signal.SIGCONT)
        assert await fetch(store, b"0") == bytes(100_000)
        assert await fetch(store, b"399") is None
        store.close()

    in_loop(work)


def test_a_server_without_memory_keeps_nothing(tmp_path: Path) -> None:
    with redis_server(tmp_path, "maxmemory 1mb\nmaxmemory-policy noeviction\n") as server:

        async def work() -> None:
            store, told = await opened(server.url), Told()
            for number in range(500):
                store.put(b"%d" % number, bytes(10_000), 60.0)
                told.ask(store, b"%d" % number)
                await asyncio.sleep(0)
            assert set(await told.all()) <= {None, bytes(10_000)}
            assert (store.up, store.timeouts) == (True, 0)
            server.ask("CONFIG", "SET", "maxmemory", "100mb")
            store.put(b"key", ANSWER, 60.0)
            assert await fetch(store, b"key") == ANSWER
            store.close()

        in_loop(work)


def test_a_wrong_password_is_no_failure_and_in_no_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "carpool")
    with redis_server(tmp_path, password="right-one") as server:

        async def work() -> None:
            store = shared_store(
                server.url.replace("right-one", "hunter2"), SECRET, SHORT_S, setting="cache_url"
            )
            assert await fetch(store, b"key") is None
            await until(lambda: "WRONGPASS" in caplog.text)
            assert not store.up
            store.put(b"key", ANSWER, 60.0)
            assert await fetch(store, b"key") is None
            assert server.ask("CONFIG", "SET", "requirepass", "hunter2") == b"OK"
            await until(lambda: store.up)
            assert "hunter2" not in repr(vars(store))
            store.close()

        in_loop(work)
    assert "hunter2" not in caplog.text
    assert SECRET not in caplog.text


# ---- what answers there is no Redis server


class FakeServer(asyncio.Protocol):
    """Says the same to everything."""

    def __init__(self, says: bytes) -> None:
        self.says = says
        self.received: list[bytes] = []
        self.connections: list[asyncio.Transport] = []

    @classmethod
    async def started(cls, says: bytes) -> FakeServer:
        fake = cls(says)
        fake.listening = await asyncio.get_running_loop().create_server(lambda: fake, "127.0.0.1", 0)
        fake.url = f"redis://:hunter2@127.0.0.1:{fake.listening.sockets[0].getsockname()[1]}"
        return fake

    listening: asyncio.Server
    url: str

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.connections.append(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self.received.append(data)
        if len(self.received) == 1:  # the password, and the question whether it is there
            self.connections[-1].write(b"+OK\r\n")
        if self.says and len(self.received) <= 2:
            self.connections[-1].write(self.says)

    async def stop(self) -> None:
        for connection in self.connections:
            connection.abort()
        self.listening.close()


@pytest.mark.parametrize(
    "says",
    [
        *(b"-ERR unknown command 'AUTH', args begin with: 'hunter2'\r\n", b"HTTP/1.1 400 no\r\n\r\n"),
        *(b"$99999999999999999999\r\n", b"*-1\r\n" * 100, b"\x00\xff" * 1000, b"+PONG\r\n$5\r\nab"),
        *(b"+PONG\r\n" + b"$536870911\r\n" + bytes(1 << 20), b""),
        *(b"+PONG\r\n*400000000\r\n", b"+PONG\r\n$1\r\na\r\n*400000000\r\n", b"+PONG\r\n%1\r\n", b"+" * 5000),
    ],
)
def test_whatever_it_says_is_a_miss(says: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    caplog.set_level(logging.DEBUG, "carpool")

    async def work() -> None:
        fake, told = await FakeServer.started(says), Told()
        store = shared_store(fake.url, SECRET, SHORT_S, setting="cache_url")
        await until(lambda: fake.received)
        for _ in range(20):
            told.ask(store, b"key")
            store.put(b"key", ANSWER, 1.0)
            await asyncio.sleep(0)
        assert await told.all() == [None] * 20
        store.close()
        await fake.stop()

    in_loop(work)
    assert "hunter2" not in caplog.text


def test_one_who_cannot_take_his_answer_keeps_it_from_nobody_else(server: RedisServer) -> None:
    async def work() -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, told: complaints.append(str(told["exception"]))
        )
        store, told = await opened(server.url), Told()

        def refuse(_value: bytes | None) -> None:
            raise ValueError("not mine")

        store.get(b"key", refuse)
        told.ask(store, b"key")
        assert await told.all() == [None]
        assert complaints == ["not mine"]
        assert store.up
        store.close()

    in_loop(work)


def test_closed_it_answers_with_nothing(server: RedisServer) -> None:
    async def work() -> None:
        store = await opened(server.url)
        store.close()
        store.put(b"key", ANSWER, 1.0)
        assert await fetch(store, b"key") is None
        assert not store.up

    in_loop(work)


def test_a_certificate_that_is_not_there_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="ssl_ca_certs cannot be read"):
        shared_store(
            "rediss://:hunter2@localhost?ssl_ca_certs=/absent.pem", SECRET, SHORT_S, setting="cache_url"
        )
