"""Lets requests of sequences wait before the driver until it is their turn."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from carpool.core.objectives import FixedBatching
from carpool.engine.models.served import Served
from carpool.engine.models.serving_part import ServingPart, Stand
from carpool.engine.run.driver import Driver
from carpool.extensions.sequences.pinned import pin
from carpool.extensions.sequences.sequence_route import SequenceRoute
from carpool.extensions.sequences.settings import sequence_settings


def _before(served: Served, driver: Driver, loop: asyncio.AbstractEventLoop) -> Stand | None:
    settings = sequence_settings(served.config)
    if settings is None:
        return None
    served.signature = replace(served.signature, told=True)
    policy = served.config.policy
    pin(driver.scheduler, settings.fixed(policy) if isinstance(policy, FixedBatching) else None)
    return SequenceRoute(served.name, driver, settings, loop, served.counters.row, served.slo)


SERVING = ServingPart(before=_before)
