"""Implements `carpool sweep`: rates × settings, and a report with the operating curve."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput, Unreachable

if TYPE_CHECKING:
    from carpool.config.repository import ModelSource
    from carpool.lab.sweep.conduct import SweepProgress
    from carpool.lab.sweep.sweep_results import Results
    from carpool.lab.sweep.sweep_runs import Setting, SweepOrder

DEMO_DETECTOR = "nanodet"
_MOST_SETTINGS, _MOST_RATES, _MOST_RUNS = 16, "64", 2000

_SETTINGS = "Settings"
SweepMode = StrEnum("SweepMode", ["promise", "knobs", "both"])


@dataclass(frozen=True, kw_only=True)
class Sweep(o.AsksServer):
    """Measure a model at many rates and settings, and plot its operating curve.

    The demo detector, with an SLO and with fixed batching settings. Open the report in a browser:

        carpool sweep

    Which delay and largest batch are best for this model, and is an SLO better?

        carpool sweep resnet50.onnx --slo-ms 50 --max-delay-ms 0,5,20 --max-batch 8,32

    A running server, with its own settings:

        carpool sweep http://localhost:8000 --name detector --rates 10,20,40,80

    Ctrl-C keeps the finished runs. The same command with the same --out continues.
    """

    target: str = o.argument(
        "A model file, folder or repository; a demo model's name; or a running server, http://HOST:PORT or "
        "grpc://HOST:PORT. Default: the demo detector.",
        default="",
        metavar="[MODEL|URL]",
        envvar=o.URL_VARIABLE,
    )
    name: str = o.option("", "Which model of a repository, or of the server.", show_default=False)
    mode: SweepMode = o.option(
        SweepMode.both, "Servers to measure: with an SLO, with fixed batching settings, or both.", _SETTINGS
    )
    slo_ms: float | None = o.option(
        None,
        "The SLO, in ms; goodput counts responses within it. Default: the model's own, or 100.",
        _SETTINGS,
    )
    max_delay_ms: str = o.option(
        "0,10", "Fixed settings: batching delays to try, in ms, like 0,5,20.", _SETTINGS
    )
    max_batch: str | None = o.option(
        None, "Fixed settings: largest batches to try, like 8,32. Default: the model's.", _SETTINGS
    )
    rates: str | None = o.option(None, "Requests per second, like 10,20,40, instead of --loads.", o.TRAFFIC)
    loads: str = o.option("0.3,0.6,0.9,1.1,1.5", "Rates as multiples of the planned capacity.", o.TRAFFIC)
    images: list[Path] | None = o.option(
        None,
        "Image to upload; repeatable. Default: the demo's, if the model takes images.",
        o.TRAFFIC,
        name="--image",
    )
    shapes: list[str] | None = o.option(
        None,
        "Shape of a tensor with open lengths, name:1,3,224,224.",
        o.TRAFFIC,
        name="--shape",
    )
    curve: str | None = o.option(
        None, "Batch times, as in plan. Default: those that the server measured.", o.TRAFFIC
    )
    step: list[str] | None = o.option(
        None,
        "A step of the pipeline, as in plan, in place of --curve; repeat it for each step.",
        o.TRAFFIC,
        metavar="CURVE[@IMAGES]",
    )
    instances: int = o.option(1, "With --curve: number of instances that run at the same time.", o.TRAFFIC)
    seconds: float = o.option(6.0, "Length of a run, in seconds.", o.RUN)
    warmup: float = o.option(1.0, "Warm-up with the same traffic before a run, in seconds.", o.RUN)
    repeats: int = o.option(2, "Runs per point; two show the noise.", o.RUN)
    seed: o.Seed = 1
    out: Path | None = o.option(
        None,
        "Folder of the report. An unfinished report of the same sweep is continued.",
        o.RUN,
        metavar="FOLDER",
        show_default="./carpool-sweep-MODEL-TIME",
    )

    def run(self) -> int:
        import asyncio

        import uvloop

        from carpool.lab.sweep.conduct import NoServer
        from carpool.lab.sweep.sweep_report import check_drawing, write_report

        check_drawing()
        order = order_of(self)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", order.model or "server")[:64]
        folder = self.out or Path(f"carpool-sweep-{name}-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            with _progress() as progress:
                results = uvloop.run(_sweep(order, folder, progress))
        except (Unreachable, NoServer) as error:
            print(f"carpool: {error.message}", file=sys.stderr)
            if (folder / "sweep.json").exists():
                print(f"The finished runs are kept: continue with --out {folder}", file=sys.stderr)
            return 1
        except OSError as error:
            raise InvalidInput(f"--out: {folder}: {error.strerror or error}") from None
        except asyncio.CancelledError:
            return 130
        if results is None:
            print("carpool: stopped before the first run was over", file=sys.stderr)
            return 1
        page = write_report(results, folder)
        if self.as_json:
            print(json.dumps(results.as_json(), indent=2, ensure_ascii=False))
        else:
            _print(results, page)
        return 0


async def _sweep(order: SweepOrder, folder: Path, progress: SweepProgress) -> Results | None:
    """Ctrl-C ends it and still reports; the second one does not."""
    import asyncio

    from carpool.lab.load.generator import collect_rarely
    from carpool.lab.sweep.conduct import conduct

    task = asyncio.current_task()
    assert task is not None
    stop = o.stop_on_signal(task.cancel)
    collect_rarely()
    return await conduct(order, folder, progress, stop)


# ---- from the options to an order


def order_of(options: Sweep) -> SweepOrder:
    from carpool.lab.load.aim import read_pictures, read_url
    from carpool.lab.load.facts import TRUSTING
    from carpool.lab.load.load_plan import Phase, check_length
    from carpool.lab.sweep.sweep_runs import SweepOrder

    url = options.target if "://" in options.target else ""
    place, source = (None, None) if url else _model(options)
    slo_ms, settings = _settings(options, source)
    rates: tuple[float, ...] = ()
    loads: tuple[float, ...] = ()
    if options.rates is not None:
        rates = _rising("--rates", options.rates, above=0, most=100_000, example="10,20,40")
    else:
        loads = _rising("--loads", options.loads, above=0, most=100, example="0.3,0.6,0.9")
    runs = len(settings) * len(rates or loads) * o.whole("--repeats", options.repeats, least=1, most=100)
    if runs > _MOST_RUNS:
        raise InvalidInput(
            f"these are {runs:,} runs, and {_MOST_RUNS:,} are the limit: give fewer settings or rates"
        )
    if url:
        read_url(url)
    elif options.api_key_file or options.ca or options.insecure:
        raise InvalidInput("--api-key-file, --ca and --insecure go with the address of a running server")
    if options.curve and options.step:
        raise InvalidInput("--curve is for one model, and --step for a pipeline: give one of them")
    if options.curve:
        shared.batch_curve(options.curve, None, None)
    shared.pipeline_steps(options.step or [], None)
    images = tuple(path.absolute() for path in options.images or ())
    read_pictures(images)
    if images and options.shapes:
        raise InvalidInput("--shape goes with tensors, not with --image")
    order = SweepOrder(
        settings=settings,
        model=source.config.name if source is not None else options.name,
        url=url,
        place=place,
        source=source,
        slo_ms=slo_ms,
        rates=rates,
        loads=loads,
        seconds=o.number("--seconds", options.seconds, above=0, most=3600),
        warmup=o.number("--warmup", options.warmup, most=3600),
        repeats=options.repeats,
        seed=options.seed,
        images=images,
        shapes=dict(shared.shape(text) for text in options.shapes or ()),
        curve=options.curve or "",
        steps=tuple(options.step or ()),
        instances=o.whole("--instances", options.instances, least=1, most=256),
        command=shlex.join(["carpool", *sys.argv[1:]]),
        trust=options.trust() if url else TRUSTING,
    )
    check_length([Phase(rate, order.warmup + order.seconds) for rate in rates])
    return order


def _settings(options: Sweep, source: ModelSource | None) -> tuple[float | None, tuple[Setting, ...]]:
    """And the promise: None leaves it to the server that runs already, which may have one of its own."""
    from carpool.core.objectives import Promise
    from carpool.lab.sweep.sweep_runs import AS_IS, SLO_MS, Setting, settings_of

    asked = options.slo_ms
    slo_ms = None if asked is None else o.number("--slo-ms", asked, above=0, most=3.6e6)
    if source is None:
        return slo_ms, (Setting(AS_IS),)
    if slo_ms is None:
        policy = source.config.policy
        slo_ms = policy.slo * 1e3 if isinstance(policy, Promise) else SLO_MS
    delays = _rising("--max-delay-ms", options.max_delay_ms, most=60_000, example="0,5,20")
    found = settings_of(options.mode, slo_ms, delays, shared.sizes("--max-batch", options.max_batch))
    if len(found) > _MOST_SETTINGS:
        raise InvalidInput(
            f"these are {len(found)} settings, more than the limit of {_MOST_SETTINGS}: each has its own "
            "server"
        )
    return slo_ms, tuple(found)


def _rising(
    option: str, text: str, *, above: float | None = None, most: float, example: str
) -> tuple[float, ...]:
    """Returns numbers that rise and differ."""
    like = f"numbers like {example}"
    found = shared.numbers(option, text, example=like, at_most=_MOST_RATES, above=above, most=most)
    return tuple(sorted({*found}))


def _model(options: Sweep) -> tuple[Path, ModelSource]:
    """Returns where it lies, and what its settings say."""
    from carpool.config.repository import find_models
    from carpool.demo import bundled_models, demo_models
    from carpool.lab.sweep.conduct import check_place

    path = Path(options.target)
    if not options.target or not path.exists():
        path = bundled_models() / (options.target or DEMO_DETECTOR)
    if not path.exists():
        demos = ", ".join(path.name for path in demo_models())
        raise InvalidInput(
            f"there is no file or folder {options.target!r}, nor a demo model of that name ({demos}), nor is "
            "it an address like http://localhost:8000"
        )
    found, _ = find_models([path], only=[options.name] if options.name else None)
    if len(found) > 1:
        names = [source.config.name for source in found]
        raise InvalidInput(f"{path} has several models: choose one with --name: {', '.join(names)}")
    place = path.absolute() if path.is_file() else found[0].config.path
    check_place(place)
    return place, found[0]


# ---- while it goes on, on stderr, and its points when it is over


@contextmanager
def _progress() -> Iterator[SweepProgress]:
    """Yields progress with a bar in a terminal, lines alone elsewhere."""
    from carpool.lab.sweep.conduct import SweepProgress

    if not sys.stderr.isatty():
        yield SweepProgress(lambda line: print(line, file=sys.stderr, flush=True))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as drawn:
        task = drawn.add_task("", total=None)

        def bar(done: int, total: int, text: str) -> None:
            drawn.update(task, completed=done, total=total or None, description=escape(text))

        yield SweepProgress(lambda line: drawn.console.print(line, markup=False, highlight=False), bar)


def _print(results: Results, page: Path) -> None:
    titles = ("setting", "load", "offered/s", "within SLO/s", "plan/s", "within SLO", "p99", "batch")
    rows = []
    for row in results.rows:
        cells = results.cells(row)
        cells["p99"] = f"{cells['p99 ms']} ms"
        mark = "void" if row.void else "best" if results.is_best(row) else ""
        rows.append((*(cells[title] for title in titles), mark))
    show.table((*titles, ""), rows, left=("setting", ""))
    show.paragraph("")
    for sentence in (*results.words(), results.noise_words()):
        show.paragraph(sentence, "· ")
    show.paragraph("")
    show.paragraph(f"Report: {page}")
