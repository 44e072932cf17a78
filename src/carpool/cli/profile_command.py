"""Implements `carpool profile`: how long batches take here, and which a promise allows; or what a server
measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar
from urllib.parse import quote

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.core.numerals import numeral
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.config.repository import ModelSource
    from carpool.lab.batch_profile import ProfileQuestion, ProfileReport

_SOME_CORES = 0.1  # less is not worth a word
_GOES_WITH_A_URL = ("model", "name", "as_json", "api_key_file", "ca", "insecure")
_MOST_NAMED = 8
_DOUBTFUL = "carpool: these numbers are unreliable, because the machine was busy"
_UNSURE = "Unreliable, so that plans would be wrong; measure again on a quiet machine."
_FOR_SIMULATE = "For simulate and plan: --curve "  # and then all of it on one line, to be copied


class Report(Protocol):
    """Defines a dataclass with what was measured."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def noisy(self) -> bool: ...


ReportT = TypeVar("ReportT", bound=Report)


@dataclass(frozen=True, kw_only=True)
class ProfileVerb(o.AsksServer):
    """Measure batch times on this machine, and which SLO they allow.

    Which SLO could this model meet?

        carpool profile resnet50.onnx --slo-ms 30,50,100

    Two instances with one thread each, compared with one that has two:

        carpool profile resnet50.onnx --instances 2 --threads 1
        carpool profile resnet50.onnx --instances 1 --threads 2

    What a running server has learned about a model:

        carpool profile http://localhost:8000 --name detector
    """

    model: str = o.argument(
        "A model file, a model folder, or a repository with --name; or the URL of a running server.",
        envvar=o.URL_VARIABLE,
    )
    name: str | None = o.option(None, "Which model of a repository or a server.")
    sizes: str | None = o.option(None, "Batch sizes to measure, like 1,2,4,8. Default: powers of two.")
    slo_ms: str = o.option("30,50,100", "SLOs to evaluate, in ms, like 30,50,100.")
    repeats: int = o.option(10, "Least number of runs per batch size, after the warm-up.")
    instances: int | None = o.option(
        None, "Instances that run at the same time. Default: as the server would choose."
    )
    threads: int | None = o.option(None, "Threads of each instance. Default: as the server would choose.")
    backend: str | None = o.option(
        None, "The engine, like openvino or fake. Default: by the type of the file."
    )
    plot: Path | None = o.option(
        None, "Plot the points, the line, the knee and the SLOs.", metavar="FILE.png"
    )

    def run(self) -> None:
        if "://" in self.model:
            self._ask_server()
        else:
            self._measure()

    def _measure(self) -> None:
        from carpool.lab.batch_profile import ProfileQuestion, the_model

        shared.drawing(self.plot)
        like = "ms like 30,50,100"
        slos_ms = shared.numbers("--slo-ms", self.slo_ms, example=like, at_most="16 SLOs", above=0, most=1e7)
        question = ProfileQuestion(
            Path(self.model),
            self.name,
            shared.sizes("--sizes", self.sizes),
            tuple(ms / 1e3 for ms in slos_ms),
            o.whole("--repeats", self.repeats, least=2, most=10_000),
            None if self.instances is None else o.whole("--instances", self.instances, least=1, most=256),
            None if self.threads is None else o.whole("--threads", self.threads, least=1, most=1024),
            self.backend,
        )
        self.measure(the_model(question), question)

    def measure(self, source: ModelSource, question: ProfileQuestion) -> None:
        """Measures the model of this folder, and shows what was found."""
        from carpool.lab.batch_profile import profile
        from carpool.lab.plots import batch_profile

        with show.status("reading the model") as tell:
            report = profile(question, tell, source)
        if self.plot is not None:
            with o.blamed_on("--plot"):
                batch_profile(self.plot, report)
        self.show_report(report, _print)

    def show_report(self, report: ReportT, as_table: Callable[[ReportT], None]) -> None:
        if self.as_json:
            print(json.dumps(asdict(report), indent=2))
        else:
            as_table(report)
        if report.noisy:
            print(_DOUBTFUL, file=sys.stderr)

    def check_given(self, known: tuple[str, ...], why: str) -> None:
        """Rejects options that are not known here, with the reason."""
        for field in fields(self):
            if field.name not in known and getattr(self, field.name) != field.default:
                raise InvalidInput(f"--{field.name.replace('_', '-')} {why}")

    def _ask_server(self) -> None:
        """Nothing is measured: a running server is asked what it measured and believes now."""
        from carpool.lab.load.facts import Failed, RunningServer

        self.check_given(
            _GOES_WITH_A_URL, "is for measuring, and a running server only reports what it knows"
        )
        server = RunningServer(self.model, self.trust())
        name = self.name
        if not name:
            try:
                names = [str(name) for name in server.get("/health")["models"]]
            except (KeyError, TypeError):
                raise Failed("the server at this address is not Carpool") from None
            if len(names) != 1:
                there = ", ".join(names[:_MOST_NAMED]) or "none"
                raise InvalidInput(f"--name is missing: the server has {there}")
            name = names[0]
        document = server.get(f"/v2/models/{quote(name, safe='')}/profile")
        if self.as_json:
            print(json.dumps(document, indent=2))
        else:
            self.print_document(document)

    def print_document(self, document: dict[str, Any]) -> None:
        """Prints what a server answers about the profile of a model."""
        _print_document(document)


def _print(report: ProfileReport) -> None:
    instances = "1 instance" if report.instances == 1 else f"{report.instances} instances"
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    show.paragraph(f"{report.model} on {report.backend}, {instances} × {threads}; {report.hardware}.")
    show.table(
        ("batch", "time", "±", "spread", "runs", "images/s", "off the line", "memory"),
        [
            (
                f"{row.batch}{' ← knee' if row.batch == report.knee else ''}",
                f"{numeral(row.ms, 4)} ms",
                show.percent(row.sure),
                show.percent(row.spread),
                f"{row.runs}",
                numeral(row.images_per_s),
                f"{100 * row.off_line:+.1f} %",
                f"{row.memory_mb:,.0f} MB" if row.memory_mb else "–",
            )
            for row in report.rows
        ],
    )
    show.paragraph("")
    show.table(
        ("SLO", "batch", "takes", "images/s", "largest", "its images/s", "why"),
        [
            (
                f"{budget.slo_ms:g} ms",
                f"{budget.batch or '–'}",
                f"{numeral(budget.batch_ms)} ms" if budget.batch else "–",
                numeral(budget.images_per_s) if budget.batch else "–",
                f"{budget.largest or '–'}",
                numeral(budget.largest_images_per_s) if budget.largest else "–",
                budget.why,
            )
            for budget in report.budgets
        ],
        left=("why",),
    )
    show.paragraph("")
    for note in report.notes:
        show.paragraph(note, "· ")
    several = f" --instances {report.instances}" if report.instances > 1 else ""
    unsure = f"{_UNSURE} " if report.noisy else ""
    print(f"· {unsure}{_FOR_SIMULATE}{report.curve}{several}")
    if any(row.memory_mb for row in report.rows):
        show.paragraph(
            f"All instances took {report.weights_mb:,.0f} MB when they were loaded; the table has the "
            f"memory of batches. For plan: --memory-mb {report.memory_mb:.0f}",
            "· ",
        )
    if report.start_s:
        full = f", at full speed after {numeral(report.full_speed_s)} s" if report.full_speed_s else ""
        show.paragraph(
            f"At the last start of a server here it was ready after {numeral(report.start_s)} s{full}. For "
            f"plan: --cold-start {report.start_s:g}",
            "· ",
        )
    if report.infer_cores >= _SOME_CORES:
        show.paragraph(
            f"Batches kept {numeral(report.infer_cores)} cores busy. For plan, if decoding and the "
            f"protocol share them: --infer-cores {report.infer_cores:g}",
            "· ",
        )


def _print_document(document: dict[str, Any]) -> None:
    instances = "1 instance" if document["instances"] == 1 else f"{document['instances']} instances"
    threads = f" × {document['threads']} threads" if document["threads"] else ""
    promise = document["promise"]
    promised = f"SLO {promise['slo_ms']:g} ms" if promise else f"no SLO ({document['mode']})"
    show.paragraph(f"{document['name']} version {document['version']}: {promised}, {instances}{threads}.")
    measured = {point["size"]: point["ms"] for point in document["points"]}
    believed = dict(document["believed"])
    ran = {size: (batches, ms) for size, batches, ms in document["recent"]["sizes"]}
    show.table(
        ("batch", "measured", "estimate now", f"ran in {document['recent']['seconds']} s", "took"),
        [
            (
                f"{size}",
                shown_ms(measured.get(size)),
                shown_ms(believed.get(size)),
                f"{ran[size][0]}" if size in ran else "–",
                shown_ms(ran[size][1] if size in ran else None),
            )
            for size in sorted({*measured, *believed, *ran})
        ],
    )
    show.paragraph("")
    fit, speed = document["fit"], document["speed"]
    notes = [
        f"t(B) = {numeral(fit['fixed_ms'])} ms + B × {numeral(fit['per_image_ms'])} ms, as it was loaded."
    ]
    again = "; the curve was re-learned" if speed["relearned"] else ""
    notes.append(f"Batches take {speed['factor']:.2f} × what was loaded{again}.")
    if promise:
        notes.append(
            f"Largest batch {promise['largest_batch']}, under load near {promise['promised_batch'] or '–'}: "
            f"sustained throughput {numeral(promise['capacity_rps'])} images/s."
        )
    for note in (*notes, *map(str, document["choices"])):
        show.paragraph(note, "· ")
    print(f"· {_FOR_SIMULATE}{','.join(f'{size}:{ms:.4g}' for size, ms in document['curve'])}")


def shown_ms(value: float | None) -> str:
    return "–" if value is None else f"{numeral(value, 4)} ms"
