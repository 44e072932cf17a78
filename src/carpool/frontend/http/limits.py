"""This module has every bound of the HTTP server in one place."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.frontend.clients.accounts import MOST_BYTES, PATIENCE_S

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes are bytes, durations seconds. Timeouts are looked at every `sweep_s`, so they are that coarse."""

    max_connections: int = 1024  # served at once; the next one gets a 503 and is closed
    max_lingering: int = 64
    """Closed connections that may still wait for their client to have read the last answer."""

    max_request_line_bytes: int = 8 * KIB
    max_header_bytes: int = 32 * KIB
    """Request line and fields together; also bounds chunk extensions and trailers."""
    max_header_fields: int = 100
    max_body_bytes: int = 64 * MIB  # of one body as it comes over the wire
    max_chunks: int = 65_536  # of one chunked body, as in Triton: each is work, however short
    max_held_bytes: int = MOST_BYTES
    """Of all bodies in memory that are still needed, and all answers that clients have not read yet. One
    client gets as much of it as is left for the others: see `Accounts`."""
    max_inflating: int = 64
    """Bodies that are decompressed in turns, or wait for theirs, shared in the same way."""
    read_ahead_bytes: int = 64 * KIB
    """Kept from a client that sends its next requests before it has its answer."""

    header_timeout_s: float = 10.0
    """From the first byte of a head (for a new connection: from its start) to the last."""
    body_timeout_s: float = 5.0  # a window in which a body must end or come at `min_body_rate`
    min_body_rate: float = 10_000.0  # bytes per second
    look_at_pace_s: float = 1.0  # how old a body has to be before its pace says something
    slow_body_s: float = 10.0
    """When memory for bodies is short, those that would take longer are cut off, the slowest first."""
    write_timeout_s: float = PATIENCE_S
    """A window in which a client must have read its answer or `accounts.PROGRESS_BYTES` of it."""
    idle_timeout_s: float = 75.0  # between an answer and the next request

    drain_bytes: int = 64 * MIB
    """What is read past after an early answer, unkept, so that its sender comes to read it. What is longer
    ends the connection."""
    drain_timeout_s: float = 10.0
    linger_timeout_s: float = 2.0
    sweep_s: float = 0.5
