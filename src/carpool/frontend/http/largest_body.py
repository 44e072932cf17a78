"""How long a request for a model can be: who announces more is told at the head."""

from __future__ import annotations

import math

from carpool.errors import TooLarge
from carpool.link.door import ModelEntry
from carpool.types import Signature

_JSON_NUMBER = 32  # bytes, with its comma and some space
_JSON_REST = 1 << 20  # names, parameters, what nobody expects
_ALWAYS = 64 * 1024  # up to here a body is read in any case: what is wrong with it can then be said exactly


class LargestBody:
    """Of requests for one model. Without a bound of its own, that of all bodies."""

    __slots__ = ("_bytes", "_elements", "_limit", "_model", "_rows")

    def __init__(self, entry: ModelEntry, limit: int) -> None:
        signature = entry.signature
        self._limit = limit
        self._model = entry.name
        self._rows = signature.max_batch
        bounded = entry.vision is None and _is_bounded(signature)  # pictures may come in a tensor's place
        rows = max(1, signature.max_batch)
        elements = [(rows * math.prod(spec.shape), spec.datatype.size) for spec in signature.inputs]
        self._bytes = sum(count * size for count, size in elements) if bounded else None
        self._elements = sum(count for count, _ in elements)

    def in_place(self, header_length: int) -> int:
        """Of a body with so much JSON before its tensors."""
        return self._limit if self._bytes is None else self._most(header_length + self._bytes)

    def gathered(self) -> int:
        """Of one whose tensors may be JSON."""
        return self._limit if self._bytes is None else self._most(_JSON_NUMBER * self._elements + _JSON_REST)

    def _most(self, size: int) -> int:
        return min(self._limit, max(size, _ALWAYS))

    def check(self, announced: int, most: int) -> None:
        if announced > most and self._bytes is not None:
            batch = f": batch-size must be <= {self._rows} for '{self._model}'" if self._rows else ""
            raise TooLarge(
                f"the body has {announced} bytes, but a request for model '{self._model}' takes at most "
                f"{most}{batch}",
                field="Content-Length",
            )


def _is_bounded(signature: Signature) -> bool:
    return all(spec.datatype.size and -1 not in spec.shape for spec in signature.inputs)
