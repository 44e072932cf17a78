"""Leads a sweep from beginning to end: servers up, the curve known, one run after the other, servers down.

A server of our own has the model with other batching settings, on free loopback ports. The model is
linked, not copied.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from carpool import __version__
from carpool.config.repository import PBTXT, TOML, VERSION, ModelSource
from carpool.config.rules import read_settings
from carpool.core.curve import BatchCurve
from carpool.core.numerals import numeral
from carpool.demo import pictures as demo_pictures
from carpool.engine.profile.hardware import CpuWatch, hardware
from carpool.errors import CarpoolError, InvalidInput, Unreachable
from carpool.lab.load.aim import Aim, http_facts, read_url, take_aim
from carpool.lab.load.facts import only_model
from carpool.lab.load.generator import run as run_load
from carpool.lab.load.load_plan import Open, Phase, Plan
from carpool.lab.load.messages import Filling
from carpool.lab.sweep.sweep_prediction import (
    GIVEN,
    STEPS_GIVEN,
    CurveEstimate,
    SweepBasis,
    ask_server,
    predict,
    rates_of,
    read_basis,
    try_out,
)
from carpool.lab.sweep.sweep_results import Results
from carpool.lab.sweep.sweep_runs import (
    PROMISE,
    SLO_MS,
    Journal,
    MeasuredRun,
    Point,
    Setting,
    SweepOrder,
    Watcher,
    measured,
    points,
)
from carpool.sim.step_simulation import read_steps

T = TypeVar("T")


def check_place(place: Path) -> None:
    """Rejects a single version: in a folder of links it could not be distinguished from the others."""
    if place.is_file() and VERSION.fullmatch(place.parent.name):
        raise InvalidInput(f"{place} is one of a model's versions: give the model's folder instead")


def make_variant(source: ModelSource, place: Path, setting: Setting, under: Path) -> Path:
    """Returns the folder to serve: `under`/…/NAME. Nothing of the model itself is touched or copied."""
    home = place if place.is_dir() else place.parent
    folder = under / source.config.name
    folder.mkdir(parents=True)
    for entry in home.iterdir():
        if entry.name not in (PBTXT, TOML):
            (folder / entry.name).symlink_to(entry.resolve())
    if (home / PBTXT).exists():
        text = pbtxt_with_fixed(read_settings(home / PBTXT), setting)
        (folder / PBTXT).write_text(text, "utf-8")
        return folder
    before = read_settings(home / TOML) if (home / TOML).exists() else ""
    settings = tomllib.loads(before)
    if place.is_file():
        settings["file"] = place.name
    (folder / TOML).write_text(toml_with_fixed(settings, setting), "utf-8")
    return folder


def toml_with_fixed(settings: dict[str, Any], setting: Setting) -> str:
    """Returns the settings without the model's own promise and batching."""
    own = ("slo_ms", "slo_may_grow", "batching", "name")
    kept = {key: value for key, value in settings.items() if key not in own}
    kept["batching"] = {"max_delay_ms": setting.max_delay_ms}
    if setting.max_batch is not None:
        kept["max_batch"] = setting.max_batch
    return "".join(f"{_toml(key)} = {_toml(value)}\n" for key, value in kept.items())


def _toml(value: Any) -> str:
    """Returns it on one line: tables are written inside. A string or a truth is what it is in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value).replace("\x7f", "\\u007f") if isinstance(value, str | bool) else str(value)


def pbtxt_with_fixed(text: str, setting: Setting) -> str:
    from google.protobuf import text_format

    from carpool.config.triton_text import read_text

    config = read_text(text, PBTXT).message
    config.ClearField("dynamic_batching")
    config.dynamic_batching.max_queue_delay_microseconds = round((setting.max_delay_ms or 0.0) * 1e3)
    if setting.max_batch is not None:
        config.max_batch_size = setting.max_batch
    return str(text_format.MessageToString(config))


_CODE = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
_ADDRESS = re.compile(r"Carpool serves .* at (http://\S+)")
_ERROR = re.compile(r"""^carpool: (.+)|\berror="(.+)"$""")
_STARTING_S = 900.0  # a model may be measured first
_LOOK_S = 0.05
_STOPPING_S = 20.0
_OURS = ("CARPOOL_SLO_MS", "CARPOOL_MODEL_CONTROL_MODE", "CARPOOL_LOAD_MODELS")  # would change the numbers


class NoServer(CarpoolError):
    """It did not start, or it ended too early."""

    reason = "server-died"


class OwnServer:
    """Represents one process with its children, and its log beside the results."""

    def __init__(
        self,
        model: Path,
        log: Path,
        options: Sequence[str] = (),
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._log = log
        arguments = [sys.executable, "-P", "-c", _CODE, "serve", str(model), "--host", "127.0.0.1"]
        arguments += ["--http-port", "0", "--metrics-port", "0", "--grpc-frontends", "0"]
        arguments += ["--model-control-mode", "none", "--drain-s", "1", *options]
        kept = {name: value for name, value in os.environ.items() if name not in _OURS} | dict(environ)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=kept,
                start_new_session=True,  # Ctrl-C is ours to hear
            )

    async def address(self) -> str:
        """Returns where it serves, once it does."""
        give_up = time.monotonic() + _STARTING_S
        while time.monotonic() < give_up:
            found = _ADDRESS.search(self._said())
            if found:
                return found[1]
            self.check()
            await asyncio.sleep(_LOOK_S)
        raise NoServer(f"the server was not ready within {_STARTING_S:g} s; its log is {self._log}")

    def check(self) -> None:
        """Raises `NoServer` with its last words if it is gone."""
        if self._process.poll() is not None:
            raise NoServer(f"the server ended: {last_words(self._said())} (its log is {self._log})")

    def ask_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait until it has; with those that were not asked, or do not listen, it is brought about."""
        try:
            self._process.wait(_STOPPING_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(_STOPPING_S)

    def _said(self) -> str:
        return self._log.read_text("utf-8", "replace")


def last_words(log: str) -> str:
    """Returns the last error in it, or else its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [found[1] or found[2] for line in lines if (found := _ERROR.search(line))]
    return (errors or lines or ["it said nothing"])[-1][:500]


_CONNECTIONS, _OTHER_FILES = 2048, 128
_TIMEOUT_S = 10.0  # of a request, at least
_OVERHEAD_S = 0.5  # between two runs, until it is known better


@dataclass
class SweepProgress:
    """Prints a line for every finished run, with the time that is left."""

    write: Callable[[str], None]
    bar: Callable[[int, int, str], None] = lambda _done, _total, _text: None
    done: int = 0
    before: int = 0
    total: int = 0
    began: float = 0.0

    def step(self, text: str) -> None:
        self.bar(self.done, self.total, text)

    def planned(self, left: int, done: int, seconds_each: float) -> None:
        self.done = self.before = done
        self.total = left + done
        self.began = time.monotonic()
        before = f" ({done} are done already)" if done else ""
        self.write(f"{left} runs{before}, about {lasting(left * (seconds_each + _OVERHEAD_S))}")

    def ended(self, run: MeasuredRun) -> None:
        self.done += 1
        each = (time.monotonic() - self.began) / (self.done - self.before)
        self.write(
            f"[{self.done}/{self.total}] {run.setting} at {run.rate:.9g}/s: {numeral(run.goodput_rps)}/s "
            f"within the SLO, p99 {run.p99_ms:,.0f} ms{', void' if run.void else ''}; "
            f"{lasting((self.total - self.done) * each)} left"
        )
        self.bar(self.done, self.total, "")


def lasting(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


async def conduct(
    order: SweepOrder, folder: Path, progress: SweepProgress, stop: asyncio.Event
) -> Results | None:
    """Returns everything that was found, also by an earlier sweep in this folder; None if that is nothing at
    all."""
    identity = order.identity()
    journal = Journal.open(folder, identity)
    basis = None if journal.basis is None else read_basis(journal.basis)
    if basis is None or _left(order, basis, journal):
        with TemporaryDirectory(prefix="carpool-sweep-") as scratch:
            stage = _Stage(order, folder, Path(scratch), progress)
            try:
                await _or_stop(stage.set_up(), stop)
                if basis is None and not stop.is_set():
                    basis = await _or_stop(stage.find_out(), stop)
                    if basis is not None:
                        journal.begin(identity, basis.as_json())
                if basis is not None and not stop.is_set():
                    await stage.measure(basis, journal, stop)
            finally:
                stage.end()
    if basis is None or not journal.runs:
        return None
    progress.step("simulating the same")
    return _results(order, basis, journal)


async def _or_stop(work: Coroutine[None, None, T], stop: asyncio.Event) -> T | None:
    """Returns its result; None if it was stopped before."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for waiting in (task, stopped):
            waiting.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


@dataclass
class _Stage:
    """Holds the servers that are asked, by the name of their setting."""

    order: SweepOrder
    folder: Path
    scratch: Path  # for the settings of our own servers, as long as they run
    progress: SweepProgress
    aims: dict[str, Aim] = field(default_factory=dict)
    own: list[OwnServer] = field(default_factory=list)

    async def set_up(self) -> None:
        """All servers at once, since an idle one costs nothing: then settings can take turns run by run."""
        for setting in self.order.settings:
            self.aims[setting.name] = _aim(self.order, self.order.url or await self._serve(setting))

    async def _serve(self, setting: Setting) -> str:
        self.progress.step(f"starting a server: {setting.name}")
        place, number = self.order.place, str(len(self.own) + 1)
        assert place is not None
        options: tuple[str, ...] = ()
        if setting.kind == PROMISE:
            options = ("--slo-ms", str(setting.slo_ms))
        else:
            assert self.order.source is not None
            place = make_variant(self.order.source, place, setting, self.scratch / number)
        self.own.append(OwnServer(place, self.folder / f"server-{number}.log", options))
        return await self.own[-1].address()

    async def find_out(self) -> SweepBasis:
        order = self.order
        last = order.settings[
            -1
        ]  # fixed settings, if there are any: they form larger batches than a promise may want
        aim = self.aims[last.name]
        self.progress.step("reading the batch times")
        if order.steps:
            first = read_steps(order.steps)[0].curve
            belief = CurveEstimate(first, order.instances, STEPS_GIVEN, steps=order.steps)
        elif order.curve:
            belief = CurveEstimate(BatchCurve.parse(order.curve), order.instances, GIVEN)
        else:
            belief = ask_server(aim) or await try_out(aim, last.max_batch)
        slo_ms = order.slo_ms or belief.slo_ms or SLO_MS
        many = f"{len(aim.pictures)} images in turn" if aim.pictures else "random tensors"
        rates = rates_of(order.rates, order.loads, belief, slo_ms)
        return SweepBasis(aim.model, slo_ms, rates, belief, f"{many}, one in a request")

    async def measure(self, basis: SweepBasis, journal: Journal, stop: asyncio.Event) -> None:
        left = _left(self.order, basis, journal)
        self.progress.planned(len(left), len(journal.runs), self.order.warmup + self.order.seconds)
        for point in left:
            self.progress.step(f"{point.setting} at {point.rate:.9g}/s")
            for server in self.own:
                server.check()
            run = await _measure(self.order, basis, point, self.aims[point.setting], stop)
            if stop.is_set():
                return  # a run that was cut short is none
            journal.add(run)
            self.progress.ended(run)

    def end(self) -> None:
        for server in self.own:
            server.ask_to_end()
        for server in self.own:
            server.end()


def _aim(order: SweepOrder, url: str) -> Aim:
    """Aims with pictures where the model takes them, tensors else. Sends one request, to see."""
    address = read_url(url)
    tensors = Aim(url, order.model, filling=Filling(shapes=order.shapes, seed=order.seed), trust=order.trust)
    if address.over_grpc:
        return _tried(tensors)
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]  # enough for whom an overloaded server lets wait
    many = max(64, min(_CONNECTIONS, allowed - _OTHER_FILES) if allowed > 0 else _CONNECTIONS)
    pictures = replace(tensors, pictures=order.images, connections=many, filling=Filling())
    if order.images:
        return _tried(pictures)
    facts = http_facts(address, order.trust)
    facts.check_ready()
    model = order.model or only_model(facts)
    if not order.shapes:
        with suppress(Unreachable):
            return _tried(replace(pictures, model=model, pictures=tuple(demo_pictures())))
    return _tried(replace(tensors, model=model, connections=many))


def _tried(aim: Aim) -> Aim:
    take_aim(aim)
    return aim


def _points(order: SweepOrder, basis: SweepBasis) -> list[Point]:
    names = [setting.name for setting in order.settings]
    return list(points(names, basis.rates, order.repeats, order.seed))


def _left(order: SweepOrder, basis: SweepBasis, journal: Journal) -> list[Point]:
    """Returns what is not measured yet."""
    done = {run.key for run in journal.runs}
    return [point for point in _points(order, basis) if point.key not in done]


async def _measure(
    order: SweepOrder, basis: SweepBasis, point: Point, aim: Aim, stop: asyncio.Event
) -> MeasuredRun:
    phases = [Phase(point.rate, order.seconds)]
    if order.warmup:
        phases.insert(0, Phase(point.rate, order.warmup, warmup=True))
    slo = basis.slo_ms / 1e3
    patience = max(_TIMEOUT_S, 4 * slo)
    plan = Plan(Open(tuple(phases), seed=order.seed + point.seed), slo=slo, timeout=patience, drain=patience)
    seen, watched = Watcher(len(phases) - 1), CpuWatch()
    at = _now()
    report = await run_load(plan, take_aim(aim), stop=stop, record=seen)
    return measured(point, at, report, seen, watched.read().steal)


def _results(order: SweepOrder, basis: SweepBasis, journal: Journal) -> Results:
    import onnxruntime

    rates = [rate for rate, _ in basis.rates]
    seconds = order.warmup + order.seconds
    return Results(
        model=basis.model or order.model,
        target=order.url or "one server per setting",
        requests=basis.requests,
        slo_ms=basis.slo_ms,
        curve=basis.belief.text,
        curve_from=basis.belief.source,
        instances=basis.belief.instances,
        capacity_rps=round(basis.belief.capacity(basis.slo_ms), 3),
        settings=order.settings,
        seconds=order.seconds,
        planned_runs=len(_points(order, basis)),
        runs=tuple(journal.runs),
        prediction=tuple(predict(order.settings, rates, basis.belief, basis.slo_ms, seconds)),
        machine=f"{hardware()}; {platform.system()} {platform.release()}",
        date=_now(),
        command=order.command,
        versions={
            "carpool": __version__,
            "Python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
    )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
