"""Headers that reach a model as parameters of its requests, as in Triton: those whose name matches a pattern.

What this server itself asks for as a proof, its keys and the headers of restricted APIs, is never among them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace

from carpool.errors import InvalidInput
from carpool.wire.head import RESERVED_PREFIX, RequestHead, shorten

_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers")
_RESERVED_NAMES = frozenset((*_RESERVED, "binary_data_output"))


class ForwardedHeaders:
    """`pattern` is searched for in names of headers, which are in lower case here; `hidden` are left out."""

    def __init__(self, pattern: str, hidden: Collection[str]) -> None:
        self._pattern = re.compile(pattern, re.IGNORECASE)
        self._hidden = frozenset(hidden)

    @classmethod
    def of(cls, pattern: str, hidden: Collection[str]) -> ForwardedHeaders | None:
        """Returns None for no pattern."""
        return cls(pattern, hidden) if pattern else None

    def added(self, head: RequestHead, sent: Mapping[bytes, bytes]) -> RequestHead:
        """Returns the head with the headers as parameters. A header, which a proxy may have set, counts for
        more than a parameter of the same name."""
        found: dict[str, str] = {}
        for field, value in sent.items():
            name = field.decode("latin-1")
            if self._pattern.search(name) is None or name in self._hidden:
                continue
            if name in _RESERVED_NAMES or name.startswith(RESERVED_PREFIX):
                raise InvalidInput(
                    f"Header {shorten(name)} is reserved for Triton usage and cannot be forwarded.",
                    field=name[:80],
                )
            found[name] = value.decode(errors="replace")
        if not found:
            return head
        return replace(head, options=replace(head.options, custom={**head.options.custom, **found}))
