"""What a GPU is asked for, and when, with a GPU that only writes it down."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from carpool.extensions.torch.device_sharing import GpuTurns
from carpool.extensions.torch.torch_device import CudaDevice, Device, is_out_of_memory


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CUDA whose every call is remembered; tensors stay on the CPU."""
    said: list[str] = []

    def say(name: str, answer: Any = None) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            words = [name, *(str(value) for value in named.values())]
            said.append(" ".join(words))
            return answer

        return call

    class Graph:
        def __init__(self) -> None:
            self.capture_begin, self.capture_end = say("begin"), say("end")
            self.replay = say("replay")

    class Event:
        def __init__(self, blocking: bool = False) -> None:
            self.record, self.synchronize = say("record"), say("synchronize")

    class Stream:
        def __init__(self, place: object, priority: int = 0) -> None:
            self.wait_event = say("stream waits")

    for name, value in {
        "init": say("init"),
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: "pool",
        "set_device": say("set_device"),
        "set_stream": say("set_stream"),
        "memory_reserved": lambda _place: 5,
        "memory_allocated": lambda _place: 4,
        "reset_peak_memory_stats": say("reset"),
        "max_memory_allocated": lambda _place: 11,
        "mem_get_info": lambda _place: (30, 40),
        "set_per_process_memory_fraction": lambda share, _place: said.append(f"limit {share}"),
        "synchronize": say("device synchronize"),
        "empty_cache": say("empty_cache"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "device", lambda _place: torch.no_grad())
    monkeypatch.setattr(torch, "set_num_threads", say("threads"))
    return said


def test_a_capture_is_warm_alone_and_of_this_thread(asked: list[str]) -> None:
    device = CudaDevice(5)
    runs: list[int] = []

    def run() -> dict[str, torch.Tensor]:
        runs.append(1)
        return {"y": torch.ones(1)}

    assert device.warm(run) == 7
    assert len(runs) == 4
    asked.clear()
    program = device.capture(run)
    assert asked == ["begin pool thread_local", "end", "replay", "record", "synchronize"]
    assert len(runs) == 5
    asked.clear()
    program.replay()
    device.wait()
    assert asked == ["replay", "record", "synchronize"]
    assert program.outputs["y"].tolist() == [1]
    device.close()


def test_a_capture_that_fails_is_ended_and_tells_why(asked: list[str]) -> None:
    device = CudaDevice(5)

    def run() -> dict[str, torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        device.capture(run)
    assert asked[-1] == "end"
    device.close()


def test_only_large_batches_compute_in_a_row(asked: list[str]) -> None:
    one, other = CudaDevice(5), CudaDevice(5)
    programs = {device: device.capture(dict) for device in (one, other)}
    asked.clear()
    for device, program in programs.items():
        device.launch(program, 31)
    assert asked == ["replay", "replay"]
    asked.clear()
    for device, program in programs.items():
        device.launch(program, 32)
    assert asked == ["replay", "record", "stream waits", "replay", "record"]
    asked.clear()
    other.close()  # who is gone is not waited for
    one.launch(programs[one], 64)
    assert asked == ["replay", "record"]
    one.close()


def test_gpus_do_not_wait_for_each_other(asked: list[str]) -> None:
    devices = [CudaDevice(5), CudaDevice(6)]
    programs = [device.capture(dict) for device in devices]
    asked.clear()
    for device, program in zip(devices, programs, strict=True):
        device.launch(program, 64)
    assert "stream waits" not in asked
    for device in devices:
        device.close()


def test_a_model_without_a_graph_keeps_nobody_waiting(asked: list[str]) -> None:
    """Its own code runs during the launch: that of another must be able to go on meanwhile."""
    device, other = CudaDevice(5), CudaDevice(5)
    captured = other.capture(dict)

    def run() -> dict[str, torch.Tensor]:
        other.launch(captured, 64)
        return {"y": torch.ones(1)}

    program = device.call(run)
    device.launch(program, 64)
    assert program.outputs["y"].tolist() == [1]
    device.close()
    other.close()


def test_on_a_cpu_a_launch_runs() -> None:
    device = Device()
    program = device.capture(lambda: {"y": torch.ones(1)})
    device.launch(program, 64)
    assert program.outputs["y"].tolist() == [1]


def test_a_thread_is_set_up_once_for_each_device_that_it_works_for(asked: list[str]) -> None:
    one, other = CudaDevice(5), CudaDevice(5)
    asked.clear()
    for device in (one, one, other, other, one):
        device.enter()
    assert asked.count("set_stream") == 3
    one.close()
    other.close()


def test_memory_is_what_the_process_holds_and_what_it_may(asked: list[str]) -> None:
    device = CudaDevice(5)
    assert (device.allocated(), device.free()) == (5, 30)
    device.limit(10)
    device.limit(100)
    assert asked[-2:] == ["limit 0.25", "limit 1.0"]
    device.release()
    assert asked[-2:] == ["device synchronize", "empty_cache"]
    device.close()


def test_running_out_of_memory_is_known_by_type_and_by_words() -> None:
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("x"))
    assert is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_whoever_captures_waits_for_batches_and_they_for_it() -> None:
    turns = GpuTurns()
    batch, other = turns.join(), turns.join()
    began, ended = threading.Event(), threading.Event()

    def capture() -> None:
        with turns.alone():
            began.set()
            assert ended.wait(60)

    thread = threading.Thread(target=capture)
    with batch:
        thread.start()
        assert not began.wait(0.02)  # a batch runs
    assert began.wait(60)
    assert not batch.acquire(blocking=False)
    assert not other.acquire(blocking=False)
    ended.set()
    thread.join(60)
    assert not thread.is_alive()
    turns.leave(other)
    turns.leave(other)
    with turns.alone():
        assert not batch.acquire(blocking=False)
    assert batch.acquire(blocking=False)
