"""A capture that fails leaves nothing behind that makes the next one fail. The graphs are a stand-in that
keeps the books of torch's allocator: a pool records for one capture at a time, until it is told to end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from carpool.extensions.torch import torch_device
from carpool.extensions.torch.device_sharing import GpuTurns
from carpool.extensions.torch.torch_device import CudaDevice

Pool = tuple[int, int]


class Allocator:
    def __init__(self) -> None:
        self.recording: set[Pool] = set()
        self.users: dict[Pool, int] = {}
        self.handles = 0
        self.invalid = False  # something that a capture forbids was done in it
        self.not_instantiated = False

    def handle(self) -> Pool:
        self.handles += 1
        return (0, self.handles)

    def begin(self, pool: Pool) -> None:
        self.users[pool] = self.users.get(pool, 0) + 1
        if pool in self.recording:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.recording.add(pool)

    def end(self, _device: int, pool: Pool) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, _device: int, pool: Pool) -> None:
        assert self.users[pool] > 0
        self.users[pool] -= 1


class Graph:
    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._pool = pool
        self._allocator.begin(pool)

    def capture_end(self) -> None:
        if self._allocator.invalid:
            self._allocator.invalid = False
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self._allocator.end(0, self._pool)
        if self._allocator.not_instantiated:
            self._allocator.not_instantiated = False
            raise RuntimeError("CUDA error: out of memory")

    def replay(self) -> None: ...


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    kept = Allocator()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(kept))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", kept.handle)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", kept.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", kept.release, raising=False)
    monkeypatch.setattr(torch_device, "_spoilt", [])
    return kept


@pytest.fixture
def device(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> CudaDevice:
    made: Any = object.__new__(CudaDevice)
    made.place, made._pool, made._turns = SimpleNamespace(index=0), allocator.handle(), GpuTurns()
    for name in ("enter", "wait"):
        monkeypatch.setattr(CudaDevice, name, lambda _self: None)
    found: CudaDevice = made
    return found


def nothing() -> dict[str, torch.Tensor]:
    return {}


def spoils(allocator: Allocator, *, raises: bool) -> Callable[[], dict[str, torch.Tensor]]:
    def run() -> dict[str, torch.Tensor]:
        allocator.invalid = True
        if raises:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        return {}

    return run


@pytest.mark.parametrize("raises", [True, False])
def test_after_a_spoilt_capture_the_next_one_works(
    device: CudaDevice, allocator: Allocator, raises: bool
) -> None:
    device.capture(nothing)
    with pytest.raises(RuntimeError, match="not permitted" if raises else "previous error"):
        device.capture(spoils(allocator, raises=raises))
    assert not allocator.recording
    assert allocator.users == {(0, 1): 1}, "only what was captured well holds on to it"
    assert len(torch_device._spoilt) == 1
    device.capture(nothing)
    assert allocator.users == {(0, 1): 1, (0, 2): 1}


def test_an_error_that_is_the_models_own_leaves_the_pool_as_it_is(
    device: CudaDevice, allocator: Allocator
) -> None:
    def wrong() -> dict[str, torch.Tensor]:
        raise ValueError("a model's own")

    with pytest.raises(ValueError, match="own"):
        device.capture(wrong)
    device.capture(nothing)
    assert not allocator.recording
    assert allocator.handles == 1


def test_a_capture_that_fails_after_its_end_is_not_released_twice(
    device: CudaDevice, allocator: Allocator
) -> None:
    allocator.not_instantiated = True
    with pytest.raises(RuntimeError, match="out of memory"):
        device.capture(nothing)
    assert allocator.users == {(0, 1): 1}, "the graph itself gives it back"


class MortalGraph(Graph):
    """As torch's: a pool whose last graph has gone takes no other."""

    def capture_begin(self, pool: Pool, capture_error_mode: str) -> None:
        if self._allocator.users.get(pool) == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        super().capture_begin(pool, capture_error_mode)

    def __del__(self) -> None:
        self._allocator.release(0, self._pool)


def test_a_trial_leaves_the_pool_to_what_serves(
    device: CudaDevice, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: MortalGraph(allocator))
    for _ in range(2):
        assert isinstance(device.trial(nothing), torch_device.Captured)
    assert isinstance(device.capture(nothing), torch_device.Captured)
    assert sorted(allocator.users.values()) == [0, 0, 0]


def test_what_cannot_be_captured_is_tried_as_a_call(device: CudaDevice, allocator: Allocator) -> None:
    assert isinstance(device.trial(spoils(allocator, raises=True)), torch_device.Called)
    assert isinstance(device.capture(nothing), torch_device.Captured)
