"""Implements `carpool top`: what a running server does, in the terminal."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import CarpoolError

if TYPE_CHECKING:
    from rich.console import Group

Document = dict[str, Any]

_BARS = " ▁▂▃▄▅▆▇█"
_BAR_POINTS = 20
_MOST_SENDERS = 8
_REFRESH_S = 1.0
_WIDE = 140  # columns, where there is no terminal
_LATENCY = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, kw_only=True)
class TopVerb(o.AsksServer):
    """Show a running server once a second: rates, percentiles, rejections, busiest clients.

    It needs only a terminal, and so works over ssh. q ends it:

        carpool top --url http://10.0.0.7:8000

    Once, for scripts:

        carpool top --once --json
    """

    url: o.ServerUrl = o.DEFAULT_URL
    once: bool = o.option(False, "Print one table and exit.")
    seconds: int = o.option(10, "Time that each figure covers, in seconds, 1 to 900.")

    def run(self) -> int:
        from carpool.lab.load.facts import RunningServer

        seconds = o.whole("--seconds", self.seconds, least=1, most=900)
        server = RunningServer(self.url, self.trust())
        wanted = max(seconds, _BAR_POINTS)

        def ask() -> Document:
            found: Document = server.get(f"/v2/history?seconds={wanted}")
            return found

        if self.as_json:
            print(json.dumps(summary(ask(), seconds), indent=2, ensure_ascii=False))
        elif self.once or not sys.stdout.isatty():
            from rich.console import Console

            console = Console(width=None if sys.stdout.isatty() else _WIDE)
            console.print(_screen(summary(ask(), seconds), self.url, console.width))
        else:
            self._watch(ask, seconds)
        return 0

    def _watch(self, ask: Any, seconds: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        console = Console()
        live = Live(console=console, screen=True, auto_refresh=False)
        with live, single_keys() as pressed, suppress(KeyboardInterrupt):
            while True:
                try:
                    shown: Any = _screen(summary(ask(), seconds), self.url, console.width)
                except CarpoolError as error:  # it may be restarting
                    shown = Text(f"{self.url}: {error.message}. Retrying …")
                live.update(shown, refresh=True)
                if pressed(_REFRESH_S) in ("q", "Q"):
                    return


@contextmanager
def single_keys() -> Iterator[Callable[[float], str]]:
    """Yields a function that waits at most so many seconds for a key and returns it, or nothing. Without a
    terminal to read from it only waits."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)  # Ctrl-C remains a signal

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([terminal], [], [], seconds)
        return os.read(terminal, 1).decode("ascii", "replace") if ready else ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def summary(history: Document, seconds: int) -> Document:
    """Returns what the last so many seconds of a history were like. Each model with traffic in the points
    that came is there, also one that has been silent since."""
    points: list[Document] = history["points"]
    newest = points[-1]["time"] if points else 0.0
    recent = [point for point in points if point["time"] > newest - seconds]
    covered = sum(point["seconds"] for point in recent)
    names = sorted({name for point in points for name in point["models"]})
    bounds = history["bounds"]
    answered = sum(one.get("answered", 0) for point in recent for one in point["models"].values())
    core_s = sum(point["server"]["cores"] * point["seconds"] for point in recent)
    return {
        "time": newest,
        "seconds": round(covered, 3),
        "core_ms_per_request": round(core_s / answered * 1e3, 3) if answered else None,
        "server": points[-1]["server"] if points else {},
        "models": {
            name: _model([point["models"].get(name, {}) for point in recent], covered, bounds)
            | {"answered_by_second": [p["models"].get(name, {}).get("answered", 0) for p in points]}
            for name in names
        },
        "senders": points[-1].get("senders", []) if points else [],
    }


def _model(points: Sequence[Document], seconds: float, bounds: Document) -> Document:
    from carpool.observe.history import quantile

    latency = _added((point.get("latency", {}) for point in points), len(bounds["seconds"]) + 1)
    found = {name: quantile(latency, bounds["seconds"], share) for name, share in _LATENCY.items()}
    batches = [point["batch"] for point in points if "batch" in point]
    count = sum(sum(batch["buckets"].values()) for batch in batches)
    rejected: dict[str, int] = {}
    for point in points:
        for word, times in point.get("rejected", {}).items():
            rejected[word] = rejected.get(word, 0) + times
    return {
        "answered_rps": round(sum(point.get("answered", 0) for point in points) / seconds, 2)
        if seconds
        else 0.0,
        **{f"{name}_ms": None if value is None else round(value * 1e3, 3) for name, value in found.items()},
        "rejected_rps": round(sum(rejected.values()) / seconds, 2) if seconds else 0.0,
        "rejected": rejected,
        "failed": sum(sum(point.get("failed", {}).values()) for point in points),
        "mean_batch": round(sum(batch["sum"] for batch in batches) / count, 2) if count else None,
        "pending": points[-1].get("pending", 0) if points else 0,
        "saturation": points[-1].get("saturation", 0.0) if points else 0.0,
    }


def _added(histograms: Iterable[Document], size: int) -> list[float]:
    buckets = [0.0] * size
    for histogram in histograms:
        for index, times in histogram.get("buckets", {}).items():
            buckets[int(index)] += times
    return buckets


def bars(values: Sequence[float]) -> str:
    """Returns a line of small columns, one a value, the highest as high as the line."""
    most = max(values, default=0) or 1
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] for value in values[-_BAR_POINTS:])


def _screen(found: Document, url: str, width: int = _WIDE) -> Group:
    from rich.console import Group
    from rich.text import Text

    clock = time.strftime("%H:%M:%S", time.localtime(found["time"]))
    server = found["server"]
    parts = [f"{url}  {clock}, figures of the last {found['seconds']:.0f} s"]
    if server:
        parts.append(f"{server['connections']} connections, {server['cores']:.1f} cores, ")
        parts[-1] += f"{server['memory_bytes'] / 1e6:,.0f} MB"
        if (core_ms := found["core_ms_per_request"]) is not None:
            parts.append(f"{core_ms:.1f} ms of a core per request")
        parts += [f"GPU {_percent(gpu['utilization'])}" for gpu in server["gpus"]]
    lines: list[Any] = [Text("   ".join(parts)), Text()]
    lines.append(_models(found["models"], width))
    if found["senders"]:
        lines += [Text(), _senders(found["senders"])]
    return Group(*lines)


def _models(models: Document, width: int) -> Any:
    """The last columns are left out where the terminal has no room for them: no title is wrapped."""
    titles = (
        "model",
        "answered/s",
        "p50",
        "p99",
        "rejected/s",
        "why",
        "failed",
        "batch",
        "queued",
        "busy",
        "",
    )
    rows: list[Sequence[str]] = [
        (
            name,
            f"{one['answered_rps']:,.1f}",
            _ms(one["p50_ms"]),
            _ms(one["p99_ms"]),
            f"{one['rejected_rps']:,.1f}",
            max(one["rejected"], key=one["rejected"].get, default=""),
            str(one["failed"]),
            "–" if one["mean_batch"] is None else f"{one['mean_batch']:.1f}",
            f"{one['pending']:.0f}",
            _percent(one["saturation"]),
            bars(one["answered_by_second"]),
        )
        for name, one in models.items()
    ]
    rows = rows or [("no traffic yet", *[""] * (len(titles) - 1))]
    needed = [max(map(len, column)) + 2 for column in zip(titles, *rows, strict=True)]
    kept = next(count for count in range(len(titles), 0, -1) if sum(needed[:count]) <= width or count == 1)
    return show.made_table(titles[:kept], [row[:kept] for row in rows], left=("model", "why", ""))


def _senders(senders: Sequence[Document]) -> Any:
    titles = ("source", "key", "of model", "images/s", "queued")
    rows = [
        (
            one["source"] or "(none named)",
            one["key"],
            one["model"],
            f"{one['offered_rps']:,.1f}" + (" rejected" if one["rejected"] else ""),
            str(one["queued"]),
        )
        for one in senders[:_MOST_SENDERS]
    ]
    return show.made_table(titles, rows, left=("source", "key", "of model"))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} ms"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"
