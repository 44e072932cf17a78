"""Cached responses over gRPC: the same as over HTTP, with metadata in the place of header fields."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from extensions.cache.caching import caches_of
from frontend.grpc.front_end import SERVICE, SUM, FrontEnd, channel, floats, front_end, image_request
from frontend.http.front_end import image_model
from frontend.http.harness import PATIENCE
from waiting import until


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    with front_end(
        image_model("image", mode="eager", cache={"exact": True}), image_model("plain")
    ) as running:
        yield running


def ask(connected: grpc.Channel, request: Any, **more: Any) -> tuple[Any, dict[str, str]]:
    """The answer, and what its trailing metadata says."""
    call = connected.unary_unary(SERVICE + "ModelInfer")
    answer, done = call.with_call(request.SerializeToString(), timeout=PATIENCE, **more)
    return pb.ModelInferResponse.FromString(answer), dict(done.trailing_metadata() or ())


def test_the_third_of_the_same_is_a_hit_with_its_own_id(front: FrontEnd) -> None:
    with channel(front) as connected:
        said = []
        for name in ("a", "b", "c", ""):
            answer, metadata = ask(connected, image_request(id=name))
            assert (answer.id, answer.model_name, floats(answer)) == (name, "image", SUM)
            assert answer.outputs[0].name == "scores"
            said.append(metadata["x-carpool-cache"].partition("; age")[0])
        assert said == ["miss", "miss", "hit; kind=exact", "hit; kind=exact"]
        assert metadata["cache-status"].startswith("carpool; hit")
        assert len(front.door.calls) == 2
        again, metadata = ask(connected, image_request(), metadata=[("cache-control", "no-store")])
        assert (metadata["x-carpool-cache"], floats(again)) == ("off", SUM)
        _, metadata = ask(connected, image_request("plain"))
        assert "x-carpool-cache" not in metadata


def test_twins(front: FrontEnd) -> None:
    front.door.held = True
    with channel(front) as connected, ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(ask, connected, image_request(id=str(number))) for number in range(4)]
        computing = caches_of(front.server.service).computing
        until(lambda: [len(one.joined or ()) for one in list(computing.values())] == [3])
        front.run(front.door.calls[0].finish)
        answers = [one.result(PATIENCE) for one in asked]
    assert sorted(answer.id for answer, _ in answers) == ["0", "1", "2", "3"]
    assert sorted(said["x-carpool-cache"] for _, said in answers) == ["joined"] * 3 + ["miss"]
    assert len(front.door.calls) == 1


def test_in_a_stream_it_is_a_parameter(front: FrontEnd) -> None:
    with channel(front) as connected:
        call = connected.stream_stream(SERVICE + "ModelStreamInfer")

        def one(name: str) -> Any:
            sent = iter([image_request(id=name).SerializeToString()])
            answer = next(call(sent, timeout=PATIENCE))
            return pb.ModelStreamInferResponse.FromString(answer).infer_response

        answers = [one(name) for name in ("a", "b", "c")]
        words = [answer.parameters["x_carpool_cache"].string_param for answer in answers]
        assert [word.partition(";")[0] for word in words] == ["miss", "miss", "hit"]
        assert [answer.id for answer in answers] == ["a", "b", "c"]
        assert floats(answers[2]) == SUM
        assert answers[2].parameters["triton_final_response"].bool_param
