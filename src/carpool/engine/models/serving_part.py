"""Defines how an extension changes the way in which the versions of a model are served.

It stands here, and not beside the manifest, so that reading manifests imports nothing of the engine.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast

from carpool.backends.backend import Backend
from carpool.config.asked_extensions import asked_extensions
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelVersion
from carpool.core.objectives import FixedBatching, Promise
from carpool.engine.loading.loading import Ready
from carpool.engine.models.runtime import EngineParts
from carpool.engine.models.served import Runtime, Served
from carpool.engine.run.batch import Work
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import Executes, Report
from carpool.errors import CarpoolError
from carpool.types import Signature

MakeRuntime: TypeAlias = Callable[[Served, ModelVersion, EngineParts], Runtime]


class Stand(Protocol):
    """Stands between the requests of a version and its driver, which it gives them when it is their turn: a
    `Route` with more to say. Used in the loop's thread."""

    why_no_background: str  # why no background work runs beside its requests, in words; empty: it does

    def submit(self, works: Sequence[Work]) -> None: ...

    def ready(self, work: Work) -> None: ...

    def cancel(self, work: Work) -> None: ...

    @property
    def idle(self) -> bool:
        """Returns whether it holds nothing that would be lost if its version were unloaded."""

    def turned(self) -> int:
        """Shows its gauges after a turn of the driver; returns how many requests wait here."""

    def placed(self, instance: int, /) -> None:
        """The instance of this number was replaced."""

    def lost(self, instance: int, /) -> None:
        """The instance of this number has died."""

    def stop(self, error: CarpoolError, /, *, until_placed: bool = False) -> None:
        """Ends all requests that wait here with this error, and those that come from now on. With
        `until_placed`, the driver rejects those that come."""

    async def drained(self, timeout: float | None, /) -> object:
        """Waits until no request waits here, but no longer than that."""

    def close(self) -> None: ...


class Seating(NamedTuple):
    """Describes instances that take requests apart from each other, and not in one batch at a time."""

    seats: int  # of each instance: requests that it runs at once
    policy: Promise | FixedBatching
    executors: Callable[[Backend, Signature, Report, AbstractEventLoop], Sequence[Executes]]
    """Makes what runs the requests of an instance, one for each of its seats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPart:
    """Lists what an extension does for models that ask for it. A module of the extension holds one, at the
    place that the manifest names as `serving`. What is None costs nothing."""

    runtime: Callable[[ModelConfig], MakeRuntime | None] | None = None
    """Returns what makes the runtime of such a model; None: another one serves it."""
    seating: Callable[[Ready], Seating | None] | None = None
    """Returns how the loaded instances take requests; None: in batches, one at a time."""
    before: Callable[[Served, Driver, AbstractEventLoop], Stand | None] | None = None
    """Returns what stands before the driver, whose scheduler has no requests and no instances yet."""
    work_beside: Callable[[Served], Coroutine[Any, Any, None] | None] | None = None
    """Returns work that goes on while the version serves, until it is withdrawn; None: there is none."""


T = TypeVar("T")


def first(offers: Iterable[T | None]) -> T | None:
    """Returns the first that is one; what follows is not asked for."""
    return next((offer for offer in offers if offer is not None), None)


def serving_parts(config: ModelConfig) -> Iterator[ServingPart]:
    """Yields the parts of the extensions that a model asks for, in the order of the one list."""
    for extension in asked_extensions(config):
        if extension.serving:
            yield cast(ServingPart, extension.part(extension.serving))


def runtime_for(config: ModelConfig, usual: MakeRuntime) -> MakeRuntime:
    """Returns what makes the runtime of a model: the first that an extension offers, else the usual one."""
    offers = (part.runtime(config) for part in serving_parts(config) if part.runtime is not None)
    return first(offers) or usual


def work_beside(served: Served) -> Coroutine[Any, Any, None] | None:
    """Returns what is measured or compiled while a version serves: the work of an extension, else the
    runtime's own."""
    parts = serving_parts(served.config)
    offers = (part.work_beside(served) for part in parts if part.work_beside is not None)
    return first(offers) or served.runtime.work_beside()
