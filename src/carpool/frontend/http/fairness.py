"""Divides a front end's own time between clients: which requests it rejects, and which answers it delays.

Everything that is decided is decided in `core`; here are the loop's clock, the connections and the prices.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, Protocol

from carpool.core.constants import CONSTANTS
from carpool.core.front_load import FairBacklog, FrontLane, LaneKey
from carpool.core.job import ADDRESS
from carpool.core.pacing import Pacer
from carpool.errors import CarpoolError, InvalidInput, NotFound, Refused, TooLarge, Unsupported, without_stack
from carpool.frontend.http.exchange import BodyPlan, Collect, Exchange, WrongMethod, answer_error, rendered
from carpool.frontend.http.limits import KIB, MIB
from carpool.link.catalog import ModelEntry
from carpool.link.senders import Sender
from carpool.observe.logs import logger

log = logger("http")

_LOOK_S = 0.002  # so often, while something waits
# the more wait, the later: each look wakes the loop, and their clients
_LOOK_TOGETHER_S: Final = 0.02
_TOGETHER: Final = 4
_LOOK_EVERY_S: Final = 0.005
_LAST_DATA_RECEIVED: Final = struct.Struct("52xI")  # of struct tcp_info: milliseconds since data came last
_KEPT_S: Final = 0.25  # how long a measurement holds, while no request can be measured
_LONGEST_S = 10.0  # what would be more is no wait: it is a field that means something else here
_UNMET_S: Final = (
    0.5  # so long after its refusals had to wait, a lane counts as wanting more than it asked for
)
_NO_PROMISE_WAIT_S: Final = 0.1
_DOCUMENT_WAIT_S: Final = 1.0
_PACED = (Refused, InvalidInput, NotFound, TooLarge, Unsupported, WrongMethod)
"""Errors that clients bring upon themselves, or that come in floods. The others are answered at once."""

_REQUEST_S: Final = 150e-6  # of the loop: the unit in which lanes ask
_REFUSAL_S = 80e-6
_DOCUMENT_S: Final = 30e-6  # around what its handler takes
_LONGEST_DOCUMENT_S: Final = 0.05  # what takes longer was kept from running by others
_SECONDS_PER_BYTE: Final = 2e-10
_BYTES_OF_A_REQUEST: Final = 64 * KIB  # take as long to read as the rest of a request
_REFUSAL_PART: Final = 0.4  # of what serving it would have taken
_MOST_NEW_ONES = 128
_DRAINABLE: Final = 8 * MIB  # a longer body ends its connection: nothing is gained by waiting


class Unread:
    """Measures how long requests lately lay in their sockets before this front end read them.

    Asked of the kernel, which alone knows: it notes when data comes, to the tick (4 ms or less).

    The loop's own turns would say less. uvloop does not report when it polled, a poll that returns late looks
    like one that had nothing to return, and on a busy machine it is just the waking up that takes long. A
    question to the kernel costs some microseconds, so the answer is good for all requests of the next few
    milliseconds: of the same turn, mostly.
    """

    __slots__ = ("look_at", "seconds")

    def __init__(self) -> None:
        self.look_at = 0.0
        self.seconds = 0.0

    def look(self, connection: socket.socket | None, now: float) -> None:
        """A request has just been read from this socket, to its end. None: its wait says nothing, and what
        was seen long ago says nothing, either."""
        if connection is None:
            if now >= self.look_at + _KEPT_S:
                self.seconds = 0.0
            return
        self.look_at = now + _LOOK_EVERY_S
        try:
            measured = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA_RECEIVED.size)
            seconds: float = _LAST_DATA_RECEIVED.unpack(measured)[0] / 1e3
        except (AttributeError, OSError, struct.error):  # no Linux, no TCP, or gone already
            seconds = 0.0
        self.seconds = seconds if seconds <= _LONGEST_S else 0.0


class Excuse(Protocol):
    """Makes the refusal of a front end that is behind, and counts it."""

    def __call__(self, entry: ModelEntry, now: float, source: str, waited: float) -> Refused: ...


class Fairness:
    """Divides the time of one front end, in its loop's thread only. Without `behind` no request is rejected
    here."""

    def __init__(
        self, waits: Unread | None = None, behind: Excuse | None = None, gate_status: int = 429
    ) -> None:
        self.gate_status = gate_status
        self._waits = waits
        self._behind = behind
        self._backlog = FairBacklog()
        self._pacer: Pacer[Callable[[], object]] = Pacer(monotonic())
        self._document_s = _DOCUMENT_S
        self._timer: asyncio.TimerHandle | None = None

    @property
    def held(self) -> int:
        """Answers that wait for their turn."""
        return self._pacer.waiting

    def judge(
        self, entry: ModelEntry, exchange: Exchange, sender: Sender, refusal: CarpoolError | None
    ) -> CarpoolError | None:
        """Returns what becomes of a newcomer whom the engine would let in, or would refuse with `refusal`."""
        now = exchange.head_at
        backlog = self._backlog
        lane = backlog.shares.lane(_lane(entry, exchange, sender.source), now)
        work = 1.0 + (exchange.head.content_length or 0) / _BYTES_OF_A_REQUEST
        if sender.weight != lane.weight:
            lane.weight = sender.weight
        lane.asked.add(work, now)
        if refusal is None and self._waits is not None and self._behind is not None:
            waited = self._waits.seconds
            if backlog.rejects(entry.key, entry.batching.slo, lane, waited, now):
                refusal = self._behind(entry, now, sender.source, waited)
        backlog.shares.done.add(work if refusal is None else work * _REFUSAL_PART, now)
        return refusal

    def tell(
        self,
        exchange: Exchange,
        error: CarpoolError,
        entry: ModelEntry | None = None,
        source: str = "",
        more_fields: bytes = b"",
    ) -> None:
        """Answer with an error: at once, or in its turn if such answers take too much of this front end."""
        if not isinstance(error, _PACED):
            answer_error(exchange, error, more_fields)
            return
        now = monotonic()
        key = ("", exchange.payer) if entry is None else _lane(entry, exchange, source)
        lane = self._backlog.shares.lane(key, now)
        cost = _REFUSAL_S + (exchange.head.content_length or 0) * _SECONDS_PER_BYTE
        if entry is None:  # else it was judged
            self._charge(lane, cost, now)
        if self._pacer.is_free(lane.key, now) or not self._can_wait(exchange):
            self._pacer.spend(lane.key, cost, now)
            answer_error(exchange, error, more_fields, self.gate_status)
            return
        without_stack(error)  # which would keep the body that it was found in
        status, fields, body = rendered(error, self.gate_status)
        slo = None if entry is None else entry.batching.slo
        wait = _NO_PROMISE_WAIT_S if slo is None else CONSTANTS.paced_wait * slo
        exchange.on_disconnect = _nothing
        self._hold(lane, partial(exchange.respond, status, fields + more_fields, body), cost, now, wait)

    def document(self, exchange: Exchange, handle: Callable[[], BodyPlan], cost: float = 0.0) -> BodyPlan:
        """Does what a small route does: at once, or in its turn. `cost` is what it costs the engine."""
        now = exchange.head_at
        lane = self._backlog.shares.lane(("", exchange.payer), now)
        if self._pacer.is_free(lane.key, now) or exchange.head.has_body or not self._can_wait(exchange):
            try:
                return handle()
            finally:
                took = min(monotonic() - now, _LONGEST_DOCUMENT_S)
                self._document_s += 0.1 * (took + _DOCUMENT_S - self._document_s)
                self._charge(lane, took + _DOCUMENT_S, now)
                self._pacer.spend(lane.key, took + _DOCUMENT_S + cost, now)
        self._charge(lane, self._document_s, now)
        self._hold(
            lane, partial(_handle_later, exchange, handle), self._document_s + cost, now, _DOCUMENT_WAIT_S
        )
        return None

    def charge(self, address: str, seconds: float) -> None:
        """Connections from there took so much of the loop, beside their requests."""
        now = monotonic()
        self._charge(self._backlog.shares.lane(("", address), now), seconds, now)

    def _charge(self, lane: FrontLane, seconds: float, now: float) -> None:
        """Counts work for one client as done. Else it would look as if other clients had made the front end
        late, and their requests would be rejected for it."""
        lane.asked.add(seconds / _REQUEST_S, now)
        self._backlog.shares.done.add(seconds / _REQUEST_S, now)

    def _can_wait(self, exchange: Exchange) -> bool:
        """Returns whether its body can be read past meanwhile, and its connection go on afterwards.

        Connections that are new may be one for each request: held, they would soon be all that there can be.
        """
        if exchange.first and self._pacer.waiting >= _MOST_NEW_ONES:
            return False
        head = exchange.head
        if not head.has_body:
            return True
        length = head.content_length
        return length is not None and length <= _DRAINABLE and not head.expects_continue

    def _hold(self, lane: FrontLane, act: Callable[[], object], cost: float, now: float, wait: float) -> None:
        lane.waits_for_more(now + _UNMET_S)
        self._pacer.hold(lane.key, act, cost, now, wait, strict=self._backlog.is_to_blame(lane, now))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        for act in self._pacer.due(monotonic()):
            try:
                act()
            except Exception:  # the others of this turn must still be answered
                log.exception("answer-failed")
        waiting = self._pacer.waiting
        if waiting and self._timer is None:
            together = min(
                _LOOK_S * (waiting // _TOGETHER), _LOOK_TOGETHER_S, self._pacer.soonest(monotonic())
            )
            self._timer = asyncio.get_running_loop().call_later(max(_LOOK_S, together), self._go_on)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _handle_later(exchange: Exchange, handle: Callable[[], BodyPlan]) -> None:
    """Runs a small route whose turn came after its head. No caller is left to answer for its errors."""
    if not exchange.pending:
        return
    try:
        plan = handle()
        if isinstance(plan, Collect):
            plan.done(b"", monotonic())
    except CarpoolError as error:
        answer_error(exchange, error)
    except Exception:
        log.exception("request-failed", path=exchange.head.path)
        answer_error(exchange, CarpoolError("the server failed on this request"))


def _lane(entry: ModelEntry, exchange: Exchange, source: str) -> LaneKey:
    """Returns the client to charge: a key's holder, who cannot take more by making up sources; else the
    source that the request names, or else its address."""
    return entry.name, exchange.payer if exchange.head.who is not None else source or ADDRESS + exchange.peer


def _nothing() -> None:
    """Does nothing when the client leaves: no work is to be saved, and no client to be answered."""
