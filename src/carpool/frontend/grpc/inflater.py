"""Undoes the compression of one message of gRPC, in slices that take a few milliseconds each."""

from __future__ import annotations

import zlib
from typing import Protocol

from carpool.errors import Unavailable
from carpool.frontend.clients.accounts import Accounts, Stake
from carpool.frontend.grpc.rpc_heads import Status

_AT_ONCE = 8 * 1024  # bytes, in or out, in the loop; they name the model
_WINDOW = 16 * 1024  # bytes of input: what zlib leaves of it comes back as a copy
_STEP, _STEPS = 256 * 1024, 16  # bytes of output, and how many times in one turn
_TRAILER, _SHORTEST_GZIP = 4, 18
_MOST_TIMES = 1032  # as many bytes as one can become


class MessageBounds(Protocol):
    """How long messages may be, and who pays for them: `GrpcService` says it."""

    accounts: Accounts
    largest_message: int

    def most_of(self, start: bytes) -> int:
        """Bytes that a message may have that starts like this."""


class Inflater:
    """Inflates a message. Unless it is complete then, each `turn` in any thread inflates a slice.

    What comes out is bounded by what the model takes that the message names, and counted before there is more
    of it. A gzip file ends with its size: one that says too much is refused before it is inflated, and one
    that says too little is damaged.
    """

    __slots__ = (
        *("_at", "_bounds", "_by_model", "_data", "_encoding", "_most", "_stake", "_stream"),
        *("complete", "fault", "found"),
    )

    def __init__(
        self,
        message: memoryview,
        encoding: str,
        bounds: MessageBounds,
        stake: Stake | None,
        *,
        by_model: bool,
    ) -> None:
        self._data = message
        self._encoding = encoding
        self._bounds = bounds
        self._stake = stake
        self._by_model = by_model
        self._most = bounds.largest_message
        self._at = 0
        self._stream = self._new_stream()
        self.complete = False
        self.found = bytearray()
        self.fault: tuple[Status, str] | None = None

    def begin(self) -> None:
        """Inflates, in the loop, short messages, and those that are refused for their first or last bytes."""
        self._step(_AT_ONCE, _AT_ONCE)
        if self.complete:
            return
        if self._by_model:
            self._most = self._bounds.most_of(bytes(self.found))
        size = max(len(self.found), self._said_size())
        if size > _MOST_TIMES * len(self._data):
            self._fail_damaged()
        elif size > self._most:
            self._fail(Status.RESOURCE_EXHAUSTED, too_long(size, self._most))
        else:
            # Many messages may wait for their turn, and zlib's state is as long as some of them.
            self._forget()
            self._at, self._stream = 0, self._new_stream()

    def _said_size(self) -> int:
        """Returns the size by its last bytes; 0 if they do not say it."""
        said = self._encoding == "gzip" and len(self._data) >= _SHORTEST_GZIP
        return int.from_bytes(self._data[-_TRAILER:], "little") if said else 0

    def turn(self) -> None:
        """Inflates a slice. In any thread, one after the other."""
        for _ in range(_STEPS):
            if self.complete:
                return
            self._step(_WINDOW, min(_STEP, self._most - len(self.found) + 1))

    def _new_stream(self) -> zlib._Decompress:
        return zlib.decompressobj(zlib.MAX_WBITS + (16 if self._encoding == "gzip" else 0))

    def _step(self, window: int, most: int) -> None:
        stream, data = self._stream, self._data[self._at : self._at + window]
        try:
            piece = stream.decompress(data, most)
        except zlib.error:
            self._fail_damaged()
            return
        self._at += len(data) - len(stream.unconsumed_tail) - len(stream.unused_data)
        size = len(self.found) + len(piece)
        if size > self._most:
            self._fail(Status.RESOURCE_EXHAUSTED, too_long(size, self._most))
        elif self._stake is not None and not self._bounds.accounts.take(self._stake, len(piece)):
            self.refuse()
        else:
            self.found += piece
            at_end = self._at == len(self._data)
            if stream.eof and at_end:
                self.complete = True
            elif stream.eof or (at_end and not piece):
                self._fail_damaged()

    def refuse(self) -> None:
        """Its client has too many."""
        self._fail(Status.UNAVAILABLE, too_many_messages().message)

    def _fail_damaged(self) -> None:
        self._fail(Status.INTERNAL, f"a message cannot be decompressed as {self._encoding}")

    def _fail(self, status: Status, details: str) -> None:
        self.fault = status, details
        self.complete = True
        self._forget()

    def _forget(self) -> None:
        """What came out is not held any more."""
        if self._stake is not None:
            self._bounds.accounts.give(self._stake, len(self.found))
        self.found = bytearray()


def too_long(size: int, most: int) -> str:
    """Returns a sentence in the words that clients know."""
    return f"SERVER: Received message larger than max ({size} vs. {most})"


def too_many_messages() -> Unavailable:
    return Unavailable("this client has too many concurrent messages; retry", reason="busy")
