"""The console's routes: the page and its files, and the numbers that it polls."""

from __future__ import annotations

from carpool.errors import NotFound
from carpool.frontend.http.compressing import answer_compressed
from carpool.frontend.http.compression import choose_encoding
from carpool.frontend.http.document_handlers import Variables
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import Service
from carpool.frontend.http.image_reading import read_query
from carpool.frontend.http.responses import JSON_FIELDS
from carpool.frontend.http.site import answer_asset, site
from carpool.frontend.live_document import with_profile

_TEXT_FIELDS = b"content-type: text/plain; charset=utf-8\r\nvary: accept\r\n"
_TEXT = (
    b"Carpool serves vision models over the v2 inference protocol.\n\n"
    b"/                     in a browser: the console\n"
    b"/docs                 in a browser: pictures in, answers out (POST /detect, /classify, ...)\n"
    b"/v2                   this server and what it can do\n"
    b"/v2/repository/index  its models (POST)\n"
    b"/v2/health/ready      whether it serves\n"
    b"/metrics              for Prometheus\n"
)
_LIVE_FIELDS = JSON_FIELDS + b"cache-control: no-store\r\nx-content-type-options: nosniff\r\n"
_WORTH_COMPRESSING = 16 * 1024  # a page that looks at a few models is on the same machine or a near one


def front_page(_service: Service, exchange: Exchange, _variables: Variables) -> None:
    """The console for whoever asks for HTML; a short text for curl and its like."""
    if b"text/html" in exchange.head.headers.get(b"accept", b"").lower():
        answer_asset(exchange, site()["index.html"], b"vary: accept\r\n")
    else:
        exchange.respond(200, _TEXT_FIELDS, _TEXT)


def console_file(_service: Service, exchange: Exchange, variables: Variables) -> None:
    asset = site().get(variables["file"])
    if asset is None:
        raise NotFound("the console has no such file")
    answer_asset(exchange, asset)


def console_live(service: Service, exchange: Exchange, _variables: Variables) -> None:
    """With `?model=…&version=…` also the profile of that one, as far as the engine has told it."""
    page = service.live.read(service.door)
    asked = read_query(exchange.head.query)
    if "model" in asked:
        page = with_profile(page, service.profiles.look(asked["model"], asked.get("version", "")))
    encoding = choose_encoding(exchange.head.headers.get(b"accept-encoding", b""))
    if encoding is None or len(page) < _WORTH_COMPRESSING:
        exchange.respond(200, _LIVE_FIELDS, page)
    else:
        answer_compressed(service, exchange, _LIVE_FIELDS + b"vary: accept-encoding\r\n", page, encoding)
