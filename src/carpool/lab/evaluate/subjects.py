"""Defines who is asked: a running server, or a model that is loaded here for the purpose."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeAlias

from carpool.client.client import Client
from carpool.config.fingerprint import Fingerprint
from carpool.config.model import ModelConfig, SpecificVersions
from carpool.config.repository import find_places, the_place, version_folders
from carpool.engine.engine import Engine
from carpool.engine.fleet.control import LoadListener
from carpool.engine.fleet.model_state import ModelState
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, Refused, Unavailable
from carpool.vision.python_pictures import Answer

_PATIENCE_S = 60.0
_MOST_WAITED_S = 600.0  # for all pictures together
_PAUSE_S = 0.1

Ask: TypeAlias = Callable[[Path, Mapping[str, Any]], Answer]
"""A picture's file and the options; called from several threads at once."""


@contextmanager
def asked_server(client: Client, task: str, model: str, version: str) -> Iterator[Ask]:
    def ask(file: Path, options: Mapping[str, Any]) -> Answer:
        return client.predict(
            file,
            task="" if model else task,
            model=model,
            version=version,
            deadline_ms=_PATIENCE_S * 1e3,  # no latency is kept here: requests wait their turn
            **options,
        )

    yield _patient(ask)


@contextmanager
def loaded_model(path: Path, model: str, version: str, cache_dir: Path | None) -> Iterator[Ask]:
    """Runs an engine in a thread of its own, with this version alone: a model's settings most often choose
    the newest."""
    place = _place(path, model, version)

    loads = partial(_OnlyThis, int(version)) if version else LoadListener
    with running(Engine(place, cache_dir=cache_dir, loads=loads)) as (engine, loop):
        yield asked_engine(engine, loop, engine.index()[0].name)


class _OnlyThis(LoadListener):
    def __init__(self, version: int) -> None:
        self._versions = SpecificVersions((version,))

    def pin(self, _model: ModelState, _files: Fingerprint) -> Callable[[ModelConfig, Path], ModelConfig]:
        return lambda config, _folder: replace(config, versions=self._versions)


def asked_engine(engine: Engine, loop: asyncio.AbstractEventLoop, name: str) -> Ask:
    def ask(file: Path, options: Mapping[str, Any]) -> Answer:
        answer = asyncio.run_coroutine_threadsafe(engine.predict(file, model=name, **options), loop)
        return answer.result()

    return _patient(ask)


def _patient(ask: Ask) -> Ask:
    """What an SLO rejected is sent again: how well a model sees has nothing to do with how busy it is. Also
    where no time to come back was named: the pictures that were ahead of this one are soon answered. All
    pictures together wait a bounded time: beside a saturated server, an evaluation would not end."""
    waited = 0.0  # of all threads; which of two additions at once is lost does not matter

    def again(file: Path, options: Mapping[str, Any]) -> Answer:
        nonlocal waited
        give_up = monotonic() + _PATIENCE_S
        while True:
            try:
                return ask(file, options)
            except (Refused, Unavailable, DeadlineExceeded) as error:
                if waited > _MOST_WAITED_S:
                    said = f"the server rejected images until {_MOST_WAITED_S:g} s were spent on retries"
                    raise Busy(f"{said}: evaluate when it has less load ({error.message})") from None
                if monotonic() > give_up:
                    raise
                pause = min(max(getattr(error, "retry_after_s", None) or _PAUSE_S, 0.01), 1.0)
                sleep(pause)
                waited += pause

    return again


class Busy(CarpoolError):
    """Means that the server has no time left for an evaluation."""

    reason = "busy"
    exit_code = 1


@contextmanager
def running(engine: Engine) -> Iterator[tuple[Engine, asyncio.AbstractEventLoop]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="evaluate-engine", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(engine.start(), loop).result()
        try:
            yield engine, loop
        finally:
            asyncio.run_coroutine_threadsafe(engine.stop(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _place(path: Path, model: str, version: str) -> Path:
    """Returns where the model lies, which has this version, if one is named."""
    places, _ = find_places([path], some=True)
    if not model and len(places) > 1:
        raise InvalidInput(f"--model: which one? {path} has {', '.join(sorted(places))}", field="model")
    name = model or next(iter(places))
    place = the_place(name, places)
    versions = version_folders(place) if place.is_dir() else {}
    if version and (not version.isdecimal() or int(version) not in versions):
        there = ", ".join(map(str, sorted(versions))) or "no numbered versions"
        raise InvalidInput(f"there is no version {version} of {name}: {place} has {there}", field="version")
    return place
