"""What describes the picture routes: for programs and for people."""

from __future__ import annotations

import orjson

from carpool.servers.door import Catalog
from carpool.servers.http.docs_page import FIELDS, docs_page
from carpool.servers.http.exchange import Exchange
from carpool.servers.http.handlers import Variables
from carpool.servers.http.openapi import openapi
from carpool.servers.http.responses import JSON_FIELDS
from carpool.servers.http.service import Service


def describe(service: Service, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200, JSON_FIELDS, service.pages.read(service.door.catalog, _for_programs))


def read(service: Service, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200, FIELDS, service.pages.read(service.door.catalog, _for_people))


def _for_programs(catalog: Catalog) -> bytes:
    return orjson.dumps(openapi(catalog))


def _for_people(catalog: Catalog) -> bytes:
    return docs_page(openapi(catalog))
