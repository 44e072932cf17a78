"""What runs in the engine's process: the models, behind links to the front ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from carpool.config.server import ServerSettings
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.hosted.runner_client import Runner
from carpool.engine.memory_registry import MemoryRegistry
from carpool.engine.model_control import ControlDesk
from carpool.engine.models.elsewhere import Elsewhere
from carpool.engine.profile_answers import teach_profiles
from carpool.observe.columns import RESTARTS, UP
from carpool.observe.counters import Block, Table
from carpool.observe.logs import logger
from carpool.process.log_settings import LogSettings
from carpool.process.trace_settings import TraceSettings


def engine_for(
    paths: Sequence[str] | Sequence[Path],
    settings: ServerSettings,
    table: Table,
    block: Block | None = None,
    elsewhere: Elsewhere | None = None,
) -> Engine:
    """With all that the server's settings say about models."""
    return Engine(
        *paths,
        slo_ms=settings.slo_ms,
        table=table,
        block=block,
        cache_dir=settings.cache_dir,
        device_memory_gb=settings.device_memory_gb,
        elsewhere=elsewhere,
    )


def teach(host: EngineHost, settings: ServerSettings) -> None:
    """What front ends can ask of the engine besides inference and models."""
    host.extra["server_name"] = settings.server_name
    MemoryRegistry(host, allowed=settings.allow_client_shm)
    LogSettings(host, settings.log_level)
    TraceSettings(host, settings.trace_file)
    teach_profiles(host)


async def engine(
    settings: ServerSettings,
    paths: Sequence[str],
    *,
    table: Table,
    block: int,
    write_gate: Callable[..., None],
    progress: Callable[[str, str], None],
) -> EngineHost:
    """Load the models; the front ends answer that they are alive, but not ready, until this returns."""
    log = logger("engine")
    mine = table.block(block)
    runner = Runner(settings, lambda: mine.server.add(RESTARTS["worker"]))
    served = engine_for(paths, settings, table, mine, runner)
    host = EngineHost(served, write_gate, runner)
    runner.stall_changed = served.look_at_instances
    host.listen(lambda catalog: runner.follow_logging(catalog.logging))
    teach(host, settings)

    def step_taken(model: str, step: str) -> None:
        log.debug("loading", model=model, step=step)
        progress(model, step)

    await ControlDesk(host, settings).open(step_taken)
    mine.server.set(UP, 1.0)
    host.set_ready(True)
    return host
