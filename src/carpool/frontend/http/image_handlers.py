"""What describes the picture routes: for programs and for people."""

from __future__ import annotations

from functools import partial

import orjson

from carpool.servers.door import Catalog
from carpool.servers.http.docs_page import FIELDS, docs_page
from carpool.servers.http.exchange import Exchange
from carpool.servers.http.handlers import Variables
from carpool.servers.http.openapi import openapi
from carpool.servers.http.responses import JSON_FIELDS
from carpool.servers.http.service import Service


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
