"""Reads what a caller says about the trace that its request belongs to: W3C `traceparent` and `tracestate`.

Whatever is not exactly that is ignored, as the standard asks: a trace then begins here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from carpool.errors import CarpoolError
from carpool.frontend.calls.reused_answer import AnswerNote
from carpool.link.catalog import ModelEntry
from carpool.wire.v2 import RequestHead

PARENT_FIELD = b"traceparent"
STATE_FIELD = b"tracestate"

_PARENT = re.compile(rb"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[ -~]*)?")
_STATE = re.compile(rb"[ -~\t]{1,512}")
_NOBODY = bytes(16)
_SAMPLED = 1
_MOST_MEMBERS = 32


class RequestOrigin(NamedTuple):
    """Describes how a request came, in the words of its protocol's semantic conventions."""

    name: str
    attributes: Mapping[str, str | int]


class Caller(Protocol):
    """Defines a request, or what is known of one that was refused at its head."""

    @property
    def siblings(self) -> bytes: ...

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]: ...

    def origin(self, error: CarpoolError | None) -> RequestOrigin: ...


class TracedCall(Caller, Protocol):
    """Defines a request that is over."""

    @property
    def entry(self) -> ModelEntry: ...

    @property
    def arrived(self) -> float: ...

    @property
    def head(self) -> RequestHead: ...

    @property
    def request_id(self) -> str: ...

    @property
    def note(self) -> AnswerNote | None: ...


class Parent(NamedTuple):
    trace: bytes
    span: bytes
    sampled: bool


def read_parent(field: bytes | None) -> Parent | None:
    """Returns the caller's span. Later versions may say more behind a dash."""
    found = None if field is None else _PARENT.fullmatch(field)
    if found is None or (found[1] == b"00" and found[5] is not None):
        return None
    trace, span = bytes.fromhex(found[2].decode()), bytes.fromhex(found[3].decode())
    if trace == _NOBODY or span == _NOBODY[:8]:
        return None
    return Parent(trace, span, bool(int(found[4], 16) & _SAMPLED))


def read_state(field: bytes | None) -> str:
    """Returns the state that other tracers want passed on; "" where it exceeds what must be kept."""
    if field is None or not _STATE.fullmatch(field) or field.count(b",") >= _MOST_MEMBERS:
        return ""
    return field.decode()
