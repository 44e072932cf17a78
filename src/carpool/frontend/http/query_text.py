"""Reads the query of an address."""

from __future__ import annotations

from urllib.parse import parse_qsl

from carpool.config.rules import shown
from carpool.errors import InvalidInput

_MOST_PARAMETERS = 32


def read_query(query: str) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            query, keep_blank_values=True, errors="strict", max_num_fields=_MOST_PARAMETERS, encoding="utf-8"
        )
    except ValueError:
        raise InvalidInput(
            f"the query is not UTF-8 text or has more than {_MOST_PARAMETERS} parameters", field="query"
        ) from None
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise InvalidInput(f"{shown(name)} is given twice", field=name[:64])
        found[name] = value
    return found
