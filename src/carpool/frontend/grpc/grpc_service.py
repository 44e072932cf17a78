"""What all calls of the gRPC front end share, besides what every front end has: what is under way, and errors
as statuses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import quote

from grpc import StatusCode

from carpool import errors
from carpool.errors import CarpoolError, Unavailable, retry_after, without_stack
from carpool.frontend.call import Times
from carpool.frontend.front_service import FrontService
from carpool.frontend.grpc.infer_messages import Families
from carpool.frontend.packing import AT_ONCE
from carpool.link.door import Door
from carpool.memory.spare_memory import SpareMemory
from carpool.observe.counters import Block
from carpool.observe.logs import logger

T = TypeVar("T")

log = logger("grpc")

MOST_BYTES_IN_FLIGHT = 512 << 20
"""Of messages whose calls are under way: more are refused, those that are known by then before they come."""


class Service(FrontService):
    """`with` it, every call is counted while it lasts."""

    def __init__(self, door: Door, block: Block, max_body_bytes: int, picture_threads: int = 1) -> None:
        super().__init__("grpc", door, block, max_body_bytes, picture_threads)
        self.families = Families()
        self._spare_memory = SpareMemory(self.threads)
        self.stopping = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()
        self.running = 0
        self.in_flight = 0  # bytes of messages

    @property
    def ready(self) -> bool:
        catalog = self.door.catalog
        return self.door.serving and catalog.ready and catalog.able and not self.stopping.is_set()

    async def aside(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Work on so many bytes: in a thread, if everybody else would have to wait for it."""
        if size <= AT_ONCE:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self.threads, function, *arguments)

    @contextlib.contextmanager
    def holding(self, message: bytes) -> Iterator[CarpoolError | None]:
        """Count a message while its call lasts; gives the refusal if there are too many."""
        size = len(message)
        full = self.is_full(size)
        self.in_flight += size
        try:
            yield too_many_messages() if full else None
        finally:
            self.in_flight -= size
            self._spare_memory.freed(size)

    def is_full(self, more: int = 0) -> bool:
        return self.in_flight > 0 and self.in_flight + more > MOST_BYTES_IN_FLIGHT

    def __enter__(self) -> None:
        """A call begins, which is to be finished before the server stops."""
        self.running += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self.running -= 1
        if not self.running:
            self.idle.set()

    def close(self) -> None:
        self._spare_memory.close()
        super().close()


def too_many_messages() -> Unavailable:
    return Unavailable("too many messages are under way at once; try again", reason="busy")


# ---- errors as gRPC statuses: the one table, and the metadata that goes with them -------------------------

STATUSES: dict[type[CarpoolError], StatusCode] = {
    errors.InvalidInput: StatusCode.INVALID_ARGUMENT,
    errors.ConfigError: StatusCode.INVALID_ARGUMENT,
    errors.TooLarge: StatusCode.INVALID_ARGUMENT,
    errors.Cancelled: StatusCode.CANCELLED,
    errors.Unauthenticated: StatusCode.UNAUTHENTICATED,
    errors.Forbidden: StatusCode.PERMISSION_DENIED,
    errors.NotFound: StatusCode.NOT_FOUND,
    errors.Replaced: StatusCode.ABORTED,
    errors.Refused: StatusCode.RESOURCE_EXHAUSTED,
    errors.Unsupported: StatusCode.UNIMPLEMENTED,
    errors.Unavailable: StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: StatusCode.DEADLINE_EXCEEDED,
}
"""Everything else is the server's or the model's fault: INTERNAL."""

_PRINTABLE = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"
_LONGEST = 1024  # bytes: everything but the data of a call must fit some KiB
_TIMING = 'decode;dur={:.3f}, queue;dur={:.3f}, infer;dur={:.3f}, post;dur={:.3f}, batch;desc="{}"'


class Failure(Exception):
    """How a request failed, and where its time went if it has been to the engine."""

    def __init__(self, error: CarpoolError, times: Times | None = None) -> None:
        super().__init__(error.message)
        self.error = without_stack(error)
        self.times = times


def status_of(error: CarpoolError) -> StatusCode:
    known = (STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)
    return next(known, StatusCode.INTERNAL)


def details_of(error: CarpoolError) -> str:
    """The sentence; text from outside may hold what UTF-8 cannot."""
    return error.message.encode(errors="replace")[:_LONGEST].decode(errors="ignore")


def metadata_of(error: CarpoolError, times: Times | None = None) -> tuple[tuple[str, str], ...]:
    found = [("carpool-reason", error.reason)]
    if error.field is not None:
        # Metadata is printable ASCII: the rest is escaped as gRPC escapes its own messages.
        found.append(("carpool-field", quote(error.field[:256], _PRINTABLE, errors="replace")))
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


def refuse(context: Any, error: CarpoolError, times: Times | None = None) -> bytes:
    """End the call with this error; returns what its handler has to return, which is not sent.

    Not by `context.abort`: it raises an error that the context keeps, whose stack leads to the message and
    back to the context, and so messages would stay until the collector comes.
    """
    context.set_code(status_of(error))
    context.set_details(details_of(error))
    context.set_trailing_metadata(metadata_of(error, times))
    without_stack(error)
    return b""
