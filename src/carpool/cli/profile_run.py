"""What `carpool profile` does once it knows its options."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from carpool.cli import checks, show
from carpool.cli.profile import ProfileVerb
from carpool.engine.numerals import numeral
from carpool.errors import InvalidInput
from carpool.lab.profile import Question, Report, profile

_MOST_BUDGETS = 16
_SOME_CORES = 0.1  # less is not worth a word


def run(options: ProfileVerb) -> None:
    checks.picture(options.plot)
    question = _question(options)
    with show.status("reading the model") as tell:
        report = profile(question, tell)
    if options.plot is not None:
        _draw(options, report)
    if options.as_json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        _print(report)
    if report.noisy:
        print("carpool: these numbers are doubtful: the machine was not quiet", file=sys.stderr)


def _question(options: ProfileVerb) -> Question:
    instances, threads = options.instances, options.threads
    return Question(
        Path(options.model),
        options.name,
        checks.sizes("--sizes", options.sizes),
        _slos(options.slo_ms),
        checks.whole("--repeats", options.repeats, least=2, most=10_000),
        None if instances is None else checks.whole("--instances", instances, least=1, most=256),
        None if threads is None else checks.whole("--threads", threads, least=1, most=1024),
        options.backend,
    )


def _slos(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"--slo-ms must be ms like 30,50,100, not {text!r}", field="--slo-ms") from None
    if len(found) > _MOST_BUDGETS:
        raise InvalidInput(f"--slo-ms: {_MOST_BUDGETS} promises at most, not {len(found)}", field="--slo-ms")
    return tuple(checks.number("--slo-ms", ms, above=0, most=1e7) / 1e3 for ms in found)


def _draw(options: ProfileVerb, report: Report) -> None:
    from carpool.lab.plots import batch_profile

    assert options.plot is not None
    try:
        batch_profile(options.plot, report)
    except InvalidInput as error:
        raise InvalidInput(f"--plot: {error.message}", field="--plot") from None


def _print(report: Report) -> None:
    instances = "1 instance" if report.instances == 1 else f"{report.instances} instances"
    threads = "1 thread" if report.threads == 1 else f"{report.threads} threads"
    show.paragraph(f"{report.model} on {report.backend}, {instances} × {threads}; {report.hardware}.")
    show.table(
        ("batch", "time", "±", "spread", "runs", "images/s", "off the line"),
        [
            (
                f"{row.batch}{' ← knee' if row.batch == report.knee else ''}",
                f"{numeral(row.ms, 4)} ms",
                show.percent(row.sure),
                show.percent(row.spread),
                f"{row.runs}",
                numeral(row.images_per_s),
                f"{100 * row.off_line:+.1f} %",
            )
            for row in report.rows
        ],
    )
    show.paragraph("")
    show.table(
        ("promise", "batch", "takes", "images/s", "largest", "why"),
        [
            (
                f"{budget.slo_ms:g} ms",
                f"{budget.batch or '–'}",
                f"{numeral(budget.batch_ms)} ms" if budget.batch else "–",
                numeral(budget.images_per_s) if budget.batch else "–",
                f"{budget.largest or '–'}",
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
    show.paragraph(f"For simulate and plan: --curve {report.curve}{several}", "· ")
    if report.infer_cores >= _SOME_CORES:
        show.paragraph(
            f"Batches kept {numeral(report.infer_cores)} cores busy. For plan, where they share them with "
            f"decoding and the protocol: --infer-cores {report.infer_cores:g}",
            "· ",
        )
