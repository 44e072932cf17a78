"""Documents that are nearly right, to a whole server: each is answered, or refused with what is wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from backends import onnx_models
from engine import repositories
from later import later
from live.server import serving

PYTHON = "def predict(x):\n    return x\n"
TENSOR: dict[str, Any] = {
    "name": "x",
    "datatype": "FP32",
    "shape": [1, 3],
    "data": [1, 2.5, 3],
    "parameters": {"binary_data_size": 12},
}
INFER: dict[str, Any] = {
    "id": "7",
    "inputs": [TENSOR],
    "outputs": [{"name": "y", "parameters": {"binary_data": True, "classification": 2}}],
    "parameters": {"timeout": 5_000_000, "priority": 1, "sequence_id": 3, "binary_data_output": False},
}
CHAT: dict[str, Any] = {
    "model": "same",
    "messages": [{"role": "user", "content": [{"type": "text", "text": "what is this?"}]}],
    "max_tokens": 5,
    "stream": False,
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "/v2/models/same/infer": INFER,
    "/v2/models/python/infer": INFER,
    "/v2/models/same/versions/1/infer": INFER,
    "/v2/models/same/generate": {"x": [1, 2, 3], "parameters": {"id": 3}},
    "/v2/models/python/generate_stream": {"x": [1.0, 2.0, 3.0], "stream": True},
    "/v1/chat/completions": CHAT,
    "/v2/repository/index": {"ready": True},
    "/v2/systemsharedmemory/region/mine/register": {"key": "/nothing", "offset": 0, "byte_size": 12},
    "/v2/models/same/trace/setting": {"trace_level": ["TIMESTAMPS"], "trace_rate": "7"},
    "/v2/logging": {"log_verbose_level": 0},
    "/v1/models/same:predict": {"instances": [[1, 2, 3]]},
    "/predictions/same": {"x": [1, 2, 3]},
}
NAMES = ("x", "parameters", "shape", "data", "stream", "id")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**64), 1.5, 1e308, 1e-320),
    *("", "x", "y", "FP32", "INT64", "BYTES", "BOOL", "same", "é\0", "9" * 40, "a" * 5000),
    *([], [[]], [[], None], [1, [2]], [[1, 2, 3]], [None], ["1"], [{}], {}, {"x": []}, {"": None}, [[[[]]]]),
]


def changed(document: Any, chance: Random) -> Any:
    """One value somewhere in it is another, is gone, or is given twice."""
    places = list(places_of(document))
    if not places or chance.random() < 0.03:
        return copy.deepcopy(chance.choice(VALUES))
    holder, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.7:
        holder[key] = copy.deepcopy(chance.choice(VALUES))
    elif kind < 0.85:
        del holder[key]
    elif isinstance(holder, list):
        holder.append(copy.deepcopy(holder[key]))
    else:
        holder[chance.choice(NAMES)] = copy.deepcopy(holder[key])
    return document


def places_of(node: Any) -> Any:
    """Each list or object in it, with the index or name of each thing that it holds."""
    held = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in held:
        yield node, key
        yield from places_of(value)


@pytest.mark.parametrize("count", [500, later(20_000)])
def test_no_document_is_the_servers_fault(count: int, tmp_path: Path) -> None:
    onnx_models.identity(tmp_path / "models" / "same" / "1" / "model.onnx")
    repositories.python(tmp_path / "models", PYTHON, name="python")
    with serving(tmp_path / "models", folder=tmp_path) as server, server.connect() as client:
        for seed in range(count):
            chance = Random(seed)
            path = chance.choice(list(DOCUMENTS))
            document: Any = copy.deepcopy(DOCUMENTS[path])
            for _ in range(chance.randrange(4)):
                document = changed(document, chance)
            answer = client.post(path, json.dumps(document).encode())
            said = f"{seed}: {path} {document!r}: {answer.status} {answer.body!r}"
            assert answer.status < 500 or answer.status == 501, said
        assert '"level":"error"' not in server.log()
        assert client.get("/v2/models/same/ready").status == 200
