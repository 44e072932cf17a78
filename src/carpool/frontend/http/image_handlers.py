"""What describes the picture routes: for programs and for people."""

from __future__ import annotations

from functools import partial

import orjson

from carpool.frontend.http.docs_page import FIELDS, docs_page
from carpool.frontend.http.document_handlers import Variables
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.openapi import openapi
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.link.door import Catalog


def _for_programs(catalog: Catalog, *, with_keys: bool) -> bytes:
    return orjson.dumps(openapi(catalog, with_keys=with_keys))


def _for_people(catalog: Catalog, *, with_keys: bool) -> bytes:
    return docs_page(openapi(catalog, with_keys=with_keys))


_PROGRAMS = {with_keys: partial(_for_programs, with_keys=with_keys) for with_keys in (False, True)}
_PEOPLE = {with_keys: partial(_for_people, with_keys=with_keys) for with_keys in (False, True)}


def describe(service: Service, exchange: Exchange, _variables: Variables) -> None:
    write = _PROGRAMS[service.asks_for_keys]
    exchange.respond(200, JSON_FIELDS, service.pages.read(service.door.catalog, write))


def read(service: Service, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200, FIELDS, service.pages.read(service.door.catalog, _PEOPLE[service.asks_for_keys]))
