"""Talks to a Redis server in which servers share values and documents, and that may be slow, wrong or gone
at any time.

There is one connection, on the loop of its user. What is asked in one turn of the loop leaves in one write,
and replies come in the order of the commands, so that one timer for the oldest is enough. Nothing here
raises because of the server, and a question is never open for longer than its wait: without a reply, the
user goes on as if the server had nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from time import monotonic as now
from typing import Any, cast

from carpool.config.redis_url import RedisUrl, read_redis_url
from carpool.errors import ConfigError
from carpool.link.circuit_breaker import CircuitBreaker
from carpool.observe.logs import logger

Then = Callable[[Any], None]
"""Gets what was asked for; None if nothing came in time, or nothing that was written here."""

_PROBE_S = 1.0  # for a connection, TLS and the server's welcome
_MOST_UNSENT = 1 << 20  # bytes; what comes on top is not written
_MOST_WAITING = 4096  # commands without a reply
_MOST_REPLY = 16 << 20  # bytes: servers write less
_LONGEST_LINE = 4096  # bytes
_MOST_MARK = 64  # bytes
_FORMAT = b"cpl1"
_HEAD = struct.Struct(">4s16sQ")  # the format, the digest, and when it ends: seconds since 1970
_CLOCKS_DIFFER_S = 3600  # between two machines, at most: what ended earlier was put back by another program
_CODE = re.compile(r"[A-Z]{2,16}\b")
_NEVER = 1 << 40  # seconds since 1970
_SWAP = (
    b"if (redis.call('GET', KEYS[1]) or '') ~= ARGV[1] then return 0 end "
    b"redis.call('SET', KEYS[1], ARGV[2]) return 1"
)

_log = logger("cache")


def shared_store(
    url: str, secret: str, wait_s: float, *, setting: str, pause_s: float | None = None
) -> SharedStore:
    """Connects at once where a loop runs, else when it is first used. `setting` is the name of the setting
    with the address, `pause_s` the longest time between two attempts to reach a server that is gone."""
    address = read_redis_url(url, setting)
    tls = None
    if address.tls:
        try:
            tls = ssl.create_default_context(cafile=address.ca or None)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ConfigError(f"{setting}: ssl_ca_certs cannot be read: {why}", field=setting) from None
    store = SharedStore(address, tls, secret, wait_s, CircuitBreaker(pause_s))
    with suppress(RuntimeError):
        store.begin()
    return store


class SharedStore:
    """Offers `get` and `put` of one loop. `up`: the server is there, and has accepted the connection."""

    def __init__(
        self,
        address: RedisUrl,
        tls: ssl.SSLContext | None,
        secret: str,
        wait_s: float,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.timeouts = 0
        self._address = address
        self._tls = tls
        self._key = blake2b(secret.encode(), digest_size=32).digest()
        self._wait_s = wait_s
        self._breaker = breaker or CircuitBreaker()
        self._given_up = 0.0  # when the last wait was that counts
        self._link: _Link | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._probing: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._closed = False
        self._said = ""  # why it is down, as far as the log knows

    @property
    def up(self) -> bool:
        return self._link is not None

    @property
    def is_prompt(self) -> bool:
        """It is there, and answered in time when it was asked last."""
        return self._link is not None and not self._breaker.in_a_row

    @property
    def where(self) -> str:
        return self._address.where

    @property
    def said(self) -> str:
        """Returns why it is down, if it is."""
        return "" if self.up else self._said

    def get(self, key: bytes, then: Then) -> None:
        """`then` gets the value, or None, in a later turn of the loop: exactly once, and when the wait is
        over at the latest."""
        self._ask(then, partial(self._open, key), b"GET", self._name(key))

    def lasts(self, key: bytes, then: Then) -> None:
        """Asks how many seconds it still lives there, by the server's clock, so that others' need not
        agree."""
        self._ask(then, _seconds, b"PTTL", self._name(key))

    def mark(self, name: str, then: Then) -> None:
        """The word that was last said for this name; empty if none was."""
        self._ask(then, _word, b"GET", self._mark_name(name))

    def set_mark(self, name: str, word: bytes, then: Then) -> None:
        """`then` gets the word if the server has it now."""
        self._ask(then, lambda reply: word if reply == b"OK" else None, b"SET", self._mark_name(name), word)

    def document(self, name: str, then: Then) -> None:
        """`then` gets it as it lies there, for `swap_document`, and as it was written: (None, None) if there
        is none, (bytes, None) if it was not written here, and nothing else but None without a reply."""

        def opened(reply: Any) -> tuple[bytes | None, bytes | None] | None:
            if isinstance(reply, bytes):
                return reply, self._open(name.encode(), reply)
            return None if isinstance(reply, Exception) else (None, None)

        self._ask(then, opened, b"GET", self._document_name(name))

    def swap_document(self, name: str, old: bytes | None, value: bytes, then: Then) -> None:
        """Writes only if `old`, as it lay there, still does. `then` gets whether it did."""
        sealed = self._seal(name.encode(), value, _NEVER)
        words = (b"EVAL", _SWAP, b"1", self._document_name(name), old or b"", sealed)
        self._ask(then, lambda reply: bool(reply) if isinstance(reply, int) else None, *words)

    def _document_name(self, name: str) -> bytes:
        return b"carpool:document:" + self._mark_name(name).rpartition(b":")[2]

    def _ask(self, then: Then, read: Callable[[Any], Any], *command: bytes) -> None:
        if self._link is not None and self._link.is_full:
            self._link.drop("too many commands without a reply")
        if self._link is None:
            self.begin().call_soon(then, None)
            return
        self._link.ask(PendingCommand(read, then, now() + self._wait_s), command)

    def put(self, key: bytes, value: bytes, ttl_s: float) -> None:
        """Whether it is kept is never known. What would have to wait behind a megabyte is not written."""
        link = self._link
        if link is None:
            self.begin()
        elif link.unsent + len(value) <= _MOST_UNSENT and not link.is_full:
            sealed = self._seal(key, value, round(time.time() + ttl_s))
            lasts = b"%d" % max(1, round(ttl_s * 1e3))
            link.ask(PendingCommand(None, None, 0.0), (b"SET", self._name(key), sealed, b"PX", lasts))

    def close(self) -> None:
        """Open questions get None."""
        self._closed = True
        if self._probing is not None:
            self._probing.cancel()
        if self._pause is not None:
            self._pause.cancel()
        if self._link is not None:
            self._link.drop("closed")

    # ---- the connection

    def begin(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._probe()
        return self._loop

    def _probe(self) -> None:
        """The loop's clock may be a little early: then once more."""
        if self._closed or self._loop is None:
            return
        time_now = now()
        if self._breaker.may_probe(time_now):
            self._probing = self._loop.create_task(self._connect(self._loop))
        elif self._breaker.open_until is not None:
            pause = max(0.001, self._breaker.open_until - time_now)
            self._pause = self._loop.call_later(pause, self._probe)

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        link = _Link(loop, self)
        address, tls = self._address, self._tls
        try:
            async with asyncio.timeout(_PROBE_S):
                if address.port:
                    await loop.create_connection(lambda: link, address.host, address.port, ssl=tls)
                else:
                    await loop.create_unix_connection(lambda: link, address.host)
                await link.greet(_welcome(address))
        except Exception as error:
            link.drop("")
            self._down(_reason(error))
        except BaseException:
            link.drop("")
            raise
        else:
            self._breaker.close()
            self._link = link
            self._said = ""
            _log.info("shared-cache-up", where=address.where)

    def _down(self, why: str) -> None:
        self._breaker.failed(now())
        if self._closed:
            return
        if why != self._said:
            self._said = why
            _log.warning("shared-cache-down", where=self._address.where, why=why)
        self._probe()

    # ---- called by the connection

    def answered(self) -> None:
        self._breaker.answered()

    def timed_out(self, asked: PendingCommand) -> bool:
        """Returns whether it is enough. Those who were under way while another one was given up met the same
        silence, and count once: a hiccup in which a hundred wait is one hiccup."""
        self.timeouts += 1
        if asked.due - self._wait_s < self._given_up:
            return False
        self._given_up = now()
        return self._breaker.timed_out(self._given_up)

    def lost(self, link: _Link, why: str) -> None:
        if link is self._link:
            self._link = None
            self._down(why)

    # ---- names and values: without the secret they can neither be found nor made

    def _name(self, key: bytes) -> bytes:
        return b"carpool:" + blake2b(key, digest_size=16, key=self._key, person=b"name").hexdigest().encode()

    def _mark_name(self, name: str) -> bytes:
        return b"carpool:mark:" + blake2b(name.encode(), digest_size=16, key=self._key).hexdigest().encode()

    def _digest(self, key: bytes, value: bytes | memoryview, ends: int) -> bytes:
        made = blake2b(b"%d %d " % (ends, len(key)), digest_size=16, key=self._key, person=b"value")
        made.update(key)
        made.update(value)
        return made.digest()

    def _seal(self, key: bytes, value: bytes, ends: int) -> bytes:
        return _HEAD.pack(_FORMAT, self._digest(key, value, ends), ends) + value

    def _open(self, key: bytes, sealed: Any) -> bytes | None:
        """Whatever was not written here, for this key, is a miss."""
        if not isinstance(sealed, bytes) or len(sealed) < _HEAD.size:
            return None
        form, digest, ends = _HEAD.unpack_from(sealed)
        if form != _FORMAT or time.time() > ends + _CLOCKS_DIFFER_S:
            return None
        value = memoryview(sealed)[_HEAD.size :]
        return bytes(value) if hmac.compare_digest(digest, self._digest(key, value, ends)) else None


class PendingCommand:
    """Represents a command whose reply is waited for until `due`; without `then`, it is not waited for."""

    __slots__ = ("due", "read", "then")

    def __init__(self, read: Callable[[Any], Any] | None, then: Then | None, due: float) -> None:
        self.read = read  # makes of a reply what `then` gets
        self.then = then
        self.due = due

    def answered(self, loop: asyncio.AbstractEventLoop, value: Any) -> None:
        then, self.then = self.then, None
        if then is not None:
            try:
                then(value)
            except Exception as error:  # the next question still has to get its reply
                loop.call_exception_handler(
                    {"message": "a shared response was not accepted", "exception": error}
                )


class Unwelcome(Exception):
    """The server rejects the connection."""


class _Link(asyncio.Protocol):
    """Represents one connection, from its first byte to its last."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: SharedStore) -> None:
        self._loop = loop
        self._store = store
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._leaving: list[bytes] = []
        self._leaving_bytes = 0
        self._replies: deque[PendingCommand] = deque()  # to come, in this order
        self._due: deque[PendingCommand] = deque()  # those that are waited for
        self._timer: asyncio.Handle | None = None
        self._greeting: deque[asyncio.Future[None]] = deque()

    @property
    def is_full(self) -> bool:
        return len(self._replies) >= _MOST_WAITING

    @property
    def unsent(self) -> int:
        return self._leaving_bytes + (self._transport.get_write_buffer_size() if self._transport else 0)

    async def greet(self, commands: list[tuple[bytes, ...]]) -> None:
        """Greets in one write; none of them may be answered with an error."""
        welcomed = [self._loop.create_future() for _ in commands]
        self._greeting.extend(welcomed)
        for command in commands:
            self._send(command)
        await asyncio.gather(*welcomed)
        if self._transport is None:
            raise ConnectionResetError(0, "connection lost")

    def ask(self, asked: PendingCommand, command: tuple[bytes, ...]) -> None:
        self._replies.append(asked)
        self._send(command)
        if asked.then is not None:
            self._due.append(asked)
            if self._timer is None:
                self._look()

    def _send(self, command: tuple[bytes, ...]) -> None:
        words = (b"$%d\r\n%b\r\n" % (len(word), word) for word in command)
        packed = b"".join((b"*%d\r\n" % len(command), *words))
        if not self._leaving:
            self._loop.call_soon(self._leave)
        self._leaving.append(packed)
        self._leaving_bytes += len(packed)

    def _leave(self) -> None:
        leaving, self._leaving, self._leaving_bytes = self._leaving, [], 0
        if self._transport is not None and leaving:
            self._transport.write(b"".join(leaving))

    # ---- waits that are over

    def _look(self) -> None:
        """Looks after the oldest that still waits."""
        self._timer = None
        while self._due and self._due[0].then is None:
            self._due.popleft()
        if self._due:
            left = self._due[0].due - now()
            late = left <= 0.0
            self._timer = (
                self._loop.call_soon(self._read_first)
                if late
                else self._loop.call_later(max(0.001, left), self._look)
            )

    def _read_first(self) -> None:
        """Where the loop itself was late, replies may lie there unread. It has read them by its next turn but
        one: a question counts as unanswered only then."""
        self._timer = self._loop.call_soon(self._give_up)

    def _give_up(self) -> None:
        time_now = now()
        while self._due and self._due[0].due <= time_now:
            asked = self._due.popleft()
            if asked.then is not None:
                asked.answered(self._loop, None)
                if self._store.timed_out(asked):
                    self.drop("timeouts")
                    return
        self._look()

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        try:
            while (found := _read_reply(unread)) is not None:
                reply, end = found
                del unread[:end]
                self._take(reply)
        except (ValueError, IndexError):  # no Redis, or a reply to nothing
            unread.clear()
            self.drop("no Redis server")

    def _take(self, reply: Any) -> None:
        if self._greeting:
            welcomed = self._greeting.popleft()
            if isinstance(reply, Exception) and not welcomed.done():
                welcomed.set_exception(Unwelcome(str(reply)))
            elif not welcomed.done():
                welcomed.set_result(None)
            return
        asked = self._replies.popleft()
        if asked.then is not None and asked.read is not None:
            self._store.answered()
            asked.answered(self._loop, asked.read(reply))

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop("connection lost")

    def drop(self, why: str) -> None:
        """Everything unanswered goes with the connection."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for welcomed in self._greeting:
            if not welcomed.done():
                welcomed.set_exception(ConnectionResetError(0, why))
        self._store.lost(self, why)
        waiting, self._due = self._due, deque()
        self._replies.clear()
        for asked in waiting:
            asked.answered(self._loop, None)


def _read_reply(data: bytearray) -> tuple[Any, int] | None:
    """Returns the first reply and where it ends; None if it is not all here. ValueError for what is none.

    No command of ours is answered with a list, and a list is not read: a few bytes can announce one of four
    hundred million places, which a reader for all of Redis would make, and free for seconds in the loop.
    """
    end = data.find(b"\r\n", 0, _LONGEST_LINE)
    if end < 0:
        if len(data) >= _LONGEST_LINE:
            raise ValueError("a line without an end")
        return None
    kind, line, end = data[:1], bytes(data[1:end]), end + 2
    if kind == b"+":
        return line, end
    if kind == b"-":
        return Unwelcome(line.decode(errors="replace")), end
    number = int(line)
    if kind == b":":
        return number, end
    if kind != b"$" or not -1 <= number <= _MOST_REPLY:
        raise ValueError("no reply to any of our commands")
    if number < 0:
        return None, end
    if len(data) < end + number + 2:
        return None
    return bytes(data[end : end + number]), end + number + 2


def _seconds(reply: Any) -> float | None:
    """Returns the seconds of PTTL: what is not there, or never ends, is less than nothing."""
    return reply / 1e3 if isinstance(reply, int) and reply > 0 else None


def _word(reply: Any) -> bytes | None:
    if reply is None:
        return b""
    return reply if isinstance(reply, bytes) and len(reply) <= _MOST_MARK else None


def _welcome(address: RedisUrl) -> list[tuple[bytes, ...]]:
    commands: list[tuple[bytes, ...]] = []
    if address.password or address.user:
        named = (address.user.encode(),) if address.user else ()
        commands.append((b"AUTH", *named, address.password.encode()))
    if address.database:
        commands.append((b"SELECT", b"%d" % address.database))
    return [*commands, (b"PING",)]


def _reason(error: Exception) -> str:
    """Returns the reason for the log. Of what the server says, the first word: some repeat what they were
    sent, secrets too."""
    if isinstance(error, Unwelcome):
        code = _CODE.match(str(error))
        return f"the server rejected the connection: {code[0] if code else 'error'}"
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or type(error).__name__}"
    return (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
