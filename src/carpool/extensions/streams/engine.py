"""Gives each instance of a decoupled model several places, which its clients share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from carpool.backends.backend import Backend
from carpool.config.model import Mode
from carpool.core.objectives import FixedBatching
from carpool.engine.loading.loading import Ready
from carpool.engine.models.served import Served
from carpool.engine.models.serving_part import Seating, ServingPart, Stand
from carpool.engine.run.driver import Driver
from carpool.engine.run.executor import Executes, Report
from carpool.extensions.streams.decoupled import DecoupledInstance, places_of
from carpool.extensions.streams.stream_route import StreamRoute
from carpool.types import Signature


def _seating(ready: Ready) -> Seating:
    seats, policy = places_of(ready.backends[0]), ready.config.policy
    if seats > 1 and isinstance(
        policy, FixedBatching
    ):  # each seat takes one request, which waits for no others
        policy = replace(policy, preferred=(1,), max_delay=0.0)
    return Seating(seats, policy, _executors)


def _executors(
    backend: Backend, signature: Signature, report: Report, loop: asyncio.AbstractEventLoop
) -> Sequence[Executes]:
    return DecoupledInstance(backend, signature, report, loop).places


def _before(served: Served, driver: Driver, loop: asyncio.AbstractEventLoop) -> Stand:
    places, eager = len(driver.scheduler.instances), served.config.mode is Mode.EAGER
    return StreamRoute(served.name, driver, places, loop, eager=eager)


SERVING = ServingPart(seating=_seating, before=_before)
