"""What holds for all tests."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

import by_file
from carpool import extension
from carpool.compiling import is_compiled
from later import THOROUGH, many
from together import are_together, one_test

# A machine may stand still for seconds: how long an example takes, or is made, says nothing about the code.
settings.register_profile(
    "carpool", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=many(100)
)
# What is to land is judged by the same examples each time; whoever develops looks at new ones with every run.
settings.register_profile("ci", settings.get_profile("carpool"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "carpool")
if not os.environ.get(THOROUGH):
    # Hypothesis looks through all sources for constants to try: in a fresh clone, 4 s of CPU for each of
    # pytest's processes. `make conformance` has them.
    providers._get_local_constants = lambda: providers._local_constants

# Tests start hundreds of processes. Where bytecode must not be kept, each would compile the package anew, and
# each of pytest's workers would write the assertions of all files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# None of them multiplies large matrices: threads for that, which NumPy begins with its import, only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


gc.disable()  # until everything is imported, of which nothing is garbage


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(by_file, "by_file")


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_FOLDERS] = Path(tempfile.mkdtemp(prefix="carpool-tests-"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    shutil.rmtree(session.config.stash[_FOLDERS], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a test, or a process of it, keeps in the folders for state and for caches, no other test finds."""
    folder = item.config.stash[_FOLDERS] / str(next(_TESTS_BEGUN))
    # Some tests start processes without any setting of Carpool: the standard's variable reaches them too. The
    # one for caches would hide a browser's files from it.
    os.environ |= {"XDG_STATE_HOME": f"{folder}/state", "CARPOOL_CACHE_DIR": f"{folder}/cache"}


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> pytest.Item | None:
    if name.startswith("test") and isinstance(collector, pytest.Module) and are_together(collector.config):
        return one_test(collector, name, obj)
    return None


def pytest_collection_finish() -> None:
    """What was imported stays: whoever collects garbage in a test need not look through all of it again. What
    tests make has few cycles: nearly all that Python's usual thresholds look for is not there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> Iterator[None]:
    """How many tests did not run, by what they would need; below everything else that pytest says."""
    yield
    skipped = terminalreporter.stats.get("skipped", [])
    wants = Counter(_wanting(report) for report in skipped)
    for want, count in wants.most_common():
        terminalreporter.write_line(f"{count} skipped: {want}")


def _wanting(report: pytest.TestReport) -> str:
    """Reports of skipped tests hold a file, a line and "Skipped: REASON"."""
    reason = str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    named = (want for word, want in _WANTS.items() if word.lower() in reason.lower())
    return next(named, reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    """A test whose stand-in compiled code does not take has not run there; the summary counts such tests."""
    report = yield
    if call.excinfo is not None and is_compiled() and _REFUSED_STAND_IN.search(str(call.excinfo.value)):
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {_STAND_IN}")
    return report


@pytest.fixture(scope="module", autouse=True)
def _what_files_before_this_one_left_stays() -> None:
    """Most of it are libraries that were imported when they were needed, of some 100 000 objects each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_instance_outlives_its_test() -> Iterator[None]:
    """A thread that runs a model's batches would raise, or write, in the midst of some later test. A server
    that several tests share may start some that live on with it, and those of `batched` live for ever."""
    before = set(threading.enumerate())
    yield
    left = {thread for thread in threading.enumerate() if thread.name.endswith(_INSTANCE)} - before
    if not left or any(thread.is_alive() for thread in before if thread.name == _SERVER):
        return
    end = time.monotonic() + _PATIENCE_S
    batchers = {thread.name for thread in threading.enumerate() if thread.name.endswith("-batcher")}
    for thread in left:
        if thread.name.replace(_INSTANCE, "-batcher") not in batchers:
            thread.join(max(0.0, end - time.monotonic()))
            assert not thread.is_alive(), f"{thread.name} goes on when the test is over: close what began it"


@pytest.fixture(autouse=True)
def _process_wide_settings_are_restored() -> Iterator[None]:
    """A server or a command that runs inside a test's own process may change what holds for the whole of it,
    and which tests share a process differs from run to run."""
    ours = logging.getLogger("carpool")
    level, thresholds = ours.level, gc.get_threshold()
    yield
    ours.setLevel(level)
    gc.set_threshold(*thresholds)


@pytest.fixture
def no_large_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorFlow, TensorRT and transformers count as missing, also on a machine that has them."""
    found = extension.importable

    def importable(module: str) -> bool:
        return module not in ("tensorflow", "tensorrt", "transformers") and found(module)

    monkeypatch.setattr(extension, "importable", importable)


_FOLDERS = pytest.StashKey[Path]()
_TESTS_BEGUN = itertools.count(1)
_STAND_IN = "a stand-in that compiled code does not take"
_TESTS = "|".join(("tests", "unittest", "types", *(path.stem for path in Path(__file__).parent.iterdir())))
_REFUSED_STAND_IN = re.compile(  # never an object of the package itself: that is a fault
    rf"^interpreted classes cannot inherit from compiled$| object attribute '\w+' is read-only$"
    rf"| object expected; got (?:{_TESTS})\."
)
_WANTS = {
    "gpu": "a GPU",
    "redis": "Redis",
    "browser": "a browser",
    "make fleet": "balancers (make fleet)",
    "make ray": "Ray (make ray)",
    "mlflow": "MLflow (make mlflow)",
    "s3 servers": "S3 servers (make s3)",
    "could not import": "a Python package that is not installed",
    "ipv6": "IPv6",
}
_PATIENCE_S = 30.0
_INSTANCE = "-instance"
_SERVER = "whole-server"  # frontend/whole_server.py
