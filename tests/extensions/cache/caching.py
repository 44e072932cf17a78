"""Front ends whose caches a test chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from carpool.extensions.cache import front as front_half
from carpool.extensions.cache.front_caches import NAME, CacheParts, Caches
from carpool.frontend.front_service import FrontService
from frontend.fake_door import FakeModel
from frontend.http.front_end import FrontEnd, front_end


@contextlib.contextmanager
def caching_front_end(*models: FakeModel, parts: CacheParts, **given: Any) -> Iterator[FrontEnd]:
    """What it may store, and with whom it shares, is in no setting of the server."""
    chosen = mock.patch.object(front_half, "cache_parts", return_value=parts)
    with chosen, front_end(*models, **given) as front:
        yield front


def caches_of(service: FrontService) -> Caches:
    found = service.parts.state_of(NAME)
    assert isinstance(found, Caches)
    return found
