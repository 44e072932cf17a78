"""What all attacks share: whom they attack, how they are held to half a core, and sockets that give up."""

import contextlib
import ctypes
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event

HOST = "127.0.0.1"
CORE_SHARE = 0.5
_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 5.0
_SHORTEST_REST_S = 0.005


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int
    redis: int = 0  # where the attacker may listen, as well as at the next
    collector: int = 0


class Pace:
    """Holds this process, all its threads, to a share of one core: who has had more rests."""

    def __init__(self, share: float = CORE_SHARE) -> None:
        self._share = share
        self._began = time.monotonic()
        self._used = time.process_time()

    def rest(self) -> None:
        used = time.process_time() - self._used
        ahead = used / self._share - (time.monotonic() - self._began)
        if ahead > _SHORTEST_REST_S:
            time.sleep(ahead)


def nothing() -> None:
    """For who needs no weapon."""


@dataclass(frozen=True)
class Attack:
    """`round` is one of many, and ends after some tenths of a second. `weapon` is made once, beforehand."""

    round: Callable[[Ports, Pace], None]
    weapon: Callable[[], object] = nothing


def attack_until_killed(attack: Attack, ports: Ports, armed: Event) -> None:
    """The whole life of an attacker's process. It ends with the process that started it, at the latest."""
    end_with_parent()
    attack.weapon()
    armed.set()
    pace = Pace()
    while True:
        with contextlib.suppress(OSError):  # a server that hangs up is not put out by that, nor are we
            attack.round(ports, pace)
        pace.rest()
        time.sleep(0.001)


def end_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, port), _PATIENCE_S) as made:
        yield made


def post(path: str, length: int, fields: bytes = b"") -> bytes:
    line = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n"
    return line % (path.encode(), length, fields)


def get(path: str) -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


def read_answer(client: socket.socket) -> None:
    """Until its end, by its length."""
    got = b""
    while b"\r\n\r\n" not in got:
        got += _some(client)
    head, _, rest = got.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1])
        for line in head.lower().split(b"\r\n")
        if line.startswith(b"content-length:")
    )
    left = length - len(rest)
    while left > 0:
        left -= len(_some(client))


def _some(client: socket.socket) -> bytes:
    data = client.recv(1 << 18)
    if not data:
        raise ConnectionResetError
    return data


def ask(client: socket.socket, head: bytes, body: bytes, pace: Pace) -> None:
    """Send a request and read its answer, resting in between."""
    client.sendall(head)
    view = memoryview(body)
    for start in range(0, len(view), 1 << 20):
        client.sendall(view[start : start + (1 << 20)])
        pace.rest()
    read_answer(client)
    pace.rest()


def varint(value: int) -> bytes:
    """A number as protobuf writes it."""
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
