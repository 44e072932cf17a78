"""Implements the picture routes: what one head asks for, worked out once; the pictures of a request, each of
them a call of its own; and the one answer when the last of them is done."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, NamedTuple, Protocol, cast

from carpool.errors import CarpoolError, InvalidInput, Refused, Unavailable, without_stack
from carpool.frontend.access.guard import check_model
from carpool.frontend.calls.lane import UnreadPicture
from carpool.frontend.calls.packing import AT_ONCE
from carpool.frontend.calls.request import ModelLane, Request
from carpool.frontend.calls.request_facts import LEFT, RequestFacts, RequestReply
from carpool.frontend.calls.reused_answer import AnswerNote, EncodedAnswer
from carpool.frontend.calls.thread_errors import stopping
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.documents import task_of
from carpool.frontend.http.body import GatheredBody
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    Receive,
    status_of,
)
from carpool.frontend.http.http_service import WORTH_COMPRESSING, HttpService
from carpool.frontend.http.image_reading import BodyLayout, ImageHead, Sent, read_image_head, read_pictures
from carpool.frontend.http.infer_route import TIMING
from carpool.frontend.http.model_route import ModelRoute, origin_of
from carpool.frontend.http.picture_reply import (
    DRAWN_ANSWER,
    FORM,
    JSON_ANSWER,
    assumed_fields,
    early_fields,
    version_fields,
)
from carpool.frontend.http.task_models import default_model
from carpool.frontend.pictures.sent_pictures import PictureModel, RoutePicture
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import LATEST
from carpool.link.step_times import Times, in_words
from carpool.memory.arena import Slot
from carpool.memory.layout import FILE_AT, write_length
from carpool.observe.columns import BYTES_RECEIVED, BYTES_SENT
from carpool.observe.counters import count_failure
from carpool.types import StepTiming
from carpool.vision.geometry import Geometry
from carpool.vision.heads import MOST_PIXELS_AT_ONCE, Buffer, PictureHead, heads_of_request, sniff
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import options_of
from carpool.vision.tasks.task import cannot_draw
from carpool.wire.v2 import encode_error

_AT_ONCE_UNDER_WAY = 16
"""Pictures of one request: enough to fill batches, and no client takes all the slots."""


class ImageTarget(NamedTuple):
    """Describes what serves a request, and what the query asks of it."""

    lane: ModelLane
    model: PictureModel
    options: Options
    drawn: str | None  # the format of the picture to answer with, instead of JSON
    assumed: bytes  # fields of every answer


class ImageRoute(ModelRoute[ImageTarget]):
    _tensors = False
    in_parts = False  # it may be answered in parts

    def __init__(
        self,
        service: HttpService,
        head: HttpHead,
        task: str | None,
        model: str = "",
        version: str = "",
        asked: ImageHead | None = None,
    ) -> None:
        """Takes the `model` and `version` that the path names; and what is `asked`, where the head does not
        say it."""
        self.makes = ImageRequest
        self.writer: Callable[[Exchange, ImageTarget], AnswerInParts | None] | None = None
        self.asked = read_image_head(head, version) if asked is None else asked
        super().__init__(service, self.asked.sender, self.asked.budget, head, named=bool(self.asked.version))
        self._task = task
        self._who = head.who
        if model and self.asked.model:
            raise InvalidInput("the path has a model already", field="model")
        self._model = model or self.asked.model
        if self.asked.version and not self._model:
            raise InvalidInput("a version needs its model: give model, too", field="version")

    def _advised(self, exchange: Exchange, target: ImageTarget) -> CarpoolError | None:
        asked, now = self.asked, exchange.head_at
        entry, holds_back = target.lane.entry, target.lane.holds_back
        if holds_back is not None and holds_back():
            return None  # it may be answered without the engine; the gate is asked again where it is not
        if target.model.patient:
            return None
        size = exchange.head.content_length or 0
        given = now + asked.budget, now, exchange.sender, size, exchange.payer
        return self.service.pictures.refuses(entry, *given)

    def _plan(self, exchange: Exchange, target: ImageTarget) -> BodyPlan:
        """A picture that the device may decode comes straight into a slot."""
        service = self.service
        request = self.makes(self, exchange, target)
        size = exchange.head.content_length or 0
        if target.model.encoded and self.asked.in_place and size <= service.max_body_bytes:
            with contextlib.suppress(Unavailable):
                # see `BodyIntake` for what the byte is good for
                room = FILE_AT + size + 1 + target.model.room_behind
                request.slot = slot = service.engine.first_slot(room, exchange.make_room)
                return Receive(slot.view[FILE_AT:], request.received_in_slot, request.more)
        return Collect(service.max_body_bytes, request.received)

    def _checked_unloaded(self, body: bytes | bytearray) -> Callable[[], object] | None:
        layout = self.asked.layout
        if layout.kind == "raw":
            return partial(check_images, body)
        return partial(check_sent, body, layout)

    def _made(self, entry: ModelEntry) -> ImageTarget:
        check_model(self._who, entry.name)
        return self._target_for(entry, self.asked.options)

    def _target_for(self, entry: ModelEntry, given: Mapping[str, str]) -> ImageTarget:
        model = self.service.picture_model(entry, given)
        options, drawn = self._wanted(given, model)
        if self.asked.wants_drawn and "overlay" not in options_of(model.task):
            raise cannot_draw(f"what {entry.name} answers")
        return ImageTarget(self.service.lane(entry), model, options, drawn, assumed_fields(model))

    def _find(self, catalog: Catalog) -> ModelEntry:
        if not self._model:
            assert self._task is not None
            return default_model(catalog, self._task, self._who)
        entry = self.service.look_up(self._model, self.asked.version)
        if self._task is not None and task_of(entry) not in (self._task, None):
            raise InvalidInput(
                f"model '{entry.name}' is for {task_of(entry)}, not for {self._task}; "
                f"send its images to /models/{entry.name}/predict",
                field="model",
            )
        return entry

    def parts(self, exchange: Exchange, target: ImageTarget) -> AnswerInParts | None:
        """Returns what writes the answer in parts; None: it is one document."""
        return None if self.writer is None else self.writer(exchange, target)

    def target_with(self, fields: Mapping[str, str], target: ImageTarget) -> ImageTarget:
        """Returns the target with the options that stand in a form, too."""
        twice = next((name for name in fields if name in self.asked.options), None)
        if twice is not None:
            raise InvalidInput(f"{twice} is given in the query and in the form", field=twice)
        return self._target_for(target.lane.entry, {**self.asked.options, **fields})

    def _wanted(self, given: Mapping[str, str], model: PictureModel) -> tuple[Options, str | None]:
        if "max_tokens" in given and not model.entry.traits.decoupled:
            raise InvalidInput(f"{model.entry.name} does not take max_tokens", field="max_tokens")
        options = model.read_options(given)
        if not (options.overlay or self.asked.wants_drawn):
            return options, None
        return replace(options, overlay=True), self.asked.drawn


def check_images(*pictures: Buffer) -> None:
    """Raises what is wrong with images whatever their model is."""
    for picture in pictures:
        sniff(picture)
    heads_of_request(pictures)


def check_sent(body: bytes | bytearray, layout: BodyLayout) -> None:
    """Does the same as `check_images`, for those in a form or in JSON."""
    check_images(*read_pictures(body, layout).pictures)


class AnswerInParts(Protocol):
    """Defines how the answer to one request is written as its parts come."""

    def part(self, text: str) -> None: ...

    def end(self, fields: bytes, body: bytes, outcome: PictureOutcome | None) -> None:
        """Ends it with the whole answer, of which the head has these fields if no part came. The outcome is
        None of an answer that was known."""

    def fail(self, error: CarpoolError) -> bool:
        """Returns whether the error was written; not before the first part, when it has a status."""


class PictureOutcome(NamedTuple):
    """Describes how a picture ended: an answer as bytes, or an error."""

    body: bytes
    error: CarpoolError | None
    times: Times
    note: AnswerNote | None = None
    version: str = ""  # who answered, where that is a question
    steps: StepTiming | None = None  # where the time went in each
    degraded: str = ""
    fields: bytes = b""  # more for the head of the answer
    document: Mapping[str, Any] | None = None  # what `body` says, where that is at hand


class ImageCall(RequestReply):
    """Leads one picture of several to its outcome, of which all of them hear, unless the client has left."""

    __slots__ = ("_number", "_whole", "looked", "request", "siblings")

    form = FORM

    def __init__(self, whole: ImageRequest, number: int) -> None:
        exchange = whole.exchange
        self.request = request = Request(whole.service, self, exchange.sender, whole.deadline, whole.arrived)
        request.entry, request.row, request.infer = whole.target.lane[:3]
        request.choice = whole.route.choice
        request.unread, request.client = exchange.unread, exchange.payer
        self.looked = whole.looked
        self.siblings = whole.siblings
        self._whole = whole
        self._number = number

    def start(
        self,
        data: Buffer,
        head: PictureHead | None,
        slot: Slot | None = None,
        as_file: Geometry | None = None,
    ) -> None:
        """Starts with the picture's data, or with a slot that holds its file, and how the device will see
        it."""
        whole = self._whole
        try:
            picture = RoutePicture(whole.target.model, data, whole.options, whole.drawn, head, as_file)
            picture.slot = slot
            self.request.offer_pictures(picture)
        except CarpoolError as error:
            self.request.fail(error)

    def fields(self) -> Mapping[bytes, bytes]:
        return self._whole.exchange.head.headers

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return origin_of(self._whole.exchange, error, self._whole.service.fair.gate_status)

    def encode(self, request: RequestFacts, answer: Answer) -> EncodedAnswer:
        picture = request.pictures  # not always the one it began with: another version may have answered
        assert isinstance(picture, RoutePicture)
        return EncodedAnswer(picture.body)

    def part(self, request: RequestFacts, answer: Answer) -> None:
        self._whole.part(answer.text)

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        if self._whole.drawn is not None:
            answer.outside = None  # who wants a drawing waits for that: it says nothing of the others
        picture, ready = request.pictures, request.encoded
        body, document = b"", None
        if ready is not None:
            body = ready.body
        elif isinstance(picture, RoutePicture):
            body, document = picture.body, picture.document
        version = "" if request.choice is None else request.entry.version
        timing = answer.timing
        steps = timing if isinstance(timing, StepTiming) and timing.steps else None
        of_version = request.note, version, steps, answer.degraded, request.more_fields, document
        self._whole.ended(self._number, PictureOutcome(body, None, self.request.times(timing), *of_version))

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        self._whole.ended(self._number, PictureOutcome(b"", without_stack(error), times or Times()))


class ImageRequest:
    """Represents one request: its body, its pictures and its answer."""

    __slots__ = (
        *(
            "_fetching",
            "_heads",
            "_held",
            "_outcomes",
            "_parts",
            "_pixels",
            "_pixels_held",
            "_several",
            "_starting",
        ),
        *("_under_way", "_waiting", "arrived", "deadline", "drawn", "exchange", "looked", "options", "route"),
        *("service", "siblings", "slot", "target"),
    )

    options: Options
    drawn: str | None  # the format of the picture to answer with, instead of JSON

    def __init__(self, route: ImageRoute, exchange: Exchange, target: ImageTarget) -> None:
        self.route = route
        self.service = route.service
        self.exchange = exchange
        self.target = target
        self.arrived = 0.0
        self.deadline = exchange.head_at + route.asked.budget
        self._parts = route.parts(exchange, target) if route.in_parts else None
        self.slot: Slot | None = None  # the body comes into it
        self.looked: object = None  # what was found of its one picture before it was read
        self._fetching: asyncio.Task[bytearray] | None = None
        self._held = 0
        self._heads: Sequence[PictureHead | None] = ()  # of each picture
        self._pixels: Sequence[int] = ()  # as they say
        self._pixels_held = 0
        self._several = False
        self.siblings = b""  # of several pictures: what only they have in common
        self._outcomes: list[PictureOutcome | None] = []
        self._under_way: dict[int, ImageCall] = {}
        self._waiting: deque[tuple[int, Buffer]] = deque()
        self._starting = False
        exchange.on_disconnect = self._left

    # ── the body ──

    def received(self, body: bytes | bytearray, at: float) -> None:
        self.arrived = at
        service, layout = self.service, self.route.asked.layout
        service.server_row.add(BYTES_RECEIVED, self.exchange.head.content_length or len(body))
        try:
            self.target = self.route.current(self.exchange.head_at)  # it may have changed meanwhile
            if layout.kind == "raw":
                if self.target.lane.early is None or not self._is_known(body):
                    # One that was gathered counts there, for as long as anything refers to it.
                    self._begin(Sent((body,)), 0 if isinstance(body, GatheredBody) else len(body))
                return
            if len(body) <= AT_ONCE:
                self._begin(read_pictures(body, layout), len(body))
                return
        except CarpoolError as error:
            self._fail(error)
            return
        work = service.fair_threads.begin(self.exchange.payer, lambda _: read_pictures(body, layout)).done
        work.add_done_callback(partial(self._read, len(body)))

    def _is_known(self, body: bytes | bytearray) -> bool:
        look, target = self.target.lane.early, self.target
        if look is None or self.route.choice is not None or self.service.observers:
            return False  # which version answered, and when, only a request says
        given = target.options, target.drawn, self.route.asked.sender, self.exchange.head.headers
        found = look(UnreadPicture(FORM, body, *given, self.arrived))
        self.looked = found.looked
        if found.answer is not None:
            source = self.route.asked.sender.source
            self.service.engine.answered_here(target.lane.entry, self.arrived, 1, source)
            fields = early_fields(target.lane.row, target.drawn, target.assumed, found.note, self.arrived)
            self._send(fields, found.answer.body, compressible=target.drawn is None)
        return found.answer is not None

    def more(self, received: int) -> memoryview | None:
        slot, self.slot = self.slot, None
        exchange = self.exchange
        assert slot is not None
        size = FILE_AT + (exchange.head.content_length or 0) + 1 + self.target.model.room_behind
        try:
            self.slot = self.service.engine.larger_slot(slot, FILE_AT + received, size, exchange.make_room)
        except CarpoolError as error:
            self.arrived = exchange.head_at
            self._fail(error)
            return None
        return self.slot.view[FILE_AT:]

    def received_in_slot(self, at: float) -> None:
        """The body is in the slot. If the device cannot take it from there, it goes the way of all others."""
        slot, size = self.slot, self.exchange.head.content_length or 0
        assert slot is not None
        self.arrived = at
        picture = slot.view[FILE_AT : FILE_AT + size]
        try:
            target = self.target = self.route.current(self.exchange.head_at)
            geometry = target.model.seen_as_file(picture)
            self.options, self.drawn = target.options, target.drawn
        except CarpoolError as error:
            self._fail(error)
            return
        fits = len(slot.view) >= FILE_AT + size + target.model.room_behind
        if geometry is None or self.drawn is not None or not fits:
            body = bytes(picture)
            self._let_go()
            self.received(body, at)
            return
        self.service.server_row.add(BYTES_RECEIVED, size)
        write_length(slot.view, size)
        self._outcomes = [None]
        self.slot = None
        self._under_way[0] = call = ImageCall(self, 0)
        call.start(b"", None, slot, geometry)

    def _read(self, size: int, work: asyncio.Future[Sent] | asyncio.Future[bytearray]) -> None:
        """A long body was taken apart in a thread, or a picture was fetched."""
        error = stopping() if work.cancelled() else work.exception()
        if not self.exchange.pending:
            self._let_go()
            return
        try:
            if error is not None:
                raise error
            found = work.result()
            if isinstance(found, bytearray):
                self.target = self.route.current(self.exchange.head_at)  # it may have changed meanwhile
                size = len(found)
                found = Sent((found,))
            self._begin(found, size)
        except CarpoolError as known:
            self._fail(known)
        except Exception as unknown:
            self.service.log.exception("request-failed", path=self.exchange.head.path)
            self._fail(CarpoolError(f"the server failed on this request: {type(unknown).__name__}"))
            without_stack(unknown)

    def _fetched(self, work: asyncio.Task[bytearray]) -> None:
        """A promise is for what the server has: it begins now. The client's deadline runs on."""
        self._fetching = None
        self.arrived = monotonic()
        self._read(0, work)

    # ── the pictures ──

    def _begin(self, sent: Sent, size: int) -> None:
        if sent.url:
            seconds = self.deadline - monotonic()
            self._fetching = work = self.service.fetcher.start(sent.url, seconds, self.exchange.payer)
            work.add_done_callback(self._fetched)
            return
        pictures, several = sent.pictures, sent.several
        if several and self._parts is not None:
            raise InvalidInput("a text stream is for one image: send one at a time")
        if several and self.route.asked.sender.latest:
            raise InvalidInput(f"with {LATEST} send one image at a time", field=LATEST)
        if sent.fields:
            self.target = self.route.target_with(sent.fields, self.target)
        self.options, self.drawn = self.target.options, self.target.drawn
        if several and self.drawn is not None:
            raise InvalidInput("several images are answered in JSON: draw one at a time", field="overlay")
        self._several = several
        if several:
            self.siblings = struct.pack("<dQ", self.exchange.head_at, id(self))
        self._heads, self._pixels = heads_of_request(pictures)
        pixels = sum(self._pixels)
        if not self.service.pictures.hold(self.exchange.payer, size, pixels):
            raise Refused("too many images are in progress", reason="queue-full", retry_after_s=1.0)
        self._held, self._pixels_held = size, pixels
        self._outcomes = [None] * len(pictures)
        self._waiting.extend(enumerate(pictures))
        self._go_on()

    def _go_on(self) -> None:
        """Start what may be under way; answer when nothing is any more."""
        self._starting = True
        while self._waiting and (not self._under_way or self._may_start(self._waiting[0][0])):
            number, data = self._waiting.popleft()
            self._under_way[number] = call = ImageCall(self, number)
            call.start(data, self._heads[number])
        self._starting = False
        if not self._under_way:
            self._answer()

    def _may_start(self, number: int) -> bool:
        """Large ones come one after the other, so that pictures of other requests are decoded in between."""
        under_way = sum(self._pixels[other] for other in self._under_way)
        fits = under_way + self._pixels[number] <= MOST_PIXELS_AT_ONCE
        return fits and len(self._under_way) < _AT_ONCE_UNDER_WAY

    def ended(self, number: int, outcome: PictureOutcome) -> None:
        del self._under_way[number]
        self._outcomes[number] = outcome
        if self._waiting and not self._starting:
            self._go_on()
        elif not self._under_way and not self._starting:
            self._answer()

    def part(self, text: str) -> None:
        """Takes what a model writes, as it comes."""
        if self._parts is not None:
            self._parts.part(text)

    # ── the answer ──

    def _answer(self) -> None:
        self._let_go()
        outcomes = cast("list[PictureOutcome]", self._outcomes)  # all of them are there now
        slowest = outcomes[0] if len(outcomes) == 1 else max(outcomes, key=lambda one: sum(one.times[:4]))
        if slowest.error is not None and not self._several:
            self._tell(slowest.error, TIMING % slowest.times)
            return
        drawn = None if self._several else self.drawn
        of_drawing = () if drawn is None else (drawn.encode(),)
        fields = (JSON_ANSWER if drawn is None else DRAWN_ANSWER) % (*of_drawing, *slowest.times)
        if slowest.steps is not None:  # the last are the times, which go on
            fields = b"%b, %b\r\n" % (fields[:-2], in_words(slowest.steps).encode())
        fields += slowest.fields
        if len(outcomes) > 1:
            fields += _fields_of_notes(outcomes)
        elif slowest.note is not None:
            fields += slowest.note.fields
        fields += self.target.assumed
        if slowest.version:
            fields += version_fields(slowest.version)
        degraded = slowest.degraded
        if self._several:
            degraded = next((one.degraded for one in outcomes if one.degraded), "")
        if degraded:
            fields += b"X-Carpool-Degraded: %b\r\n" % degraded.encode()
        body = slowest.body
        if self._several:
            body = b'{"results":[%b]}' % b",".join([_listed(outcome) for outcome in outcomes])
        self._send(fields, body, compressible=drawn is None)

    def _send(self, fields: bytes, body: bytes, *, compressible: bool = True) -> None:
        service, encoding = self.service, self.route.asked.encoding
        if self._parts is not None:
            self._parts.end(fields, body, self._outcomes[0] if self._outcomes else None)
            return
        if compressible and encoding is not None and len(body) >= WORTH_COMPRESSING:
            service.answer_compressed(self.exchange, fields, body, encoding)
            return
        service.server_row.add(BYTES_SENT, len(body))
        self.exchange.respond(200, fields, body)

    def _tell(self, error: CarpoolError, more_fields: bytes = b"") -> None:
        if self._parts is not None and self._parts.fail(error):
            return
        source = self.route.asked.sender.source
        self.service.fair.tell(self.exchange, error, self.target.lane.entry, source, more_fields)

    def _fail(self, error: CarpoolError) -> None:
        self._let_go()
        count_failure(self.target.lane.row, error, monotonic() - self.arrived)
        self._tell(error)

    def _left(self) -> None:
        """No answer is wanted any more."""
        if self._fetching is not None:
            self._fetching.cancel()
        begun = list(self._under_way.values())
        self._waiting.clear()
        self._under_way.clear()
        for call in begun:
            call.request.leave()
        self._let_go()
        if not begun:
            count_failure(self.target.lane.row, LEFT, 0.0)

    def _let_go(self) -> None:
        slot, self.slot = self.slot, None
        if slot is not None:
            slot.release()
        held, self._held = self._held, 0
        pixels, self._pixels_held = self._pixels_held, 0
        self.service.pictures.let_go(self.exchange.payer, held, pixels)


def _fields_of_notes(outcomes: Sequence[PictureOutcome]) -> bytes:
    """Returns the fields in which wrappers say something of several answers."""
    notes = [one.note for one in outcomes]
    return next((one.fields_of_all(notes) for one in notes if one is not None), b"")


def _listed(outcome: PictureOutcome) -> bytes:
    """An answer, or an error with the status that it would have had alone."""
    if outcome.error is None:
        return outcome.body
    return encode_error(outcome.error)[:-1] + b',"status":%d}' % status_of(outcome.error)
