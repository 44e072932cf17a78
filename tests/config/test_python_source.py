"""Source is read by several threads at once."""

from __future__ import annotations

import ast
import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from time import sleep
from typing import Any

import pytest

from carpool.config.python_source import read_expression, read_module

SOURCE = "{" + "'a': [1, (2, 3)], " * 100 + "}"


@pytest.fixture
def _threads_change_in_mid_tree() -> Any:
    """Whoever makes a tree lets others run where garbage is collected, if somebody is told of that."""

    def told(*_: object) -> None:
        sleep(1e-5)

    gc.callbacks.append(told)
    gc.set_threshold(20)
    yield
    gc.callbacks.remove(told)


@pytest.mark.usefixtures("_threads_change_in_mid_tree")
def test_threads_that_read_source_at_once_do_not_disturb_each_other() -> None:
    together = Barrier(2)

    def read(number: int) -> object:
        together.wait()
        for _ in range(15):
            if number:
                read_module(b"x = " + SOURCE.encode(), "model.py")
            else:
                read_expression(f" {SOURCE}")
        return ast.literal_eval(read_expression(f" {SOURCE}"))

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read, range(2))) == [{"a": [1, (2, 3)]}] * 2
