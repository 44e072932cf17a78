"""One model's rollout as this process knows it, and how it is kept."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from pathlib import Path
from time import monotonic

from carpool.extensions.rollout.rollout_file import Record, as_json, write_document
from carpool.extensions.rollout.rollout_guards import Counts, GuardResult
from carpool.extensions.rollout.rollout_states import Labelled, State
from carpool.observe.logs import logger

log = logger("rollout")


class WatchedRollout:
    """Belongs to the engine's loop, but for `_write`."""

    def __init__(self, record: Record, file: Path | None) -> None:
        self.record = record
        self.file = file
        self.trouble = ""  # why it is not kept
        self.ready = False  # the candidate is loaded, and was checked
        self.epoch = time.time_ns() // 1000
        self.stamps: Mapping[str, object] = {}  # of both versions' files, as they were loaded
        self.identities: Mapping[str, object] = {}
        self.sources: OrderedDict[str, float] = OrderedDict()  # when each was last counted
        self.seen_ms: float | None = None  # how long the last change took to the last front end
        self.saving: Future[None] | None = None
        self._unwritten: bytes | None = None  # what a write that has not begun will write
        self._lock = threading.Lock()  # for that
        self.saved_at = self.looked_at = 0.0
        self.guards: list[GuardResult] = []
        self.labelled: Labelled | None = None  # what its labelled set said
        self.others = Counts()  # what other replicas counted, and all of them before this state
        self.missing = ""  # the version that this replica still waits for

    @property
    def counts(self) -> Counts:
        """Returns the counts of all replicas."""
        return self.record.counts.plus(self.others)

    def save(self, disk: Executor) -> None:
        """One write at most waits for a disk that hangs, and it writes the latest."""
        self.saved_at = monotonic()
        if self.file is None:
            return
        document = as_json(self.record, self.saved_at)
        with self._lock:
            waits, self._unwritten = self._unwritten is not None, document
        if not waits:
            self.saving = disk.submit(self._write, self.file)

    @property
    def loads_again(self) -> bool:
        """Its server was started in the middle of it, and it does not go on yet."""
        rollout = self.record.rollout
        return not (self.ready or rollout.over or rollout.state in (State.LOADING, State.RETIRED))

    async def kept(self) -> None:
        """Waits until what was decided is on the disk: an action is acknowledged only after that."""
        if self.saving is not None:
            await asyncio.wrap_future(self.saving)

    def _write(self, file: Path) -> None:
        """Writes in the disk's thread. A disk that is full or read-only stops no rollout: that is logged,
        and tried again."""
        with self._lock:
            document, self._unwritten = self._unwritten, None
        assert document is not None  # a write is submitted only with one
        try:
            write_document(file, document)
            self.trouble = ""
        except OSError as error:
            if not self.trouble:
                log.error("rollout-not-stored", model=self.record.model, error=str(error))
            self.trouble = f"its state cannot be stored: {error.strerror or error}"
