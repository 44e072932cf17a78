"""A compressed message: what its inflating may take, and when it ends."""

from __future__ import annotations

import gzip
import zlib
from typing import Any, cast

import pytest

from carpool.frontend.clients.accounts import CALL, Accounts, Stake
from carpool.frontend.grpc.inflater import Inflater
from carpool.frontend.grpc.rpc_heads import Status

MB = 1 << 20


class Service:
    """What an inflater asks of one."""

    def __init__(self, takes: int = 64 * MB) -> None:
        self.accounts = Accounts(9, 9)
        self.largest_message = 64 * MB
        self._takes = takes

    def most_of(self, _start: bytes) -> int:
        return self._takes

    def stake(self) -> Stake:
        found = self.accounts.open("somebody", CALL, None, 0.0)
        assert found is not None
        return found


def begun(packed: bytes, service: Service, stake: Stake, encoding: str = "gzip") -> Inflater:
    inflater = Inflater(memoryview(packed), encoding, cast(Any, service), stake, by_model=True)
    inflater.begin()
    return inflater


def finished(inflater: Inflater) -> int:
    turns = 0
    while not inflater.complete:
        inflater.turn()
        turns += 1
    return turns


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, 300_000, 9 * MB])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_it_is_what_it_was_in_bounded_slices(encoding: str, size: int) -> None:
    plain = bytes(range(251)) * (size // 251 + 1)
    plain = plain[:size]
    packed = gzip.compress(plain) if encoding == "gzip" else zlib.compress(plain)
    service = Service()
    stake = service.stake()
    inflater = begun(packed, service, stake, encoding)
    assert inflater.complete or not inflater.found
    assert finished(inflater) >= size // (4 * MB)
    assert inflater.fault is None
    assert inflater.found == plain
    assert service.accounts.bytes == size


def test_a_size_that_is_too_much_for_the_model_is_refused_before_anything_is_inflated() -> None:
    service = Service(takes=2 * MB)
    stake = service.stake()
    inflater = begun(gzip.compress(bytes(8 * MB)), service, stake)
    assert inflater.complete
    assert inflater.fault == (
        Status.RESOURCE_EXHAUSTED,
        f"SERVER: Received message larger than max ({8 * MB} vs. {2 * MB})",
    )
    assert service.accounts.bytes == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_without_its_size_or_with_a_wrong_one_it_ends_at_what_the_model_takes(encoding: str) -> None:
    service = Service(takes=2 * MB + 5)
    stake = service.stake()
    packed = (
        gzip.compress(bytes(8 * MB))[:-4] + bytes(4) if encoding == "gzip" else zlib.compress(bytes(8 * MB))
    )
    inflater = begun(packed, service, stake, encoding)
    assert not inflater.complete
    finished(inflater)
    assert inflater.fault is not None
    assert inflater.fault[0] is Status.RESOURCE_EXHAUSTED
    assert f"({2 * MB + 6} vs. {2 * MB + 5})" in inflater.fault[1]
    assert service.accounts.bytes == 0
    assert not inflater.found


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(bytes(MB), mtime=0)[:-9],
        gzip.compress(bytes(MB), mtime=0) + b"x",
        gzip.compress(bytes(MB), mtime=0) * 2,
        gzip.compress(bytes(MB), mtime=0)[:-4] + bytes(4),
        gzip.compress(b"short", mtime=0)[:-1],
        b"",
        b"no gzip",
    ],
)
def test_what_is_damaged_is_said_to_be_and_holds_nothing(packed: bytes) -> None:
    service = Service()
    stake = service.stake()
    inflater = begun(packed, service, stake)
    finished(inflater)
    assert inflater.fault == (Status.INTERNAL, "a message cannot be decompressed as gzip")
    assert service.accounts.bytes == 0


def test_what_is_inflated_for_a_client_that_left_ends_with_the_next_step() -> None:
    service = Service()
    stake = service.stake()
    inflater = begun(gzip.compress(bytes(32 * MB)), service, stake)
    inflater.turn()
    assert service.accounts.bytes == len(inflater.found) == 4 * MB
    service.accounts.close(stake)
    assert service.accounts.bytes == 0
    inflater.turn()
    assert inflater.complete
    assert not inflater.found
    assert service.accounts.bytes == 0
