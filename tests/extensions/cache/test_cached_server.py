"""A cache on a whole server: settings from the model's folder, and what a reload makes of it."""

from __future__ import annotations

import itertools
import shutil
from contextlib import ExitStack
from pathlib import Path

import orjson
import pytest

from absent import needs
from carpool.link.catalog import ModelEntry
from engine import ensembles
from frontend.http.front_end import outputs_of
from frontend.http.harness import Client, Response
from frontend.whole_server import WholeServer, whole_server
from link.redis_server import redis_server
from waiting import until

PBTXT = """
backend: "python"
max_batch_size: 4
input [ {{ name: "x", data_type: TYPE_FP32, dims: [ 2 ] }} ]
output [ {{ name: "y", data_type: TYPE_FP32, dims: [ 2 ] }} ]
{more}
"""
CODE = """
class Model:
    def predict(self, x):
        return {{"y": x + {added}}}
"""


def write_model(folder: Path, added: float, more: str = "response_cache { enable: true }") -> None:
    (folder / "adder" / "1").mkdir(parents=True, exist_ok=True)
    (folder / "adder" / "config.pbtxt").write_text(PBTXT.format(more=more))
    (folder / "adder" / "1" / "model.py").write_text(CODE.format(added=added))


def ask(client: Client) -> Response:
    given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    return client.post("/v2/models/adder/infer", orjson.dumps({"inputs": [given]}))


def words(answers: list[Response]) -> list[str]:
    return [answer.fields["x-carpool-cache"].partition(";")[0] for answer in answers]


def test_tritons_setting_and_a_reload_with_other_weights(tmp_path: Path) -> None:
    write_model(tmp_path, 10.0)
    settings = {"model_control_mode": "explicit", "load_models": ("*",)}
    with whole_server(tmp_path, **settings) as server, server.connect() as client:
        assert words([ask(client) for _ in range(2)]) == ["miss", "hit"]  # as Triton's
        config = orjson.loads(client.get("/v2/models/adder/config").body)
        assert config["response_cache"] == {"enable": True}
        write_model(tmp_path, 200.0)  # of another length: Python compares that, and whole seconds
        assert client.post("/v2/repository/models/adder/load", b"").status == 200
        answer = ask(client)
        assert words([answer]) == ["miss"]
        assert outputs_of(answer) == {"y": [201.0, 202.0]}
        assert words([ask(client)]) == ["hit"]
        assert client.ask("DELETE", "/v2/models/adder/cache").status == 200
        status = orjson.loads(client.get("/v2/models/adder/cache").body)
        assert (status["entries"], status["evicted"]) == (0, {"reload": 1, "cleared": 1})
        assert words([ask(client)]) == ["miss"]


@pytest.mark.parametrize("more", ["", "response_cache { enable: false }"])
def test_without_it_nothing_is_kept(tmp_path: Path, more: str) -> None:
    write_model(tmp_path, 10.0, more)
    with whole_server(tmp_path) as server, server.connect() as client:
        assert not any("x-carpool-cache" in ask(client).fields for _ in range(3))


def entry_of(server: WholeServer, version: str = "1") -> ModelEntry:
    return server.host.catalog.entries["adder", version]


def test_equal_replicas_have_one_digest_and_others_have_another(tmp_path: Path) -> None:
    """As Redis needs it: how many instances were found to be best is nobody's business, labels are."""
    digests = {}
    for name, more in (("one", ""), ("same", "instance_group { count: 2 }"), ("other", "")):
        write_model(tmp_path / name, 10.0, f"response_cache {{ enable: true }} {more}")
        if name == "other":
            (tmp_path / name / "adder" / "helper.py").write_text("FACTOR = 2\n")
        with whole_server(tmp_path / name) as server:
            digests[name] = entry_of(server).extra["cache"]["digest"]
    assert digests["one"] == digests["same"] != digests["other"]


def test_a_version_is_never_answered_with_another_ones_answer(tmp_path: Path) -> None:
    write_model(tmp_path, 10.0, "response_cache { enable: true } version_policy { all {} }")
    shutil.copytree(tmp_path / "adder" / "1", tmp_path / "adder" / "2")
    with whole_server(tmp_path) as server, server.connect() as client:
        for version in "12":
            path = f"/v2/models/adder/versions/{version}/infer"
            given = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
            answers = [client.post(path, orjson.dumps({"inputs": [given]})) for _ in range(2)]
            assert words(answers) == ["miss", "hit"]
            assert {orjson.loads(answer.body)["model_version"] for answer in answers} == {version}


@needs("ensembles")
def test_replicas_share_an_ensembles_answers_until_a_step_is_replaced(tmp_path: Path) -> None:
    """Through Redis: one that was measured to run other instances shares, one with another step does not."""
    for name, count in (("one", 1), ("two", 2)):
        ensembles.chain(tmp_path / name, more="response_cache { enable: true }")
        settings = tmp_path / name / "ten" / "config.pbtxt"
        settings.write_text(settings.read_text() + f"instance_group {{ count: {count} }}")
    numbers = itertools.count()

    def ask_chain(client: Client, number: int) -> tuple[float, str]:
        given = {"name": "in", "datatype": "FP32", "shape": [1, 3], "data": [number] * 3}
        answer = client.post("/v2/models/chain/infer", orjson.dumps({"inputs": [given]}))
        return outputs_of(answer)["out"][0] - number, answer.fields["x-carpool-cache"].partition("; age")[0]

    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(tmp_path))
        shared = {"cache_url": redis.url, "cache_secret": "a secret of all servers", "cache_wait_ms": 200.0}
        explicit = {"model_control_mode": "explicit", "load_models": ("*",)}
        servers = [
            stack.enter_context(whole_server(tmp_path / name, **shared, **explicit))
            for name in ("one", "two")
        ]
        one, two = (stack.enter_context(server.connect()) for server in servers)

        def is_shared() -> bool:
            """On a busy machine Redis may answer too late, and then it is computed."""
            number = next(numbers)
            assert ask_chain(one, number)[0] == 11
            amount, word = ask_chain(two, number)
            assert amount == 11
            return word == "hit; kind=shared"

        until(is_shared, "an answer of the other one")
        ensembles.adds(tmp_path / "two", "ten", 100)
        assert two.post("/v2/repository/models/ten/load", b"").status == 200
        for number in range(next(numbers)):
            assert ask_chain(one, number)[0] == 11
            assert ask_chain(two, number)[0] == 101
