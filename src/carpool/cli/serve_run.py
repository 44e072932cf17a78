"""How `carpool serve` starts: settings, models, one process or several, and the first screen."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import uvloop

from carpool.cli.serve import Serve
from carpool.cli.serve_progress import LoadingProgress
from carpool.config.repository import ModelSource, find_models
from carpool.config.server import ServerSettings, server_settings
from carpool.demo import demo_models, pictures
from carpool.engine.hardware import gpu_count
from carpool.errors import CarpoolError, ConfigError
from carpool.frontend.access.access import check_files, is_loopback
from carpool.frontend.documents import picture_tasks, promises
from carpool.link.door import Catalog
from carpool.observe.descriptors import raise_limit
from carpool.observe.logs import configure, finish, logger
from carpool.observe.output import caught
from carpool.process.children import EXIT_CONFIG, EXIT_CUT_OFF, EXIT_FAILED
from carpool.process.recording import claim
from carpool.process.supervisor import FrontendKind, Supervisor

_ENGINE = "carpool.process.start:engine"
_HTTP = "carpool.process.front_ends:http"
_GRPC = "carpool.process.front_ends:grpc"
_PHOTOS = {"detect": "astronaut", "classify": "coffee", "segment": "astronaut", "embed": "chelsea"}


def run(asked: Serve) -> int:
    """Returns the exit code."""
    given = {name: getattr(asked, name) for name in Serve.__dataclass_fields__ if name != "paths"}
    settings, warnings = server_settings(given)
    configure(settings.log_format, settings.log_level)
    for warning in warnings:
        logger("server").warning("settings", message=warning)
    raise_limit(settings.max_connections)
    check_files(settings)
    _warn_if_open(settings)
    paths = asked.paths or demo_models(settings.cache_dir, tell=_tell)
    # Mistakes in settings are told before anything is started.
    sources, _ = find_models(
        paths, gpus=gpu_count(), only=settings.models_at_start, some=settings.needs_models
    )
    if settings.record:
        settings = replace(settings, record=str(claim(settings.record)))
    print(f"Loading {_count(len(sources), 'model')} …", flush=True)
    screen = _Screen(sources, settings)
    if settings.frontends == 0:
        return _alone(paths, settings, screen)
    ports = {"http": settings.http_port, "metrics": settings.metrics_port}
    grpc = {"grpc": settings.grpc_port}
    supervisor = Supervisor(
        settings,
        [str(path) for path in paths],
        engine=_ENGINE,
        frontends=[
            FrontendKind("http", _HTTP, settings.frontends, ports),
            FrontendKind("grpc", _GRPC, settings.grpc_frontends, grpc, accepts=False),
        ],
        ready=screen.show,
        loading=screen.progress.told,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(supervisor.run())
    finish()
    return code


def _warn_if_open(settings: ServerSettings) -> None:
    if (
        settings.model_control_mode == "explicit"
        and not settings.admin_key_file
        and not settings.api_key_file  # which close control to everybody
        and not is_loopback(settings.host)
    ):
        logger("server").warning(
            "control-is-open",
            host=settings.host,
            why="whoever reaches this address can load models, and so run code: give --admin-key-file",
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _alone(paths: Sequence[Path], settings: ServerSettings, screen: _Screen) -> int:
    from carpool.process import one_process  # all of the engine, which otherwise has a process of its own

    async def serve() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled(number: signal.Signals) -> None:
            if stop.is_set():
                os._exit(128 + number)  # the second one: at once
            if not screen.shown:
                os._exit(0)  # nothing to drain yet, and a thread that loads a model would be waited for
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, signalled, number)

        def ready(catalog: Catalog, ports: Mapping[str, int]) -> None:
            screen.show(ports, picture_tasks(catalog), promises(catalog))

        def progress(model: str, step: str) -> None:  # from the thread that loads
            loop.call_soon_threadsafe(screen.progress.told, model, step)

        return await one_process.serve(paths, settings, stop, progress=progress, ready=ready)

    try:
        with (
            caught(settings.log_format, settings.log_level),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            cut_off = runner.run(serve())
    except CarpoolError as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return EXIT_CUT_OFF if cut_off else 0


class _Screen:
    """What is served, where, under which promise, and a line to try it with: shown once, when it is true."""

    def __init__(self, sources: Sequence[ModelSource], settings: ServerSettings) -> None:
        self._sources = sources
        self._settings = settings
        self.progress = LoadingProgress(len(sources))
        self.shown = False

    def show(self, ports: Mapping[str, int], tasks: Mapping[str, str], promised: Mapping[str, float]) -> None:
        """By model: the tasks of those that take pictures, the milliseconds of those that promise."""
        if self.shown:
            return  # a restarted engine is a line in the log, not a new beginning
        self.shown = True
        self.progress.end()
        settings = self._settings
        host = "localhost" if settings.host in ("0.0.0.0", "::") else settings.host
        http = "https" if settings.tls_cert else "http"
        address = f"{http}://{host}:{ports['http']}"
        print(f"\n  Carpool serves {_count(len(self._sources), 'model')} at {address}\n")
        for source in self._sources:
            print(f"    {_line(source, promised.get(source.config.name))}")
        if self._sources:
            print(f"\n  Try:      {_line_to_try(address, tasks) or self._metadata_line(address)}")
        if settings.model_control_mode == "explicit":
            print(f"  Load:     carpool models load NAME --url {address}")
        if "grpc" in ports:
            print(f"  gRPC:     {host}:{ports['grpc']}")
        print(f"  Metrics:  {http}://{host}:{ports['metrics']}/metrics")
        if is_loopback(settings.host):
            print(
                "  Open:     only this machine gets in; --host 0.0.0.0 opens it to others (docs/security.md)"
            )
        print("  Stop:     Ctrl-C finishes what was accepted\n", flush=True)

    def _metadata_line(self, address: str) -> str:
        return f"curl -s {address}/v2/models/{self._sources[0].config.name}"


def _line(source: ModelSource, slo_ms: float | None) -> str:
    config = source.config
    promise = f"promises {slo_ms:g} ms" if slo_ms else f"{config.mode.value} batching, no promise"
    versions = ", ".join(str(version.number) for version in source.versions)
    return f"{config.name:<24} version {versions:<8} {config.backend or '?':<12} {promise}"


def _line_to_try(address: str, tasks: Mapping[str, str]) -> str:
    """A picture for the first model that says something about pictures; it works as it is."""
    for task in tasks.values():
        photo = next((file for file in pictures() if file.stem == _PHOTOS.get(task)), None)
        if photo is not None:
            return f"curl -s -F file=@{shlex.quote(str(photo))} {address}/{task}"
    return ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
