"""Implements the routes of caches: what is stored of a model's answers, and how to clear it."""

from __future__ import annotations

from typing import Any

from carpool.extensions.cache.counted import cache_counts, shared_cache_counts
from carpool.extensions.cache.front_caches import NAME, Caches
from carpool.frontend.http.exchange import Exchange
from carpool.frontend.http.http_service import HttpService, Variables, answer_document
from carpool.frontend.http.small_routes import per_request
from carpool.link.catalog import ModelEntry
from carpool.observe.counters import CounterRow, Table


def _status(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """Answers what all front ends keep of a model's answers, and what became of the requests for it."""
    entry = service.look_up(variables["model"], variables.get("version", ""))
    caches = _caches(service)
    is_shared = caches is not None and caches.shared is not None
    answer_document(exchange, _document(entry, service.table, is_shared=is_shared))


def _clear(service: HttpService, exchange: Exchange, variables: Variables) -> None:
    """`shared` says whether what servers share is cleared too: false when Redis does not answer now, null
    where nothing is shared."""
    entry = service.look_up(variables["model"])

    async def clear() -> dict[str, Any]:
        caches, reached = _caches(service), None
        if caches is not None:  # before the front ends look there again
            reached = await caches.clear_shared(entry.name)
        await service.engine.ask("cache/clear", {"name": entry.name})
        return {"shared": reached}

    service.answer_later(exchange, clear())


def _caches(service: HttpService) -> Caches | None:
    """Returns those of this front end; None where no model's answers were ever cached."""
    state = service.parts.state_of(NAME)
    return state if isinstance(state, Caches) else None


def _document(entry: ModelEntry, table: Table, *, is_shared: bool) -> dict[str, Any]:
    """`settings` is None for a model whose answers are not cached, `shared` where servers share none."""
    counts = cache_counts(table.cells(CounterRow(*entry.row)))
    settings = entry.extra["cache"]["settings"] if "cache" in entry.extra else None
    shared = shared_cache_counts(table.server()) if is_shared else None
    return {"name": entry.name, "version": entry.version, "settings": settings, **counts, "shared": shared}


start_status = per_request(_status)
start_clear = per_request(_clear)
