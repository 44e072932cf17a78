from __future__ import annotations

from collections.abc import Iterator

import pytest

from frontend.http.harness import Client, Serving, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with server.connect() as connected:
        yield connected
