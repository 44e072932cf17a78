"""Whatever frames come to a whole server, it answers as before and keeps nothing of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from backends import onnx_models
from frontend.grpc.random_frames import attack
from frontend.grpc.wire import data, framed, head, wire
from later import later
from live.server import Live, resident_bytes, serving
from waiting import until

MARGIN = 8 << 20
X = np.array([[1.0, 2.0, 3.0]], np.float32)


@dataclass
class EngineClient:
    port: int


def message() -> bytes:
    request = pb.ModelInferRequest(model_name="same")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 3])
    request.raw_input_contents.append(X.tobytes())
    return framed(request.SerializeToString())


def is_unharmed(door: EngineClient) -> bool:
    with wire(door) as client:
        client.send(head(1), data(1, message()))
        answer = pb.ModelInferResponse.FromString(client.answer(1).data[5:])
        return bool(answer.raw_output_contents[0] == X.tobytes())


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def send(door: EngineClient, frames: int, seed: int) -> int:
    """At least so many; returns the seed of what comes next."""
    sent, said = 0, message()
    while sent < frames:
        sent += attack(door, seed, said)
        seed += 1
    assert is_unharmed(door)
    return seed


def until_alone(server: Live, most: int) -> None:
    (pid,) = server.grpc_pids
    until(lambda: descriptors(pid) <= most, "connections that are over are still open")


@pytest.mark.parametrize("frames", [5_000, later(1_000_000)])
def test_frames_by_chance_leave_nothing_behind(frames: int, tmp_path: Path) -> None:
    onnx_models.identity(tmp_path / "models" / "same" / "1" / "model.onnx")
    with serving(tmp_path / "models", grpc=1, folder=tmp_path) as server:
        door = EngineClient(server.grpc_port)
        assert is_unharmed(door)
        pids = server.all_pids()  # the front end for gRPC is the last to be there
        (front,) = server.grpc_pids
        files = descriptors(front)
        seed = send(door, frames // 10, seed=1)
        until_alone(server, files)
        before = {pid: resident_bytes(pid) for pid in (front, server.engine_pid)}
        send(door, frames - frames // 10, seed)
        until_alone(server, files)
        assert server.all_pids() == pids, "a process was replaced"
        grown = {pid: resident_bytes(pid) - size for pid, size in before.items()}
        assert max(grown.values()) < MARGIN, grown
        assert '"level":"error"' not in server.log()
