"""Frames of HTTP/2 by chance: calls that are nearly right, and anything else."""

from __future__ import annotations

import random

from carpool.frontend.grpc import h2_frames as h2
from frontend.grpc.front_end import SERVICE, image_request
from frontend.grpc.wire import INFER, OPENING, WHOLE, HasPort, block, data, framed, head, wire

MESSAGE = framed(image_request().SerializeToString())
PATHS = (INFER, SERVICE + "ModelStreamInfer", SERVICE + "ServerLive", "/grpc.health.v1.Health/Watch", "/x/y")
FRAMES_EACH = 200


def some_frame(chance: random.Random, message: bytes) -> bytes:
    """Mostly right ones, for streams that may be there; the rest is anything."""
    stream = chance.choice((0, 1, 3, 5, 7, 9, 11, 12, 2**31 - 1))
    kind = chance.random()
    if kind < 0.3:
        return head(stream, chance.choice((WHOLE, WHOLE, WHOLE | 1, 0)), path=chance.choice(PATHS))
    if kind < 0.6:
        cut = chance.randrange(len(message) + 1)
        payload = chance.choice((message, message[:cut], message[cut:], message * 2, chance.randbytes(20)))
        return data(stream, payload, chance.choice((0, 0, h2.END_STREAM, h2.PADDED)))
    if kind < 0.9:
        payload = chance.choice(
            (bytes(8), bytes(4), b"\0\0\0\x08", chance.randbytes(chance.randrange(12)), b"")
        )
        return h2.frame(chance.randrange(2, 11), chance.choice((0, 0, 1, 4, 255)), stream, payload)
    if kind < 0.97:
        return h2.frame(h2.HEADERS, WHOLE, stream, block()[:-2] + chance.randbytes(chance.randrange(9)))
    return chance.randbytes(chance.randrange(40))


def attack(front: HasPort, seed: int, message: bytes = MESSAGE) -> int:
    """What one connection sends, for which the front end may say or do anything; returns how many frames."""
    chance = random.Random(seed)
    frames = [some_frame(chance, message) for _ in range(chance.randrange(1, FRAMES_EACH))]
    if chance.random() < 0.5:  # streams in their order, so that it lasts
        frames = [head(number, path=chance.choice(PATHS)) for number in range(1, 12, 2)] + frames
    with wire(front, OPENING) as client:
        client.send(*frames)
        if chance.random() < 0.5:
            client.socket.settimeout(0.05)
            try:
                for _ in client.frames():
                    pass
            except TimeoutError:
                pass
    return len(frames)
