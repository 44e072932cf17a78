"""Passes on the gate's advice: what the engine would say to a newcomer now, so that front ends can say it at
once.

The engine writes its verdict after every turn; a front end that refuses on it spares reading the body. It is
advice only: whatever passes is offered to the engine, whose word is law. Refusals are reported in bulk, so
that the engine still knows the rate that is asked of it. What a front end says that is itself behind is here
too, because it is counted with them; when it says so is for `http.fairness` to know.
"""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from hashlib import blake2b
from mmap import mmap
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from carpool.core.job import ORDINARY, REFUSAL_NUMBERS, Job, Reason, Refusal, refusal_of
from carpool.errors import CarpoolError, Refused
from carpool.link.catalog import ModelEntry
from carpool.link.engine_client import Ahead, nobody_ahead
from carpool.link.senders import NOBODY, Sender

if TYPE_CHECKING:
    from carpool.core.scheduler import Scheduler  # front ends have none

WriteGate: TypeAlias = Callable[..., None]
ReadGate: TypeAlias = Callable[[int, int], tuple[float, ...] | None]

_BEFORE = 3  # numbers of a row before its verdicts: when, whether no request names a source, and for how many
_VERDICT = 2 + REFUSAL_NUMBERS  # numbers of one: see `_numbers`
_MOST_SOURCES = 7  # that have a verdict each: those that flood
MAX_VALUES = _BEFORE + _MOST_SOURCES * _VERDICT
_ROWS = 1024
_HEAD = struct.Struct("<IIQ")  # checksum of the rest, number of values, key
_ROW = _HEAD.size + 8 * MAX_VALUES
_VALUES = tuple(struct.Struct(f"<{count}d") for count in range(MAX_VALUES + 1))
_LOOKS = 3

GATE_BYTES = _ROWS * _ROW

_REASONS = list(Reason)
_WORDS = [reason.value for reason in Reason]
_OVERLOAD = _REASONS.index(Reason.OVERLOAD)
_STALE_S = 0.05  # an engine that is busy turns far more often: older advice says nothing
_REPORT_S = 0.02
_MOST_SAID = 256
_MOST_NUMBERS = 1024
_SAME_S = 0.005  # for so long one sentence does for all who are refused for the same reason, at least
_LATELY_S = 0.25  # no request was rejected for so long: there is room


class Gate(Protocol):
    """As `EngineClient.refuses`, which it is: refuses what the engine would refuse as well."""

    def __call__(
        self,
        entry: ModelEntry,
        deadline: float,
        now: float,
        sender: Sender = NOBODY,
        *,
        certain: bool = True,
        ahead: Ahead = nobody_ahead,
    ) -> CarpoolError | None: ...


def open_gate(*_: object, **_named: object) -> None:
    """Lets every request through to the engine, since nothing is known of its load."""


class GateTable:
    """Holds a few numbers per model that the engine writes and every front end reads, over a buffer of
    `GATE_BYTES` zeros that all processes share.

    One row per model key. A row carries a checksum and is copied as a whole, so a reader that meets a row in
    mid-write knows it, on any processor and even if the writer died there; it looks again, then goes without.
    Keys share rows in turn: of two live models that share one, the last to write has advice.
    """

    def __init__(self, buffer: bytearray | mmap | memoryview) -> None:
        self._view = memoryview(buffer).cast("B")
        self._known: dict[int, tuple[bytes, tuple[float, ...]]] = {}  # by row: its head, and what it held

    def write(self, key: int, *values: float) -> None:
        start = key % _ROWS * _ROW
        row = _HEAD.pack(0, len(values), key) + _VALUES[len(values)].pack(*values)
        checksum = zlib.crc32(row[4:])
        self._view[start : start + len(row)] = checksum.to_bytes(4, "little") + row[4:]

    def read(self, key: int, least: int = 0) -> tuple[float, ...] | None:
        """Returns what was written last for this key, or None if that cannot be read, or if it is fewer than
        `least` numbers: most rows are, and those need not be copied. A count in mid-write harms no request:
        to go without advice is always right."""
        place = key % _ROWS
        start = place * _ROW
        head = bytes(self._view[start : start + _HEAD.size])
        _, count, owner = _HEAD.unpack(head)
        if count < least:
            return None
        known = self._known.get(place)
        if known is not None and known[0] == head:  # whose checksum is that of all that was read then
            return known[1] if owner == key else None
        for _ in range(_LOOKS):
            row = bytes(self._view[start : start + _ROW])
            checksum, count, owner = _HEAD.unpack_from(row)
            if count <= MAX_VALUES:
                end = _HEAD.size + 8 * count
                if zlib.crc32(row[4:end]) == checksum:
                    values = _VALUES[count].unpack_from(row, _HEAD.size)
                    self._known[place] = row[: _HEAD.size], values
                    return values if owner == key else None
        return None

    def clear(self) -> None:
        """Clears the table: a new engine numbers its models anew, so nothing that an older one wrote may be
        believed."""
        self._view[:] = bytes(len(self._view))


def publish(write: WriteGate, key: int, scheduler: Scheduler, now: float) -> bool:
    """Writes the verdicts on new requests with the whole SLO ahead of them; returns whether there are any.

    A single source has one verdict: on its next request, or on the one that follows so many others that the
    engine has not received yet. Of several sources, each that was lately rejected has its own verdict, so
    that the gate rejects a flood of one and lets the others through. Only the engine knows which requests are
    more urgent than others: as long as such requests arrive, it decides alone.
    """
    lanes = list(scheduler.lanes)
    verdicts: list[float] = []
    nameless = not any(lane.named for lane in lanes)
    here = [lane for lane in lanes if lane.seen > now - scheduler.constants.lately_s]
    alone = here[0].source if len(here) == 1 and not here[0].shared else None
    room = 0
    if all(lane.level == ORDINARY for lane in lanes):
        if alone is not None and here[0].refused > now - _LATELY_S:
            room, refusal = scheduler.room(scheduler.newcomer(alone, now), now)
            verdicts += _numbers(alone, refusal)
        else:
            since = now - _STALE_S
            lately = [lane.source for lane in lanes if lane.refused > since and not lane.shared]
            for source in lately[:_MOST_SOURCES] if alone is None else [alone]:
                verdicts += _numbers(source, scheduler.refuses(scheduler.newcomer(source, now), now))
    write(key, now, float(nameless), float(room), *verdicts)
    return bool(verdicts or room)


def _numbers(source: str, refusal: Refusal | None) -> tuple[float, ...]:
    """Returns a verdict: nothing, or a refusal in numbers."""
    if refusal is None:
        return ()
    return _number(source), float(_REASONS.index(refusal.reason)), *refusal.flat()


def _number(source: str) -> float:
    """Returns the source as a number that a double holds exactly; 0 for requests that name none."""
    if not source:
        return 0.0
    return 1.0 + int.from_bytes(blake2b(source.encode(errors="replace"), digest_size=6).digest())


class Advice:
    """Reads the gate for a front end, and says what it answers when it cannot keep up itself."""

    def __init__(self, read: ReadGate, ask: Callable[[str, Any], Coroutine[Any, Any, Any]]) -> None:
        self._read = read
        self._ask = ask
        self._loop = asyncio.get_running_loop()
        self._refused: Counter[tuple[int, str, str]] = Counter()
        self._said: dict[
            tuple[int, str | None, int], tuple[float, tuple[float, ...], Refused, ModelEntry]
        ] = {}
        self._numbers: dict[str, float] = {}
        self._report: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def __call__(
        self,
        entry: ModelEntry,
        deadline: float,
        now: float,
        sender: Sender = NOBODY,
        *,
        certain: bool = True,
        ahead: Ahead = nobody_ahead,
    ) -> CarpoolError | None:
        if (
            entry.batching.slo is None or sender.latest
        ):  # a newer frame asks for no more room than the one it replaces
            return None
        row = self._read(entry.key, _BEFORE + _VERDICT)
        if row is None or now - row[0] > _STALE_S:
            return None
        nameless = row[1]
        if not (sender.source or nameless or (certain and not sender.priority)):
            return None
        source = sender.source or sender.payer
        number = self._numbers.get(source)
        if number is None:
            if len(self._numbers) >= _MOST_NUMBERS:
                self._numbers.clear()
            number = self._numbers[source] = _number(source)
        for at in range(_BEFORE, len(row), _VERDICT):
            if row[at] == number:
                if row[2] and ahead(row[0]) < row[2]:
                    return None
                return self._refuse(entry, deadline, now, source, row[at : at + _VERDICT])
        return None

    def behind(self, entry: ModelEntry, now: float, source: str, waited: float) -> Refused:
        """The refusal of a front end that cannot read all that comes, counted as the engine's are."""
        self._count(entry, source, _OVERLOAD)
        said = self._said_before(entry, None, _OVERLOAD, now, (waited,))
        return said or self._keep(entry, None, _OVERLOAD, now, (waited,), _behind(entry, waited))

    def _refuse(
        self, entry: ModelEntry, deadline: float, now: float, source: str, verdict: tuple[float, ...]
    ) -> CarpoolError:
        assert entry.batching.slo is not None
        code = int(verdict[1])
        self._count(entry, source, code)
        whole = deadline >= now + entry.batching.slo
        said = self._said_before(entry, source, code, now, verdict) if whole else None
        if said is not None:
            return said
        error = _error(entry, Job(now, min(deadline, now + entry.batching.slo)), _REASONS[code], verdict)
        if whole and isinstance(error, Refused):
            return self._keep(entry, source, code, now, verdict, error)
        return error

    def _said_before(
        self, entry: ModelEntry, source: str | None, code: int, now: float, numbers: tuple[float, ...]
    ) -> Refused | None:
        """A flood gets the same sentence many times: it is kept, and so is what its clients are sent. Equal
        numbers make an equal sentence, however long ago that was; but another engine numbers its models
        anew."""
        said = self._said.get((entry.key, source, code))
        if said is None or said[3] is not entry or (now >= said[0] and numbers != said[1]):
            return None
        return said[2].again()

    def _keep(
        self,
        entry: ModelEntry,
        source: str | None,
        code: int,
        now: float,
        numbers: tuple[float, ...],
        error: Refused,
    ) -> Refused:
        """Caches an error; `source` is None for a sentence that contains no numbers of a single source."""
        error.rendered = {}
        if len(self._said) >= _MOST_SAID:
            self._said.clear()
        self._said[entry.key, source, code] = now + _SAME_S, numbers, error, entry
        return error.again()

    def _count(self, entry: ModelEntry, source: str, code: int) -> None:
        self._refused[entry.key, source, _WORDS[code]] += 1
        if self._report is None:
            self._report = self._loop.call_later(_REPORT_S, self._send_report)

    def _send_report(self) -> None:
        self._report = None
        counts = [[*what, count] for what, count in self._refused.items()]
        self._refused.clear()
        task = self._loop.create_task(self._tell({"refused": counts}))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, counts: dict[str, Any]) -> None:
        try:
            await self._ask("refused", counts)
        except CarpoolError:
            """The engine is gone: the next one starts with its own count."""


def _error(entry: ModelEntry, job: Job, reason: Reason, verdict: tuple[float, ...]) -> CarpoolError:
    """The verdict is about one with its whole time ahead: this one may have less."""
    from carpool.core.refusal_words import refused

    refusal = refusal_of(reason, verdict[2:])
    terms = refusal.terms
    less = terms._replace(deadline=min(terms.deadline, job.deadline - job.arrived))
    return refused(entry.name, job, refusal._replace(terms=less), fixed=False)


def _behind(entry: ModelEntry, waited: float) -> Refused:
    wait_ms = waited * 1e3
    said = f"{entry.name}: this front end cannot read requests fast enough; they wait {wait_ms:.0f} ms"
    numbers = {"unread_ms": round(wait_ms, 3)}
    if entry.batching.slo is not None:
        said += f", of the {entry.batching.slo * 1e3:g} ms of the SLO"
        numbers["deadline_ms"] = round(entry.batching.slo * 1e3, 3)
    return Refused(said, retry_after_s=waited, numbers=numbers)
