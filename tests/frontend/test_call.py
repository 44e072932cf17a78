"""The one state machine of a request, under a protocol of the test's own: each end from each state, once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, ModelError, Refused, TooLarge
from carpool.frontend.calls.request import Request
from carpool.frontend.calls.request_facts import (
    ANSWERING,
    OFFERED,
    OVER,
    READING,
    RUNNING,
    RequestFacts,
    RequestReply,
)
from carpool.frontend.front_service import FrontService
from carpool.frontend.pictures.sent_pictures import RoutePicture
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import NOBODY
from carpool.link.step_times import Times
from carpool.types import Datatype
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import raw_head
from frontend.fake_door import FakeDoor, FakeModel, echo
from frontend.picture_models import classifier, device_classifier, picture, segmenter
from waiting import until_in_loop as until

TENSOR = echo("echo", Datatype.FP32, (4,))
SLOW = segmenter()  # whose answers are made in a thread


class ToyCall(RequestReply):
    """A whole protocol: how a request is read, and how its answer is written."""

    def __init__(self, service: FrontService, model: FakeModel) -> None:
        self.said: list[object] = []
        self.most = 100  # answers that it takes
        self.request = Request(service, self, NOBODY, INFINITY, monotonic())
        self.request.enter(service.lane(service.look_up(model.name)))

    @property
    def state(self) -> int:
        return self.request.state

    def read(self) -> None:
        request, service = self.request, self.request.service
        try:
            if request.entry.vision is None:
                head = raw_head(request.entry.signature, 16)
                request.offer_pieces(head, [bytes(16)], checked=True)
            else:
                model = service.with_pictures().model(request.entry)
                request.offer_pictures(RoutePicture(model, picture(), Options(), None))
        except CarpoolError as error:
            request.fail(error)

    def leave(self) -> None:
        self.request.leave()

    def current(self) -> ModelEntry:
        return self.request.entry

    def answer(self, _request: RequestFacts, answer: Answer) -> None:
        self.said.append(answer)

    def part(self, _request: RequestFacts, answer: Answer) -> None:
        if len(self.said) >= self.most:
            raise TooLarge("it reads too slowly")
        self.said.append(answer.outputs[0].data[0, 0])

    def error(self, _request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        self.said.append((error.reason, times is not None))


@asynccontextmanager
async def served(model: FakeModel) -> AsyncIterator[tuple[FakeDoor, ToyCall]]:
    door = FakeDoor(model)
    door.held, door.admits = True, False
    service = FrontService("toy", door, door.table.block(0), 1 << 20, 1)
    try:
        yield door, ToyCall(service, model)
        await until(lambda: not door.slots_in_use)
    finally:
        service.close()


async def reach(state: int, door: FakeDoor, call: ToyCall) -> None:
    """As far as this state, and no further."""
    if state == READING:
        return
    call.read()
    if state in (RUNNING, ANSWERING) and call.state == OFFERED:
        door.calls[0].let_in()
        await until(lambda: call.state == RUNNING)
    if state == ANSWERING:
        door.calls[0].finish()
    assert call.state == state


REACHED = [
    (TENSOR, READING),
    (TENSOR, RUNNING),
    (classifier(), OFFERED),
    (classifier(), RUNNING),
    (device_classifier(), RUNNING),
    (SLOW, ANSWERING),
]
each_state = pytest.mark.parametrize(("model", "state"), REACHED, ids=lambda it: getattr(it, "name", str(it)))


@pytest.mark.parametrize("model", [TENSOR, classifier(), device_classifier(), SLOW], ids=lambda it: it.name)
def test_a_request_is_answered_once(model: FakeModel) -> None:
    async def run() -> None:
        async with served(model) as (door, call):
            door.held, door.admits = False, True
            call.read()
            await until(lambda: call.state == OVER)
            call.leave()  # too late to matter
            (answer,) = call.said
            assert isinstance(answer, Answer)
            assert door.calls[0].released

    asyncio.run(run())


@each_state
def test_leaving_gives_back_everything(model: FakeModel, state: int) -> None:
    async def run() -> None:
        async with served(model) as (door, call):
            await reach(state, door, call)
            call.leave()
            call.leave()
        assert call.state == OVER
        assert not call.said
        assert all(inner.cancelled or inner.released for inner in door.calls)

    asyncio.run(run())


@each_state
def test_a_failure_is_told_once(model: FakeModel, state: int) -> None:
    """And says where the time went, if the engine has heard of it."""

    async def run() -> None:
        async with served(model) as (door, call):
            await reach(state, door, call)
            if state == READING:
                door.refusal = Refused("full", reason="queue-full")
                call.read()
            elif state == ANSWERING:
                return  # what fails there is the thread's work: see below
            else:
                door.calls[0].finish(Refused("full", reason="queue-full"))
            assert call.said == [("queue-full", state != READING)]
            assert bool(door.turned) == (state == READING)

    asyncio.run(run())


@pytest.mark.parametrize("model", [classifier(), SLOW], ids=lambda it: it.name)
@pytest.mark.parametrize("where", ["prepare", "of_one"])
def test_a_thread_that_fails(model: FakeModel, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    async def run() -> None:
        async with served(model) as (door, call):
            door.held, door.admits = False, True
            monkeypatch.setattr(f"carpool.frontend.pictures.sent_pictures.PictureModel.{where}", broken)
            call.read()
            await until(lambda: call.state == OVER)
            assert call.said == [("internal", True)]

    asyncio.run(run())


def test_leaving_while_a_thread_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot is the thread's until it is done with it."""

    async def run() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def slowly(*_: Any) -> None:
            loop.call_soon_threadsafe(begun.set)
            asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(10)

        monkeypatch.setattr("carpool.frontend.pictures.sent_pictures.PictureModel.prepare", slowly)
        async with served(classifier()) as (door, call):
            call.read()
            door.calls[0].let_in()
            await begun.wait()
            call.leave()
            assert len(door.slots_in_use) == 1
            go_on.set()
        assert not call.said

    asyncio.run(run())


# ── many answers to one request ──

MANY = FakeModel(
    "many",
    TENSOR.inputs,
    TENSOR.outputs,
    lambda inputs: [{"y": inputs["x"] + number} for number in range(3)],
    decoupled=True,
)


def test_every_answer_is_written_and_then_the_end() -> None:
    async def run() -> None:
        async with served(MANY) as (door, call):
            call.read()
            door.calls[0].finish()
            *parts, end = call.said
            assert parts == [0.0, 1.0, 2.0]
            assert isinstance(end, Answer)
            assert end.outputs == ()
            assert call.state == OVER
            assert door.calls[0].released

    asyncio.run(run())


def test_one_that_cannot_be_written_cancels_the_rest() -> None:
    async def run() -> None:
        async with served(MANY) as (door, call):
            call.most = 2
            call.read()
            door.calls[0].finish()
            assert call.said == [0.0, 1.0, ("too-large", True)]
            assert door.calls[0].cancelled

    asyncio.run(run())


def test_a_client_that_leaves_between_answers_hears_no_more() -> None:
    async def run() -> None:
        async with served(MANY) as (door, call):
            call.read()
            door.calls[0].say({"y": [[7.0] * 4]})
            call.leave()
            assert door.calls[0].cancelled
            assert call.said == [7.0]

    asyncio.run(run())


def test_an_error_after_some_answers_is_the_last_that_is_said() -> None:
    async def run() -> None:
        async with served(MANY) as (door, call):
            call.read()
            door.calls[0].say({"y": [[7.0] * 4]})
            door.calls[0].finish(ModelError("it had enough"))
            assert call.said == [7.0, ("model-error", True)]

    asyncio.run(run())


def test_a_protocol_of_one_answer_says_so_before_the_engine_hears_of_it() -> None:
    async def run() -> None:
        async with served(MANY) as (door, call):
            call.request.refuses_many = "one only"
            call.read()
            assert call.said == [("unsupported", False)]
            assert not door.calls

    asyncio.run(run())
