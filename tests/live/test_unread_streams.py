"""A gRPC stream of a whole server whose client grants no window: it is let go, and others are served.

What lies in memory meanwhile is counted in tests/frontend/grpc/test_unread_answers.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tritonclient.grpc.service_pb2 as pb

from carpool.frontend.grpc import h2_frames as h2
from carpool.frontend.grpc.rpc_heads import Status
from carpool.frontend.grpc.stream_infer import TOO_SLOW
from frontend.grpc.front_end import SERVICE
from frontend.grpc.wire import data, framed, head, wire
from live.server import serving

LONG = """
class Model:
    def predict(self, n):
        for _ in range(int(n[0, 0])):
            yield {"y": [[7] * 16384]}
"""
SETTINGS = """
decoupled = true
[[input]]
name = "n"
datatype = "INT32"
shape = [1]
[[output]]
name = "y"
datatype = "INT32"
shape = [-1]
"""
NO_WINDOW = h2.PREFACE + h2.settings({h2.INITIAL_WINDOW_SIZE: 0})


def asked(stream: int, count: int) -> bytes:
    request = pb.ModelInferRequest(model_name="long")
    request.inputs.add(name="n", datatype="INT32", shape=[1, 1]).contents.int_contents.append(count)
    return head(stream, path=SERVICE + "ModelStreamInfer") + data(
        stream, framed(request.SerializeToString()), 0
    )


@pytest.mark.conformance
def test_streams_without_a_window_are_cut_off_and_others_are_served(tmp_path: Path) -> None:
    """The model has one instance: the request behind them is answered when they have let go of it."""
    folder = tmp_path / "models" / "long"
    (folder / "1").mkdir(parents=True)
    (folder / "model.toml").write_text(SETTINGS)
    (folder / "1" / "model.py").write_text(LONG)
    with serving(tmp_path / "models", grpc=1, folder=tmp_path) as server:
        port = cast(Any, SimpleNamespace(port=server.grpc_port))
        with wire(port, NO_WINDOW) as client, server.connect() as other:
            for stream in (1, 3, 5):
                client.send(asked(stream, 2_000_000_000))
            answer = other.post("/v2/models/long/generate", json.dumps({"n": 1}).encode())
            assert answer.status == 200
            for stream in (1, 3, 5):
                said = client.answer(stream)
                assert (said.status, said.fields["grpc-message"]) == (Status.UNAVAILABLE, TOO_SLOW)
            assert client.is_alive()
