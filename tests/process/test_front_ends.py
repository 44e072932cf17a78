"""What front ends are put together with."""

from __future__ import annotations

import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.clients.accounts import MOST_BYTES
from carpool.process.front_ends import http_limits


@pytest.mark.parametrize(("http", "grpc", "parts"), [(0, 0, 1), (0, 1, 2), (2, 1, 3), (6, 2, 8)])
def test_the_bytes_held_for_clients_are_divided_among_the_front_ends(
    http: int, grpc: int, parts: int
) -> None:
    settings = ServerSettings(frontends=http, grpc_frontends=grpc)
    assert http_limits(settings).max_held_bytes == MOST_BYTES // parts
    assert settings.front_ends * http_limits(settings).max_held_bytes <= MOST_BYTES
