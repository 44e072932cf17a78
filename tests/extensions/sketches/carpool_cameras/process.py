"""The process of the cameras. A camera has one request under way; a newer frame replaces one that waits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from carpool.errors import CarpoolError
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.calls.request import Request
from carpool.frontend.calls.request_facts import OVER, RequestFacts, RequestReply
from carpool.frontend.front_service import FrontService
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import Answer
from carpool.link.senders import Sender
from carpool.link.step_times import Times
from carpool.observe.columns import by_word
from carpool.process.children import FrontendParts
from carpool.types import Array

_FRAMES = by_word("cameras_sketch", "frames")


class Camera(RequestReply):
    """Reads one camera. What becomes of its frames would go to a tracker, and its events to clients."""

    __slots__ = ("_fps", "_model", "_name", "_service", "_task", "_under_way", "_waiting")

    def __init__(self, service: FrontService, name: str, model: str, fps: float) -> None:
        self._service = service
        self._name = name
        self._model = model
        self._fps = fps
        self._under_way: Request | None = None
        self._waiting: Array | None = None
        self._task = asyncio.get_running_loop().create_task(self._read())

    def close(self) -> None:
        self._task.cancel()
        if self._under_way is not None:
            self._under_way.leave()

    async def _read(self) -> None:
        for number in count():
            await asyncio.sleep(1 / self._fps)
            self._frame(np.full((1, 4), number, np.float32))

    def _frame(self, frame: Array) -> None:
        entry = self._service.engine.catalog.newest.get(self._model)
        if entry is None:  # the camera waits for its model
            return
        if self._under_way is not None:
            self._count(entry, "replaced" if self._waiting is not None else "")
            self._waiting = frame
            return
        sender = Sender(source=f"cameras/{self._name}", latest=True)
        inputs = {entry.signature.inputs[0].name: frame}
        request = self._service.parts.server.send(entry, inputs, self, sender)
        self._under_way = None if request.state == OVER else request

    def _ended(self, request: RequestFacts, word: str) -> None:
        self._count(request.entry, word)
        self._under_way = None
        frame, self._waiting = self._waiting, None
        if frame is not None:
            asyncio.get_running_loop().call_soon(self._frame, frame)

    def _count(self, entry: ModelEntry, word: str) -> None:
        if word:
            self._service.row(entry).add(_FRAMES[word])

    # ── as `RequestReply` ──

    def current(self) -> ModelEntry:
        return self._service.look_up(self._model)

    def answer(self, request: RequestFacts, answer: Answer) -> None:
        self._ended(request, "answered")

    def error(self, request: RequestFacts, error: CarpoolError, times: Times | None) -> None:
        self._ended(request, "failed")


class Cameras:
    """Implements `Frontend`: what the catalogue lists runs."""

    def __init__(self, service: FrontService) -> None:
        self._service = service
        self._running: dict[str, tuple[Mapping[str, Any], Camera]] = {}
        service.engine.watch(self._follow)

    def _follow(self, catalog: Catalog) -> None:
        wanted: Mapping[str, Any] = catalog.extra.get("cameras_sketch", {}).get("cameras", {})
        for name, (settings, camera) in list(self._running.items()):
            if wanted.get(name) != settings:
                camera.close()
                del self._running[name]
        for name in wanted.keys() - self._running.keys():
            settings = wanted[name]
            self._running[name] = settings, Camera(self._service, name, settings["model"], settings["fps"])

    async def stop(self, _within_s: float) -> int:
        for _, camera in self._running.values():
            camera.close()
        self._service.close()
        return 0

    async def help(self, other: int, sockets: Mapping[str, Sequence[socket.socket]]) -> None:
        """Has no ports."""


async def start(parts: FrontendParts) -> Cameras:
    settings = parts.settings
    started = StartedWith(settings, parts.table.block_exemplars(parts.block), parts.began)
    block = parts.table.block(parts.block)
    return Cameras(
        FrontService("cameras", parts.engine_client, block, settings.max_body_bytes, 1, started=started)
    )
