"""Writes what was found: as JSON for programs, as Markdown and as one HTML page with a plot for people."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from carpool.core.numerals import numeral
from carpool.extensions.optimize.optimizing import Optimized, Tried

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 720, 400, 64, 56, 24, 24
_GREEN = "#1e8a3c"
_STYLE = """body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .6rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child,td:last-child,th:last-child{text-align:left}tr.best{font-weight:600}
svg{width:100%;height:auto}"""
_TITLES = ("form", "capacity", "with decoding", "gain", "loss", "95 %", "close calls", "result")
_AS_IT_IS = "as it is"

Row = tuple[str, ...]


def as_json(found: Optimized) -> bytes:
    return json.dumps(found.document(), indent=2, ensure_ascii=False).encode()


def reports(found: Optimized) -> dict[str, bytes]:
    """Returns the files that stand beside a version, by name."""
    return {
        "optimize.json": as_json(found),
        "optimize.md": as_markdown(found).encode(),
        "optimize.html": as_html(found).encode(),
    }


def headline(found: Optimized) -> str:
    what = f"version {found.written}" if found.written else ("write" if found.winner else "keep")
    return f"{found.model}, version {found.version}: {what}. {found.why[:1].upper()}{found.why[1:]}."


def rows(found: Optimized) -> list[Row]:
    listed: list[Row] = []
    if found.base is not None:
        base = found.base
        listed.append(
            (
                _AS_IT_IS,
                f"{numeral(base.capacity)}/s",
                f"{numeral(base.images)}/s",
                "1.00 ×",
                "–",
                "–",
                "–",
                "",
            )
        )
    return listed + [_row(form, found) for form in found.forms]


def _row(form: Tried, found: Optimized) -> Row:
    loss, speed = form.loss, form.speed
    return (
        form.name,
        f"{numeral(speed.capacity)}/s" if speed else "–",
        f"{numeral(speed.images)}/s" if speed else "–",
        f"{speed.gain:.2f} ×" if speed else "–",
        f"{numeral(loss.points)}" if loss else "–",
        f"{numeral(loss.low)} to {numeral(loss.high)}" if loss else "–",
        f"{loss.close_changed} of {loss.close}" if loss else "–",
        "best" if form.name == found.winner else "rejected" if form.why_not else "good",
    )


def facts(found: Optimized) -> Iterator[str]:
    """Yields sentences about how it was found."""
    by = next((form.loss.by for form in found.forms if form.loss), "sure answers that changed")
    yield (
        f"Capacity: images/s within {numeral(found.slo_ms)} ms on {found.hardware}, by the measured batch "
        "times; with decoding: the same where images are decoded on the same cores."
    )
    yield (
        f"Loss: percentage points ({by}) on {found.inputs['held']} images that no quantizer saw; at most "
        f"{numeral(found.limit_points)} are accepted. All forms were compared on the same images."
    )
    yield f"Calibrated with {found.inputs['calibrating']} other images."
    for note in found.notes:
        yield f"{note[:1].upper()}{note[1:]}."
    for form in found.forms:
        if form.why_not:
            yield f"{form.name} was rejected: {form.why_not}."
    for form in found.forms:
        if form.kept:
            yield f"{form.name} keeps {', '.join(form.kept)}."


def as_markdown(found: Optimized) -> str:
    lines = [f"# {headline(found)}", "", f"| {' | '.join(_TITLES)} |", f"|{'---|' * len(_TITLES)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows(found)]
    lines += ["", *(f"- {fact}" for fact in facts(found)), "", _tools(found), ""]
    return "\n".join(lines)


def _tools(found: Optimized) -> str:
    return "Tools: " + ", ".join(f"{name} {version}" for name, version in found.tools.items()) + "."


def as_html(found: Optimized) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in _TITLES)
    body = "".join(
        f"<tr{' class=best' if row[-1] == 'best' else ''}>"
        + "".join(f"<td>{escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row in rows(found)
    )
    said = "".join(f"<li>{escape(fact)}</li>" for fact in facts(found))
    title = escape(f"{found.model}: {found.decision}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(headline(found))}</p>{plot(found)}"
        f"<table><tr>{titles}</tr>{body}</table><ul>{said}</ul><p>{escape(_tools(found))}</p></html>\n"
    )


# ---- the plot: what is gained against what is lost


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points (loss, gain) that no other is better than in both, by rising loss."""
    best: list[tuple[float, float]] = []
    for loss, gain in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or gain > best[-1][1]:
            best.append((loss, gain))
    return best


def plot(found: Optimized) -> str:
    """Returns an SVG: gain over loss, the Pareto front, and the limit."""
    shown = [(form, form.loss.points, form.speed.gain) for form in found.forms if form.loss and form.speed]
    points = [(0.0, 1.0), *((max(0.0, loss), gain) for _, loss, gain in shown)]
    widest = max(2 * found.limit_points, 1.1 * max(loss for loss, _ in points), 0.1)
    highest = 1.15 * max(gain for _, gain in points)

    def across(loss: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * loss / widest

    def down(gain: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * gain / highest

    floor, left = _HEIGHT - _BOTTOM, _LEFT
    steps = " ".join(f"{across(loss):.1f},{down(gain):.1f}" for loss, gain in front(points))
    limit = across(found.limit_points)
    parts = [
        f"<rect x='{left}' y='{_TOP}' width='{limit - left:.1f}' height='{floor - _TOP}' fill='#eaf6ec'/>",
        f"<line x1='{limit:.1f}' x2='{limit:.1f}' y1='{_TOP}' y2='{floor}' stroke='{_GREEN}' "
        "stroke-dasharray='4'/>",
        f"<text x='{limit + 6:.1f}' y='{_TOP + 14}' fill='{_GREEN}'>limit "
        f"{numeral(found.limit_points)}</text>",
        f"<polyline points='{steps}' fill='none' stroke='#888' stroke-width='1.5'/>",
        f"<line x1='{left}' x2='{_WIDTH - _RIGHT}' y1='{floor}' y2='{floor}' stroke='#333'/>",
        f"<line x1='{left}' x2='{left}' y1='{_TOP}' y2='{floor}' stroke='#333'/>",
    ]
    for number in range(5):
        loss, gain = widest * number / 4, highest * number / 4
        parts.append(
            f"<text x='{across(loss):.1f}' y='{floor + 18}' text-anchor='middle'>{loss:.2g}</text>"
            f"<text x='{left - 8}' y='{down(gain) + 4:.1f}' text-anchor='end'>{gain:.2g} ×</text>"
        )
    parts.append(
        f"<text x='{(left + _WIDTH) / 2}' y='{_HEIGHT - 10}' text-anchor='middle'>"
        "loss, percentage points</text>"
        f"<text x='16' y='{_HEIGHT / 2}' text-anchor='middle' transform='rotate(-90 16 {_HEIGHT / 2})'>"
        "capacity within the SLO</text>"
    )
    parts.append(_dot(across(0.0), down(1.0), _AS_IT_IS, "#333"))
    for form, loss, gain in shown:
        colour = "#c0392b" if form.why_not else "#2f6fb0"
        if form.name == found.winner:
            colour = _GREEN
        parts.append(_dot(across(max(0.0, loss)), down(gain), form.name, colour))
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' font-size='12' "
        f"font-family='system-ui,sans-serif' role='img' aria-label='Gain over loss of each form'>"
        f"{''.join(parts)}</svg>"
    )


def _dot(x: float, y: float, name: str, colour: str) -> str:
    anchor, at = ("end", x - 9) if x > _WIDTH * 0.6 else ("start", x + 9)
    return (
        f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{colour}'/>"
        f"<text x='{at:.1f}' y='{y + 4:.1f}' text-anchor='{anchor}' fill='{colour}'>{escape(name)}</text>"
    )
