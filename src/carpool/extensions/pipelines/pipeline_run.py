"""Leads one picture through the steps of a pipeline. It runs here, in the front end that decoded it.

The other place would be the engine, where ensembles have theirs. But what goes from step to step is pixels,
and those are here, or on a device that only gets the boxes to cut out: the engine would have to send
boxes back and wait for crops, which is this run with more messages; or hold pictures itself, cut them and
look through detectors' outputs in the one thread that schedules for all. Here each step is a request like any
other, in a slot like any other, and crops of many requests share batches because their models' queues are the
engine's. What only the engine can know, whether all of it can be in time and how much a step must leave to
the later ones, it says through the booking that each request names (`PipelineRoute`). So a
front end that dies takes its own runs along and no others, and an engine that dies ends each of them once.

To what is above it a run is one call to the engine: it is made ready, cancelled and done like one.

    the first step's tensor ─► its answer ─► a thread reads it ─► slots for the crops ─► a thread cuts ─► …
                                                 └ nothing found: the step is over at once

Everything but most of `_cut` and of `_read` happens in the loop's thread. A step is OPEN from the moment that
its source is over; a slot is the run's until its request has it. Calls whose outputs are being read, and
slots that are being cut into, belong to the thread: they are given back when it is done, whatever became of
the run.

What runs in the loop goes through `_guarded`: an unexpected error ends the run with an answer, and releases
what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any

import numpy as np
import orjson

from carpool.errors import CarpoolError, DeadlineExceeded, Refused, prefixed, without_stack
from carpool.extensions.pipelines.device_picture import DevicePicture
from carpool.extensions.pipelines.picture_graph import Document, Item, chunks, moved
from carpool.extensions.pipelines.pipeline_pictures import PipelineModel, StepModel
from carpool.extensions.pipelines.run_steps import (
    RequestHears,
    StepRequest,
    StepState,
    give_back,
    release_all,
    told,
)
from carpool.extensions.pipelines.settings import NAME, WITHOUT
from carpool.frontend.calls.thread_errors import explained
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.link.engine_client import Answer, Ask, Call, Hears
from carpool.memory.arena import Slot
from carpool.observe import columns
from carpool.types import Datatype, PartTiming, StepTiming, Tensor, Timing
from carpool.vision.decode import Decoded
from carpool.vision.picture_answers import DEFAULT, Options
from carpool.wire.v2 import RequestHead

_WHOLE = (Item(),)
_CROPS = columns.by_word(NAME, "crops")
_FEW = 4  # answers of few numbers each: read in less time than a thread takes to wake up


class PipelineRun:
    """Implements `Call`. The methods from `options_of` to `was_answered` are for runs that answer in another
    way."""

    degraded = ""  # why the answer is less than what was asked for

    def __init__(self, model: PipelineModel, ask: Ask, hears: Hears) -> None:
        pictures = ask.handling.content
        assert isinstance(pictures, SentPictures)
        self._model = model
        self._graph = model.graph
        self._engine = model.service.engine
        self._workers = model.service.workers
        self.pictures = pictures
        self._hears: Hears | None = hears  # None: it has the answer, or does not want it
        self._booking = self._engine.begin_booking(model.entry)
        urgent = max(ask.sender.priority, pictures.asked.options.priority)
        sender = ask.sender._replace(priority=urgent) if urgent else ask.sender
        handling = ask.handling._replace(booking=self._booking)
        self._asked = ask._replace(sender=sender, handling=handling)
        self.steps: dict[int, StepState] = {}
        self._late: list[int] = []
        self._picture: Decoded | None = None
        self._device: DevicePicture | None = None  # its pixels are there, not here
        self._kept = 0
        self._last = Answer()

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
        """Offer the first step; nothing has happened if this raises."""
        ask, base = self._asked, self._graph.base
        request = StepRequest((0,))
        assert ask.slot is not None
        self._device = DevicePicture(ask.slot) if self.pictures.is_file else None
        try:
            first = self._model.steps[base].entry
            ask = ask._replace(entry=first, handling=ask.handling._replace(step=base))
            request.call = self._engine.infer(ask, RequestHears(self, base, request))
        except BaseException:
            self._let_go_of_device()
            raise
        self.steps[base] = StepState(_WHOLE, (request,))

    # ── as `Call` ──

    def ready(self, slot: Slot) -> None:
        """The picture was decoded. Other steps that see all of it begin as well."""
        call = self.steps[self._graph.base].requests[0].call
        assert call is not None
        call.ready(slot)
        self._guarded(self._begin_beside)

    def _begin_beside(self) -> None:
        if self._hears is not None and self._keep(self.pictures.whole[0]):
            for number in self._graph.beside:
                self._open(number, list(_WHOLE))

    def _keep(self, picture: Decoded) -> bool:
        size = picture.pixels.size
        if not self._model.service.keep(size):
            full = "too many images are kept for later steps"
            self._end(Refused(full, reason="queue-full", retry_after_s=1.0))
            return False
        self._picture, self._kept = picture, size
        return True

    def cancel(self) -> None:
        """The client has gone."""
        self._hears = None
        self._let_go()

    def release(self) -> None:
        """Its answer is no view of anything: all was given back before."""

    # ── one step ──

    def _open(self, number: int, items: list[Item]) -> None:
        """Its source is over. With nothing to ask, so is it."""
        self._booking.reaches(number, len(items))
        at = self._model.steps[number]
        state = self.steps[number] = StepState(items, [StepRequest(part) for part in chunks(items, at.most)])
        if not items:
            self._over(number, [])
            return
        try:
            for request in state.requests:
                request.slot = self._engine.slot(self._head(at, state, request).tail_size)
            if self._device is not None:
                self._describe(at, state, self._device.token)
            elif self._picture is not None and at.is_quick(self._picture, items):
                self._cut(at, state)
            else:
                self._workers.finish(partial(self._cut, at, state), partial(self._was_cut, at, state))
                return
            self._ask(at, state)
        except Exception as error:
            give_back(state.requests)
            self._failed(number, explained(error, at.entry.name))

    def _describe(self, at: StepModel, state: StepState, token: int) -> None:
        """Writes which parts of its picture the device is to cut out."""
        geometry = self.pictures.geometry
        for request in state.requests:
            asked = [state.items[number] for number in request.items]
            assert request.slot is not None
            size, view = (geometry.width, geometry.height), request.slot.view
            request.geometries = at.describe(token, asked, size, view)
            request.sizes = [(one.width, one.height) for one in request.geometries]

    def _head(self, at: StepModel, state: StepState, request: StepRequest) -> RequestHead:
        if self._device is not None:
            return at.cut_head(len(request.items))
        return at.head(state.items[request.items[0]].width, len(request.items))

    def _cut(self, at: StepModel, state: StepState) -> None:
        """Writes every crop straight into the slot of its request, in a thread where that takes long."""
        started = monotonic()
        picture = self._picture
        if picture is None:
            return  # the run has ended
        for request in state.requests:
            assert request.slot is not None
            size = at.head(state.items[request.items[0]].width, 1).tail_size
            for place, number in enumerate(request.items):
                memory = request.slot.view[place * size : (place + 1) * size]
                geometry, part = at.prepare(picture, state.items[number], memory)
                request.geometries.append(geometry)
                request.sizes.append(part)
        state.cut = monotonic() - started

    def _was_cut(self, at: StepModel, state: StepState, _: None, error: BaseException | None) -> None:
        self._guarded(partial(self._ask, at, state, error))
        give_back(state.requests)  # what no request took over

    def _ask(self, at: StepModel, state: StepState, error: BaseException | None = None) -> None:
        """The slots go over to the engine, each as a request."""
        if self._hears is None or self._is_late(at.number):
            return
        if error is not None:
            self._failed(at.number, explained(error, at.entry.name))
            return
        for request in state.requests:
            slot, request.slot = request.slot, None
            assert slot is not None
            try:
                head = self._head(at, state, request)
                handling = self._asked.handling._replace(ready_in=None, step=at.number)
                ask = self._asked._replace(entry=at.entry, head=head, slot=slot, tail=0, handling=handling)
                request.call = self._engine.infer(ask, RequestHears(self, at.number, request))
            except Exception as failed:
                slot.release()
                give_back(state.requests)
                self._failed(at.number, explained(failed, at.entry.name))
                return

    def admitted(self) -> None:
        """Is called by the engine client: the pipeline has been let in with its first step."""
        if self._hears is not None:
            self._hears.admitted()

    def answered(self, number: int, answer: Answer) -> None:
        """Is called by the engine client: one request of the step is over."""
        self._guarded(partial(self._go_on, number, answer))

    def _go_on(self, number: int, answer: Answer) -> None:
        if answer.error is not None:
            self._failed(number, answer.error)
            return
        if self._is_late(number):
            return
        state = self.steps[number]
        state.waiting -= 1  # with the last one its outputs are the reader's: nothing may fail before that
        if state.waiting:
            return
        at = self._model.steps[number]
        try:
            if not at.model.quick or len(state.items) > _FEW:
                self._workers.finish(partial(self._read, at, state), partial(self._was_read, number, state))
                return
            self._was_read(number, state, self._read(at, state), None)
        except Exception as error:
            self._was_read(number, state, None, error)

    def _read(self, at: StepModel, state: StepState) -> list[Document]:
        """Returns what the model's outputs mean, for each item; in a thread, where that takes long."""
        base, keep = at.number == self._graph.base, self._graph.steps[at.number].keep
        answers: list[Document] = [{} for _ in state.items]
        options, model = self.options_of(at.number), at.model
        if keep.score and options.score is None:  # else the model's own would apply before it
            options = replace(options, score=keep.score)
        for request in state.requests:
            assert request.answer is not None
            outputs = request.answer.outputs
            for place, number in enumerate(request.items):
                geometry = self.pictures.geometry if base else request.geometries[place]
                asked = partial(model.answer, model.of_one(outputs, place), geometry)
                answer = self.said(at.number, asked, options)
                part = state.items[number].place
                if part is not None:
                    width, height = request.sizes[place]
                    across, down = (part.right - part.left) / width, (part.bottom - part.top) / height
                    answer = moved(answer, part, (across, down))
                answers[number] = self._graph.kept(at.number, answer)
        return answers

    def options_of(self, number: int) -> Options:
        """Returns the options with which a step answers; in any thread. Those of the client are for the whole
        picture."""
        return self.pictures.options if number == self._graph.base else DEFAULT

    def said(self, number: int, answer: Callable[[Options], Document], options: Options) -> Document:
        """Returns what a step says about an item, given what makes its answer with these options; in any
        thread."""
        return answer(options)

    def _was_read(
        self, number: int, state: StepState, answers: list[Document] | None, error: BaseException | None
    ) -> None:
        release_all(state.requests)
        self._guarded(partial(self._go_on_after, number, answers, error))

    def _go_on_after(self, number: int, answers: list[Document] | None, error: BaseException | None) -> None:
        if self._hears is None or self._is_late(number):
            return
        if answers is None:
            self._failed(number, explained(error, self._model.steps[number].entry.name))
        else:
            self._over(number, answers)

    def _over(self, number: int, answers: list[Document]) -> None:
        """The step is over. Those begin that waited for it, and the whole ends with the last."""
        self.steps[number].answers = answers
        following = [(other, self.items_of(other, answers)) for other in self._graph.following(number)]
        if self._device is not None and number == self._graph.base:
            following += [(other, list(_WHOLE)) for other in self._graph.beside]
            if not self._stays(self._device, following):
                return
        self._open_all(following)

    def items_of(self, number: int, answers: Sequence[Document]) -> list[Item]:
        """Returns what a step is asked about, after its source gave these answers."""
        size = self.pictures.geometry
        return self._graph.items(number, answers, (size.width, size.height))

    def _open_all(self, steps: Sequence[tuple[int, list[Item]]]) -> None:
        for number, items in steps:
            self._open(number, items)
            if self._hears is None:
                return
        self._finish_if_over()

    # ── a picture that the device decoded ──

    def _stays(self, device: DevicePicture, following: Sequence[tuple[int, list[Item]]]) -> bool:
        """Returns whether, after the first step, the picture stays on the device for the later steps, if any
        needs it. If not, it is decoded here, and they begin after that."""
        if not any(items for _, items in following):
            return True
        counted = self._model.service.row(self._model.entry)
        counted.add(_CROPS["device" if device.kept else "cpu"])
        if device.kept:
            return True
        decode, slot = device.borrowed(self._model.decoded)
        self._let_go_of_device()
        self._workers.finish(decode, partial(self._was_decoded, slot, following))
        return False

    def _was_decoded(
        self,
        slot: Slot,
        following: Sequence[tuple[int, list[Item]]],
        picture: Decoded | None,
        error: BaseException | None,
    ) -> None:
        slot.release()
        self._guarded(partial(self._begin_following, following, picture, error))

    def _begin_following(
        self,
        following: Sequence[tuple[int, list[Item]]],
        picture: Decoded | None,
        error: BaseException | None,
    ) -> None:
        if self._hears is None:
            return
        if picture is None:
            self._end(explained(error, self._model.entry.name))
        elif self._keep(picture):
            self._open_all(following)

    def _let_go_of_device(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.end()

    # ── the end ──

    def _is_late(self, number: int) -> bool:
        return number in self._late

    def _failed(self, number: int, error: CarpoolError) -> None:
        """A step did not come to its end: neither does the whole, unless that is answered without it."""
        if self._hears is None or self._is_late(number):
            return
        late = isinstance(error, Refused | DeadlineExceeded)
        if self.goes_without(number, error):
            self._late.append(number)
            self._drop(number)
            self._finish_if_over()
            return
        if not late or self._graph.settings.if_late != WITHOUT or number == self._graph.base:
            self._end(prefixed(error, f"in step '{self._graph.steps[number].name}', "))
            return
        left_out = [number]
        while left_out:
            self._late.append(at := left_out.pop())
            self._drop(at)
            left_out += self._graph.following(at)
        self._finish_if_over()

    def goes_without(self, number: int, error: CarpoolError) -> bool:
        """Returns whether the answer is given although this step failed with this error, and says nothing of
        that."""
        return False

    def _finish_if_over(self) -> None:
        if self._hears is None:
            return
        for number in range(len(self._graph.steps)):
            state = self.steps.get(number)
            if not self._is_late(number) and (state is None or state.answers is None):
                return
        started = monotonic()
        try:
            answer = self._answer(started)
        except Exception as error:
            self._end(explained(error, self._model.entry.name))
            return
        hears, self._hears = self._hears, None
        picture = self._picture
        try:
            self._booking.over(answered=True)
            self._let_go()
        finally:
            if hears is not None:
                hears.done(answer)
        if picture is not None:
            self.was_answered(picture)

    def was_answered(self, picture: Decoded) -> None:
        """Does what comes after the answer to this picture."""

    def _answer(self, started: float) -> Answer:
        graph, steps = self._graph, self.steps
        there = {number: state for number, state in steps.items() if state.answers is not None}
        entry, assumed = self._model.entry, self._model.assumed
        document: dict[str, Any] = {"model": entry.name, "version": entry.version, **assumed}
        answer = graph.answer(
            {number: state.items for number, state in there.items()},
            {number: state.answers or [] for number, state in there.items()},
        )
        document |= self._model.worded(answer)
        document |= self.marks()
        timing = self._timing(monotonic() - started)
        if self.pictures.options.extra.get("explain"):
            document["steps"] = told(timing)
        data = np.empty(1, object)
        data[0] = orjson.dumps(document)
        last = self._last
        tensor = Tensor("answer", Datatype.BYTES, (1,), data)
        return Answer([tensor], None, timing, last.sent, last.outside, self.degraded)

    def marks(self) -> Mapping[str, Any]:
        """Returns what stands in the answer beside that of the steps: which of them were late."""
        return {"late": sorted(self._graph.steps[number].name for number in self._late)} if self._late else {}

    def _timing(self, merge: float) -> StepTiming:
        steps: list[tuple[str, Timing]] = []
        for number in self._graph.order:
            state = self.steps.get(number)
            if state is None or number in self._late:
                continue
            given = [request.answer for request in state.requests if request.answer is not None]
            slowest = max((one.timing for one in given), key=lambda t: t.queue + t.infer, default=Timing())
            self._last = max((self._last, *given), key=lambda one: one.sent)
            steps.append(
                (
                    self._graph.steps[number].name,
                    PartTiming(
                        slowest.queue,
                        slowest.input,
                        slowest.infer,
                        slowest.output,
                        slowest.batch,
                        len(state.items),
                        state.cut,
                        number=slowest.number,
                    ),
                )
            )
        timing = StepTiming.of(steps)
        timing.steps += (("merge", PartTiming(output=merge)),)
        return timing

    def _end(self, error: CarpoolError) -> None:
        hears, self._hears = self._hears, None
        try:
            self._let_go()
        finally:
            if hears is not None:
                hears.done(Answer(error=without_stack(error)))

    def _let_go(self) -> None:
        """Lets go of everything that no thread has: siblings are cancelled, and the pixels are free. All of
        it is tried, whatever part of it raises."""
        self._picture = None
        self.pictures.whole.clear()
        kept, self._kept = self._kept, 0
        self._model.service.forget(kept)
        with ExitStack() as rest:
            for number in self.steps:
                rest.callback(self._drop, number)
            rest.callback(self._let_go_of_device)
            rest.callback(self._booking.over, answered=False)  # unless it was said to be answered

    def _drop(self, number: int) -> None:
        """Drops what is under way of a step. What a thread reads or cuts is given back when it comes back."""
        state = self.steps.get(number)
        if state is None or state.answers is not None:
            return
        with ExitStack() as rest:
            for request in state.requests:
                call = request.call
                if call is not None and request.answer is None:
                    request.call = None
                    rest.callback(call.cancel)
                elif call is not None and state.waiting:
                    request.call = None
                    rest.callback(call.release)


class PipelineClient:
    """Stands in the place of the engine for pipelines: one request goes through all steps, and `hears`
    gets the whole answer."""

    def __init__(self, run: type[PipelineRun] = PipelineRun) -> None:
        self._run = run

    def infer(self, ask: Ask, hears: Hears) -> Call:
        pictures = ask.handling.content
        assert isinstance(pictures, SentPictures)
        assert isinstance(pictures.model, PipelineModel)
        run = self._run(pictures.model, ask, hears)
        run.begin()
        return run
