"""Whatever frames come, nobody else is harmed, and nothing is kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.frontend.grpc import h2_frames as h2
from frontend.grpc.front_end import SERVICE, SUM, FrontEnd, floats, front_end, image_request
from frontend.grpc.wire import INFER, OPENING, WHOLE, block, data, framed, head, wire
from frontend.http.harness import until

MESSAGE = framed(image_request().SerializeToString())
PATHS = (INFER, SERVICE + "ModelStreamInfer", SERVICE + "ServerLive", "/grpc.health.v1.Health/Watch", "/x/y")
FRAMES_EACH = 200


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end(slots=1000) as running:
        yield running


def some_frame(chance: random.Random) -> bytes:
    """Mostly right ones, for streams that may be there; the rest is anything."""
    stream = chance.choice((0, 1, 3, 5, 7, 9, 11, 12, 2**31 - 1))
    kind = chance.random()
    if kind < 0.3:
        return head(stream, chance.choice((WHOLE, WHOLE, WHOLE | 1, 0)), path=chance.choice(PATHS))
    if kind < 0.6:
        cut = chance.randrange(len(MESSAGE) + 1)
        payload = chance.choice((MESSAGE, MESSAGE[:cut], MESSAGE[cut:], MESSAGE * 2, chance.randbytes(20)))
        return data(stream, payload, chance.choice((0, 0, h2.END_STREAM, h2.PADDED)))
    if kind < 0.9:
        payload = chance.choice(
            (bytes(8), bytes(4), b"\0\0\0\x08", chance.randbytes(chance.randrange(12)), b"")
        )
        return h2.frame(chance.randrange(2, 11), chance.choice((0, 0, 1, 4, 255)), stream, payload)
    if kind < 0.97:
        return h2.frame(h2.HEADERS, WHOLE, stream, block()[:-2] + chance.randbytes(chance.randrange(9)))
    return chance.randbytes(chance.randrange(40))


def attack(front: FrontEnd, seed: int) -> int:
    chance = random.Random(seed)
    frames = [some_frame(chance) for _ in range(chance.randrange(1, FRAMES_EACH))]
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


def is_unharmed(front: FrontEnd) -> bool:
    with wire(front) as client:
        client.send(head(1), data(1, MESSAGE))
        return floats(pb.ModelInferResponse.FromString(client.answer(1).data[5:])) == SUM


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def survives(front: FrontEnd, frames: int, first_seed: int) -> None:
    assert is_unharmed(front)
    shared, service = front.server._shared, front.server.service
    assert shared is not None
    until(lambda: not shared.connections)
    before, seed, sent = descriptors(), first_seed, 0
    while sent < frames:
        sent += attack(front, seed)
        seed += 1
    assert is_unharmed(front)
    until(lambda: not shared.connections)
    front.until_slots_are_back()
    until(lambda: not service.running)
    assert (shared.calls, service.in_flight, len(shared.stalled)) == (0, 0, 0)
    assert descriptors() <= before + 1


def test_some_thousand_frames(front: FrontEnd) -> None:
    survives(front, 10_000, first_seed=1)


@pytest.mark.conformance
def test_a_million_frames(front: FrontEnd) -> None:
    survives(front, 1_000_000, first_seed=1000)
