"""What is done with outputs before an answer is sent: once, whatever a thread raises and whenever a client
leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from carpool.errors import CarpoolError, Unavailable
from carpool.frontend.calls.answer_work import AnswerWork
from carpool.frontend.calls.request_facts import ANSWERING, NO_REPLY, OVER, RequestFacts, RequestService
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer
from carpool.observe.columns import POST_SECONDS
from carpool.types import RequestOptions, Tensor
from carpool.wire.v2 import RequestHead

pytestmark = pytest.mark.interpreted  # what surrounds the work is replaced

MADE: Sequence[Tensor] = ()


class Pictures:
    """Documents that a thread makes, unless they are made at once."""

    composes = True

    def __init__(self, *, quick: bool, fails: bool = False) -> None:
        self.quick = quick
        self.fails = fails
        self.concluded = 0

    def compose(self, _outputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], float]:
        if self.fails:
            raise ZeroDivisionError
        return MADE, 0.5

    def conclude(self) -> None:
        self.concluded += 1


class Threads:
    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Callable[..., None]]] = []

    def finish(self, work: Callable[[], Any], then: Callable[..., None]) -> None:
        self.jobs.append((work, then))


class Memory:
    """Outputs that a client wants in its own memory."""

    def __init__(self) -> None:
        self.then: Callable[..., None] | None = None

    def put(self, _outputs: object, _entry: object, _threads: object, then: Callable[..., None]) -> bool:
        self.then = then
        return True


class Case:
    def __init__(
        self, pictures: Pictures | None = None, memory: Memory | None = None, *, in_parts: bool = False
    ) -> None:
        self.threads, self.logged = Threads(), list[str]()
        self.ended: list[Answer] = []
        self.observed: list[object] = []
        log = SimpleNamespace(error=lambda event, **_: self.logged.append(event))
        images = SimpleNamespace(workers=self.threads, ran=lambda *_: None)
        service = SimpleNamespace(log=log, pictures=images, threads=None)
        traits = SimpleNamespace(decoupled=in_parts, in_parts=lambda _: in_parts)
        self.request = request = RequestFacts()
        request.head = RequestHead("", (), (), RequestOptions(), True, 0)
        request.entry = cast(ModelEntry, SimpleNamespace(name="m", traits=traits))
        request.row = cast(Any, SimpleNamespace(observe=lambda *one: self.observed.append(one)))
        request.reply, request.state, request.refuses_many = NO_REPLY, ANSWERING, ""
        request.pictures, request.outlets, request.placed = cast(Any, pictures), cast(Any, memory), {}
        self.answer = Answer()
        self.work = AnswerWork(cast(RequestService, service), request, self.answer, self.ended.append)

    def ends(self) -> Answer:
        (answer,) = self.ended
        assert answer is self.answer
        return answer


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_documents_are_made_at_once_or_in_a_thread(quick: bool, fails: bool) -> None:
    case = Case(Pictures(quick=quick, fails=fails))
    case.work.go_on()
    for work, then in case.threads.jobs:
        try:
            made, error = work(), None
        except ZeroDivisionError as raised:
            made, error = None, raised
        then(made, error)
    assert len(case.threads.jobs) == (not quick)
    error = case.ends().error
    assert (None if error is None else error.reason) == ("internal" if fails else None)
    assert case.observed == ([] if fails else [(POST_SECONDS, 0.5)])


def test_parts_are_concluded_and_nothing_is_made_of_them() -> None:
    pictures = Pictures(quick=True, fails=True)
    case = Case(pictures, in_parts=True)
    case.work.go_on()
    assert case.ends().error is None
    assert pictures.concluded == 1


def test_an_error_is_answered_without_any_work() -> None:
    case = Case(Pictures(quick=False), Memory())
    case.answer.error = CarpoolError("the model failed")
    case.work.go_on()
    assert case.ends().error is not None
    assert not case.threads.jobs


def test_what_is_made_for_a_client_that_has_left_is_not_written() -> None:
    memory = Memory()
    case = Case(Pictures(quick=False), memory)
    case.work.go_on()
    ((work, then),) = case.threads.jobs
    case.request.state = OVER
    then(work(), None)
    assert case.ends().error is None
    assert memory.then is None


def raises(error: Exception) -> Callable[[], Any]:
    def placed() -> Any:
        raise error

    return placed


@pytest.mark.parametrize(
    ("placed", "reason", "logged"),
    [
        (lambda: {"y": "there"}, None, []),
        (raises(Unavailable("no room", reason="full")), "full", []),
        (raises(ZeroDivisionError()), "internal", ["request-failed"]),
        (None, "stopping", []),
    ],
)
def test_outputs_in_the_clients_memory(placed: Any, reason: str | None, logged: list[str]) -> None:
    memory = Memory()
    case = Case(memory=memory)
    case.work.go_on()
    assert memory.then is not None
    assert not case.ended
    memory.then(placed)
    error = case.ends().error
    assert (None if error is None else error.reason) == reason
    assert case.request.placed == ({"y": "there"} if reason is None else {})
    assert case.logged == logged


def test_a_bug_is_answered_and_logged() -> None:
    case = Case()
    case.request.outlets = cast(Any, SimpleNamespace())  # it cannot put anything
    case.work.go_on()
    assert case.ends().error is not None
    assert case.logged == ["request-failed"]
