"""Implements a front end's part of drift: a few answered pictures are measured in idle threads, and sent to
the engine in bulk. A request that is not sampled costs one subtraction."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Coroutine, Mapping
from functools import partial
from math import log, log1p
from random import Random
from time import monotonic
from typing import Any, Protocol

from carpool.errors import CarpoolError
from carpool.extensions.drift.kept_pictures import MOST_PICTURE_BYTES
from carpool.extensions.drift.samples import PictureMeasures, Sampled, measure
from carpool.extensions.drift.settings import UncertainSettings
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.pictures.sent_pictures import SentPictures
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import Sender
from carpool.memory.arena import Slot
from carpool.memory.layout import find_file
from carpool.observe.logs import logger
from carpool.types import Timing

NAME = "drift"
_EVERY_S = 0.1  # at most ten a second
_MOST_OF_A_CORE = 0.01  # larger pictures are measured more rarely, so that all of them take no more than this
_REPORT_S = 1.0
_MOST_PIXELS = 1 << 23  # of what is held until a thread is idle
_MOST_UNTOLD = 100

_log = logger("drift")


class _Picking:
    """Decides when the next picture of a model is looked at. Gaps are drawn: cameras that take turns would
    else be seen always, or never."""

    __slots__ = ("_random", "_sample", "drift", "due", "left", "uncertain")

    def __init__(self, drift: Mapping[str, Any]) -> None:
        self.drift = drift
        self._sample = float(drift["sample"])
        self._random = Random()
        self.left = 0
        self.due = 0.0
        given = drift.get("uncertain")
        self.uncertain = (
            None
            if given is None
            else UncertainSettings("kept", tuple(given["score"]), margin=float(given["margin"]))
        )
        self.draw()

    def draw(self) -> None:
        """Draws the next gap, as if each had been drawn for itself."""
        self.left = 1
        if self._sample < 1.0:
            self.left += int(log(1.0 - self._random.random()) / log1p(-self._sample))


def front(server: FrontServer) -> FrontPart:
    """Returns what drift does in a front end."""
    return Sampler(server).part


class AnsweredCall(Protocol):
    """Represents a request that was answered."""

    @property
    def pictures(self) -> SentPictures | None: ...

    @property
    def entry(self) -> ModelEntry: ...

    @property
    def sender(self) -> Sender: ...


class Sampler:
    """Implements `Observer`. Used in the loop's thread; only `measure` runs in others."""

    def __init__(self, server: FrontServer) -> None:
        self._server = server
        self._threads = server.threads
        self._models: dict[int, _Picking] = {}  # by the entry's key
        self._untold: list[dict[str, Any]] = []
        self._due = 0.0  # before this, what was measured already takes its part of a core
        self._room: dict[int, int] = {}  # for doubtful pictures, by the entry's key
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.part = FrontPart(
            follow=self.follow,
            observe=self.observe,
            picture=self.pick,
            close=self.close,
            shows=lambda entry: True if NAME in entry.extra else None,
        )

    def observe(self) -> Sampler | None:
        return self if self._models else None

    def follow(self, catalog: Catalog) -> None:
        watched = [
            (entry.key, entry.extra[NAME]) for entry in catalog.entries.values() if NAME in entry.extra
        ]
        known, self._models = self._models, {}
        for key, drift in watched:
            before = known.get(key)
            is_same = before is not None and before.drift == drift  # another engine numbers anew
            self._models[key] = before if before and is_same else _Picking(drift)
        self._room = {key: room for key, room in self._room.items() if key in self._models}

    def pick(self, entry: ModelEntry, pictures: SentPictures, slot: Slot | None) -> None:
        """Notes what is to be measured of a request that goes to the engine, with a slot if its file lies
        there already."""
        pictures.noted = self._picked(entry, pictures, slot)

    def _picked(self, entry: ModelEntry, pictures: SentPictures, slot: Slot | None) -> Sampled | None:
        model = self._models.get(entry.key)
        if model is None:
            return None
        model.left -= 1
        if model.left > 0:
            return None
        model.draw()
        now = monotonic()
        if (
            now < max(model.due, self._due)
            or not self._threads.takes_idle
            or len(self._untold) >= _MOST_UNTOLD
        ):
            return None
        model.due = now + _EVERY_S
        wanted = model.uncertain is not None and self._room.get(entry.key, 1) > 0
        file, size = b"", 0
        came = pictures.files
        if came and len(came[0]):
            size = len(came[0])
            if (wanted or pictures.is_file) and size <= MOST_PICTURE_BYTES:
                file = bytes(came[0])
        elif slot is not None:
            start, end = find_file(slot.view, 0)
            size = end - start
            file = bytes(slot.view[start:end]) if size <= MOST_PICTURE_BYTES else b""
        if pictures.is_file and not file:
            return None
        return Sampled([], size, file, model.uncertain if wanted else None)

    def failed(self, call: AnsweredCall, error: CarpoolError, timing: Timing | None, now: float) -> None:
        """Forgets them: of those nothing is measured."""

    def answered(self, call: AnsweredCall, answer: Answer, times: tuple[float, float, float]) -> None:
        pictures = call.pictures
        sampled = None if pictures is None else pictures.noted
        if pictures is None or not isinstance(sampled, Sampled):
            return
        if sampled.decoded and sampled.decoded[0].pixels.size > 3 * _MOST_PIXELS:
            return
        document = pictures.first_document(answer.outputs)
        then = partial(self._measured, call.entry, call.sender.source, sampled.file)
        self._threads.idle(partial(measure, sampled, document), then)

    def _measured(
        self,
        entry: ModelEntry,
        source: str,
        file: bytes,
        found: PictureMeasures | None,
        error: BaseException | None,
    ) -> None:
        if entry.key not in self._models or found is None:
            if error is not None and not isinstance(error, asyncio.CancelledError | CarpoolError):
                _log.error("not-measured", model=entry.name, error=f"{type(error).__name__}: {error}")
            return
        self._due = max(self._due, monotonic()) + found.seconds / _MOST_OF_A_CORE
        seen = {"key": entry.key, "source": source, "look": found.look, "black": found.black}
        self._untold.append({**seen, "values": found.values})
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_REPORT_S, self._report)
        if found.doubt and self._room.get(entry.key, 1) > 0:
            self._room[entry.key] = self._room.get(entry.key, 1) - 1
            line = {"why": "uncertain", "says": found.doubt, "source": source, "answer": found.answer}
            picture = base64.b64encode(file).decode()
            arguments = {"key": entry.key, "form": found.form, "line": line, "picture": picture}
            self._begin(self._tell("drift/keep", arguments))

    def _report(self) -> None:
        self._timer = None
        samples, self._untold = self._untold, []
        self._begin(self._tell("drift/samples", {"samples": samples}))

    def _begin(self, telling: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(telling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, what: str, arguments: Mapping[str, Any]) -> None:
        """What is lost with an engine is lost: these are samples."""
        try:
            answer = await self._server.ask(what, arguments)
        except CarpoolError:
            return
        self._room |= {int(key): int(room) for key, room in (answer or {}).get("room", {}).items()}

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
