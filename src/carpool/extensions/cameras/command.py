"""Implements `carpool watch`: videos and cameras to a running server, and what became of their frames."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.config.usable_cores import usable_cores
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.extensions.cameras.camera_address import CameraAddress
    from carpool.extensions.cameras.watch_output import Output
    from carpool.extensions.cameras.watching import CameraReport, Watching, WatchReport, Wish

_LONGEST = 365 * 86_400.0
_LINE_EVERY_S = 5.0  # where stderr is not a terminal
_TIMEOUT_S = 30.0  # for an answer
_MOST_AT_ONCE = 64
_COLUMNS = ("read", "dropped", "answered", "cached", "replaced", "refused", "failed")
_LIVE = ("camera", "state", "fps", "p50 ms", "p99 ms", "hits", "replaced", "rejected", "dropped")
_WHAT = "The request"
_WHERE = "The output"


@dataclass(frozen=True, kw_only=True)
class WatchVerb(o.AsksServer):
    """Send frames of videos and cameras to a running server; a newer frame replaces a waiting one.

    Run the server's detector on recordings, five frames a second from each:

        carpool watch recordings/ --task detect --fps 5

    Write an annotated video per camera, and all boxes as JSON lines:

        carpool watch gate.mp4 yard.mp4 --model nanodet --out annotated --jsonl boxes.jsonl

    Cameras, which are reconnected after a loss. Ctrl-C ends it with the report:

        carpool watch rtsp://10.0.0.7/stream1 /dev/video0

    Addresses from a file, which keeps passwords out of the process list:

        carpool watch --list cameras.txt --seconds 60

    A frame is sent, or dropped here because a newer one was read. A sent frame is answered
    (computed, or from the server's cache), replaced by a newer one at the server, rejected, or failed.
    """

    cameras: list[str] | None = o.argument(
        "Videos, folders with videos, rtsp://… or http://… streams, or /dev/video0.",
        default=None,
        metavar="CAMERA…",
    )
    url: o.ServerUrl = o.DEFAULT_URL
    listed: Path | None = o.option(
        None, "File with more cameras, 'name address' or 'address' per line.", name="--list", metavar="FILE"
    )
    fps: float = o.option(5.0, "Frames per second of each camera.")
    seconds: float | None = o.option(None, "Stop after this many seconds. Default: when the videos end.")
    loop: bool = o.option(False, "Repeat videos when they end.")
    at_once: int = o.option(3, "Most concurrent frames per camera. Beyond it, older ones are dropped.")
    task: str = o.option("", "The task. Default: the model's own.", _WHAT)
    model: str = o.option("", "Model that answers. Default: the server's first.", _WHAT)
    score: float | None = o.option(None, "Lowest score of a result.", _WHAT, min=0.0, max=1.0)
    iou: float | None = o.option(
        None, "Overlap (IoU) above which the box with the lower score is dropped.", _WHAT, min=0.0, max=1.0
    )
    deadline_ms: float | None = o.option(None, "Deadline of each frame, in ms.", _WHAT)
    quality: int = o.option(90, "Quality of the JPEGs that are sent, 1 to 100.", _WHAT, min=1, max=100)
    out: Path | None = o.option(
        None, "Folder for a video per camera, with the results drawn in.", _WHERE, metavar="DIR"
    )
    jsonl: Path | None = o.option(
        None, "File for all responses, one JSON object per line.", _WHERE, metavar="FILE"
    )

    def run(self) -> int:
        """Exits with 1 if a camera could not be read, or nothing was answered."""
        if find_spec("av") is None:
            raise InvalidInput("carpool watch needs a package that is missing: pip install 'carpool[video]'")
        import uvloop

        from carpool.extensions.cameras.camera_address import find_cameras

        cameras = find_cameras(self.cameras or (), self.listed)
        report = uvloop.run(self._watch(cameras, self._wish(len(cameras))))
        if self.as_json:
            print(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
        else:
            _show(report)
        silent = [one for one in report.cameras if one.state in ("broken", "lost") or not one.counts.read]
        for one in silent:
            print(f"carpool: {one.address}: {one.why or 'no frame was received'}", file=sys.stderr)
        if not report.total.counts.answered:
            whys = sorted({one.why for one in report.cameras if one.why and one not in silent})
            print(": ".join(("carpool", "nothing was answered", *whys[:3])), file=sys.stderr)
        return 1 if silent or not report.total.counts.answered else 0

    def _wish(self, cameras: int) -> Wish:
        from carpool.client.questions import Asked
        from carpool.extensions.cameras.watching import Wish

        deadline = self.deadline_ms
        if deadline is not None:
            o.number("--deadline-ms", deadline, above=0, most=1e8)
        chosen: dict[str, object] = {"score": self.score, "iou": self.iou}
        seconds = self.seconds
        return Wish(
            Asked(self.task, self.model, deadline_ms=deadline),
            {name: value for name, value in chosen.items() if value is not None},
            o.number("--fps", self.fps, least=0.01, most=240),
            o.whole("--at-once", self.at_once, least=1, most=_MOST_AT_ONCE),
            self.quality,
            self.loop,
            None if seconds is None else o.number("--seconds", seconds, above=0, most=_LONGEST),
            max(1, usable_cores() // cameras),
        )

    async def _watch(self, cameras: Sequence[CameraAddress], wish: Wish) -> WatchReport:
        """Ctrl-C ends it early and still reports; the second one does not wait for anything."""
        from carpool.client import questions
        from carpool.client.connections import AsyncRuntime, Connections
        from carpool.extensions.cameras.watching import Watching

        trust = self.trust()
        with o.blamed_on("--url"):
            server = questions.find_server(
                self.url,
                api_key=trust.key,
                ca=trust.ca,
                certificate="",
                private_key="",
                insecure=trust.insecure,
            )
        stop = o.stop_on_signal(partial(os._exit, 130))
        connections = Connections(AsyncRuntime(), server, _TIMEOUT_S, len(cameras) * wish.at_once)
        try:
            with self._outputs() as outputs, _progress() as tell:
                watching: Watching = Watching(cameras, connections, wish, outputs)
                return await watching.run(stop, tell)
        finally:
            await connections.close()

    @contextmanager
    def _outputs(self) -> Iterator[Callable[[CameraAddress], Sequence[Output]]]:
        from carpool.extensions.cameras.watch_output import AnnotatedVideo, CannotWrite, JsonLines

        lines = JsonLines(self.jsonl) if self.jsonl is not None else None
        folder = self.out
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"--out: {folder} cannot be written: {error.strerror or error}") from None

        def of(camera: CameraAddress) -> list[Any]:
            kept: list[Any] = [lines.of(camera)] if lines is not None else []
            name = camera.name.replace("/", "_").lstrip(".") or "camera"
            return kept + ([AnnotatedVideo(folder / f"{name}.mp4")] if folder is not None else [])

        try:
            yield of
        finally:
            if lines is not None:
                lines.close()


# ---- progress on stderr while the command runs, and the report on stdout at its end


@contextmanager
def _progress() -> Iterator[Callable[[WatchReport], None]]:
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    with Live(console=Console(stderr=True), transient=True, auto_refresh=False) as live:

        def tell(report: WatchReport) -> None:
            table = Table(box=None, pad_edge=False, header_style="bold")
            for title in _LIVE:
                table.add_column(title, justify="left" if title in ("camera", "state") else "right")
            for one in (*report.cameras, report.total):
                table.add_row(*_live_cells(one), style="red" if one.state in ("broken", "lost") else "")
            live.update(table, refresh=True)

        yield tell


def _live_cells(one: CameraReport) -> tuple[str, ...]:
    counts = one.counts
    figures = (counts.cached, counts.replaced, counts.refused + counts.failed, counts.dropped)
    state = f"{one.state}: {one.why[:40]}" if one.state in ("broken", "lost") else one.state
    times = (f"{one.fps:.1f}", f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}")
    return (one.camera, state, *times, *(f"{figure:,}" for figure in figures))


def _lines() -> Callable[[WatchReport], None]:
    last = time.monotonic()

    def tell(report: WatchReport) -> None:
        nonlocal last
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            c = report.total.counts
            running = sum(one.state == "running" for one in report.cameras)
            print(
                f"{report.seconds:.0f} s  {running} of {len(report.cameras)} cameras  "
                f"{report.total.fps:.1f} responses/s  p99 {report.total.p99_ms:.0f} ms  cached "
                f"{c.cached:,}  replaced {c.replaced:,}  rejected {c.refused:,}  failed {c.failed:,}  "
                f"dropped {c.dropped:,}",
                file=sys.stderr,
                flush=True,
            )

    return tell


def _show(report: WatchReport) -> None:
    rows = []
    shown = report.cameras if len(report.cameras) == 1 else [*report.cameras, report.total]
    for one in shown:
        counts = [f"{getattr(one.counts, name):,}" for name in _COLUMNS]
        times = (f"{one.fps:.1f}", f"{one.p50_ms:.0f}", f"{one.p99_ms:.0f}")
        rows.append((one.camera, *counts, *times))
    show.table(("camera", *map(show.count_label, _COLUMNS), "fps", "p50", "p99"), rows, left=("camera",))
    c = report.total.counts
    show.paragraph(
        f"{c.read:,} frames read in {report.seconds:.1f} s = {c.sent:,} sent + {c.dropped:,} dropped here. "
        f"{c.sent:,} sent = {c.answered:,} answered + {c.replaced:,} replaced + {c.refused:,} rejected + "
        f"{c.failed:,} failed. {c.answered:,} answered = {c.computed:,} computed + {c.cached:,} from the "
        "cache. p50 and p99 are in ms, from reading a frame to its response.",
        "· ",
    )
    whys = sorted({one.why for one in report.cameras if one.why and one.counts.failed})
    for why in whys[:3]:
        show.paragraph(f"Failed: {why}", "! ")
