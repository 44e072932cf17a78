"""Random lives of requests: whatever happens in whatever order, each slot is given back once and each client
is answered once. There is no clock: threads and the engine do a step when the story says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError, ModelError, Refused
from carpool.frontend.calls.front_part import FrontPart
from carpool.frontend.calls.request import Infer, Listener, Request
from carpool.frontend.calls.request_facts import ANSWERING, OVER, RequestFacts, RequestReply
from carpool.frontend.front_service import FrontService
from carpool.frontend.pictures.sent_pictures import RoutePicture, SentPictures
from carpool.frontend.pictures.workers import PictureJob
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import NOBODY
from carpool.link.step_times import Times
from carpool.types import Datatype
from carpool.vision.picture_answers import Options
from carpool.wire.v2 import raw_head
from frontend.fake_door import FakeDoor, echo
from frontend.picture_models import classifier, picture, segmenter

pytestmark = pytest.mark.interpreted  # threads are replaced

MODELS = echo("echo", Datatype.FP32, (4,)), classifier(), segmenter()
PICTURE = picture()
STEPS = 120


class SteppedThreads:
    """Does the work of threads when the story says so."""

    takes_idle = False
    waiting = 0

    def __init__(self) -> None:
        self.jobs: list[list[Any]] = []  # each with whether it has begun, its work, what follows and its job

    def begin(self, job: PictureJob, *_: object) -> None:
        self.jobs.append([False, job.work, job.then, job])

    def finish(self, work: Callable[[], Any], then: Callable[..., None]) -> None:
        self.jobs.append([True, work, then, None])

    def drop(self, job: PictureJob) -> bool:
        found = [one for one in self.jobs if one[3] is job and not one[0]]
        for one in found:
            self.jobs.remove(one)
        return bool(found)

    def step(self, random: Random) -> None:
        if not self.jobs:
            return
        job = random.choice(self.jobs)
        if not job[0]:
            job[0] = True
            return
        self.jobs.remove(job)
        _, work, then, _ = job
        if random.random() < 0.2:
            then(None, ZeroDivisionError("a thread fails"))
        else:
            then(work(), None)

    def foresee(self, *_: object) -> float:
        return 0.0

    def came_true(self, *_: object) -> float:
        """Learns nothing."""
        return 0.0

    def refuses(self, *_: object) -> None:
        """Has always time."""

    def close(self) -> None:
        """Has no threads."""


class Again(Listener):
    """Sends a request once more when it fails, or in the middle of it."""

    def __init__(self, request: Request, inner: Infer) -> None:
        assert request.content is not None
        self.content, self.inner, self.left_over = request.content, inner, 1
        self.content.kept = True

    def answered(self, request: Request, answer: Answer) -> Answer | None:
        return None if answer.error is not None and self.again(request, failed=True) else answer

    def again(self, request: Request, *, failed: bool = False) -> bool:
        """Sends what is kept of it, if that can be. A picture may be decoded for the engine meanwhile."""
        content = self.content
        if not self.left_over or (not failed and request.state in (ANSWERING, OVER)):
            return False
        if isinstance(content, SentPictures):
            if not content.can_be_again(content.model):
                return False
            content = content.again(content.model)
        elif content.held is None:
            return False
        self.left_over -= 1
        request.recall(self)
        self.content = request.content = content
        request.listen(self)
        request.go(self.inner)
        return True


class Resending:
    """Wraps every request, and sometimes fails."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.part = FrontPart(around=self.around)
        self.under_way: list[tuple[Again, Request]] = []

    def around(self, inner: Infer, _entry: ModelEntry) -> Infer:
        def infer(request: Request) -> None:
            request.listen(again := Again(request, inner))
            self.under_way.append((again, request))
            if self.random.random() < 0.1:
                raise self.random.choice((Refused("not now"), ZeroDivisionError("a bug")))
            inner(request)
            if self.random.random() < 0.05:
                raise ModelError("too late")

        return infer


class Client(RequestReply):
    def __init__(self, service: FrontService, name: str) -> None:
        self.answers: list[str] = []
        self.request = Request(service, self, NOBODY, INFINITY, 0.0)
        self.request.enter(service.lane(service.look_up(name)))
        self.gone = False

    def send(self) -> None:
        request, service = self.request, self.request.service
        try:
            if request.entry.vision is None:
                request.offer_pieces(raw_head(request.entry.signature, 16), [bytes(16)], checked=True)
            else:
                model = service.with_pictures().model(request.entry)
                request.offer_pictures(RoutePicture(model, PICTURE, Options(), None))
        except CarpoolError as error:
            request.fail(error)

    def leave(self) -> None:
        self.gone = self.gone or self.request.state != OVER
        self.request.leave()

    def answer(self, _request: RequestFacts, _answer: Answer) -> None:
        self.answers.append("answer")

    def error(self, _request: RequestFacts, error: CarpoolError, _times: Times | None) -> None:
        self.answers.append(error.reason)


class Story:
    def __init__(self, seed: int, *, wrapped: bool) -> None:
        self.random = Random(seed)
        self.door = FakeDoor(*MODELS, slots=6)
        self.door.held, self.door.admits = True, False
        self.resending = Resending(self.random)
        parts = (self.resending.part,) if wrapped else ()
        self.service = FrontService("story", self.door, self.door.table.block(0), 1 << 20, 1, parts=parts)
        self.service.pictures.workers.close()
        self.threads = self.service.pictures.workers = SteppedThreads()  # type: ignore[assignment]
        self.clients: list[Client] = []
        self.let_in: list[Any] = []

    def open_calls(self) -> list[Any]:
        return [call for call in self.door.calls if not (call.cancelled or call.answered)]

    def under_way(self) -> list[tuple[Again, Request]]:
        return [one for one in self.resending.under_way if one[1].state not in (ANSWERING, OVER)]

    def step(self) -> None:
        random, calls = self.random, self.open_calls()
        act = random.randrange(10)
        if act < 3:
            self.clients.append(client := Client(self.service, random.choice(MODELS).name))
            client.send()
        elif act < 5 and calls:
            self.let_in.append(call := random.choice(calls))
            call.let_in()
        elif act == 5 and calls:
            call = random.choice(calls)
            late = not call.is_ready or random.random() < 0.4
            call.finish(ModelError("it failed") if late else None)
        elif act == 6 and self.clients and random.random() < 0.3:
            random.choice(self.clients).leave()
        elif act == 7 and self.under_way():
            again, request = random.choice(self.under_way())
            again.again(request)
        else:
            self.threads.step(random)

    def end(self) -> None:
        while self.threads.jobs:
            self.threads.step(self.random)
        # What was let in has its tensors now: none went to a call that the request does not have any more.
        assert all(call.is_ready for call in self.let_in if call in self.open_calls())
        while self.threads.jobs or self.open_calls():
            self.threads.step(self.random)
            for call in self.open_calls():
                if call.is_ready or not self.threads.jobs:
                    call.finish(None if call.is_ready else ModelError("it failed"))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_everything_is_given_back_and_answered_once(seed: int, wrapped: bool) -> None:
    async def live() -> None:
        story = Story(seed, wrapped=wrapped)
        try:
            for _ in range(STEPS):
                story.step()
            story.end()
        finally:
            story.service.close()
        assert not story.door.slots_in_use
        for client in story.clients:
            assert client.request.state == OVER
            assert len(client.answers) == (0 if client.gone else 1), client.answers

    asyncio.run(live())
