"""Is a candidate worse on labelled pictures? Asked before it gets any traffic: by `carpool evaluate` in a
process of its own, which loads both versions by their files, at the lowest priority, within a time limit."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from carpool.engine.engine_host import without_paths
from carpool.engine.engine_parts import EngineServer
from carpool.extensions.rollout.rollout_states import Labelled, State
from carpool.extensions.rollout.watched_rollout import WatchedRollout
from carpool.observe.logs import logger

log = logger("rollout")

_LONGEST_S = 3600.0
_LOOK_S = 0.5  # between two looks whether the result is still wanted
_LOWEST = 19
_MOST_SAID = 300
_CODE = (
    "import sys; from carpool.link.child_process import belong_to_parent; from carpool.cli.main import main; "
    "belong_to_parent(); sys.argv[0] = 'carpool'; main()"
)


class LabelledCheck:
    """`home` is the folder of a model's versions; `decide` goes on with a rollout that has its verdict."""

    def __init__(
        self,
        server: EngineServer,
        home: Callable[[str], Path | None],
        decide: Callable[[WatchedRollout], None],
    ) -> None:
        self._control = server.engine.control
        self._folders = server.engine.folders
        self._cache_dir = server.settings.cache_dir
        self._home, self._decide = home, decide
        self._asking: dict[str, tuple[WatchedRollout, asyncio.Task[None]]] = {}
        self._closed = False

    def close(self) -> None:
        """Ends it: the threads that wait for evaluations see it."""
        self._closed = True

    def evaluate(self, watched: WatchedRollout) -> None:
        """Sets `labelled`, later. Once for each candidate: asked again after a start of the server."""
        name = watched.record.model
        known = self._asking.get(name)
        if known is None or known[0] is not watched:
            task = asyncio.get_running_loop().create_task(self._ask(watched))
            self._asking[name] = watched, task

    async def _ask(self, watched: WatchedRollout) -> None:
        record, home = watched.record, self._home(watched.record.model)
        assert home is not None  # it is loaded from there
        log.info("evaluation-begun", model=record.model, candidate=record.rollout.candidate)
        command = [
            *(sys.executable, "-P", "-c", _CODE, "evaluate", str(home.absolute()), "--json"),
            *("--data", str((home / record.plan.evaluate).absolute())),
            *("--version", record.rollout.candidate, "--against", record.rollout.stable),
            *("--tolerate", str(record.plan.tolerate)),
        ]
        environment = dict(os.environ)
        if self._cache_dir is not None:
            environment["CARPOOL_CACHE_DIR"] = str(self._cache_dir)

        def wanted() -> bool:
            return not self._closed and State.CHECKED in (record.rollout.state, record.rollout.before)

        model = self._control.known(record.model)
        try:
            if model is None or any(served.config.file is None for served in model.serving.values()):
                found = Labelled("its versions are not files that can be loaded separately")
            else:
                found = await asyncio.to_thread(_run, command, environment, wanted)
        except OSError as error:
            found = Labelled(f"it could not be started: {error.strerror or error}")
        if self._closed:
            return
        watched.labelled = Labelled(without_paths(found.sentence, self._folders), found.worse)
        log.info("evaluation-over", model=record.model, worse=found.worse, why=watched.labelled.sentence)
        self._decide(watched)


def _run(command: list[str], environment: dict[str, str], wanted: Callable[[], bool]) -> Labelled:
    """Runs until it ends, takes too long, or its result is not wanted any more. In a thread that waits."""
    # A session of its own: what it starts ends with it.
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    end = monotonic() + _LONGEST_S
    try:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process.pid, _LOWEST)
        while True:
            try:
                said, complained = process.communicate(timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                if not wanted():
                    return Labelled("its request was cancelled")
                if monotonic() > end:
                    return Labelled(f"it took longer than {_LONGEST_S / 60:.0f} minutes")
    finally:
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return read_evaluation(said, complained)


def read_evaluation(said: bytes, complained: bytes) -> Labelled:
    """Reads what `carpool evaluate --against --json` printed."""
    try:
        found: Any = json.loads(said)
        gap, unanswered = found["gap"], len(found["failed"])
        if unanswered:
            return Labelled(f"{unanswered} of its images were not answered")
        figures = [float(gap[key]) for key in ("difference", "low", "high", "tolerate")]
        worse = bool(gap["worse"])
        if not all(map(isfinite, figures)):
            raise ValueError
        difference, low, high, tolerate = figures
        between = f"{difference:+.4f} ({low:+.4f} to {high:+.4f})"
        told = "worse than" if worse else "within"
        sentence = f"{str(gap['figure'])[:40]} on {found['pictures']} labelled images: {between}"
        return Labelled(f"{sentence}, {told} the {tolerate:g} that are tolerated", worse)
    except (ValueError, KeyError, TypeError):
        lines = complained.decode(errors="replace").strip().splitlines()
        return Labelled(lines[-1][-_MOST_SAID:] if lines else "carpool evaluate ended without an answer")
