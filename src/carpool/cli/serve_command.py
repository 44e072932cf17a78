"""`carpool serve`: models behind HTTP and gRPC, until a signal says stop."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, make_dataclass, replace
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, get_type_hints

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.config.model import BATCH_HELP, Mode
from carpool.config.server import ServerSettings, settings_in_order
from carpool.errors import CarpoolError, ConfigError

if TYPE_CHECKING:
    import asyncio

    from carpool.config.repository import ModelSource
    from carpool.link.catalog import Catalog, LoadingStep

_ENGINE = "carpool.process.start:engine"
_HTTP = "carpool.process.front_ends:http"
_GRPC = "carpool.process.front_ends:grpc"
_HTTP_IMPORTS = ("carpool.frontend.http.app",)
_GRPC_IMPORTS = ("carpool.frontend.grpc.grpc_server",)
_PHOTOS = {"detect": "astronaut", "classify": "coffee", "segment": "astronaut", "embed": "chelsea"}
_WATCHED_S = 5.0
_LOGGED_S = 10.0


class _Serve:
    """Serve models over HTTP and gRPC: image routes and Triton's protocol (KServe v2).

    The demo models:

        carpool serve

    A Triton repository:

        carpool serve models/

    One ONNX file with an SLO. A request is answered within 50 ms, or rejected early:

        carpool serve resnet50.onnx --slo-ms 50

    Every option is also an environment variable: CARPOOL_HTTP_PORT, CARPOOL_SLO_MS, … A flag that a variable
    switched on is switched off with --no-, as in --no-on-demand.
    """

    def run(self) -> int:
        return _run(**vars(self))


_PANELS = {  # of the help, each from this setting on
    "slo_ms": "The models",
    "host": "Addresses",
    "frontends": "Processes",
    "gate_status": "Balancers",
    "watchdog_s": "Processes",
    "model_control_mode": "Loading models",
    "allow_rollouts": "Rollouts and replicas",
    "allow_client_shm": "Security",
    "metrics_config": "Metrics, traces and logs",
}


def _panels() -> dict[str, str]:
    panel, of_each = "", {}
    for setting in settings_in_order():
        panel = of_each[setting.name] = _PANELS.get(setting.name, panel)
    return of_each


def _option(setting: Field[Any], kind: Any, panel: str) -> tuple[str, Any, Any]:
    """Returns a setting as a field of the verb: None where it is not given."""
    default = "" if setting.default is MISSING else setting.default
    told = f"{default:g}" if isinstance(default, int | float) and kind is not bool else default
    shown = told if isinstance(told, str) and told else False
    more = {"panel": panel, "show_default": shown, **setting.metadata["option"]}
    typed = list[str] if isinstance(default, tuple) else kind
    if kind is bool:
        more["name"] = f"{more['name']}/--no-{more['name'].removeprefix('--')}"
    return setting.name, typed | None, o.option(None, setting.metadata["words"], **more)


_KINDS = get_type_hints(ServerSettings)
_PATHS = o.argument(
    "Model files, model folders or Triton repositories; object storage such as s3://BUCKET/PATH; or "
    "models:/NAME@ALIAS of a registry. Default: CARPOOL_MODELS, or the demo models.",
    default=None,
)
Serve = make_dataclass(
    "Serve",
    [
        ("paths", list[Path] | None, _PATHS),
        *(
            _option(one, _KINDS[one.name], _panels()[one.name])
            for one in settings_in_order()
            if one.metadata.get("words")
        ),
    ],
    bases=(_Serve,),
    kw_only=True,
)
Serve.__doc__ = _Serve.__doc__


def _run(paths: Sequence[Path] | None, **given: object) -> int:
    """Returns the exit code."""
    import asyncio

    import uvloop

    from carpool.config.control_groups import memory_limit, within_limit
    from carpool.config.server import server_settings
    from carpool.demo import demo_models
    from carpool.extensions import started
    from carpool.frontend.access.access import check_files
    from carpool.observe.descriptors import raise_limit
    from carpool.observe.logs import configure, finish, logger
    from carpool.process.supervisor import FrontendKind, Supervisor

    settings, warnings = server_settings(given)
    if settings.quiet:
        if settings.log_level == "debug":
            raise ConfigError("--quiet and --log-level debug contradict each other: give one", field="quiet")
        settings = replace(settings, log_level="error" if settings.log_level == "error" else "warning")
    if settings.labels:
        from carpool.cli.inspect_command import named_labels

        settings = replace(settings, labels=named_labels(settings.labels))
    configure(settings.log_format, settings.log_level)
    for warning in warnings:
        logger("server").warning("settings", message=warning)
    raise_limit(settings.max_connections)
    limit = memory_limit()
    if limit is not None:
        slots_mb, most_mb = settings.arena_bytes >> 20, within_limit(limit) >> 20
        sizes = {"limit_mb": limit >> 20, "each_budget_mb": most_mb, "slots_mb": slots_mb}
        logger("server").info("memory-limit", **sizes)
    check_files(settings)
    _warn_if_open(settings)
    _warn_of_folders(settings)
    paths = paths or [Path(one) for one in settings.models] or demo_models()
    settings = replace(settings, models=tuple(map(str, paths)))
    paths = _fetched(paths, settings)
    sources, mistaken = _find(paths, settings)
    settings = _begun(settings)
    verb = "Expecting" if settings.on_demand else "Loading"
    if not settings.quiet:
        print(f"{verb} {show.count(len(sources) + mistaken, 'model')} …", flush=True)
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
            FrontendKind("http", _HTTP, settings.frontends, ports, _HTTP_IMPORTS),
            FrontendKind("grpc", _GRPC, settings.grpc_frontends, grpc, _GRPC_IMPORTS),
            *(
                FrontendKind(process.name, extension.whole(process.start), 1, process.ports, vital=False)
                for extension in started(settings)
                for process in extension.processes
            ),
        ],
        begin=_started_first(sources, settings),
        ready=screen.show,
        loading=screen.progress.step,
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(supervisor.run())
    finish()
    return code


def _begun(settings: ServerSettings) -> ServerSettings:
    """Lets the extensions that are switched on check their options; returns those that the processes get."""
    from carpool.extensions import started
    from carpool.observe.logs import logger

    for extension in started(settings):
        if extension.begin:
            settings, warning = extension.part(extension.begin)(settings)
            if warning:
                logger("server").warning("settings", message=warning)
    return settings


def _started_first(sources: Sequence[ModelSource], settings: ServerSettings) -> str:
    """Returns the place of what starts the process beside the engine, if a model runs there that is loaded at
    the start; else nothing."""
    from carpool.config.backend_kinds import kind_of
    from carpool.extensions import installed

    processes = {kind_of(source.config.backend).process for source in sources if source.config.backend}
    if settings.on_demand or "runner" not in processes:
        return ""
    return next((one.whole(one.zygote) for one in installed().values() if one.zygote), "")


def _fetched(paths: Sequence[Path], settings: ServerSettings) -> Sequence[Path]:
    """Returns the paths, with what extensions put in the place of addresses, and after they brought what is
    not on this machine."""
    from carpool.config.asked_folders import asked_under
    from carpool.extensions import installed

    fetching = [one for one in installed().values() if one.fetch]
    asked = asked_under([path for path in paths if not any(one.fetches(path) for one in fetching)])
    for extension in fetching:
        if extension.name in asked or any(map(extension.fetches, paths)):
            paths = extension.part(extension.fetch)(paths, settings, _tell)
    return paths


def _tell(step: str) -> None:
    print(f"{step} …", flush=True)


def _find(paths: Sequence[Path], settings: ServerSettings) -> tuple[Sequence[ModelSource], int]:
    """Returns the models, and how many more have mistakes in their settings: mistakes are reported before
    anything is started, and those that stop nothing by the engine."""
    from carpool.config.repository import find_models
    from carpool.engine.profile.hardware import gpu_count

    mistakes: dict[str, ConfigError] = {}
    sources, _ = find_models(
        paths,
        gpus=gpu_count(),
        only=settings.models_at_start,
        some=settings.needs_models,
        mistakes=None if settings.exit_on_error else mistakes,
    )
    if mistakes and not sources and settings.needs_models:
        raise next(iter(mistakes.values()))
    if settings.task or settings.labels or settings.size or settings.preset:
        if len(sources) + len(mistakes) != 1:
            raise ConfigError(
                "--task, --labels, --size and --preset apply to a single model, but "
                f"{len(sources) + len(mistakes)} are served: write them into the model.toml of each"
            )
        settings.pictures.applied(sources[0].config)
    return sources, len(mistakes)


def _warn_if_open(settings: ServerSettings) -> None:
    from carpool.frontend.access.access import is_loopback
    from carpool.observe.logs import logger

    if (
        settings.model_control_mode == "explicit"
        and not settings.admin_key_file
        and not settings.api_key_file  # which close control to clients without a key
        and not is_loopback(settings.host)
    ):
        logger("server").warning(
            "control-is-open",
            host=settings.host,
            why="every client that reaches this address can load models, and so run code: give "
            "--admin-key-file",
        )


def _warn_of_folders(settings: ServerSettings) -> None:
    """Says which folders of this server every user of the machine can write to."""
    from carpool.observe.logs import logger

    for name, folder in (("state", settings.state_dir), ("cache", settings.cache_dir)):
        if folder is not None and folder.is_dir() and folder.stat().st_mode & stat.S_IWOTH:
            why = "every user of this machine can change the files that this server reads there"
            logger("server").warning("folder-is-open", what=name, folder=str(folder), why=why)


def _alone(paths: Sequence[Path], settings: ServerSettings, screen: _Screen) -> int:
    import asyncio

    import uvloop

    from carpool.frontend import documents
    from carpool.observe.logs import logger
    from carpool.observe.output import caught
    from carpool.process import lone_server  # all of the engine, which otherwise has a process of its own
    from carpool.process.children import EXIT_CONFIG, EXIT_CUT_OFF, EXIT_FAILED
    from carpool.process.stop_signals import heard_signals

    async def serve() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def signalled(number: signal.Signals) -> None:
            if stop.is_set():
                os._exit(128 + number)  # the second one: at once
            stop.set()

        def ready(catalog: Catalog, ports: Mapping[str, int]) -> None:
            screen.show(
                ports,
                documents.picture_tasks(catalog),
                documents.promises(catalog),
                documents.failures(catalog),
                documents.assumptions(catalog),
                documents.versions_of(catalog),
                documents.unbatched(catalog),
            )

        def progress(step: LoadingStep) -> None:  # from the thread that loads
            loop.call_soon_threadsafe(screen.progress.step, step)

        with heard_signals(signalled, logger("serve")):
            return await lone_server.serve(paths, settings, stop, progress=progress, ready=ready)

    try:
        with (
            caught(settings.log_format, settings.log_level),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            cut_off = runner.run(serve())
            if not screen.shown:
                os._exit(EXIT_CUT_OFF if cut_off else 0)  # a thread that loads a model would be waited for
    except CarpoolError as error:
        print(f"carpool: {error.message}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED
    return EXIT_CUT_OFF if cut_off else 0


class _Screen:
    """Shows what is served, where, under which promise, and a line to try it with: once, when it is true."""

    def __init__(self, sources: Sequence[ModelSource], settings: ServerSettings) -> None:
        self._sources = sources
        self._settings = settings
        self.progress = LoadingProgress(quiet=settings.quiet)
        self.shown = False

    def show(
        self,
        ports: Mapping[str, int],
        tasks: Mapping[str, str],
        promised: Mapping[str, float],
        failed: Mapping[str, str],
        assumed: Mapping[str, str] = MappingProxyType({}),
        versions: Mapping[str, str] = MappingProxyType({}),
        unbatched: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Shows, by model, the tasks of those that take pictures, the milliseconds of those that promise, why
        others are not served, what nothing says about their pixels, the versions that serve (after a
        rollback they are not the newest), and why requests of a model never share a batch."""
        from carpool.frontend.access.access import is_loopback

        if self.shown:
            return  # a restarted engine is a line in the log, not a new beginning
        self.shown = True
        self.progress.end()
        settings = self._settings
        if settings.quiet:
            return
        host = "localhost" if settings.host in ("0.0.0.0", "::") else settings.host
        http = "https" if settings.tls_cert else "http"
        address = f"{http}://{host}:{ports['http']}"
        served = [source for source in self._sources if source.config.name not in failed]
        print(f"\n  Carpool serves {show.count(len(served), 'model')} at {address}\n")
        for source in served:
            config, slo_ms = source.config, promised.get(source.config.name)
            how = "fixed" if config.mode is Mode.FIXED else config.mode.value
            promise = f"SLO {slo_ms:g} ms" if slo_ms else f"{how} batching, no SLO"
            promise = "loaded on demand" if settings.on_demand else promise
            found = ", ".join(str(version.number) for version in source.versions)
            serving = versions.get(config.name, found)
            print(f"    {config.name:<24} version {serving:<8} {config.backend or '?':<12} {promise}")
        for name, why in failed.items():
            print(f"    {name:<24} not served: {why}")
        for line in _warnings(assumed, unbatched):
            print(f"    ! {line}")
        if served:
            curl = "curl -sS" if not settings.tls_cert else f"curl -sS --cacert {quote(settings.tls_cert)}"
            metadata = f"{curl} {address}/v2/models/{served[0].config.name}"
            print(f"\n  Try:      {_line_to_try(curl, address, tasks) or metadata}")
        if settings.model_control_mode == "explicit":
            print(f"  Load:     carpool models load NAME --url {address}")
        if "grpc" in ports:
            print(f"  gRPC:     {host}:{ports['grpc']}")
        print(f"  Metrics:  {http}://{host}:{ports['metrics']}/metrics")
        if is_loopback(settings.host):
            print("  Open:     only from this machine; --host 0.0.0.0 opens it to others (docs/security.md)")
        print("  Stop:     Ctrl-C finishes the accepted requests\n", flush=True)


def _warnings(assumed: Mapping[str, str], unbatched: Mapping[str, str]) -> Iterator[str]:
    for name, keys in assumed.items():
        what = "set its preset" if keys.startswith("resize, mean") else "see carpool inspect"
        yield f"{name}: responses may be wrong, because its {keys} is not known: {what}"
    for name, why in unbatched.items():
        yield f"{name}: each request runs alone, because {why}; {BATCH_HELP}"


def _line_to_try(curl: str, address: str, tasks: Mapping[str, str]) -> str:
    """A picture for the first model that says something about pictures; it works as it is."""
    from carpool.demo import pictures

    for task in tasks.values():
        photo = next((file for file in pictures() if file.stem == _PHOTOS.get(task)), None)
        if task == "read":
            from carpool.demo.ocr_repository import ocr_page

            photo = ocr_page()
        if photo is not None:
            return f"{curl} -F file=@{quote(str(photo))} {address}/{task}"
    return ""


class LoadingProgress:
    """Shows each step of loading, in the loop's thread. A step may take minutes: the time shown goes on."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._last: LoadingStep | None = None
        self._said = 0  # models before this one are over with, and that was shown
        self._began = time.monotonic()
        self._watched = sys.stdout.isatty()
        self._timer: asyncio.TimerHandle | None = None
        self._over = quiet

    def step(self, step: LoadingStep) -> None:
        if self._over:
            return  # a restarted engine is a line in the log, not a new beginning
        self._last = step
        if self._watched and step.number != self._said:
            self._say()
        if self._timer is None:
            self._remind()

    def end(self) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _remind(self) -> None:
        import asyncio

        if self._timer is not None:
            self._say()
        every = _WATCHED_S if self._watched else _LOGGED_S
        self._timer = asyncio.get_running_loop().call_later(every, self._remind)

    def _say(self) -> None:
        last = self._last
        assert last is not None
        self._said = last.number
        seconds = round(time.monotonic() - self._began)
        if self._watched:
            print(f"  {last} ({seconds} s)", flush=True)
        else:
            from carpool.observe.logs import logger

            fields = {"step": last.step, "number": last.number, "of": last.of, "seconds": seconds}
            logger("server").info("loading", model=last.model, **fields)
