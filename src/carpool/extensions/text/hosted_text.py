"""An instance of a model that writes, in the runner, as the engine holds it."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from carpool.engine.run.batch import Work
from carpool.extensions.text.text_records import ASKED, LEAVE, WRITE, TextEventReader
from carpool.extensions.torch.hosted_model import HostedInstance, InRunner, Wire
from carpool.link import records
from carpool.link.records import ProtocolError
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.extensions.text.text_driver import TextDriver

_log = logger("runner")


class HostedText(InRunner):
    """Implements `Writes`. Belongs to the loop's thread, but for `join`."""

    stuck = "step-stuck"

    def __init__(self, opened: HostedInstance, model: str, driver: TextDriver) -> None:
        super().__init__(opened.runner, model, opened.number, opened.device)
        self._driver = driver
        self._loop = asyncio.get_running_loop()
        self._known: set[int] = set()
        self._reader = TextEventReader(model)
        ours, theirs = socket.socketpair()
        self._wire = Wire(ours, self._loop, self._heard, self._gone)
        with theirs:
            self.runner.serve(self, 1, theirs)

    def submit(self, number: int, work: Work, limit: int) -> None:
        place = work.place
        assert place is not None  # the engine lets nothing else in
        said: list[bytes] = []
        if len(self._known) >= records.MAX_RUNNER_TEMPLATES:
            self._known.clear()
            said.append(records.TO_RUNNER.pack(records.RESET, 0, 0))
        template = place.template
        if template.identity not in self._known:
            self._known.add(template.identity)
            size = len(template.payload)
            said += (records.TO_RUNNER.pack(records.TEMPLATE, size, template.identity), template.payload)
        payload = records.RUN_PLACE.pack(place.arena, template.identity, place.offset, 0, 0)
        payload += ASKED.pack(work.arrived, work.deadline, limit)
        said += (records.TO_RUNNER.pack(WRITE, len(payload), number), payload)
        self._wire.send(b"".join(said))

    def cancel(self, number: int) -> None:
        self._wire.send(records.TO_RUNNER.pack(LEAVE, 0, number))

    def _heard(self, data: bytes) -> None:
        try:
            events = self._reader.feed(data)
        except ProtocolError as error:
            _log.error("runner-not-understood", model=self._model, error=str(error))
            self.runner.kill()
            return
        self._driver.heard(self, events)

    def close(self) -> None:
        self._wire.finish()

    def _gone(self) -> None:
        super()._gone()
        self._driver.lost(self)
