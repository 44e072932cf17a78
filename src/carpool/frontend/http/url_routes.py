"""Finds the handler of a request by its method and path."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from carpool.errors import NotFound
from carpool.frontend.http.exchange import WrongMethod

Target = TypeVar("Target")

_LONGEST_SHOWN = 80


class UrlRoute(NamedTuple, Generic[Target]):
    """`{name}` in a pattern is any one segment; what stands in brackets may be absent."""

    method: str
    pattern: str
    handler: Target


class Router(Generic[Target]):
    """Matches whole segments that are decoded already, so an escaped slash never becomes a separator. Of two
    routes alike the first one counts."""

    def __init__(self, table: Iterable[UrlRoute[Target]]) -> None:
        self._by_length: dict[int, list[tuple[list[str], dict[str, Target]]]] = {}
        for route in table:
            for pattern in expanded(route.pattern):
                self._add(pattern.strip("/").split("/"), route)

    def find(self, method: str, segments: Sequence[str]) -> tuple[Target, Mapping[str, str]]:
        """The first pattern in the table that fits; raises `NotFound` or `WrongMethod`."""
        if len(segments) > 1 and not segments[-1]:
            segments = segments[:-1]
        for parts, handlers in self._by_length.get(len(segments), ()):
            variables = _variables(parts, segments)
            if variables is not None:
                return _handler_for(method, handlers), variables
        raise NotFound(f"there is nothing at '{_shown(segments)}'")

    def _add(self, parts: list[str], route: UrlRoute[Target]) -> None:
        lines = self._by_length.setdefault(len(parts), [])
        for known, handlers in lines:
            if known == parts:
                handlers.setdefault(route.method, route.handler)
                return
        lines.append((parts, {route.method: route.handler}))


def expanded(pattern: str) -> list[str]:
    before, bracket, rest = pattern.partition("[")
    if not bracket:
        return [pattern]
    optional, _, after = rest.partition("]")
    return [before + after, before + optional + after]


def _variables(parts: Sequence[str], segments: Sequence[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for part, segment in zip(parts, segments, strict=True):
        if part.startswith("{"):
            if not segment:
                return None
            found[part[1:-1]] = segment
        elif part != segment:
            return None
    return found


def _handler_for(method: str, handlers: Mapping[str, Target]) -> Target:
    handler = handlers.get("GET" if method == "HEAD" else method)
    if handler is None:
        allowed = [verb for known in handlers for verb in (("GET", "HEAD") if known == "GET" else (known,))]
        raise WrongMethod(method, allowed)
    return handler


def _shown(segments: Sequence[str]) -> str:
    path = "/" + "/".join(segments)
    return path if len(path) <= _LONGEST_SHOWN else path[:_LONGEST_SHOWN] + "…"
