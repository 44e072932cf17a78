"""Many cameras and one server: each camera's newest frame is sent as that of a live source, and everything
that is read is counted once."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from time import monotonic as now
from typing import Any

from carpool.client import questions
from carpool.client.connections import Connections
from carpool.client.questions import Asked
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    NotFound,
    Refused,
    Replaced,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from carpool.extensions.cameras.camera_address import CameraAddress
from carpool.extensions.cameras.video_reader import CannotRead, Frame, LatestFrame, VideoReader, jpeg_of
from carpool.extensions.cameras.watch_output import Output
from carpool.lab.load.tally import Histogram
from carpool.vision.python_pictures import Answer

_TICK_S = 0.5  # between two looks at the numbers
_RECENT_S = 5.0
_DRAIN_S = 10.0  # for requests that are running when the command is stopped
_READERS_S = 1.0  # for threads that read a file; one in a camera's silence is left behind
_REFUSALS = (Refused, DeadlineExceeded, Unavailable)
_HOPELESS = (InvalidInput, NotFound, Unauthenticated, Forbidden, Unsupported)


@dataclass(frozen=True, slots=True)
class Wish:
    """Describes what to ask of each frame, and how often."""

    asked: Asked  # without the source
    options: Mapping[str, object]
    fps: float = 5.0
    at_once: int = 3  # frames of one camera under way
    quality: int = 90
    again: bool = False  # files from their start when they end
    seconds: float | None = None
    decoding_threads: int = 1


@dataclass(slots=True)
class Counts:
    """read = sent + dropped, sent = answered + replaced + refused + failed, answered = computed + cached."""

    read: int = 0
    dropped: int = 0  # by this end: a newer one was there, or it came too late
    sent: int = 0
    answered: int = 0
    computed: int = 0
    cached: int = 0
    replaced: int = 0
    refused: int = 0
    failed: int = 0

    def add(self, other: Counts) -> None:
        for one in fields(Counts):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(slots=True)
class CameraReport:
    camera: str
    address: str
    state: str  # opening, running, lost, ended, stopped, broken
    why: str  # of what is broken or lost, or the last failure
    counts: Counts
    fps: float  # answered a second: lately, and in the end over all
    p50_ms: float  # from reading a frame to its answer
    p99_ms: float
    reopened: int

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = asdict(self)
        found |= found.pop("counts")
        return found


@dataclass(slots=True)
class WatchReport:
    seconds: float
    total: CameraReport
    cameras: list[CameraReport]

    def as_json(self) -> dict[str, Any]:
        total = self.total.as_json()
        for name in ("camera", "address", "state", "why"):
            del total[name]
        return {
            "seconds": round(self.seconds, 3),
            "total": total,
            "cameras": [one.as_json() for one in self.cameras],
        }


class Watching:
    """Watches all cameras, on one loop."""

    def __init__(
        self,
        cameras: Sequence[CameraAddress],
        connections: Connections,
        wish: Wish,
        outputs: Callable[[CameraAddress], Sequence[Output]] = lambda _: (),
    ) -> None:
        self.connections = connections
        self.wish = wish
        self.answered_any = False
        self.stop_readers = threading.Event()
        self._addresses = cameras
        self._outputs = outputs
        self._cameras: list[_LiveCamera] = []
        self._failure: CarpoolError | None = None
        self._stop = asyncio.Event()
        self._began = now()
        self.turns = Turns(len(cameras) * wish.at_once)

    async def run(self, stop: asyncio.Event, tell: Callable[[WatchReport], None]) -> WatchReport:
        """Until every video ended, `stop` is set, or the time is over. An error is what concerns all cameras:
        that the server will never answer, or that nothing can be written."""
        await self._see_server()
        self._began = now()
        between = 1.0 / self.wish.fps / len(self._addresses)
        self._cameras = [
            _LiveCamera(camera, self, self._outputs(camera), number * between)
            for number, camera in enumerate(self._addresses)
        ]
        for camera in self._cameras:
            camera.thread.start()
        over = None if self.wish.seconds is None else self._began + self.wish.seconds
        interrupted = [asyncio.create_task(event.wait()) for event in (stop, self._stop)]
        ending = asyncio.create_task(self._all_done())
        try:
            while not any(task.done() for task in (ending, *interrupted)):
                left = _TICK_S if over is None else min(_TICK_S, over - now())
                if left <= 0.0:
                    break
                await asyncio.wait({ending, *interrupted}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                tell(self.report(lately=True))
        finally:
            await self._end([ending, *interrupted])
        if self._failure is not None:
            raise self._failure
        return self.report(lately=False)

    def fail(self, error: CarpoolError) -> None:
        self._failure = self._failure or error
        self._stop.set()

    def report(self, *, lately: bool) -> WatchReport:
        total, spread = Counts(), Histogram()
        cameras = [camera.report(lately=lately) for camera in self._cameras]
        for camera, one in zip(self._cameras, cameras, strict=True):
            total.add(one.counts)
            spread.merge(camera.latency)
        reopened = sum(one.reopened for one in cameras)
        fps = sum(one.fps for one in cameras)
        summed = CameraReport("all", "", "", "", total, fps, *_percentiles(spread), reopened)
        return WatchReport(now() - self._began, summed, cameras)

    async def _see_server(self) -> None:
        """Once, before anything is opened; its first model answers where none was named."""
        question = questions.ask_first_model()
        first = question.read(await self.connections.ask(question))
        if not self.wish.asked.task and not self.wish.asked.model:
            self.wish = replace(self.wish, asked=self.wish.asked._replace(model=first))

    async def _all_done(self) -> None:
        for camera in self._cameras:
            await camera.done.wait()

    async def _end(self, waiting: Sequence[asyncio.Task[Any]]) -> None:
        """Nothing new is sent; what is under way is waited for, a while."""
        self.stop_readers.set()
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for camera in self._cameras:
            camera.stopped = True
        under_way = [task for camera in self._cameras for task in camera.under_way]
        if under_way:
            _, late = await asyncio.wait(under_way, timeout=_DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        give_up = now() + _READERS_S
        for camera in self._cameras:
            camera.thread.join(max(0.0, give_up - now()))
            camera.latest.close()
            for output in camera.outputs:
                try:
                    output.close()
                except CarpoolError as error:
                    self._failure = self._failure or error


class _LiveCamera:
    """Represents one camera: a thread that reads it, and as many requests as may be under way."""

    def __init__(
        self, address: CameraAddress, watching: Watching, outputs: Sequence[Output], phase: float
    ) -> None:
        wish = watching.wish
        self.address = address
        self.outputs = outputs
        self.latency = Histogram()
        self.under_way: set[asyncio.Task[str]] = set()
        self.done = asyncio.Event()
        self.latest = LatestFrame(self._wake)
        self._loop = asyncio.get_running_loop()
        self._watching = watching
        self._counts = Counts()
        self._asked = wish.asked._replace(source=address.name, latest=True)
        self._reader = VideoReader(
            address,
            wish.fps,
            watching.stop_readers,
            again=wish.again,
            threads=wish.decoding_threads,
            phase=phase,
        )
        self._why = ""
        self._recent: deque[float] = deque(maxlen=1024)
        self._writing = asyncio.Lock()
        self.stopped = False
        self._read_to_end = False
        self._began = self._ended = now()
        # A daemon: one that waits for a silent camera must not keep the command from ending.
        self.thread = threading.Thread(target=self._read, name=f"camera {address.name}", daemon=True)

    def _read(self) -> None:
        self._reader.run(self.latest)
        self._wake(ended=True)

    def _wake(self, *, ended: bool = False) -> None:
        """Wakes the loop from the reader's thread; a loop that is closed is ignored."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._read_all if ended else self._want)

    # ---- on the loop

    def _read_all(self) -> None:
        self._read_to_end = True
        self._want()
        self._settle()

    def _want(self) -> None:
        self._watching.turns.want(self._send_newest)

    def _settle(self) -> None:
        if self._read_to_end and not self.under_way and (self.stopped or self.latest.is_empty):
            self._ended = now()
            self.done.set()

    def _send_newest(self) -> bool:
        if self.stopped or len(self.under_way) >= self._watching.wish.at_once:
            return False
        frame = self.latest.take()
        if frame is None:
            return False
        self._counts.sent += 1
        task = self._loop.create_task(self._send(frame))
        self.under_way.add(task)
        task.add_done_callback(partial(self._sent, now()))
        return True

    def _sent(self, sent_at: float, task: asyncio.Task[str]) -> None:
        self.under_way.discard(task)
        became = "" if task.cancelled() or task.exception() is not None else task.result()
        self._watching.turns.over(self._send_newest, sent_at, now(), became)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._watching.fail(
                error if isinstance(error, CarpoolError) else CarpoolError(f"{type(error).__name__}: {error}")
            )
        self._want()
        self._settle()

    async def _send(self, frame: Frame) -> str:
        """Returns what became of it. Counted exactly once. What is raised ends everything, and the frame has
        been counted before."""
        counts, wish = self._counts, self._watching.wish
        try:
            assert frame.image is not None
            picture = await asyncio.to_thread(jpeg_of, frame.image, wish.quality)
            frame = frame._replace(image=None)  # many wait for their answers: let the pixels go
            question = questions.ask_picture(picture, self._asked, wish.options, Answer)
            reply = await self._watching.connections.ask(question)
            answer = question.read(reply)
        except asyncio.CancelledError:
            counts.failed += 1
            self._why = "not answered when it was time to stop"
            raise
        except Replaced:
            counts.replaced += 1
            return "replaced"
        except _REFUSALS as error:
            counts.refused += 1
            self._why = error.reason
            return "refused"
        except (CarpoolError, CannotRead) as error:
            counts.failed += 1
            self._why = str(error)
            if isinstance(error, _HOPELESS) and not self._watching.answered_any:
                raise  # no camera was answered so far: the cause is the request, not this frame
            return "failed"
        self._watching.answered_any = True
        took = now() - frame.read
        cache = reply.fields.get("x-carpool-cache", "")
        is_cached = cache.startswith(("hit", "joined"))
        counts.answered += 1
        counts.cached += is_cached
        counts.computed += not is_cached
        self.latency.add(took)
        self._recent.append(now())
        if self.outputs:
            more = {"latency_ms": round(took * 1e3, 1)} | ({"cache": cache} if cache else {})
            async with self._writing:  # frames of one camera, one after the other
                await asyncio.to_thread(self._write, frame, picture, answer, more)
        return "answered"

    def _write(self, frame: Frame, picture: bytes, answer: Answer, more: Mapping[str, Any]) -> None:
        for output in self.outputs:
            output.add(frame.number, frame.at, picture, answer, more)

    def report(self, *, lately: bool) -> CameraReport:
        reader, latest = self._reader, self.latest
        counts = Counts()
        counts.add(self._counts)
        counts.read, counts.dropped = latest.read, latest.dropped
        over = (self._ended if self.done.is_set() else now()) - self._began
        fps = counts.answered / max(over, 1e-3)
        if lately:
            recent = sum(at > now() - _RECENT_S for at in self._recent)
            fps = recent / max(1e-3, min(over, _RECENT_S))
        running = reader.state in (
            "opening",
            "running",
        )  # a thread in a camera's silence may say so to the end
        return CameraReport(
            self.address.name,
            self.address.shown,
            "stopped" if running and not lately else reader.state,
            reader.why or self._why,
            counts,
            round(fps, 2),
            *_percentiles(self.latency),
            reader.reopened,
        )


def _percentiles(spread: Histogram) -> tuple[float, float]:
    p50, p99 = spread.percentiles((0.5, 0.99)) if spread.count else (0.0, 0.0)
    return round(p50 * 1e3, 1), round(p99 * 1e3, 1)


# ---- whose turn it is


_FEWEST = 2  # so that one is on its way while another is computed
_LESS = 0.7
_IN_VAIN = 5  # refusals in a row: then it is the turn of the others, who may be asked less of

Send = Callable[[], bool]
"""Sends the newest frame of a camera; False if there is none, or enough of its frames are under way."""


class Turns:
    """Decides which camera sends next where a server rejects many: it gets little more than it answers.

    A server that is far over its capacity takes whichever request comes at the right moment. Cameras send at
    fixed times, so that some always come right and others never: of twenty, four had all answers. So those of
    one command share as many places as the server has lately had answers for: one more for each round that is
    answered, a third fewer when it refuses, and then none asks before there is an answer. The camera that had
    no turn for the longest goes first. While nothing is rejected, there are places for all. The caller passes
    the time.
    """

    def __init__(self, most: int) -> None:
        self._most = max(_FEWEST, most)
        self._places = float(self._most)
        self._under_way = 0
        self._is_held = False
        self._cut_at = float("-inf")
        self._waiting: dict[Send, None] = {}
        self._turns: dict[Send, int] = {}  # when each had its last one
        self._turn = 0
        self._in_vain: Counter[Send] = Counter()

    @property
    def places(self) -> int:
        return int(self._places)

    def want(self, send: Send) -> None:
        """A camera has a frame, or can send one more."""
        self._waiting[send] = None
        self._go_on()

    def over(self, send: Send, sent_at: float, now: float, became: str) -> None:
        """One that was sent is answered, refused or something else. What was under way when there were more
        places says nothing about those now."""
        self._under_way -= 1
        if became == "answered":
            self._places = min(self._most, self._places + 1.0 / self._places)
            self._is_held = False
        elif became == "refused":
            self._is_held = True
            self._in_vain[send] += 1
            if sent_at > self._cut_at:
                used = min(self._places, self._under_way + 1.0)  # unused places are no evidence of capacity
                self._places = max(_FEWEST, _LESS * used)
                self._cut_at = now
        if became != "refused" or self._in_vain[send] == _IN_VAIN:
            del self._in_vain[send]
        else:
            self._turns[send] = 0  # it has not had it yet
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self._under_way < self.places and not (self._is_held and self._under_way):
            send = min(self._waiting, key=lambda one: self._turns.get(one, 0))
            del self._waiting[send]
            if send():
                self._under_way += 1
                self._turn += 1
                self._turns[send] = self._turn
                self._waiting[send] = None  # it may have another
