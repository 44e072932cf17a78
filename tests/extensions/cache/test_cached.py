"""Answers that are kept, over the real HTTP server: who gets one, who never does, and what it says."""

from __future__ import annotations

import base64
import contextlib
import gc
import gzip
import io
import tracemalloc
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from carpool.config.server import ServerSettings
from carpool.errors import ModelError, Refused, Unavailable
from carpool.extensions.cache import cache_wrapper, front_caches, similar
from carpool.extensions.cache.answer_store import AnswerStore
from carpool.extensions.cache.cache_key import Digests
from carpool.extensions.cache.cache_wrapper import Lookup
from carpool.extensions.cache.front_caches import CacheParts
from carpool.frontend.access.access import Access
from carpool.types import Datatype, TensorSpec
from extensions.cache.caching import caches_of, caching_front_end
from frontend.access.key_files import ALICE, BOB, api_keys
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, front_end, image_body, image_model, infer
from frontend.http.harness import Client, Response, chunked, post
from frontend.picture_models import RED, classifier, detector, device_classifier, picture
from waiting import until

EXACT: Mapping[str, Any] = {"exact": True}
SIMILAR: Mapping[str, Any] = {"exact": True, "similar": True, "audit": 0.0, "similar_ttl_s": 60.0}
TWINS = 32


def shape_model(name: str) -> FakeModel:
    """Answers how its input is shaped."""
    spec = TensorSpec("x", Datatype.UINT8, (-1, -1))
    answer = TensorSpec("y", Datatype.INT64, (2,))
    other = TensorSpec("z", Datatype.INT64, (2,))

    def function(inputs: Mapping[str, Any]) -> dict[str, Any]:
        shape = np.array([inputs["x"].shape[1:]] * len(inputs["x"]))
        return {"y": shape, "z": shape + 100}

    return FakeModel(name, [spec], [answer, other], function, cache=EXACT)


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    models = [
        image_model("image", mode="eager", cache=EXACT),  # without a promise, twins wait for any time
        image_model("other", cache=EXACT),
        shape_model("shape"),
        classifier(cache=EXACT),
        detector(cache=SIMILAR),
        device_classifier(cache=SIMILAR),
        image_model("plain"),
    ]
    with front_end(*models) as running:
        yield running


def word(answer: Response) -> str:
    assert answer.status == 200, answer.body
    return answer.fields["x-carpool-cache"].partition(";")[0]


def kind(answer: Response) -> str:
    return answer.fields["x-carpool-cache"].rpartition("; age")[0]


def thrice(client: Client, *args: Any) -> list[Response]:
    return [infer(client, *args) for _ in range(3)]


def results(front: FrontEnd, model: str = "image") -> dict[str, int]:
    with front.connect() as client:
        found: dict[str, int] = orjson.loads(client.get(f"/v2/models/{model}/cache").body)["requests"]
    return found


def test_the_third_of_the_same_is_a_hit(front: FrontEnd) -> None:
    with front.connect() as client:
        answers = thrice(client, "image", image_body())
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        assert len({answer.body for answer in answers}) == 1
        assert len(front.door.calls) == 2
        hit = answers[-1]
        assert kind(hit) == "hit; kind=exact"
        assert hit.fields["cache-status"].startswith("carpool; hit; ttl=")
        assert answers[1].fields["cache-status"] == "carpool; fwd=miss; stored"
        assert hit.fields["content-type"] == answers[0].fields["content-type"]
        assert results(front) == {"hit": 1, "miss": 2}
        assert front.door.from_cache == [("image", 1, "")]
        other = infer(client, "image", image_body(bytes(6)))
        assert word(other) == "miss"


@pytest.mark.parametrize("binary", [False, True])
def test_each_gets_its_own_id(front: FrontEnd, binary: bool) -> None:
    rest = {"parameters": {"binary_data_output": binary}}
    with front.connect() as client:
        thrice(client, "image", image_body(**rest))
        for name in ("a", 'b"\\', ""):
            answer = infer(client, "image", image_body(id=name, **rest))
            assert word(answer) == "hit"
            length = int(answer.fields.get("inference-header-content-length", len(answer.body)))
            document = orjson.loads(answer.body[:length])
            assert document.get("id", "") == name
            assert document["outputs"][0]["name"] == "scores"
            if binary:
                assert np.frombuffer(answer.body[length:], np.float32).tolist() == [15.0, 1.0, 2.0, 3.0]


def test_two_models_share_nothing(front: FrontEnd) -> None:
    with front.connect() as client:
        thrice(client, "image", image_body())
        answer = infer(client, "other", image_body())
        assert word(answer) == "miss"
        assert orjson.loads(answer.body)["model_name"] == "other"


def test_the_same_bytes_in_another_shape_are_another_request(front: FrontEnd) -> None:
    def body(*shape: int) -> tuple[bytes, bytes]:
        given = {
            "name": "x",
            "datatype": "UINT8",
            "shape": [1, *shape],
            "parameters": {"binary_data_size": 6},
        }
        head = orjson.dumps({"inputs": [given]})
        return head + b"abcdef", b"Inference-Header-Content-Length: %d\r\n" % len(head)

    with front.connect() as client:
        thrice(client, "shape", body(2, 3))
        answer = infer(client, "shape", body(3, 2))
        assert word(answer) == "miss"
        assert orjson.loads(answer.body)["outputs"][0]["data"] == [3, 2]


def test_other_outputs_are_another_request(front: FrontEnd) -> None:
    def body(*outputs: dict[str, Any]) -> tuple[bytes, bytes]:
        given = {"name": "x", "datatype": "UINT8", "shape": [1, 2, 1], "data": [1, 2]}
        return orjson.dumps({"inputs": [given], "outputs": list(outputs)}), b""

    with front.connect() as client:
        thrice(client, "shape", body({"name": "y"}))
        answer = infer(client, "shape", body({"name": "z"}))
        assert word(answer) == "miss"
        assert orjson.loads(answer.body)["outputs"][0]["data"] == [102, 101]
        both = infer(client, "shape", body({"name": "y"}, {"name": "z"}))
        assert [one["name"] for one in orjson.loads(both.body)["outputs"]] == ["y", "z"]
        binary = infer(client, "shape", body({"name": "y", "parameters": {"binary_data": True}}))
        assert binary.fields["content-type"] == "application/octet-stream"


def test_a_model_that_is_loaded_again_begins_anew(front: FrontEnd) -> None:
    with front.connect() as client:
        thrice(client, "image", image_body())
        front.run(lambda: reload(front, "image"))
        answer = infer(client, "image", image_body())
        assert word(answer) == "miss"
        assert 'why="reload"} 1' in front.metrics()


def reload(front: FrontEnd, name: str) -> None:
    catalog = front.door.catalog
    old = catalog.entries[name, "1"]
    extra = {"cache": {**old.extra["cache"], "digest": "other weights"}}
    new = replace(old, key=old.key + 100, extra=extra)
    front.door.renew(entries={**catalog.entries, (name, "1"): new}, newest={**catalog.newest, name: new})


def test_without_a_cache_nothing_is_said(front: FrontEnd) -> None:
    with front.connect() as client:
        answers = thrice(client, "plain", image_body())
        assert len(front.door.calls) == 3
        assert not any("x-carpool-cache" in answer.fields for answer in answers)


def test_cache_control(front: FrontEnd) -> None:
    with front.connect() as client:
        thrice(client, "image", image_body())
        asked = len(front.door.calls)

        def said(value: bytes) -> str:
            return word(infer(client, "image", image_body(), b"Cache-Control: %b\r\n" % value))

        assert said(b"max-age=60") == "hit"
        assert said(b"no-store") == "off"
        assert said(b"no-cache") == "miss"
        assert said(b"max-age=0") == "miss"
        assert said(b"") == "hit"
        assert len(front.door.calls) == asked + 3
        wrong = infer(client, "image", image_body(), b"Cache-Control: max-age\r\n")
        assert (wrong.status, orjson.loads(wrong.body)["field"]) == (400, "Cache-Control")


def test_errors_are_never_kept(front: FrontEnd) -> None:
    with front.connect() as client:
        front.door.held = True
        for _ in range(4):
            body, field = image_body()
            client.send(_post("image", body, field))
            until(lambda: front.door.calls != [] and not front.door.calls[-1].answered)
            front.run(lambda: front.door.calls[-1].finish(ModelError("no")))
            assert client.response().status == 500
        front.door.held = False
        assert word(infer(client, "image", image_body())) == "miss"


def _post(model: str, body: bytes, field: bytes) -> bytes:
    path = f"/v2/models/{model}/infer".encode()
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%b\r\n%b" % (
        path,
        len(body),
        field,
        body,
    )


def hold_twins(front: FrontEnd, clients: list[Client]) -> None:
    front.door.held = True
    body, field = image_body()
    clients[0].send(_post("image", body, field))
    until(lambda: len(front.door.calls) == 1)
    for client in clients[1:]:
        client.send(_post("image", body, field))
    until(lambda: len(followers(front)) == len(clients) - 1)


@contextlib.contextmanager
def connected(front: FrontEnd, count: int) -> Iterator[list[Client]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(front.connect()) for _ in range(count)]


def followers(front: FrontEnd) -> list[Any]:
    computing = caches_of(front.app._service).computing
    return [other for one in list(computing.values()) for other in list(one.joined or ())]


def test_twins_wait_for_one_answer(front: FrontEnd) -> None:
    with connected(front, TWINS) as clients:
        hold_twins(front, clients)
        assert len(front.door.calls) == 1
        front.run(front.door.calls[0].finish)
        answers = [client.response() for client in clients]
        assert sorted(word(answer) for answer in answers) == ["joined"] * (TWINS - 1) + ["miss"]
        assert len({answer.body for answer in answers}) == 1
        assert len(front.door.calls) == 1
        assert results(front) == {"joined": TWINS - 1, "miss": 1}


def test_the_first_may_leave(front: FrontEnd) -> None:
    with connected(front, TWINS) as clients:
        hold_twins(front, clients)
        clients[0].reset()
        first = front.door.calls[0]
        until(lambda: followers(front) != [] and followers(front)[0].follows.abandoned)
        assert not first.cancelled
        front.run(first.finish)
        answers = [client.response() for client in clients[1:]]
        assert [word(answer) for answer in answers] == ["joined"] * (TWINS - 1)
        assert len(front.door.calls) == 1
        stats = orjson.loads(clients[1].get("/v2/models/image/stats").body)["model_stats"][0]
        counted = stats["inference_stats"]
        assert (counted["success"]["count"], counted["fail"]["count"]) == (TWINS - 1, 1)  # each request once


def test_others_may_leave_too_and_the_last_of_all_ends_it(front: FrontEnd) -> None:
    with connected(front, 3) as clients:
        hold_twins(front, clients)
        clients[1].reset()
        until(lambda: len(followers(front)) == 1)
        clients[2].reset()
        until(lambda: not followers(front))
        clients[0].reset()
        until(lambda: front.door.calls[0].cancelled)


def test_an_error_is_told_to_the_first_alone(front: FrontEnd) -> None:
    with connected(front, 4) as clients:
        hold_twins(front, clients)
        front.door.held = False
        front.run(lambda: front.door.calls[0].finish(ModelError("it broke")))
        answers = [client.response() for client in clients]
        assert sorted(answer.status for answer in answers) == [200, 200, 200, 500]
        assert len(front.door.calls) == 4


def test_each_twin_has_its_own_deadline(front: FrontEnd) -> None:
    with connected(front, 2) as clients:
        hold_twins(front, clients[:1])
        body, field = image_body()
        clients[1].send(_post("image", body, field + b"X-Carpool-Deadline-Ms: 50\r\n"))
        late = clients[1].response()
        assert (late.status, orjson.loads(late.body)["reason"]) == (504, "deadline")
        assert len(front.door.calls) == 1
        front.run(front.door.calls[0].finish)
        assert clients[0].response().status == 200


def test_hits_are_answered_in_overload(front: FrontEnd) -> None:
    with front.connect() as client:
        thrice(client, "image", image_body())
        front.door.refusal = Refused("too much", reason="overload")
        assert word(infer(client, "image", image_body())) == "hit"
        assert infer(client, "image", image_body(bytes(6))).status == 429
        assert word(infer(client, "image", image_body())) == "hit"


def test_where_nothing_hits_the_body_is_not_read(front: FrontEnd) -> None:
    with front.connect() as client:
        for number in range(30):
            infer(client, "image", image_body(bytes([number] * 6)))
        front.door.refusal = Refused("too much", reason="overload")
        asked = results(front)
        assert infer(client, "image", image_body()).status == 429
        assert results(front) == asked


def test_clearing_and_status(front: FrontEnd) -> None:
    def clear(arguments: Mapping[str, Any]) -> dict[str, Any]:
        front.door.renew(extra={"cache": {"cleared": {arguments["name"]: 1}}})
        return {}

    front.door.answers["cache/clear"] = clear
    with front.connect() as client:
        thrice(client, "image", image_body())
        status = orjson.loads(client.get("/v2/models/image/cache").body)
        assert (status["entries"], status["settings"], status["wrong"]) == (1, {"exact": True}, None)
        assert status["bytes"] > 0
        assert client.ask("DELETE", "/v2/models/image/cache").status == 200
        status = orjson.loads(client.get("/v2/models/image/cache").body)
        assert (status["entries"], status["bytes"], status["evicted"]) == (0, 0, {"cleared": 1})
        assert word(infer(client, "image", image_body())) == "miss"
        assert client.get("/v2/models/nobody/cache").status == 404
        assert orjson.loads(client.get("/v2/models/plain/cache").body)["settings"] is None


def test_metrics_and_statistics(front: FrontEnd) -> None:
    with front.connect() as client:
        thrice(client, "image", image_body())
        stats = orjson.loads(client.get("/v2/models/image/stats").body)["model_stats"][0]["inference_stats"]
    assert (stats["cache_hit"]["count"], stats["cache_miss"]["count"]) == (1, 2)
    assert stats["success"]["count"] == 3
    assert front.count("image", "nv_cache_num_hits_per_model") == 1
    assert front.count("image", "nv_cache_num_misses_per_model") == 2
    assert front.count("image", "carpool_cache_entries") == 1


def test_unique_inputs_keep_nothing(front: FrontEnd) -> None:
    with front.connect() as client:
        for number in range(200):
            assert word(infer(client, "image", image_body(number.to_bytes(6, "big")))) == "miss"
    store: AnswerStore = caches_of(front.app._service).store
    assert len(store) == 0
    assert not caches_of(front.app._service).computing


@pytest.mark.parametrize("how", ["empty", "chunked", "gzip", "garbage"])
def test_bodies_of_every_kind(front: FrontEnd, how: str) -> None:
    body, field = image_body()
    with front.connect() as client:
        if how == "empty":
            assert client.post("/v2/models/image/infer", b"").status == 400
        elif how == "chunked":
            for _ in range(3):
                pieces = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
                client.send(chunked("/v2/models/image/infer", pieces, field))
                last = client.response()
            assert word(last) == "hit"
            assert word(infer(client, "image", (body, field))) == "hit"
        elif how == "gzip":
            for _ in range(3):
                sent = gzip.compress(body), field + b"Content-Encoding: gzip\r\n"
                last = infer(client, "image", sent)
            assert word(last) == "hit"
        else:
            for _ in range(3):
                assert client.post("/classify", b"\xff\xd8\xffgarbage").status == 400
            assert "miss" not in results(front, "namer")


# ── pictures ──


def test_a_picture_again(front: FrontEnd) -> None:
    with front.connect() as client:
        answers = [client.post("/classify?model=namer", picture(RED)) for _ in range(3)]
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        assert len({answer.body for answer in answers}) == 1
        assert front.door.from_cache == [("namer", 1, "")]
        assert word(client.post("/classify?model=namer&top_k=1", picture(RED))) == "miss"


def test_a_drawing_again(front: FrontEnd) -> None:
    with front.connect() as client:
        path = "/detect?overlay=1"
        answers = [client.post(path, picture(RED), b"X-Carpool-Source: c\r\n") for _ in range(3)]
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        assert answers[2].fields["content-type"] == "image/jpeg"
        assert answers[2].body == answers[0].body
        assert word(client.post("/detect", picture(RED))) == "miss"


def noisy(seed: int, figure: bool = False, quality: int = 80) -> bytes:
    """A frame of a still camera, with the noise of its sensor."""
    rows, columns = np.mgrid[0:480, 0:640]
    still = np.stack([rows / 4, columns / 5, (rows + columns) / 8], -1)
    if figure:
        still[200:260, 300:324] = 250
    pixels = still + np.random.default_rng(seed).normal(0, 3, still.shape)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=quality)
    return file.getvalue()


@pytest.mark.parametrize("path", ["/detect", "/models/chip/predict"])
@pytest.mark.parametrize("most", [0, 1 << 20])
def test_the_same_scene(front: FrontEnd, path: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at in a thread, or at once."""
    for module in (cache_wrapper, front_caches):
        monkeypatch.setattr(module, "LOOKED_AT_ONCE", most)
    source = b"X-Carpool-Source: door\r\n"
    with front.connect() as client:
        first = client.post(path, noisy(1), source)
        assert word(first) == "miss"
        hit = client.post(path, noisy(2), source)
        assert kind(hit).startswith("hit; kind=similar; change=")
        assert hit.body == first.body
        assert word(client.post(path, noisy(3, figure=True), source)) == "miss"
        assert word(client.post(path, noisy(4), b"X-Carpool-Source: gate\r\n")) == "miss"
        assert word(client.post(path, noisy(5))) == "miss"
        assert word(client.post(path, noisy(6), source + b"Cache-Control: no-cache\r\n")) == "miss"
        assert word(
            client.post(f"{path}?{'score=0.9' if path == '/detect' else 'top_k=1'}", noisy(7), source)
        ) == ("miss")
        assert word(client.post(path, noisy(8), source)) == "hit"


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_scene_while_it_is_computed(exact: bool) -> None:
    """Others wait for that answer; what shows something else does not; who leaves or fails holds up none."""
    source = b"X-Carpool-Source: door\r\n"
    models = [detector(cache={**SIMILAR, "exact": exact})]
    with front_end(*models) as front, connected(front, 5) as clients:
        front.door.held = True
        clients[0].send(post("/detect", noisy(1), source))
        until(lambda: len(front.door.calls) == 1 and front.door.calls[0].is_ready)
        for number, client in enumerate(clients[1:4], 2):
            client.send(post("/detect", noisy(number), source))
        clients[4].send(post("/detect", noisy(9, figure=True), source))
        until(lambda: len(front.door.calls) == 2 and front.door.calls[1].is_ready)
        clients[3].reset()
        clients[0].reset()
        front.run(front.door.calls[0].finish)
        joined = [client.response() for client in clients[1:3]]
        assert [word(answer) for answer in joined] == ["joined", "joined"]
        front.run(lambda: front.door.calls[1].finish(ModelError("no")))
        assert clients[4].response().status == 500
        front.door.held = False
        assert word(clients[1].post("/detect", noisy(7), source)) == "hit"
        counted = results(front, "finder")
        assert counted.pop("joined") in (2, 3), "whoever leaves may be late"
        assert counted == {"similar": 1, "miss": 1}


@pytest.mark.parametrize("path", ["/detect", "/models/chip/predict"])
def test_the_audit_computes_what_was_answered(path: str) -> None:
    """Nothing differs: the models answer with the mean colour, which the noise does not move."""
    always = {**SIMILAR, "audit": 1.0}
    with front_end(detector(cache=always), device_classifier(cache=always)) as front:
        with front.connect() as client:
            for seed in range(3):
                client.post(path, noisy(seed), b"X-Carpool-Source: door\r\n")
            name = "finder" if path == "/detect" else "chip"
            until(lambda: status(client, name)["audits"] != {})
            assert status(client, name)["audits"] == {"same": 1}  # the next only some seconds later
            assert status(client, name)["requests"] == {"miss": 1, "similar": 2}
            assert status(client, name)["wrong"][0] == 0.0
        assert [call.background for call in front.door.calls] == [False, True]
        front.until_slots_are_back()


def test_a_source_that_is_proven_wrong_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is another one, however alike the pictures are."""
    monkeypatch.setattr(similar, "AUDIT_EVERY_S", 0.0)
    model = classifier(cache={**SIMILAR, "exact": False, "audit": 1.0, "similar_ttl_s": 60.0})
    answers = iter(range(1000))
    model.function = lambda inputs: {"logits": 10 * np.eye(3)[[next(answers) % 3] * len(inputs["images"])]}
    with front_end(model) as front, front.connect() as client:

        def ask(seed: int) -> str:
            return word(client.post("/classify", noisy(seed), b"X-Carpool-Source: door\r\n"))

        assert ask(0) == "miss"
        for trials in (1, 2):
            assert ask(trials) == "hit"
            until(lambda: status(client, "namer")["audits"].get("differs") == trials)  # noqa: B023
        until(lambda: status(client, "namer")["sources_off"] == 1)
        assert ask(3) == "miss"
        other = client.post("/classify", noisy(4), b"X-Carpool-Source: gate\r\n")
        assert word(other) == "miss"
        assert word(client.post("/classify", noisy(5), b"X-Carpool-Source: gate\r\n")) == "hit"


def test_under_load_nothing_is_audited() -> None:
    with front_end(detector(cache={**SIMILAR, "audit": 1.0})) as front, front.connect() as client:
        client.post("/detect", noisy(0), b"X-Carpool-Source: door\r\n")
        front.door.held = True
        assert word(client.post("/detect", noisy(1), b"X-Carpool-Source: door\r\n")) == "hit"
        until(lambda: len(front.door.calls) == 2)
        front.run(lambda: front.door.calls[1].finish(Unavailable("no slack", reason="background")))
        assert status(client, "finder")["audits"] == {"skipped": 1}


def status(client: Client, model: str) -> dict[str, Any]:
    document: dict[str, Any] = orjson.loads(client.get(f"/v2/models/{model}/cache").body)
    return document


def test_a_broken_picture_of_a_source(front: FrontEnd) -> None:
    with front.connect() as client:
        broken = noisy(1)[:2000]
        for _ in range(3):
            assert client.post("/detect", broken, b"X-Carpool-Source: door\r\n").status == 400
        assert word(client.post("/detect", noisy(1), b"X-Carpool-Source: door\r\n")) == "miss"


def test_several_pictures_each_say_what_became_of_them(front: FrontEnd) -> None:
    def form() -> tuple[bytes, bytes]:
        parts = [
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n' % one
            for one in (picture(RED), picture((1, 2, 3)))
        ]
        return b"".join(parts) + b"--x--\r\n", b"Content-Type: multipart/form-data; boundary=x\r\n"

    with front.connect() as client:
        for _ in range(2):
            client.post("/classify?model=namer", picture(RED))
        answer = client.post("/classify?model=namer", *form())
        words = answer.fields["x-carpool-cache"].split(", ")
        assert [one.partition(";")[0] for one in words] == ["hit", "miss"]
        assert answer.fields["cache-status"].startswith("carpool; fwd=miss")


def test_holders_of_keys_share_nothing(tmp_path: Path) -> None:
    access = Access(ServerSettings(api_key_file=api_keys(tmp_path)), loopback=True)
    model = image_model("image", cache=EXACT)
    with front_end(model, guard=access.guard) as front, front.connect() as client:
        alice, bob = (b"Authorization: Bearer %b\r\n" % key.encode() for key in (ALICE, BOB))
        answers = [infer(client, "image", image_body(), alice) for _ in range(3)]
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        assert word(infer(client, "image", image_body(), bob)) == "miss"


def test_nothing_of_a_request_is_left_for_the_collector(front: FrontEnd) -> None:
    """Neither of a miss, nor of a hit, a twin, a refusal or a client who left."""
    gc.collect()
    gc.disable()
    try:
        with connected(front, 4) as clients:
            thrice(clients[0], "image", image_body())
            infer(clients[0], "image", image_body(), b"Cache-Control: no-store\r\n")
            front.door.held = True
            body, field = image_body(bytes(6))
            for client in clients:
                client.send(_post("image", body, field))
            until(lambda: len(followers(front)) == 3)
            clients[3].reset()
            until(lambda: len(followers(front)) == 2)
            front.run(front.door.calls[-1].finish)
            assert {client.response().status for client in clients[:3]} == {200}
            front.door.held = False
            front.door.refusal = Refused("too much", reason="overload")
            assert infer(clients[0], "image", image_body(bytes([9] * 6))).status == 429
            front.door.calls.clear()
            infer(clients[0], "other", image_body())  # a connection remembers its last request
            until(lambda: front.run(lambda: not [one for one in gc.get_objects() if type(one) is Lookup]))
    finally:
        gc.enable()


def test_who_names_no_source_has_no_scene(tmp_path: Path) -> None:
    """A key's holder alone is none: it may have many cameras."""
    access = Access(ServerSettings(api_key_file=api_keys(tmp_path)), loopback=True)
    with front_end(detector(cache=SIMILAR), guard=access.guard) as front, front.connect() as client:
        still = [noisy(seed) for seed in range(3)]
        alice = b"Authorization: Bearer %b\r\n" % ALICE.encode()
        answers = [client.post("/detect", data, alice) for data in still]
        assert [word(answer) for answer in answers] == ["miss"] * 3
        named = alice + b"X-Carpool-Source: gate\r\n"
        answers = [client.post("/detect", data, named) for data in still]
        assert [word(answer) for answer in answers] == ["miss", "hit", "hit"]


def test_what_was_sent_is_not_held_by_what_is_known_of_it(front: FrontEnd) -> None:
    """Pictures in JSON are part of their head."""
    with front.connect() as client:
        for number in range(5):
            data = base64.b64encode(picture((number, 0, 0))).decode()
            given = {"name": "image", "datatype": "BYTES", "shape": [1, 1], "data": [data]}
            answer = client.post("/v2/models/namer/infer", orjson.dumps({"inputs": [given]}))
            assert word(answer) == "miss"
        caches = caches_of(front.app._service)
        model = caches.of(front.door.catalog.newest["namer"])
        assert not model._described


def test_three_times_the_load_of_which_most_is_repeated(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine takes 10 of 30, and 18 of them are known: those are answered, and 10 of the others."""
    windows, capacity = 10, 10
    door, let_in = front.door, 0
    monkeypatch.setattr(
        door,
        "refuses",
        lambda *_args, **_more: Refused("too much", reason="overload") if len(door.calls) >= let_in else None,
    )
    statuses: Counter[tuple[bool, int]] = Counter()
    with front.connect() as client:
        let_in = 3
        thrice(client, "image", image_body())
        let_in = 2
        number = 0
        for _ in range(windows):
            let_in += capacity
            for place in range(30):
                repeated = place % 5 < 3
                number += 1
                sent = image_body() if repeated else image_body(number.to_bytes(6, "big"))
                statuses[repeated, infer(client, "image", sent).status] += 1
    assert statuses == {(True, 200): 18 * windows, (False, 200): 10 * windows, (False, 429): 2 * windows}
    assert len(door.calls) == 2 + capacity * windows, "no hit was offered to the engine"
    assert len(door.turned) == 2 * windows


@pytest.mark.conformance
def test_unique_inputs_take_no_memory(front: FrontEnd) -> None:
    """Each of another source, too. Two thousand show what millions would do, byte by byte."""
    number = 0

    def some(count: int) -> None:
        nonlocal number
        with front.connect() as client:
            for _ in range(count // 50):
                sent = b""
                for _ in range(50):
                    number += 1
                    body, field = image_body(number.to_bytes(6, "big"))
                    sent += _post("image", body, field + b"X-Carpool-Source: %d\r\n" % number)
                client.send(sent)
                assert {word(client.response()) for _ in range(50)} == {"miss"}
                front.run(front.door.calls.clear)
                front.door.gate_deadlines.clear()
        gc.collect()

    some(1000)
    tracemalloc.start()
    try:
        some(250)
        before, _ = tracemalloc.get_traced_memory()
        some(1500)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 24_000, "less than 16 bytes are left of each"
    caches = caches_of(front.app._service)
    assert len(caches.store) == 0
    assert not caches.computing


@pytest.mark.interpreted
def test_a_digest_that_two_share_is_no_answer(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast digest only looks: what it finds is compared, on every way, while it is computed as well."""
    monkeypatch.setattr(Digests, "fast", lambda _self, _said, _pieces: 7 << 40)
    red, blue = picture(), picture((0, 0, 255))
    with front.connect() as client, front.connect() as other:
        alone = {data: client.post("/classify", data, b"Cache-Control: no-store\r\n") for data in (red, blue)}
        assert alone[red].body != alone[blue].body
        answers = [(data, client.post("/classify", data)) for data in (red, red, blue, red, blue, blue, red)]
        assert all(answer.body == alone[data].body for data, answer in answers)
        assert "".join(word(answer)[0] for _, answer in answers) == "mmmhmmh"
        tails = [bytes([number] * 6) for number in (1, 2, 1, 2)]
        sums = [
            orjson.loads(infer(client, "image", image_body(tail)).body)["outputs"][0]["data"][0]
            for tail in tails
        ]
        assert sums == [6.0, 12.0, 6.0, 12.0]
        front.door.held = True
        for who, tail in ((client, tails[0]), (other, tails[1])):
            who.send(_post("image", *image_body(tail)))
        until(lambda: len([call for call in front.door.calls if not call.answered]) == 2)
        assert not followers(front)
        for call in [call for call in front.door.calls if not call.answered]:
            front.run(call.finish)
        assert client.response().body != other.response().body


def test_what_is_known_is_compared_by_its_digest_where_its_bytes_were_forgotten(front: FrontEnd) -> None:
    data = picture()
    with front.connect() as client:
        answers = [client.post("/classify", data) for _ in range(2)]
        store: AnswerStore = caches_of(front.app._service).store
        front.run(lambda: [store._forget_asked(digest) for digest in list(store.entries)])
        answers.append(client.post("/classify", data))
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        assert len({answer.body for answer in answers}) == 1


@pytest.mark.parametrize("audit", [0.0, 1.0])
def test_a_known_picture_is_answered_as_it_was_computed(
    audit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its head is read, or, where it is audited, behind it: the same words, and the same bytes."""
    monkeypatch.setattr(front_caches, "_EXACT_PART", 1.0)
    model = detector(cache={"exact": True, "audit": audit})
    with caching_front_end(model, parts=CacheParts()) as front, front.connect() as client:
        for query in ("", "?score=0.9", "?overlay=1"):
            answers = [client.post(f"/detect{query}", picture()) for _ in range(3)]
            assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
            assert len({answer.body for answer in answers}) == 1
            assert len({answer.fields["content-type"] for answer in answers}) == 1
            assert kind(answers[-1]) == "hit; kind=exact"
            assert answers[-1].fields["cache-status"].startswith("carpool; hit; ttl=")
        if audit:
            until(lambda: status(client, "finder")["audits"] == {"exact-same": 2})  # what is drawn is not


@pytest.mark.parametrize(
    "said", [b"max-age=" + b"9" * 5000, b"," * 5000, b"no-store" * 500, b"max-age=-1", b"\xff"]
)
def test_junk_in_cache_control(front: FrontEnd, said: bytes) -> None:
    with front.connect() as client:
        answers = [client.post("/classify", picture(), b"Cache-Control: %b\r\n" % said) for _ in range(3)]
        assert [word(answer) for answer in answers] == ["miss", "miss", "hit"]
        far = client.post("/classify", picture(), b"X-Carpool-Source: %b\r\n" % (b"x" * 5000))
        assert far.status == 400
