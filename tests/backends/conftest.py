"""Fixtures that end what the tests of backends start."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backends.cases import X_TO_Y, load_python
from carpool.backends import Backend
from carpool.backends.python.python_backend import PythonBackend
from carpool.extension import importable


@pytest.fixture(autouse=True)
def looked_for_anew() -> Iterator[None]:
    """What is installed is remembered, and tests pretend that it changes."""
    importable.cache_clear()
    yield
    importable.cache_clear()


@pytest.fixture
def opened() -> Iterator[Callable[[Backend], Backend]]:
    """Closes at the end of the test whatever backend passes through it."""
    held: list[Backend] = []

    def keep(backend: Backend) -> Backend:
        held.append(backend)
        return backend

    yield keep
    for backend in held:
        backend.abort()
        backend.close()


@pytest.fixture
def model(opened: Callable[[PythonBackend], PythonBackend], tmp_path: Path) -> Callable[..., PythonBackend]:
    """Loads a Python model from its source, behind two lines that declare one input x and one output y."""

    def start(source: str, head: str = X_TO_Y) -> PythonBackend:
        backend = load_python(tmp_path, head + textwrap.dedent(source))
        assert isinstance(backend, PythonBackend)
        return opened(backend)

    return start
