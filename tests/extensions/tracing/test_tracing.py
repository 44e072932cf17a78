"""Traces as a front end writes them: which requests, and times that can be believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import Unavailable
from carpool.extensions.tracing import front as tracing
from carpool.extensions.tracing.engine import TraceSettings
from carpool.extensions.tracing.front import Tracer
from carpool.link.engine_client import Answer
from carpool.types import Datatype, RequestOptions, Timing
from carpool.wire.v2 import RequestHead
from frontend.fake_door import FakeDoor, echo
from frontend.fake_engine_server import FakeEngineServer

STEPS = [
    "REQUEST_START",
    "QUEUE_START",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "COMPUTE_END",
    "REQUEST_END",
]
HEAD = RequestHead("my-id", (), (), RequestOptions(), True, 0, batch=3)
TIMING = Timing(0.002, 0.0005, 0.004, 0.0005, 17)


class Front:
    """A tracer and the engine's settings behind it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.door = FakeDoor(echo("a", Datatype.FP32), echo("b", Datatype.FP32))
        server: Any = FakeEngineServer(self.door, "tracing")
        server.serve(TraceSettings(server, str(file)).part)
        front: Any = SimpleNamespace(ask=self.door.ask)
        self.tracer = Tracer(front)
        self.door.watch(self.tracer.follow)

    async def update(self, model: str = "", **settings: Any) -> None:
        await self.door.ask("tracing/settings", {"model": model, "settings": settings})

    def answer(self, model: str, times: int = 1) -> None:
        for _ in range(times):
            now = time.monotonic()
            if self.tracer.on:
                entry = self.door.catalog.newest[model]
                call: Any = SimpleNamespace(entry=entry, head=HEAD, request_id=HEAD.id, note=None)
                call.arrived = now - 0.01
                self.tracer.answered(call, Answer(timing=TIMING), (now - 0.0099, now, now))

    def traces(self) -> list[dict[str, Any]]:
        return [orjson.loads(line) for line in self.file.read_bytes().splitlines()]

    async def settled(self) -> None:
        while self.tracer._asking is not None:
            await asyncio.wait_for(asyncio.shield(self.tracer._asking), 40)


def with_front(tmp_path: Path, story: Callable[[Front], Awaitable[None]]) -> Front:
    front = Front(tmp_path / "traces.jsonl")
    asyncio.run(story(front))  # type: ignore[arg-type]
    return front


def test_nothing_is_traced_until_it_is_switched_on(tmp_path: Path) -> None:
    async def story(front: Front) -> None:
        assert not front.tracer.on
        await front.update(trace_rate="1")
        assert not front.tracer.on
        await front.update(trace_level=["TIMESTAMPS"])
        assert front.tracer.on
        front.answer("a")
        await front.update(trace_level=None)
        front.answer("a")

    front = with_front(tmp_path, story)
    assert not front.tracer.on
    (trace,) = front.traces()
    assert [step["name"] for step in trace["timestamps"]] == STEPS
    assert (trace["model"], trace["version"], trace["request_id"]) == ("a", "1", "my-id")
    assert (trace["images"], trace["batch"]) == (3, 17)
    end = trace["timestamps"][-1]["ns"]
    assert abs(time.time_ns() - end) < 60e9, "since 1970, and just now"


def test_every_nth_request_of_each_model(tmp_path: Path) -> None:
    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="3")
        await front.update("b", trace_rate="1")
        front.answer("a", 10)
        front.answer("b", 4)

    traces = with_front(tmp_path, story).traces()
    assert [trace["model"] for trace in traces] == ["a"] * 3 + ["b"] * 4
    assert len({trace["id"] for trace in traces}) == 7


def test_a_model_can_be_left_out_or_alone(tmp_path: Path) -> None:
    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="1")
        await front.update("a", trace_level=["OFF"])
        front.answer("a")
        front.answer("b")
        await front.update(trace_level=["OFF"])
        await front.update("a", trace_level=["TIMESTAMPS"])
        front.answer("a")
        front.answer("b")

    assert [trace["model"] for trace in with_front(tmp_path, story).traces()] == ["b", "a"]


def test_no_more_than_the_count(tmp_path: Path) -> None:
    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="1", trace_count="5")
        for _ in range(4):
            front.answer("a", 2)
            front.answer("b")
            await front.settled()
        assert not front.tracer.on

    assert len(with_front(tmp_path, story).traces()) == 5


def test_what_waits_for_the_engine_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_MOST_WAITING", 10)

    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="1", trace_count="1000")
        front.answer("a", 100)
        await front.settled()

    assert len(with_front(tmp_path, story).traces()) == 10


def test_an_engine_that_restarts_costs_traces_and_no_more(tmp_path: Path) -> None:
    def lost(_arguments: Any) -> Any:
        raise Unavailable("the engine is being restarted")

    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="1", trace_count="7")
        places = front.door.answers["tracing/places"]
        front.door.answers["tracing/places"] = lost
        front.answer("a", 3)
        await front.settled()
        front.door.answers["tracing/places"] = places
        front.answer("a", 2)
        await front.settled()

    assert len(with_front(tmp_path, story).traces()) == 2


def test_a_file_that_is_moved_away_is_begun_anew(tmp_path: Path) -> None:
    async def story(front: Front) -> None:
        await front.update(trace_level=["TIMESTAMPS"], trace_rate="1")
        front.answer("a", 2)
        front.file.rename(tmp_path / "old")
        front.answer("a")
        front.file.unlink()
        front.file.mkdir()
        front.answer("a")  # cannot be written, which is no concern of the request
        front.file.rmdir()
        front.answer("a", 3)

    assert len(with_front(tmp_path, story).traces()) == 3


SECONDS = st.floats(0, 10)


@given(*(SECONDS for _ in range(6)))
def test_times_never_run_back(
    queue: float, given_: float, infer: float, output: float, offered: float, took: float
) -> None:
    """Whatever the parts say: they were measured in two processes."""
    found = tracing._timestamps(Timing(queue, given_, infer, output, 1), 100.0, 100.0 + offered, 100.0 + took)
    times = [ns for _, ns in found]
    assert times[0] <= times[1] <= times[2] <= times[3] <= times[4] <= times[5] <= times[6]
    assert times[6] - times[0] == pytest.approx(took * 1e9, abs=1000)
