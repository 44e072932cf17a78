"""Requests to models whose rows meet: none gets anything of another's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from live.server import Live, serving

pytest.importorskip("onnx")
tritonclient = pytest.importorskip("tritonclient.grpc")

from engine import row_graphs  # noqa: E402  (they need onnx)

CLIENTS, EACH = 16, 12
Arrays = Mapping[str, Any]


def towers(random: np.random.Generator) -> dict[str, Any]:
    words = random.integers(0, 50, (1, 7))
    return {"input_ids": words, "pixel_values": random.random((1, 3, 8, 8), np.float32)}


def clicks(random: np.random.Generator) -> dict[str, Any]:
    images = random.random((1, 3, 4, 4), np.float32)
    return {
        "images": images,
        "image_index": np.zeros(1, np.int64),
        "points": random.random((1, 2), np.float32),
    }


def model(folder: Path, make: Callable[[Path], Path], settings: str) -> Path:
    (folder / "1").mkdir(parents=True)
    make(folder / "1" / "model.onnx")
    (folder / "model.toml").write_text(settings)
    return folder


def over_http(server: Live, name: str, inputs: Arrays) -> dict[str, Any]:
    types = {"int64": "INT64", "float32": "FP32"}
    tensors = [
        {"name": key, "datatype": types[array.dtype.name], "shape": list(array.shape), "data": array.tolist()}
        for key, array in inputs.items()
    ]
    with server.connect() as client:
        answer = client.post(f"/v2/models/{name}/infer", json.dumps({"inputs": tensors}).encode())
    assert answer.status == 200, answer.body
    outputs = json.loads(answer.body)["outputs"]
    return {one["name"]: np.float32(one["data"]).reshape(one["shape"]) for one in outputs}


def over_grpc(server: Live, name: str, inputs: Arrays) -> dict[str, Any]:
    types = {"int64": "INT64", "float32": "FP32"}
    sent = []
    for key, array in inputs.items():
        tensor = tritonclient.InferInput(key, list(array.shape), types[array.dtype.name])
        tensor.set_data_from_numpy(array)
        sent.append(tensor)
    client = tritonclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
    try:
        answer = client.infer(name, sent)
        return {one.name: answer.as_numpy(one.name) for one in answer.get_response().outputs}
    finally:
        client.close()


@pytest.mark.conformance
def test_each_request_gets_its_own_answer(tmp_path: Path) -> None:
    import onnxruntime

    slow = "[batching]\nmax_delay_ms = 800\n"
    folders = {
        "towers": model(tmp_path / "towers", row_graphs.two_towers, ""),
        "delayed": model(tmp_path / "delayed", row_graphs.two_towers, slow),
        "insisting": model(tmp_path / "insisting", row_graphs.two_towers, "max_batch = 8\n"),
        "points": model(tmp_path / "points", row_graphs.points, slow),
    }
    alone = {
        name: onnxruntime.InferenceSession(str(folder / "1" / "model.onnx"))
        for name, folder in folders.items()
    }

    def ask(number: int) -> list[str]:
        random = np.random.default_rng(number)
        wrong = []
        for turn in range(EACH):
            for name, session in alone.items():
                inputs = (clicks if name == "points" else towers)(random)
                names = [output.name for output in session.get_outputs()]
                right = dict(zip(names, session.run(None, inputs), strict=True))
                told = (over_http if turn % 2 else over_grpc)(server, name, inputs)
                for output, array in right.items():
                    if told[output].shape != array.shape or not np.allclose(told[output], array, atol=1e-4):
                        wrong.append(f"{name} {output} {told[output].shape} for {array.shape}")
        return wrong

    with serving(*folders.values(), grpc=1, folder=tmp_path) as server:
        with ThreadPoolExecutor(CLIENTS) as clients:
            wrong = [one for each in clients.map(ask, range(CLIENTS)) for one in each]
        with server.connect() as client:
            config = json.loads(client.get("/v2/models/insisting/config").body)
            off = {name: server.metric("carpool_unbatched", model=name) for name in folders}
    assert not wrong
    assert config["max_batch_size"] == 1
    assert "for a batch of 2" in config["parameters"]["carpool_unbatched"]["string_value"]
    assert set(off.values()) == {1.0}
    assert "! towers: each request runs alone, because in the file, the first axis of" in server.log()
