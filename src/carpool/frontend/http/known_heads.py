"""Heads that were read before: a client's next one is often the same but for its Content-Length."""

from __future__ import annotations

import re

from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import HeadFinder, RequestHead, parse_head

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([1-9][0-9]{0,17})[ \t]*\r\n", re.IGNORECASE)
_MOST_HEADS = 256
_LONGEST_HEAD = 2048


class KnownHeads:
    """Of all connections. Every picture has a length of its own: without it, the heads of a camera, and of
    many alike, are one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[bytes, RequestHead] = {}

    def read(self, raw: bytes, finder: HeadFinder) -> RequestHead:
        """The head in `raw`, which `finder` has found complete; raises `Fault`."""
        found = _LENGTH.search(raw) if len(raw) <= _LONGEST_HEAD else None
        if found is None:
            return parse_head(raw, self._limits, finder)
        start, end = found.span(1)
        others = raw[:start] + raw[end:]
        known = self._known.get(others)
        if known is not None:
            return known.with_length(found[1])
        head = parse_head(raw, self._limits, finder)
        if len(self._known) >= _MOST_HEADS:
            self._known.clear()
        self._known[others] = head
        return head

    def __len__(self) -> int:
        return len(self._known)
