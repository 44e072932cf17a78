"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from later import many

# A machine may stand still for seconds: how long an example takes, or is made, says nothing about the code.
settings.register_profile(
    "carpool", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=many(100)
)
# What is to land is judged by the same examples each time; whoever develops looks at new ones with every run.
settings.register_profile("ci", settings.get_profile("carpool"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "carpool")

# Tests start hundreds of processes. Where bytecode must not be kept, each would compile the package anew, and
# each of pytest's workers would write the assertions of all files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What was imported stays: whoever collects garbage in a test need not look through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_instance_outlives_its_test() -> Iterator[None]:
    """A thread that runs a model's batches would raise, or write, in the midst of some later test. Those of a
    server that several tests share were there before, and those of `batched` live as long as the process."""
    before = set(_instances())
    yield
    end = time.monotonic() + _PATIENCE_S
    for thread in _instances() - before:
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} goes on when the test is over: close what started it"


_PATIENCE_S = 30.0
_KIND = "-instance"


def _instances() -> set[threading.Thread]:
    threads = threading.enumerate()
    batchers = [thread.name for thread in threads if thread.name.endswith("-batcher")]
    parked = {name.removesuffix("-batcher") + _KIND for name in batchers}
    return {thread for thread in threads if thread.name.endswith(_KIND) and thread.name not in parked}
