"""Holds what all calls of the gRPC front end share, besides what every front end has: what is under way, how
long messages may be, and errors as statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar
from urllib.parse import quote

from carpool import errors
from carpool.config.control_groups import within_limit
from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError, retry_after, without_stack
from carpool.frontend.calls.forwarded_headers import ForwardedHeaders
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.calls.packing import AT_ONCE
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.clients.accounts import CALL, MOST_BYTES, Accounts, Shares
from carpool.frontend.clients.fair_threads import FairThreads
from carpool.frontend.clients.loop_turns import OpenStream, StreamTurns
from carpool.frontend.front_service import FrontService
from carpool.frontend.grpc.infer_messages import FINAL_PARAMETER, LONGEST_REST, Families
from carpool.frontend.grpc.inflater import Inflater
from carpool.frontend.grpc.rpc import Rpc
from carpool.frontend.grpc.rpc_heads import PRINTABLE, Status
from carpool.frontend.http.infer_route import LargestBody
from carpool.link.catalog import Catalog
from carpool.link.engine_client import EngineClient
from carpool.link.step_times import Times
from carpool.memory.free_memory import FreeMemory
from carpool.memory.layout import answer_size
from carpool.observe.counters import Block
from carpool.observe.logs import logger
from carpool.wire.proto import message_class

T = TypeVar("T")

log = logger("grpc")

_SHORT_MESSAGE: Final = 4 << 20  # gRPC's own default
_SHORT_HEAD: Final = 4096  # bytes; what is more counts as held for the call
# clients at a time; messages with those that wait, half of one client
_INFLATERS: Final = 2
_MOST_INFLATING: Final = 256
_MOST_ROOMS: Final = 64  # sizes of messages that are remembered
_LONGEST_MESSAGE: Final = 2**31 - 1  # what clients' libraries take for the length of a message


def largest_message(catalog: Catalog, settings: ServerSettings) -> int:
    """How long a message may be: no more than the models that are loaded can take, and what stands around
    tensors in a message: a power of two, or the limit of all bodies."""
    limit = min(settings.max_body_bytes + settings.max_header_bytes, _LONGEST_MESSAGE)
    if settings.model_control_mode == "explicit":
        return limit  # models come with a request, too
    entries = (*catalog.entries.values(), *catalog.leaving)
    needed = max((LargestBody(entry, settings.max_body_bytes).typed() for entry in entries), default=0)
    if needed >= settings.max_body_bytes:
        return limit
    needed += LONGEST_REST
    return min(limit, 1 << (max(needed, _SHORT_MESSAGE) - 1).bit_length())


class GrpcService(FrontService):
    """Counts every call while it lasts, with `with`."""

    def __init__(
        self,
        engine: EngineClient,
        block: Block,
        settings: ServerSettings,
        picture_threads: int = 1,
        forward: ForwardedHeaders | None = None,
        started: StartedWith | None = None,
    ) -> None:
        most = settings.max_body_bytes
        super().__init__("grpc", engine, block, most, picture_threads, forward, (), started)
        self.largest_message = 0  # what a model took that is gone now stays allowed: it may come back
        engine.watch(lambda catalog: self._allow(largest_message(catalog, settings)))
        self._allow(largest_message(engine.catalog, settings))
        self.families = Families()
        self._free_memory = FreeMemory(self.threads)
        self.stopping = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = 0
        most = settings.max_connections
        self.accounts = Accounts(most, most, within_limit(MOST_BYTES) // settings.front_ends)
        self.charge_to(self.accounts)
        self.inflating = Shares(_MOST_INFLATING)
        self._inflaters = FairThreads(self.accounts, self.threads, _INFLATERS)
        self.turns = StreamTurns(self.accounts)
        self.streams: dict[OpenStream, None] = {}  # that are open
        self._rooms: dict[int, int] = {}
        self._rooms_of: Catalog | None = None
        self.long_answers: dict[Rpc, None] = {}  # that are being sent from slots

    def stop(self) -> None:
        """Take no more requests; those that were taken are answered."""
        self.stopping.set()
        for stream in list(self.streams):
            stream.stop()

    def _allow(self, size: int) -> None:
        self.largest_message = max(self.largest_message, size)

    @property
    def ready(self) -> bool:
        catalog = self.engine.catalog
        return self.engine.serving and catalog.ready and catalog.able and not self.stopping.is_set()

    async def aside(self, client: str, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Does work on so many bytes: in a thread, if all other clients would have to wait for it."""
        if size <= AT_ONCE:
            return function(*arguments)
        return await self.fair_threads.begin(client, lambda _: function(*arguments)).done

    def admit(self, rpc: Rpc, client: str, *, spared: bool) -> bool:
        """Count a call in its client's account; False if that has its part of all calls, or of all bytes."""
        now, head = rpc.since, rpc.head
        rpc.stake = stake = self.accounts.open(client, CALL, rpc, now, spared=spared)
        if stake is None:
            return False
        return head.size <= _SHORT_HEAD or spared or self.accounts.take(stake, head.size)

    def sweep(self, now: float) -> None:
        self.accounts.sweep(now)
        for rpc in list(self.long_answers):
            rpc.check_time(now)
        self._free_memory.freed(self.accounts.freed())

    async def inflate(self, rpc: Rpc, inflater: Inflater) -> None:
        """Inflates a message in threads, in turns, unless it is short: one message of a client at a time, and
        the oldest first. So many may wait; what is more is refused before any of it is looked at."""
        stake, since = rpc.stake, monotonic()
        account = None if stake is None else stake.account
        if account is None:
            return
        if not self.inflating.take(account.name, 1):
            inflater.refuse()
            return
        try:
            inflater.begin()
            while not inflater.complete and not rpc.over:
                await self._inflaters.submit(account.name, inflater.turn, since)
        finally:
            self.inflating.give(account.name, 1)

    def most_of(self, start: bytes) -> int:
        """How long a message may be that begins like this: it names its model first. In any thread."""
        catalog, name = self.engine.catalog, named_model(start)
        entries = [entry for entry in catalog.entries.values() if entry.name == name]
        if not entries:
            return min(_SHORT_MESSAGE, self.largest_message)
        needed = max(LargestBody(entry, self.max_body_bytes).typed() for entry in entries)
        return min(self.largest_message, max(needed, AT_ONCE) + LONGEST_REST)

    def answer_room(self, size: int) -> int:
        """Returns how many bytes the answer to a message of so many may take: it is asked before it is known
        for which model the message is."""
        catalog = self.engine.catalog
        if self._rooms_of is not catalog or len(self._rooms) > _MOST_ROOMS:
            self._rooms_of = catalog
            self._rooms.clear()
        found = self._rooms.get(size)
        if found is None:
            takes = [
                entry.signature
                for entry in catalog.entries.values()
                if LargestBody(entry, self.max_body_bytes).gathered() >= size
            ]
            found = self._rooms[size] = max((answer_size(one, size) for one in takes), default=0)
        return found

    def end(self, rpc: Rpc, error: CarpoolError) -> None:
        """Ends a call that its handler has not ended."""
        rpc.cut(status_of(error), details_of(error), metadata_of(error))

    def failed(self, rpc: Rpc, error: Exception) -> None:
        """Handles a bug: it must not reach the caller of the handler, which serves other calls too."""
        log.exception("request-failed", call=rpc.head.path[:80], exc_info=error)
        refuse(rpc, CarpoolError(f"the server failed on this request: {type(error).__name__}"))
        without_stack(error)

    def __enter__(self) -> None:
        """A call begins, which is to be finished before the server stops."""
        self.running += 1
        if self.running == 1:
            self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    def close(self) -> None:
        self._free_memory.close()
        super().close()


def named_model(start: bytes) -> str:
    """Returns the name in the first field of a ModelInferRequest, where every client writes it; ""
    elsewhere."""
    if len(start) < 2 or start[0] != 0x0A or start[1] > 0x7F:
        return ""
    return start[2 : 2 + start[1]].decode(errors="replace")


# ---- errors as gRPC statuses: the one table, and the metadata that goes with them -------------------------

STATUSES: dict[type[CarpoolError], Status] = {
    errors.InvalidInput: Status.INVALID_ARGUMENT,
    errors.ConfigError: Status.INVALID_ARGUMENT,
    errors.TooLarge: Status.INVALID_ARGUMENT,
    errors.Cancelled: Status.CANCELLED,
    errors.Unauthenticated: Status.UNAUTHENTICATED,
    errors.Forbidden: Status.PERMISSION_DENIED,
    errors.NotFound: Status.NOT_FOUND,
    errors.Replaced: Status.ABORTED,
    errors.Refused: Status.RESOURCE_EXHAUSTED,
    errors.Unsupported: Status.UNIMPLEMENTED,
    errors.Unavailable: Status.UNAVAILABLE,
    errors.DeadlineExceeded: Status.DEADLINE_EXCEEDED,
}
"""Everything else is the server's or the model's fault: INTERNAL."""

SERVICE: Final = "inference.GRPCInferenceService"
_ModelStreamInferResponse = message_class("ModelStreamInferResponse")
_LONGEST: Final = 1024  # bytes: everything but the data of a call must fit some KiB
_TIMING: Final = 'decode;dur={:.3f}, queue;dur={:.3f}, infer;dur={:.3f}, post;dur={:.3f}, batch;desc="{}"'


class Failure(Exception):
    """Describes how a request failed, and where its time went if it has been to the engine."""

    def __init__(self, error: CarpoolError, times: Times | None = None) -> None:
        super().__init__(error.message)
        self.error = without_stack(error)
        self.times = times


def status_of(error: CarpoolError) -> Status:
    known = (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return next(known, Status.INTERNAL)


def origin_of(method: str, error: CarpoolError | None) -> RequestOrigin:
    """Returns the origin of a call, for its span."""
    status = Status.OK if error is None else status_of(error)
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
    return RequestOrigin(f"{SERVICE}/{method}", {**attributes, "rpc.grpc.status_code": int(status)})


def details_of(error: CarpoolError) -> str:
    """The sentence; text from outside may hold what UTF-8 cannot."""
    return error.message.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def metadata_of(error: CarpoolError, times: Times | None = None) -> tuple[tuple[str, str], ...]:
    found = [("carpool-reason", error.reason)]
    if error.field is not None:
        # Metadata is printable ASCII: the rest is escaped as gRPC escapes its own messages.
        found.append(("carpool-field", quote(error.field[:256], PRINTABLE, errors="replace")))
    predicted = getattr(error, "predicted_ms", None)
    if predicted is not None:
        found.append(("carpool-predicted-ms", f"{predicted:.3f}"))
    found += [(f"carpool-{name.replace('_', '-')}", f"{value:.12g}") for name, value in error.numbers.items()]
    wait = retry_after(error)
    if wait is not None:
        found.append(("retry-after", str(wait)))
    if times is not None:
        found.append(("server-timing", _TIMING.format(*times)))
    return tuple(found)


def refuse(rpc: Rpc, error: CarpoolError, times: Times | None = None) -> None:
    """End the call with this error."""
    rpc.end(status_of(error), details_of(error), metadata_of(error, times))
    without_stack(error)


def failed_in_stream(failure: Failure, request_id: bytes) -> bytes:
    """Returns the sentence where clients look for it; whose it was, and the stable words, where there is
    room."""
    message = _ModelStreamInferResponse(error_message=details_of(failure.error))
    response = message.infer_response
    response.id = request_id.decode(errors="replace")
    for name, value in metadata_of(failure.error, failure.times):
        response.parameters[name.replace("-", "_")].string_param = value
    response.MergeFromString(FINAL_PARAMETER)
    return bytes(message.SerializeToString())
