"""Paths to handlers: a table, and how a request finds its line in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from carpool.errors import CarpoolError, NotFound

Handler = TypeVar("Handler")

_LONGEST_SHOWN = 80


class Route(NamedTuple, Generic[Handler]):
    """`{name}` in a pattern is any one segment; what stands in brackets may be absent."""

    method: str
    pattern: str
    handler: Handler


class WrongMethod(CarpoolError):
    reason = "method-not-allowed"

    def __init__(self, method: str, allowed: Iterable[str]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"{method} is not allowed here; allowed is {self.allowed}")


class Match(NamedTuple, Generic[Handler]):
    handler: Handler
    variables: Mapping[str, str]


class Router(Generic[Handler]):
    """Matches whole segments that are decoded already, so an escaped slash never becomes a separator."""

    def __init__(self, table: Iterable[Route[Handler]]) -> None:
        self._by_length: dict[int, list[tuple[list[str], dict[str, Handler]]]] = {}
        for route in table:
            for pattern in _expanded(route.pattern):
                self._add(pattern.strip("/").split("/"), route)

    def find(self, method: str, segments: Sequence[str]) -> Match[Handler]:
        """The first pattern in the table that fits; raises `NotFound` or `WrongMethod`."""
        if len(segments) > 1 and not segments[-1]:
            segments = segments[:-1]
        for parts, handlers in self._by_length.get(len(segments), ()):
            variables = _variables(parts, segments)
            if variables is not None:
                return Match(_handler_for(method, handlers), variables)
        raise NotFound(f"there is nothing at '{_shown(segments)}'")

    def _add(self, parts: list[str], route: Route[Handler]) -> None:
        lines = self._by_length.setdefault(len(parts), [])
        for known, handlers in lines:
            if known == parts:
                handlers[route.method] = route.handler
                return
        lines.append((parts, {route.method: route.handler}))


def _expanded(pattern: str) -> list[str]:
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


def _handler_for(method: str, handlers: Mapping[str, Handler]) -> Handler:
    handler = handlers.get("GET" if method == "HEAD" else method)
    if handler is None:
        allowed = [verb for known in handlers for verb in (("GET", "HEAD") if known == "GET" else (known,))]
        raise WrongMethod(method, allowed)
    return handler


def _shown(segments: Sequence[str]) -> str:
    path = "/" + "/".join(segments)
    return path if len(path) <= _LONGEST_SHOWN else path[:_LONGEST_SHOWN] + "…"
