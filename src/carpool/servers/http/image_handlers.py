"""What describes the picture routes: for programs and for people."""

from __future__ import annotations

from carpool.servers.http.docs_page import FIELDS, docs_page
from carpool.servers.http.exchange import Exchange
from carpool.servers.http.handlers import Variables
from carpool.servers.http.openapi import openapi
from carpool.servers.http.service import Service, answer_document


def describe(service: Service, exchange: Exchange, _variables: Variables) -> None:
    answer_document(exchange, openapi(service.door.catalog, with_keys=service.asks_for_keys))


def read(service: Service, exchange: Exchange, _variables: Variables) -> None:
    exchange.respond(200, FIELDS, docs_page(openapi(service.door.catalog, with_keys=service.asks_for_keys)))
