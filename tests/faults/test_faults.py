"""Whatever raises, once, at any moment: everybody is told once, memory comes back, models answer again."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool import backends
from carpool.core.batcher import PromisePolicy
from carpool.core.fixed_batching import FixedBatchingPolicy
from carpool.core.queue import Lanes
from carpool.core.scheduler import Scheduler
from carpool.engine import engine_link
from carpool.engine.engine_link import Calls, EngineSide
from carpool.engine.models import runtime
from carpool.engine.models.batch_runtime import BatchRuntime
from carpool.engine.run.batch import BatchRun
from carpool.engine.run.collator import Collator
from carpool.engine.run.executor import Executor
from carpool.frontend import front_link
from carpool.frontend.front_link import FrontLink
from carpool.link.records import Outbox
from carpool.link.request_place import RequestPlace
from carpool.link.templates import ServedTemplate, Templates
from carpool.memory.arena import Arena
from carpool.observe.counters import Row
from engine.scripted import run
from faults import injection
from faults.injection import Point
from later import later


def no_memory() -> Exception:
    return MemoryError("no memory")


def no_file() -> Exception:
    return OSError(errno.EMFILE, "no file is left")


POINTS = [
    # memory
    Point(Arena, "allocate", no_memory),
    Point(engine_link, "read_template", no_memory),
    Point(ServedTemplate, "bind", no_memory),
    Point(Collator, "gather", no_memory),
    # sending
    Point(Outbox, "put"),
    Point(Outbox, "send"),
    Point(Outbox, "send", no_memory),
    # A compiled outbox opens itself, and never with the stand-in.
    pytest.param(Point(injection.Transport, "write", no_file), marks=pytest.mark.interpreted),
    Point(FrontLink, "submit"),
    Point(Templates, "match"),
    Point(EngineSide, "acknowledged"),
    # the policy and all else that decides
    Point(PromisePolicy, "admit"),
    Point(PromisePolicy, "take"),
    Point(FixedBatchingPolicy, "admit"),
    Point(FixedBatchingPolicy, "take"),
    Point(Scheduler, "offer"),
    Point(Scheduler, "offer", after=True),
    Point(Scheduler, "ready"),
    Point(Scheduler, "decide"),
    Point(Scheduler, "decide", after=True),
    Point(Scheduler, "finished"),
    Point(Scheduler, "finished", after=True),
    Point(Scheduler, "cancel"),
    Point(Scheduler, "set_available"),
    Point(Scheduler, "saturation"),
    Point(Lanes, "offer"),
    Point(Lanes, "serve_first"),
    # models
    Point(backends, "load", no_file),
    Point(injection.Backend, "run", no_memory),
    Point(injection.Backend, "run"),
    Point(injection.Backend, "close", no_file),
    Point(Collator, "check"),
    Point(Executor, "run"),
    Point(BatchRun, "run"),
    Point(threading.Thread, "start", lambda: RuntimeError("can't start new thread")),
    # answers
    Point(RequestPlace, "__call__"),
    Point(engine_link, "_answer"),
    Point(Calls, "_trouble"),
    Point(engine_link, "write_failure"),
    Point(front_link, "read_failure"),
    Point(injection.Request, "told", after=True),
    # what only looks on
    Point(Row, "add_batch"),
    Point(BatchRuntime, "batch_ended"),
    Point(BatchRuntime, "turned"),
    Point(BatchRuntime, "instance_lost"),
]


@pytest.fixture(name="folder", scope="module")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return injection.models(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Who keeps a record keeps what raised, and with it everything that its stack refers to.

    A logger that was asked before, by any test in this process, remembers that it is enabled. `disable` makes
    it forget; to set the level that `disable` sets does not.
    """
    loggers = [logging.getLogger(f"carpool.{part}") for part in ("engine", "link")]
    assert all(logger.isEnabledFor(logging.ERROR) for logger in loggers)
    logging.disable(logging.CRITICAL)
    assert not any(logger.isEnabledFor(logging.ERROR) for logger in loggers)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("most", [2, later(10)])  # calls of one point that raise in turn
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_one_fault_costs_no_more_than_one_answer(
    point: Point, most: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "load", injection.load)
    monkeypatch.setattr(runtime, "_FIRST_RETRY_S", 0.001)
    open_outbox = Outbox.open
    monkeypatch.setattr(
        Outbox, "open", lambda outbox, transport: open_outbox(outbox, injection.Transport(transport))
    )
    before = injection.held()
    made = run(injection.story(folder, point, most))
    injection.check_given_back(before)
    if point.is_compiled and not made:
        pytest.skip("a stand-in that compiled code does not take")
    assert made, "nothing was injected"
