"""Pairs of features that work together, on one server that has all of them at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from queue import Queue
from typing import Any

import numpy as np
import orjson
import pytest
import tritonclient.grpc

from engine import ensembles
from frontend.access import key_files
from frontend.client_files import client_file
from frontend.http.harness import Client, Response, post
from frontend.picture_models import BLUE, RED, picture
from frontend.span_collector import told
from interactions.stage import (
    ALICE,
    BOB,
    LIVE,
    SHOWN,
    Shown,
    Stage,
    X,
    classified,
    document,
    infer,
    staged,
    tensor,
    until,
    values_of,
    word,
)

SOURCE = b"X-Carpool-Source: yard\r\n"
OF_SERVER = ("demand", "keys", "memory", "live", "tracing", "recording")
PLAIN = Shown(
    "one",
    lambda client, extra: infer(client, "one", tensor("x", X, (1, 3)), extra=extra),
    lambda answer: values_of(answer) == [2.0, 3.0, 4.0],
)
NOT_IN_MEMORY = 501, "images come with the request, not in shared memory"
REFUSED_BY_REQUEST = {
    ("sequence", "live"): (400, "a frame of a sequence is not replaced by a newer one"),
    ("similar", "memory"): NOT_IN_MEMORY,
    ("pipeline", "memory"): NOT_IN_MEMORY,
    ("device", "memory"): NOT_IN_MEMORY,
}
GENERIC = [
    *((name, other) for name in SHOWN for other in OF_SERVER if (name, other) not in REFUSED_BY_REQUEST),
    *itertools.combinations(OF_SERVER, 2),
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with staged(tmp_path_factory.mktemp("all")) as running:
        yield running


# ---- what holds for a whole server, with each other and with models of every kind --------------------------


@pytest.mark.parametrize("pair", GENERIC, ids="-".join)
def test_together(stage: Stage, pair: tuple[str, str]) -> None:
    shown, switched = SHOWN.get(pair[0], PLAIN), {name for name in pair if name in OF_SERVER}
    if "demand" in switched:
        stage.unload(shown.model)
    if "keys" in switched:
        with stage.connect() as client:
            assert client.post(*sent_by(shown)).status == 401
    if "demand" in switched:
        assert stage.states()[shown.model] != "READY"  # nor does a request without a key load it
    if "recording" in switched:
        stage.until_settled()
    spans, lines = len(stage.spans(shown.model)), len(stage.recorded(shown.model))
    answer = ask(stage, shown, memory="memory" in switched, live="live" in switched)
    assert answer is None or shown.is_right(answer)
    if "demand" in switched:  # of two versions, the other is loaded after the one that answers
        until(lambda: stage.states()[shown.model] == "READY")
    if "tracing" in switched:
        until(lambda: len(stage.spans(shown.model)) > spans)
    if "recording" in switched:
        until(lambda: len(stage.recorded(shown.model)) > lines)
        assert len(stage.recorded(shown.model)) == lines + 1
        assert stage.recorded(shown.model)[-1]["source"] == ("alice/gate" if "live" in switched else "alice")
    if pair in ALSO:
        ALSO[pair](stage)
    if "keys" in switched:
        secrets = f"{stage.record.read_text()}{[told(span) for span in stage.collector.spans]}"
        assert key_files.ALICE not in secrets


# ---- what a pair is to do besides being answered right


def forgets(stage: Stage, shown: Shown) -> None:
    """Answers go with a model that is unloaded."""
    with stage.connect() as client:
        assert [word(shown.ask(client, SOURCE)) for _ in range(2)][1] == "hit"
        stage.unload(shown.model)
        assert word(shown.ask(client, SOURCE)) == "miss"


def rollout_demand(stage: Stage) -> None:
    canary(stage, "rolled")
    stage.unload("rolled")
    with stage.connect() as client:
        assert SHOWN["rollout"].is_right(SHOWN["rollout"].ask(client, b""))
    canary(stage, "rolled")
    until(lambda: sorted(served.version for served in stage.served("rolled")) == ["1", "2"])


def ensemble_demand(stage: Stage) -> None:
    stage.unload("ten")
    assert stage.states()["chain"] != "READY"
    with stage.connect() as client:
        assert SHOWN["ensemble"].is_right(SHOWN["ensemble"].ask(client, b""))


def sequence_demand(stage: Stage) -> None:
    [served] = stage.served("tracker")
    with stage.connect() as client:
        for state, idle in (("start", False), ("end", True)):
            said = {"sequence_id": "kept", f"sequence_{state}": True}
            given = tensor("x", [1.0, 2.0], (1, 2))
            assert infer(client, "tracker", given, parameters=said).status == 200
            until(lambda idle=idle: served.runtime.idle is idle)  # type: ignore[misc]


def own_answers(stage: Stage, shown: Shown) -> None:
    """Of one key: another's request is computed."""
    with stage.connect() as client:
        assert [word(shown.ask(client, SOURCE)) for _ in range(2)][1] == "hit"
        path, body = sent_by(shown)
        assert word(client.post(path, body, BOB + SOURCE)) == "miss"
        assert word(client.post(path, body, BOB + SOURCE)) == "hit"


def only_the_whole(stage: Stage, shown: Shown, step: str) -> None:
    """A key may ask for the whole, and not for its steps."""
    with stage.connect() as client:
        assert shown.is_right(client.post(*sent_by(shown), BOB))
        assert client.get(f"/v2/models/{step}", BOB).status == 403


def rollout_keys(stage: Stage) -> None:
    with stage.connect() as client:
        body = b'{"action": "abort"}'
        assert client.post("/v2/models/rolled/rollout", body, ALICE).status in (401, 403)


def sequence_keys(stage: Stage) -> None:
    """Both say 7, and mean each their own."""
    with stage.connect() as client:

        def sum_of(key: bytes, value: float, *flags: str) -> list[Any]:
            said = {"sequence_id": 7, **{f"sequence_{flag}": True for flag in flags}}
            body = orjson.dumps({"inputs": [tensor("x", [value, 0.0], (1, 2))], "parameters": said})
            return values_of(client.post("/v2/models/tracker/infer", body, key))

        assert sum_of(ALICE, 1.0, "start") == [1.0, 0.0]
        assert sum_of(BOB, 10.0, "start") == [10.0, 0.0]
        assert sum_of(ALICE, 2.0, "end") == [3.0, 0.0]
        assert sum_of(BOB, 20.0, "end") == [30.0, 0.0]


def decoupled_keys(stage: Stage) -> None:
    """Streams without an end, as many as there are places, by one key: another is answered."""
    endless = post("/v2/models/count/generate_stream", b'{"n": -1}', ALICE)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(stage.connect()).send(endless)
        [served] = stage.served("count")
        until(lambda: not served.runtime.idle)
        with stage.connect() as client:
            path, body = sent_by(SHOWN["decoupled"])
            assert SHOWN["decoupled"].is_right(client.post(path, body, BOB))


def not_looked_up(stage: Stage) -> None:
    answer = ask(stage, SHOWN["exact"], memory=True)
    assert answer is not None
    assert word(answer) == "off"


def hits_have_spans(stage: Stage, shown: Shown) -> None:
    with stage.connect() as client:
        for _ in range(2):
            shown.ask(client, SOURCE)
    until(lambda: any("hit" in told(span).get("carpool.cache", "") for span in stage.spans(shown.model)))


def hits_are_recorded(stage: Stage, shown: Shown) -> None:
    with stage.connect() as client:
        assert [word(shown.ask(client, SOURCE)) for _ in range(2)][1] == "hit"
    until(lambda: stage.recorded(shown.model)[-1].get("cached") is True)


def steps_have_spans(stage: Stage, model: str, steps: tuple[str, ...]) -> None:
    def below() -> set[str]:
        whole = {span.span_id for span in stage.spans(model)}
        return {span.name for span in stage.collector.spans if span.parent_span_id in whole}

    until(lambda: all(any(step in name for name in below()) for step in steps))


def steps_are_not_recorded(stage: Stage, shown: Shown, step: str) -> None:
    stage.until_settled()
    before = len(stage.recorded(step))
    with stage.connect() as client:
        shown.ask(client, b"")
    stage.until_settled()
    assert len(stage.recorded(step)) == before


ALSO: dict[tuple[str, str], Callable[[Stage], None]] = {
    ("exact", "demand"): partial(forgets, shown=SHOWN["exact"]),
    ("similar", "demand"): partial(forgets, shown=SHOWN["similar"]),
    ("rollout", "demand"): rollout_demand,
    ("ensemble", "demand"): ensemble_demand,
    ("sequence", "demand"): sequence_demand,
    ("exact", "keys"): partial(own_answers, shown=SHOWN["exact"]),
    ("similar", "keys"): partial(own_answers, shown=SHOWN["similar"]),
    ("rollout", "keys"): rollout_keys,
    ("pipeline", "keys"): partial(only_the_whole, shown=SHOWN["pipeline"], step="finder"),
    ("ensemble", "keys"): partial(only_the_whole, shown=SHOWN["ensemble"], step="one"),
    ("sequence", "keys"): sequence_keys,
    ("decoupled", "keys"): decoupled_keys,
    ("exact", "memory"): not_looked_up,
    ("exact", "tracing"): partial(hits_have_spans, shown=SHOWN["exact"]),
    ("similar", "tracing"): partial(hits_have_spans, shown=SHOWN["similar"]),
    ("pipeline", "tracing"): partial(steps_have_spans, model="street", steps=("find", "kind")),
    ("ensemble", "tracing"): partial(steps_have_spans, model="chain", steps=("one", "ten")),
    ("exact", "recording"): partial(hits_are_recorded, shown=SHOWN["exact"]),
    ("similar", "recording"): partial(hits_are_recorded, shown=SHOWN["similar"]),
    ("pipeline", "recording"): partial(steps_are_not_recorded, shown=SHOWN["pipeline"], step="finder"),
    ("ensemble", "recording"): partial(steps_are_not_recorded, shown=SHOWN["ensemble"], step="one"),
}


def sent_by(shown: Shown) -> tuple[str, bytes]:
    """Where the request goes, and its body."""
    sent: list[tuple[str, bytes]] = []

    class Caught:
        def post(self, path: str, body: bytes, _extra: bytes) -> None:
            sent.append((path, body))

    shown.ask(Caught(), b"")  # type: ignore[arg-type]
    return sent[0]


def ask(stage: Stage, shown: Shown, *, memory: bool = False, live: bool = False) -> Response | None:
    """None: its answers came over gRPC, and are right."""
    extra = LIVE if live else b""
    with stage.connect() as client:
        if not memory:
            return shown.ask(client, extra)
        name, datatype, shape, content = shown.tensor()
        with client_file(content) as file, Registered(stage, file.key, len(content)) as region:
            if shown.model == "count":
                assert counted_in_memory(stage, region, len(content)) == [0, 1, 2]
                return None
            said = {"sequence_id": 9, "sequence_start": True, "sequence_end": True}
            place = {"shared_memory_region": region, "shared_memory_byte_size": len(content)}
            given = {"name": name, "datatype": datatype, "shape": list(shape), "parameters": place}
            more: dict[str, Any] = {"parameters": said} if shown.model == "tracker" else {}
            return infer(client, shown.model, given, extra=extra, **more)


class Registered:
    def __init__(self, stage: Stage, key: str, size: int) -> None:
        self._client = stage.connect()
        self._key, self._size = key, size
        self._name = key[1:]

    def __enter__(self) -> str:
        body = orjson.dumps({"key": self._key, "offset": 0, "byte_size": self._size})
        path = f"/v2/systemsharedmemory/region/{self._name}/register"
        assert self._client.post(path, body, ALICE).status == 200
        return self._name

    def __exit__(self, *_: object) -> None:
        path = f"/v2/systemsharedmemory/region/{self._name}/unregister"
        with self._client as client:
            assert client.post(path, b"", ALICE).status == 200


def counted_in_memory(stage: Stage, region: str, size: int) -> list[int]:
    answers: Queue[Any] = Queue()
    url = f"127.0.0.1:{stage.server.grpc_port}"
    with tritonclient.grpc.InferenceServerClient(url) as client:
        client.start_stream(
            lambda result, error: answers.put(error or result),
            headers={"authorization": f"Bearer {key_files.ALICE}"},
        )
        given = tritonclient.grpc.InferInput("n", [1, 1], "INT32")
        given.set_shared_memory(region, size)
        client.async_stream_infer("count", [given], enable_empty_final_response=True)
        found = []
        while True:
            answer = answers.get(timeout=60)
            assert not isinstance(answer, Exception), str(answer)
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return found
            found.append(int(answer.as_numpy("y")[0, 0]))


@pytest.mark.parametrize("pair", REFUSED_BY_REQUEST, ids="-".join)
def test_refused_with_the_request(stage: Stage, pair: tuple[str, str]) -> None:
    status, says = REFUSED_BY_REQUEST[pair]
    answer = ask(stage, SHOWN[pair[0]], memory="memory" in pair, live="live" in pair)
    assert answer is not None
    assert (answer.status, says in orjson.loads(answer.body)["error"]) == (status, True)


# ---- two kinds of models in one ----------------------------------------------------------------------------


def alike(number: int) -> bytes:
    """Other bytes, the same scene."""
    return picture(RED, quality=60 + number)


def classify(client: Client, model: str, file: bytes, source: str = "") -> Response:
    extra = ALICE + (f"X-Carpool-Source: {source}\r\n".encode() if source else b"")
    answer = client.post(f"/classify?model={model}", file, extra)
    assert answer.status == 200, answer
    return answer


def exact_similar(stage: Stage) -> None:
    with stage.connect() as client:
        said = [classify(client, "similar", alike(n), "porch").fields["x-carpool-cache"] for n in (1, 1, 2)]
    assert [one.partition("; age")[0].partition("; change")[0] for one in said] == [
        "miss",
        "hit; kind=exact",
        "hit; kind=similar",
    ]


def canary(stage: Stage, model: str) -> None:
    def state() -> str:
        with stage.connect() as client:
            return str(document(client.get(f"/v2/models/{model}/rollout", ALICE))["state"])

    until(lambda: state() == "canary")


def exact_rollout(stage: Stage) -> None:
    """The answers of two versions are kept apart, and say which one they are from."""
    with stage.connect() as client:
        asked = infer(client, "exact_rolled", tensor("x", X, (1, 3)))
        assert asked.status == 200
        canary(stage, "exact_rolled")
        versions: dict[str, set[str]] = {}
        for _ in range(2):
            for number in range(20):
                source = f"X-Carpool-Source: s{number}\r\n".encode()
                answer = infer(client, "exact_rolled", tensor("x", X, (1, 3)), extra=source)
                version = document(answer)["model_version"]
                assert values_of(answer) == [value + float(version) for value in X]
                versions.setdefault(version, set()).add(word(answer))
    assert set(versions) == {"1", "2"}
    assert all("hit" in words for words in versions.values())


def exact_ensemble(stage: Stage) -> None:
    """A step that is replaced takes the ensemble's answers along."""
    with stage.connect() as client:

        def ask() -> tuple[str, list[Any]]:
            answer = infer(client, "exact_chain", tensor("in", X, (1, 3)))
            return word(answer), values_of(answer)

        assert [ask(), ask()] == [("miss", [12.0, 13.0, 14.0]), ("hit", [12.0, 13.0, 14.0])]
        ensembles.adds(stage.models, "swapped", 100)
        stage.load("swapped")
        assert [ask(), ask()] == [("miss", [102.0, 103.0, 104.0]), ("hit", [102.0, 103.0, 104.0])]


def exact_device(stage: Stage) -> None:
    with stage.connect() as client:
        answers = [classify(client, "exact_chip", picture(RED)) for _ in range(2)]
    assert [word(answer) for answer in answers] == ["miss", "hit"]
    assert all(map(classified, answers))


def similar_rollout(stage: Stage) -> None:
    """Each version is compared with what it computed itself."""
    with stage.connect() as client:
        classify(client, "similar_rolled", picture(BLUE))
        canary(stage, "similar_rolled")
        found: dict[str, list[str]] = {}
        for number in range(20):
            for one in range(2):
                answer = classify(client, "similar_rolled", alike(10 + one), f"s{number}")
                found.setdefault(document(answer)["version"], []).append(word(answer))
    assert set(found) == {"1", "2"}
    assert all(words == ["miss", "hit"] * (len(words) // 2) for words in found.values()), found


def similar_device(stage: Stage) -> None:
    with stage.connect() as client:
        answers = [classify(client, "similar_chip", alike(n), "yard") for n in (1, 2)]
    assert "kind=similar" in answers[1].fields["x-carpool-cache"]
    assert all(map(classified, answers))


def rollout_device(stage: Stage) -> None:
    with stage.connect() as client:
        classify(client, "rolled_chip", picture(RED))
        canary(stage, "rolled_chip")
        answers = [classify(client, "rolled_chip", picture(RED), f"s{number}") for number in range(20)]
    assert {document(answer)["version"] for answer in answers} == {"1", "2"}
    assert all(map(classified, answers))


def pipeline_device(stage: Stage) -> None:
    with stage.connect() as client:
        assert SHOWN["pipeline"].is_right(client.post("/detect?model=chip_street", picture(RED), ALICE))


def ensemble_device(stage: Stage) -> None:
    pixels = np.zeros((1, 3, 16, 16), np.uint8)
    pixels[:, 0] = 255
    with stage.connect() as client:
        answer = infer(client, "chip_chain", tensor("in", pixels.ravel().tolist(), pixels.shape, "UINT8"))
    assert values_of(answer) == [10.0, 0.0, 0.0]


TWO_KINDS: dict[tuple[str, str], Callable[[Stage], None]] = {
    ("exact", "similar"): exact_similar,
    ("exact", "rollout"): exact_rollout,
    ("exact", "ensemble"): exact_ensemble,
    ("exact", "device"): exact_device,
    ("similar", "rollout"): similar_rollout,
    ("similar", "device"): similar_device,
    ("rollout", "device"): rollout_device,
    ("pipeline", "device"): pipeline_device,
    ("ensemble", "device"): ensemble_device,
}


@pytest.mark.parametrize("pair", TWO_KINDS, ids="-".join)
def test_two_kinds(stage: Stage, pair: tuple[str, str]) -> None:
    TWO_KINDS[pair](stage)


@pytest.mark.parametrize(
    ("whole", "step", "ask_whole"),
    [
        ("rolled_chain", "rolled", lambda client: infer(client, "rolled_chain", tensor("in", X, (1, 3)))),
        (
            "rolled_street",
            "rolled_chip",
            lambda client: client.post("/detect?model=rolled_street", picture(RED), ALICE),
        ),
    ],
)
def test_a_step_that_is_rolled_out_is_the_stable_version(
    stage: Stage, whole: str, step: str, ask_whole: Callable[[Client], Response]
) -> None:
    """An ensemble's and a pipeline's requests are not divided."""
    with stage.connect() as client:
        assert ask_whole(client).status == 200, whole
        canary(stage, step)
        until(lambda: len(stage.served(step)) == 2)

        def answered(version: str) -> int:
            stats = document(client.get(f"/v2/models/{step}/versions/{version}/stats", ALICE))
            return int(stats["model_stats"][0]["inference_stats"]["success"]["count"])

        before = [answered(version) for version in "12"]
        assert all(ask_whole(client).status == 200 for _ in range(10))
        assert [answered(version) for version in "12"] == [before[0] + 10, before[1]]
