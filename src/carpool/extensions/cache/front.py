"""Answers repeated requests in each front end with what was computed before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from carpool.config.server import ServerSettings
from carpool.extensions.cache.cache_wrapper import CacheWrapper
from carpool.extensions.cache.counted import cache_counts
from carpool.extensions.cache.front_caches import NAME, CacheParts, Caches
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.lane import LooksEarly
from carpool.frontend.calls.request import Infer
from carpool.link.catalog import ModelEntry


def front(server: FrontServer) -> FrontPart:
    """Returns what caches do in a front end."""
    caches = Caches(server, cache_parts(server.settings))

    def around(inner: Infer, entry: ModelEntry) -> Infer:
        return CacheWrapper(inner, caches) if NAME in entry.extra else inner

    def holds_back(entry: ModelEntry) -> Callable[[], bool] | None:
        return partial(caches.holds_back, entry) if NAME in entry.extra else None

    def early(entry: ModelEntry) -> LooksEarly | None:
        return partial(caches.look_early, entry) if NAME in entry.extra else None

    def shows(entry: ModelEntry) -> Any:
        settings = entry.extra[NAME]["settings"] if NAME in entry.extra else None
        return settings and {name: settings[name] for name in ("exact", "similar")}

    return FrontPart(
        around=around,
        holds_back=holds_back,
        early=early,
        follow=caches.follow,
        close=caches.close,
        state=caches,
        shows=shows,
        counts=cache_counts,
    )


def cache_parts(settings: ServerSettings) -> CacheParts:
    """Returns an equal part of the memory for each front end: what one stores, no other can use."""
    most = int(settings.option("cache_mb") * 1e6) // settings.front_ends
    url: str = settings.option("cache_url")
    if not url:
        return CacheParts(most)
    from carpool.link.redis_client import shared_store  # most servers share nothing

    secret, wait_s = settings.cache_secret, settings.option("cache_wait_ms") / 1e3
    shared = shared_store(url, secret, wait_s, setting="cache_url")
    return CacheParts(most, secret, shared)
