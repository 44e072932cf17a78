"""Lets a protocol of other tools ask a model about images that it has found in a request.

The images pass everything that those of the server's own routes pass: gates, the SLO, fairness, caches and
rollouts. The protocol says what is asked, and rewrites the answer for its clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, TypeVar

import orjson

from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    Refused,
    TooLarge,
    Unavailable,
    without_stack,
)
from carpool.frontend.http.exchange import (
    JSON_FIELDS,
    Answerer,
    Before,
    Body,
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Start,
    hand_over,
    rendered,
)
from carpool.frontend.http.http_service import HttpService
from carpool.frontend.http.image_reading import MAX_PICTURES, Sent, read_head_alone
from carpool.frontend.http.image_route import ImageRequest, ImageRoute, check_images
from carpool.frontend.http.read_aside import read_aside
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.observe.logs import logger
from carpool.vision.heads import Buffer
from carpool.vision.picture_answers import Options

log = logger("http")

_FETCHED_AT_ONCE = 4
_FETCH_S = 30.0  # at most; a fetch has a time of its own, too

Found = TypeVar("Found")
Answer: TypeAlias = dict[str, Any]
Tells: TypeAlias = Callable[[Answer], object]
"""Returns the document of the protocol for the server's own; may raise a `CarpoolError`."""
TellsError: TypeAlias = Callable[[int, Mapping[str, Any]], tuple[int, object]]
"""Returns status and document of an error for this one request; see `Routes.words`."""

_ERRORS: Mapping[int, type[CarpoolError]] = {
    400: InvalidInput,
    403: Forbidden,
    404: NotFound,
    413: TooLarge,
    503: Unavailable,
    504: DeadlineExceeded,
}


class WebImage(NamedTuple):
    """Describes an image that is fetched, if its host is allowed; that host is sent the `authorization`."""

    url: str
    authorization: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureQuestion:
    """Describes what is asked: of the model that is named, or of the first for a task.

    Options that the model's task does not have are left out, because clients send theirs to every model.
    """

    pictures: Sequence[Buffer | WebImage] = ()
    url: str = ""  # of one image, in their place: it is fetched, if its host is allowed
    several: bool = False  # the answer is a list, `{"results": […]}`, also for one image
    drawn: str = ""  # the format of a drawing that is wanted instead: `{"drawn": bytes}`
    task: str | None = None
    model: str = ""
    version: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


def with_body(
    service: HttpService, read: Callable[..., Found], then: Callable[[Exchange, Found, float], None]
) -> Start:
    """Returns a start that gathers the body, reads it, in a thread if it is long, and goes on with what was
    read and when the body was here."""

    def start(exchange: Exchange) -> BodyPlan:
        def received(body: bytes | bytearray, at: float) -> None:
            def go_on(found: Found) -> None:
                then(exchange, found, at)

            read_aside(service, exchange, body, read, go_on)

        return Collect(service.max_body_bytes, received)

    return start


def ask(
    service: HttpService,
    exchange: Exchange,
    question: PictureQuestion,
    at: float,
    tell: Tells,
    tell_error: TellsError | None = None,
) -> None:
    """Asks a model, and answers the exchange: with what the first callback makes of the answer, or with an
    error. `at` is when the body was here."""
    rewrite(exchange, tell, tell_error, drawn=bool(question.drawn))
    if len(question.pictures) > MAX_PICTURES:
        service.fair.tell(exchange, TooLarge(f"a request may have at most {MAX_PICTURES} images"))
    elif any(isinstance(one, WebImage) for one in question.pictures):
        task = service.later(_fetch(service, exchange, question))

        def left() -> None:
            task.cancel()

        exchange.on_disconnect = left
    else:
        _ask(service, exchange, question, question.pictures, at)


async def _fetch(service: HttpService, exchange: Exchange, question: PictureQuestion) -> None:
    """Fetches the images, a few at a time, and asks then: the SLO is for what the server has."""
    found: list[Buffer | WebImage] = list(question.pictures)
    try:
        for start in range(0, len(found), _FETCHED_AT_ONCE):
            await _fetch_some(service, exchange, found, range(start, start + _FETCHED_AT_ONCE))
        exchange.on_disconnect = None
        if exchange.pending:
            _ask(service, exchange, question, found, monotonic())
    except CarpoolError as error:
        service.fair.tell(exchange, error)
    except Exception as fault:
        log.exception("request-failed", path=exchange.head.path)
        service.fair.tell(exchange, CarpoolError("the server failed on this request"))
        without_stack(fault)


async def _fetch_some(
    service: HttpService, exchange: Exchange, images: list[Buffer | WebImage], numbers: range
) -> None:
    """Puts the files in the places of their addresses."""
    tasks: dict[int, asyncio.Task[bytearray]] = {}
    try:
        for number in numbers[: len(images) - numbers.start]:
            one = images[number]
            if isinstance(one, WebImage):
                given = one.url, _FETCH_S, exchange.payer, one.authorization
                tasks[number] = service.fetcher.start(*given)
        for number, task in tasks.items():
            images[number] = await task
    finally:
        for task in tasks.values():
            task.cancel()


def _ask(
    service: HttpService,
    exchange: Exchange,
    question: PictureQuestion,
    pictures: Sequence[Buffer | WebImage],
    at: float,
) -> None:
    files = [one for one in pictures if not isinstance(one, WebImage)]
    try:
        route = QuestionRoute(service, exchange.head, question, files)
        first = files[0] if files else b""
        body = first if isinstance(first, bytes | bytearray) else bytes(first)
        hand_over(route.begin(exchange), body, at)
    except CarpoolError as error:
        service.fair.tell(exchange, error)


def rewrite(
    exchange: Exchange, tell: Tells, tell_error: TellsError | None = None, *, drawn: bool = False
) -> None:
    """Lets the exchange be answered in the protocol's documents, whichever route answers. A drawing becomes
    `{"drawn": bytes}`."""
    exchange.answer_through(partial(_Told, tell, tell_error, drawn))


def results_of(answer: Answer) -> list[Answer]:
    """Returns the answers for several images; raises the first error among them."""
    results: list[Answer] = answer["results"]
    for number, one in enumerate(results):
        if "error" in one:
            raise _error_of(one, number)
    return results


def _error_of(said: Mapping[str, Any], number: int) -> CarpoolError:
    message, status = f"image {number}: {said['error']}", said.get("status", 500)
    if status == 429:
        wait = float(said.get("retry_after_s") or 1.0)
        return Refused(message, reason=said["reason"], retry_after_s=wait)
    return _ERRORS.get(status, CarpoolError)(message, reason=said["reason"])


class QuestionRoute(ImageRoute):
    """Leads one question to its model: what its head says beside that is who asks."""

    def __init__(
        self, service: HttpService, head: HttpHead, question: PictureQuestion, files: Sequence[Buffer]
    ) -> None:
        asked = read_head_alone(head, question.version, question.options)
        if question.drawn:
            asked = asked._replace(wants_drawn=True, drawn=question.drawn)
        super().__init__(service, head, question.task, question.model, asked=asked)
        self.makes = QuestionRequest
        self.question = question
        self.files = files

    def _wanted(self, given: Mapping[str, str], model: PictureModel) -> tuple[Options, str | None]:
        return super()._wanted({name: text for name, text in given.items() if name in model.options}, model)

    def _checked_unloaded(self, body: bytes | bytearray) -> Callable[[], object] | None:
        return partial(check_images, *self.files) if self.files else None


class QuestionRequest(ImageRequest):
    __slots__ = ()

    def received(self, body: bytes | bytearray, at: float) -> None:
        route = self.route
        assert isinstance(route, QuestionRoute)
        question = route.question
        if not (question.several or question.url):
            super().received(body, at)
            return
        self.arrived = at
        try:
            self.target = route.current(self.exchange.head_at)  # it may have changed meanwhile
            size = sum(map(len, route.files))
            self._begin(Sent(route.files, question.several, url=question.url), size)
        except CarpoolError as error:
            self._fail(error)


class _Told(Before):
    """Stands before the connection of one exchange, and answers in the protocol's documents."""

    __slots__ = ("_drawn", "_tell", "_tell_error")

    def __init__(self, tell: Tells, tell_error: TellsError | None, drawn: bool, connection: Answerer) -> None:
        super().__init__(connection)
        self._drawn = drawn
        self._tell = tell
        self._tell_error = tell_error

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        if status == 200:
            try:
                answer = {"drawn": _joined(body)} if self._drawn else orjson.loads(_joined(body))
                fields = JSON_FIELDS if self._drawn else fields
                body = orjson.dumps(self._tell(answer))
            except CarpoolError as error:
                status, fields, body = rendered(error)
            except Exception:
                log.exception("answer-not-written")
                status, fields, body = rendered(CarpoolError("the server failed on this request"))
        if status != 200 and self._tell_error is not None:
            status, document = self._tell_error(status, orjson.loads(_joined(body)))
            fields, body = fields or JSON_FIELDS, orjson.dumps(document)
        self._connection.answer(status, fields, body)


def _joined(body: Body) -> bytes:
    return bytes(body) if isinstance(body, bytes | bytearray | memoryview) else b"".join(body)
