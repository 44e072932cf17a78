"""The report as one HTML file: no script, no network, light and dark, and every name escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from carpool.engine.numerals import numeral as _n
from carpool.lab.plots import FAINT, INK
from carpool.lab.sweep.results import Results
from carpool.lab.sweep.sweep_report import PALETTE, PAPER
from carpool.lab.sweep.sweep_results import Row

_DARK = ("#3fc1b8", "#f0845f", "#f2c14e", "#b79ce0", "#7fb2e5", "#e58ab0", "#c9a27e", "#a9a9b5")
_THEMED = {  # what Matplotlib writes → our name for it, and the colour by night
    INK: ("--ink", "#e6ebef"),
    PAPER: ("--paper", "#151b20"),
    FAINT: ("--faint", "#7d8b97"),
    "#e6eaee": ("--grid", "#2c363f"),
    **{
        light: (f"--c{number}", dark) for number, (light, dark) in enumerate(zip(PALETTE, _DARK, strict=True))
    },
}
_CAPTIONS = {
    "operating-curve": (
        "Operating curve",
        "Right is more answered in time, down is sooner; each line goes from the lowest offered rate to the "
        "highest. A ring is a setting's best point: the most answered with 99 % of what was offered in time. "
        "A line that turns left answers late once too much is offered.",
    ),
    "goodput": (
        "Goodput and its prediction",
        "Dashed is the simulation of the same scheduler on the curve below, as in carpool plan. "
        "It knows the model's time alone: decoding pictures, the network and this generator come on top.",
    ),
    "latency": (
        "How long answers took",
        "The share of what was offered that was answered within so many ms. Who was refused never gets "
        "there, so a line that ends below 100 % is the share refused. The dashed line is the SLO.",
    ),
    "batches": ("Batch sizes", "In how large a batch each answer rode."),
}
_TITLES = (
    *("setting", "load", "offered/s", "in time/s", "plan/s", "in time", "p50 ms", "p99 ms"),
    *("plan p99", "batch", "refused", "failed"),
)
_STYLE = (Path(__file__).parent / "sweep_report.css").read_text("utf-8")
_REASONS = 3  # why runs were void: the rest would say the same with other numbers
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(results: Results, charts: Mapping[str, str]) -> str:
    """`charts` are SVG documents by name, as Matplotlib writes them."""
    figures = "".join(_figure(name, *_CAPTIONS[name], charts[name]) for name in _CAPTIONS if name in charts)
    title = f"{results.model}: carpool sweep"
    words = "".join(f"<li>{escape(sentence)}</li>" for sentence in results.words())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<style>{_colours()}{_STYLE}</style></head>\n<body><main>\n"
        f"<h1>{escape(results.model)}</h1>\n<p class=lead>{_lead(results)}</p>\n"
        f'<ul class="findings">{words}</ul>\n<p id="noise">{escape(results.noise_words())}</p>\n'
        f"{figures}\n<h2>Every point</h2>\n{_table(results)}\n"
        f"<h2>How it was measured</h2>\n{_facts(results)}\n"
        "</main></body></html>\n"
    )


def _lead(results: Results) -> str:
    return escape(
        f"{len(results.runs)} runs of {results.seconds:g} s each, {len(results.settings)} "
        f"{'setting' if len(results.settings) == 1 else 'settings'}, SLO {results.slo_ms:g} ms, "
        f"{results.date}."
    )


def _colours() -> str:
    light = "".join(f"{name}:{value};" for value, (name, _) in _THEMED.items())
    dark = "".join(f"{name}:{value};" for name, value in _THEMED.values())
    return f":root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _figure(name: str, title: str, caption: str, svg: str) -> str:
    return (
        f'<figure id="{name}"><h2>{escape(title)}</h2><div class="chart">{themed(svg, title)}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def themed(svg: str, title: str) -> str:
    """The drawing alone, without its background, in colours that follow the reader's."""
    drawing = svg[svg.index("<svg") :]
    drawing = re.sub(r"<metadata>.*?</metadata>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"fill: #ffffff(; opacity: 0\.\d+)?", "fill: none", drawing)
    for colour, (name, _) in _THEMED.items():
        drawing = drawing.replace(colour, f"var({name})")
    return drawing.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _table(results: Results) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in _TITLES)
    best = {name: results.best(name) for name in results.names}
    body = "".join(_row(results, row, best[row.setting]) for row in results.rows)
    table = f'<table id="points"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _row(results: Results, row: Row, best: Row | None) -> str:
    predicted = results.predicted(row.setting, row.rate)
    chosen = best is not None and best.rate == row.rate
    mark = "void" if row.void else f"{row.void_runs} of {row.runs} void" if row.void_runs else ""
    cells = (
        row.setting,
        "–" if row.load is None else f"{row.load:g}",
        _n(row.offered_rps),
        _n(row.goodput_rps),
        "–" if predicted is None else _n(predicted.goodput_rps),
        f"{100 * row.attainment:.1f} %",
        _n(row.p50_ms),
        _n(row.p99_ms),
        "–" if predicted is None else _n(predicted.p99_ms),
        f"{row.mean_batch:.1f}",
        ", ".join(f"{reason} {count:,}" for reason, count in row.refused.items()) or "0",
        f"{row.failed:,}",
    )
    kind = "void" if row.void else "best" if chosen else ""
    number = results.names.index(row.setting) % len(PALETTE)
    dot = f'<span class="dot" style="background:var(--c{number})"></span>'
    marks = "".join(f"<b>{mark}</b>" for mark in ("best" if chosen else "", mark) if mark)
    first = f"<td>{dot}{escape(cells[0])}{marks}</td>"
    return f'<tr class="{kind}">{first}{"".join(map(_cell, cells[1:]))}</tr>'


def _cell(text: str) -> str:
    """Figures stay on one line; reasons may take several."""
    return f'<td class="words">{escape(text)}</td>' if " " in text[8:] else f"<td>{escape(text)}</td>"


def _facts(results: Results) -> str:
    instances = "1 instance" if results.instances == 1 else f"{results.instances} instances"
    void = sorted({reason for run in results.runs for reason in run.void})
    facts: Iterable[tuple[str, str]] = (
        ("command", results.command),
        ("asked", f"{results.target}; {results.requests}; arrivals at random times (Poisson)"),
        ("order", "rates shuffled, settings in turn at each rate, so that a noisy minute hits all of them"),
        ("machine", results.machine),
        ("date", results.date),
        ("versions", ", ".join(f"{name} {version}" for name, version in results.versions.items())),
        ("batch curve", f"{results.curve} (batch:ms, {results.curve_from}), {instances}"),
        ("planned capacity", f"{_n(results.capacity_rps)}/s within {results.slo_ms:g} ms: load 1"),
        *(("void because", reason) for reason in void[:_REASONS]),
        *((("", f"and {len(void) - _REASONS} more like these"),) if len(void) > _REASONS else ()),
    )
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts)
    return f"<dl>{rows}</dl>"
