"""Adds the routes of extensions to those of the server, each with where its clients send their keys and with
the words in which they read errors.

An extension's module is imported for the first request that needs it: only its manifest is known before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import orjson

from carpool.extension import Extension, HttpRoute, Routes
from carpool.extensions import installed
from carpool.frontend.access.route_rules import Kind, Rule
from carpool.frontend.http.exchange import (
    Answerer,
    Before,
    Body,
    BodyPlan,
    Exchange,
    HttpHead,
    Start,
)
from carpool.frontend.http.http_service import HttpService, Starter
from carpool.frontend.http.url_routes import UrlRoute
from carpool.observe.logs import logger

log = logger("http")

_FAILED: Final = 400  # the lowest status of an answer that is an error

Words: TypeAlias = Callable[[int, Mapping[str, Any]], tuple[int, object]]


class Dialect:
    """Describes how clients of one protocol send keys and read errors."""

    __slots__ = ("_extension", "_routes", "finds_keys_in_bodies", "prefix")

    def __init__(self, extension: Extension, routes: Routes) -> None:
        self._extension = extension
        self._routes = routes
        self.prefix = routes.prefix if routes.words else ""
        self.finds_keys_in_bodies = bool(routes.key_in)

    def key_of(self, head: HttpHead) -> bytes | None:
        """Returns the key where the head has one in a place of the protocol's own."""
        key: bytes | None = self._extension.part(self._routes.key_of)(head) if self._routes.key_of else None
        return key

    def key_in(self, body: bytes | bytearray) -> bytes | None:
        key: bytes | None = self._extension.part(self._routes.key_in)(bytes(body))
        return key

    def in_words(self, start: Start) -> Start:
        """Returns a start whose errors are written in the protocol's words."""
        if not self._routes.words:
            return start

        def begin(exchange: Exchange) -> BodyPlan:
            self.attach(exchange)
            return start(exchange)

        return begin

    def attach(self, exchange: Exchange) -> None:
        """Writes what is answered in the protocol's words if it is an error."""
        if not exchange.answers_through(InWords):
            exchange.answer_through(partial(InWords, self.reworded))

    def reworded(self, status: int, body: bytes) -> tuple[int, bytes]:
        """Returns status and body of an error in the protocol's words; as they are if it is none of the
        server's."""
        try:
            error = orjson.loads(body)
        except orjson.JSONDecodeError:
            return status, body
        if not isinstance(error, dict) or not isinstance(error.get("error"), str):
            return status, body
        try:
            words: Words = self._extension.part(self._routes.words)
            status, document = words(status, error)
            return status, orjson.dumps(document)
        except Exception:
            log.exception("words-failed", extension=self._extension.name)
            return status, body

    def starter(self, route: HttpRoute) -> Starter:
        extension = self._extension

        def starter(service: HttpService, head: HttpHead, variables: Mapping[str, str]) -> Start:
            start: Start = extension.part(route.start)(service, head, variables)
            return start

        return starter


class InWords(Before):
    """Stands before a connection and rewrites errors, whichever part of the server made them."""

    __slots__ = ("_reworded",)

    def __init__(self, reworded: Callable[[int, bytes], tuple[int, bytes]], connection: Answerer) -> None:
        super().__init__(connection)
        self._reworded = reworded

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        if status >= _FAILED and isinstance(body, bytes):
            status, body = self._reworded(status, body)
        self._connection.answer(status, fields, body)


class Destination(NamedTuple):
    """Describes what a route leads to."""

    rule: Rule
    starter: Starter
    dialect: Dialect | None = None
    for_events: bool = False  # of another route for pictures, it takes the requests whose clients want events
    events: Starter | None = None  # of a route for pictures, what takes these

    def chosen(self, head: HttpHead) -> Starter:
        if self.events is None:
            return self.starter
        from carpool.frontend.http.image_reading import read_image_head  # a server without images never does

        return self.events if read_image_head(head).events else self.starter


def routes_of_extensions(apis: Collection[str] = ()) -> Iterator[UrlRoute[Destination]]:
    """Returns the routes of all extensions; of protocols that are off by default, those of `apis`."""
    for extension in installed().values():
        if extension.api and extension.name not in apis:
            continue
        for routes in extension.routes:
            dialect = Dialect(extension, routes)
            for route in routes.table:
                rule = Rule(Kind(route.kind), route.changes, route.api)
                destination = Destination(rule, dialect.starter(route), dialect, route.events)
                yield UrlRoute(route.method, route.pattern, destination)
