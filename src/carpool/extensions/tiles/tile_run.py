"""Leads one image through its tiles, in the front end that decoded it.

To what is above it a run is one call to the engine. Its parts are items of ordinary requests to the model,
some in each, which share batches with those of other clients:

    the first part's tensor, decoded when it is let in ─► the others, a bounded number at a time:
        a slot ─► a thread cuts and writes them ─► the model ─► a thread reads what it found ─► the next ones
    the last was read ─► a thread merges ─► the answer

The engine lets in all of it with the first request, or nothing (`engine/routes/image_groups.py`). What is cut
is charged to the client by its pixels, and what runs by its images. All but the work of the threads happens
in the loop's thread; what goes through `_guarded` ends the run with an answer where it raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
import orjson

from carpool.errors import CarpoolError, Refused, Unavailable, without_stack
from carpool.extensions.tiles.merging import Found
from carpool.extensions.tiles.tile_grid import Part
from carpool.extensions.tiles.tiled_model import ANSWER, TiledModel
from carpool.frontend.calls.request import Request
from carpool.frontend.calls.thread_errors import explained
from carpool.frontend.pictures.picture_service import PictureService
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.frontend.pictures.workers import PictureJob
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Answer, Ask, Call, Hears, OneAnswer
from carpool.memory.arena import Slot
from carpool.types import Array, Datatype, Tensor, Timing
from carpool.vision.decode import Decoded
from carpool.vision.heads import read_head

_BYTES_AT_ONCE = 64 << 20
_BATCHES_AT_ONCE, _REQUESTS_OF_BATCH = 2, 4
"""Of one image there are inputs for so many batches, but no more than so many bytes of them: the model has
work while others are cut. A batch has several requests, so that those of others fit between them."""
_WORTH_TELLING = 64
"""Of more parts a client hears how many are done, if it wants events."""


_MOST_KEPT = 64  # versions of which it is known what is under way
_OF_SLO = 0.5
"""What the tiles of all clients under way take of the SLO of an image: another image waits no longer."""
_BEFORE_ANY = 8  # images in one SLO, before the first was seen
_LEARNING = 0.2  # how much the newest batch counts


class TilesUnderWay:
    """Bounds what the tiles of all clients of this front end have under way for one version. Runs that wait
    for room go on in turn."""

    def __init__(self, slo: float | None) -> None:
        self._slo = slo
        self._each = (slo or 0.0) / _BEFORE_ANY  # seconds of an image
        self._images = 0
        self._waiting: deque[TileRun] = deque()

    def take(self, run: TileRun, images: int) -> bool:
        """Returns whether there is room; else the run goes on when there is."""
        full = self._slo is not None and (self._images + images) * self._each > _OF_SLO * self._slo
        if full and self._images:  # one alone need not wait, however long it takes
            if run not in self._waiting:
                self._waiting.append(run)
            return False
        self._images += images
        return True

    def begin(self, images: int) -> None:
        """Counts images that the engine has let in."""
        self._images += images

    def give(self, images: int) -> None:
        self._images -= images
        while self._waiting:
            run, before = self._waiting.popleft(), self._images
            run.go_on()
            if self._images == before and run in self._waiting:  # it is still the next one
                self._waiting.remove(run)
                self._waiting.appendleft(run)
                return

    def ran(self, timing: Timing) -> None:
        took = (timing.input + timing.infer + timing.output) / max(1, timing.batch)
        self._each += _LEARNING * (took - self._each)


class PartRequest:
    """Represents some of the parts, in one slot, as one request."""

    __slots__ = ("answer", "call", "job", "parts", "reads", "slot")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self.slot: Slot | None = None  # until the engine has it
        self.job: PictureJob | None = None  # cuts them into the slot
        self.call: Call | None = None
        self.answer: Answer | None = None
        self.reads = False  # a thread reads its outputs, and gives them back


class RequestHears(OneAnswer):
    """Hears of a request for the run that it is part of."""

    __slots__ = ("_request", "_run")

    def __init__(self, run: TileRun, request: PartRequest) -> None:
        self._run = run
        self._request = request

    def admitted(self) -> None:
        self._run.admitted()

    def done(self, answer: Answer) -> None:
        self._request.answer = answer
        self._run.answered(self._request)


class TileRun:
    """Implements `Call`."""

    def __init__(self, service: PictureService, ask: Ask, hears: Hears, room: TilesUnderWay) -> None:
        self._room = room
        pictures = ask.handling.content
        assert isinstance(pictures, SentPictures)
        assert isinstance(pictures.model, TiledModel)
        self._service, self._model, self._pictures = service, pictures.model, pictures
        self._hears: Hears | None = hears  # None: it has the answer, or does not want it
        self._client: str = getattr(hears, "client", "")
        head = read_head(pictures.files[0])
        self._size = head.upright
        parts = self._model.parts_of(*self._size)
        self._count = len(parts)
        self._parts = parts
        self._waiting = deque(_requests(parts[1:], self._model))
        self._most = max(1, _at_once(self._model))
        entry = ask.entry
        if entry.batching.slo is not None:  # what is promised to the whole: see `ImageGroups`
            promised = replace(entry.batching, slo=entry.batching.slo * self._count)
            entry = replace(entry, batching=promised)
        self._until = entry.due(ask.arrived, ask.deadline)
        self._group = service.engine.begin_booking(entry)
        handling = ask.handling._replace(booking=self._group, step=self._count)
        self._asked = ask._replace(sender=ask.sender._replace(latest=False), handling=handling)
        self._under_way: dict[PartRequest, int] = {}  # and their parts
        self._found: list[Found] = []
        self._done = 0  # parts
        self._picture: Decoded | None = None
        self._kept = 0
        self._last = Answer()
        self._timing = Timing()
        self._batches: set[int] = set()  # their numbers

    def _guarded(self, act: Callable[[], None]) -> None:
        """Runs it and never raises: the caller serves other requests too."""
        try:
            act()
        except Exception as error:
            try:
                self._end(explained(error, self._model.entry.name))
            except Exception as again:  # by now it is answered, and all is given back
                explained(again, self._model.entry.name)

    def begin(self) -> None:
        """Offers the first part; nothing has happened if this raises."""
        request = PartRequest(self._parts[:1])
        request.call = self._service.engine.infer(self._asked, RequestHears(self, request))
        self._under_way[request] = 1
        self._room.begin(1)

    # ── as `Call` ──

    def ready(self, slot: Slot) -> None:
        """The image was decoded, and its first part is in the slot."""
        request = next((one for one in self._under_way if one.call is not None), None)
        if request is None or request.call is None:
            slot.release()
            return
        request.call.ready(slot)
        self._guarded(self._keep)

    def _keep(self) -> None:
        if self._hears is None or not self._waiting:
            return
        picture = self._pictures.whole[0]
        size = picture.pixels.size
        if not self._service.keep(size):
            raise Refused("too many images are cut into tiles", reason="queue-full", retry_after_s=1.0)
        self._picture, self._kept = picture, size
        self._go_on()

    def cancel(self) -> None:
        """The client has gone."""
        self._hears = None
        self._let_go()

    def release(self) -> None:
        """Its answer is no view of anything: all was given back before."""

    # ── the parts ──

    def go_on(self) -> None:
        """There may be room again."""
        self._guarded(self._go_on)

    def _go_on(self) -> None:
        """Cuts as many parts as may be under way."""
        while self._waiting and self._hears is not None:
            request = self._waiting[0]
            under_way = sum(self._under_way.values())
            if under_way and under_way + len(request.parts) > self._most:
                return
            head = self._model.heads(len(request.parts))
            if not self._room.take(self, len(request.parts)):
                return
            self._waiting.popleft()
            self._under_way[request] = len(request.parts)
            try:
                request.slot = self._service.engine.slot(head.tail_size)
            except Unavailable:
                if not under_way:
                    raise
                self._waiting.appendleft(request)  # goes on when one of its own is given back
                self._room.give(self._under_way.pop(request))
                return
            self._cut(request)

    def _cut(self, request: PartRequest) -> None:
        picture, slot = self._picture, request.slot
        assert picture is not None
        assert slot is not None
        work = partial(self._model.write, picture, request.parts, slot.view)
        then = partial(self._was_cut, request, slot)
        weight = float(sum(part.width * part.height for part in request.parts))
        job = PictureJob(work, then, weight, self._client)
        self._service.workers.begin(job, self._until)
        request.job = job

    def _was_cut(self, request: PartRequest, slot: Slot, _: None, error: BaseException | None) -> None:
        request.job = request.slot = None
        if self._hears is None or error is not None:
            slot.release()
            if error is not None:
                self._guarded(partial(self._end, explained(error, self._model.entry.name)))
            return
        self._guarded(partial(self._ask, request, slot))

    def _ask(self, request: PartRequest, slot: Slot) -> None:
        """The slot goes over to the engine."""
        head = self._model.heads(len(request.parts))
        handling = self._asked.handling._replace(ready_in=None)
        ask = self._asked._replace(head=head, slot=slot, tail=0, handling=handling)
        try:
            request.call = self._service.engine.infer(ask, RequestHears(self, request))
        except BaseException:
            slot.release()
            raise

    def admitted(self) -> None:
        """Is called by the engine client: all of it has been let in with its first part."""
        if self._hears is not None:
            self._hears.admitted()

    def answered(self, request: PartRequest) -> None:
        """Is called by the engine client: one request is over."""
        self._guarded(partial(self._read, request))

    def _read(self, request: PartRequest) -> None:
        answer = request.answer
        assert answer is not None
        if answer.error is not None:
            self._end(answer.error)
            return
        timing = answer.timing
        self._count_time(timing)
        self._last = max(self._last, answer, key=lambda one: one.sent)
        self._service.ran(self._model.entry, timing)
        self._room.ran(timing)
        work = partial(self._model.found, answer.outputs, request.parts, self._pictures.options)
        self._service.workers.finish(work, partial(self._was_read, request))
        request.reads = True

    def _count_time(self, timing: Timing) -> None:
        """Several of its requests may share a batch, whose time counts once."""
        new = not timing.number or timing.number not in self._batches
        self._batches.add(timing.number)
        before = self._timing
        self._timing = Timing(
            max(before.queue, timing.queue),
            before.input + (timing.input if new else 0.0),
            before.infer + (timing.infer if new else 0.0),
            before.output + (timing.output if new else 0.0),
            max(before.batch, timing.batch),
        )

    def _was_read(self, request: PartRequest, found: list[Found] | None, error: BaseException | None) -> None:
        call, request.call = request.call, None
        if call is not None:
            call.release()
        self._guarded(partial(self._after, request, found, error))

    def _after(self, request: PartRequest, found: list[Found] | None, error: BaseException | None) -> None:
        if self._hears is None:
            return
        if found is None:
            self._end(explained(error, self._model.entry.name))
            return
        self._room.give(self._under_way.pop(request))
        self._found += found
        self._done += len(request.parts)
        if self._done < self._count:
            self._tell()
            self._go_on()
            return
        work = partial(self._model.merged, self._found, self._parts, self._size, self._pictures.options)
        self._service.workers.finish(work, self._was_merged)

    def _tell(self) -> None:
        """Says how far it is, to a client that wants to know."""
        if self._count > _WORTH_TELLING and isinstance(self._hears, Request):
            said = orjson.dumps({"tiles": {"done": self._done, "of": self._count}})
            self._hears.reply.part(self._hears, Answer(text=said.decode()))

    # ── the end ──

    def _was_merged(self, body: bytes | None, error: BaseException | None) -> None:
        self._guarded(partial(self._finish, body, error))

    def _finish(self, body: bytes | None, error: BaseException | None) -> None:
        if self._hears is None:
            return
        if body is None:
            self._end(explained(error, self._model.entry.name))
            return
        data: Array = np.empty(1, object)
        data[0] = body
        outputs = [Tensor(ANSWER, Datatype.BYTES, (1,), data)]
        answer = Answer(outputs, None, self._timing, self._last.sent, self._last.outside)
        hears, self._hears = self._hears, None
        try:
            self._group.over(answered=True)
            self._let_go()
        finally:
            hears.done(answer)

    def _end(self, error: CarpoolError) -> None:
        hears, self._hears = self._hears, None
        try:
            self._let_go()
        finally:
            if hears is not None:
                hears.done(Answer(error=without_stack(error)))

    def _let_go(self) -> None:
        """Lets go of everything that no thread has. What a thread reads or cuts is given back when it comes
        back."""
        self._picture = None
        self._pictures.whole.clear()
        self._waiting.clear()
        kept, self._kept = self._kept, 0
        self._service.forget(kept)
        under_way, self._under_way = self._under_way, {}
        with ExitStack() as rest:
            for request in under_way:
                rest.callback(self._drop, request)
            rest.callback(self._room.give, sum(under_way.values()))
            rest.callback(partial(self._group.over, answered=False))  # unless it was said to be answered

    def _drop(self, request: PartRequest) -> None:
        job, request.job = request.job, None
        slot, request.slot = request.slot, None
        if slot is not None and (job is None or self._service.workers.drop(job)):
            slot.release()  # else a thread cuts into it
        call = request.call
        if call is None:
            return
        if request.answer is None:
            request.call = None
            call.cancel()
        elif not request.reads:
            request.call = None
            call.release()


def _at_once(model: TiledModel) -> int:
    """Returns how many parts of one image may be under way."""
    return min(_BATCHES_AT_ONCE * model.most, max(2, _BYTES_AT_ONCE // model.bytes))


def _requests(parts: Sequence[Part], model: TiledModel) -> list[PartRequest]:
    each = max(1, min(model.most, _at_once(model)) // _REQUESTS_OF_BATCH)
    return [PartRequest(parts[start : start + each]) for start in range(0, len(parts), each)]


class TileClient:
    """Stands in the place of the engine for images that are cut."""

    def __init__(self, service: Callable[[], PictureService]) -> None:
        self._service = service
        self._rooms: dict[int, tuple[ModelEntry, TilesUnderWay]] = {}  # by the entry's key

    def infer(self, ask: Ask, hears: Hears) -> Call:
        entry = ask.entry
        kept = self._rooms.get(entry.key)
        if kept is None or (kept[0].name, kept[0].batching) != (entry.name, entry.batching):
            if len(self._rooms) >= _MOST_KEPT:
                self._rooms.clear()
            kept = self._rooms[entry.key] = entry, TilesUnderWay(entry.batching.slo)
        run = TileRun(self._service(), ask, hears, kept[1])
        run.begin()
        return run
