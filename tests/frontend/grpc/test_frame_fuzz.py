"""Whatever frames come, nobody else is harmed, and nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tritonclient.grpc import service_pb2 as pb

from frontend.grpc.front_end import SUM, FrontEnd, floats, front_end
from frontend.grpc.random_frames import MESSAGE, attack
from frontend.grpc.wire import data, head, wire
from waiting import until


@pytest.fixture(scope="module")
def front() -> Iterator[FrontEnd]:
    with front_end(slots=1000) as running:
        yield running


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
    assert (service.accounts.calls, service.accounts.bytes, service.accounts.unread) == (0, 0, 0)
    assert descriptors() <= before + 1


def test_some_thousand_frames(front: FrontEnd) -> None:
    survives(front, 10_000, first_seed=1)


@pytest.mark.conformance
def test_a_million_frames(front: FrontEnd) -> None:
    survives(front, 1_000_000, first_seed=1000)
