"""Many cameras and one detector: what became of every frame?

Videos of still cameras are made (`tools/make_camera_videos.py`), and `carpool watch` plays them to a server
with the demo detector, five frames a second from each. Whatever is read is counted once:

    read = sent + dropped here
    sent = answered + replaced + refused + failed
    answered = computed + cached

A row adds up when that holds for every camera and in all, nothing failed, and the server's own numbers agree:
it has answered at least what is said to be computed, and no more than was answered in all. How much is
answered is the machine's matter: decoding the videos, the server and the detector share its cores here.

Then cameras before which nobody walks, and a detector that keeps answers to the same scene for two seconds:
at 5 and at 10 frames a second, of which at most 90 and 95 of 100 can be such answers.

    python benchmarks/cameras.py                    # 1, 5 and 20 cameras, 20 s each: about three minutes
    python benchmarks/cameras.py --quick            # 20 cameras and 4 still ones, 8 s
    python benchmarks/cameras.py --cameras 20,100 --json
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import asdict, dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import carpool
from load.burst import LoadError
from load.carpool_server import CarpoolServer, carpool_server
from load.program import run_program

ROOT = Path(__file__).parents[1]
MODEL = "nanodet"
STILL_CAMERAS = 4
CACHE = "\n[cache]\nexact = false\nsimilar = true\nsimilar_ttl_s = 2\naudit = 0\n"
PARTS = ("answered", "replaced", "refused", "failed")


@dataclass(frozen=True)
class Row:
    cameras: int
    fps_each: int
    still: bool  # with a cache
    seconds: float
    read: int
    dropped: int
    sent: int
    answered: int
    computed: int
    cached: int
    replaced: int
    refused: int
    failed: int
    fps: float
    p50_ms: float
    p99_ms: float
    least_answered: int  # by the camera with the fewest
    most_answered: int
    server_computed: int
    adds_up: bool

    @property
    def hits(self) -> float:
        return self.cached / max(1, self.answered)


def main() -> int:
    args = parse_arguments()
    counts = [20] if args.quick else [int(count) for count in args.cameras.split(",") if count]
    seconds = 8.0 if args.quick else args.seconds
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        if not args.json:
            print(as_line(row), flush=True)

    with tempfile.TemporaryDirectory(prefix="carpool-cameras-") as name:
        folder, length = Path(name), min(seconds, 20.0)
        model = Path(carpool.__file__).parent / "demo" / "models" / MODEL
        if counts:
            videos = make_videos(folder / "people", max(counts), length, args.fps)
            with carpool_server(model) as server:
                for count in counts:
                    add(measure(server, videos[:count], seconds, args.fps))
        keeping = folder / MODEL
        shutil.copytree(model, keeping)
        (keeping / "model.toml").write_text((keeping / "model.toml").read_text() + CACHE)
        with carpool_server(keeping) as server:
            for fps in (5,) if args.quick else (5, 10):
                videos = make_videos(folder / f"still-{fps}", STILL_CAMERAS, length, fps, people=False)
                add(measure(server, videos, seconds, fps, still=True))
    if args.json:
        print(json.dumps({"fps": args.fps, "rows": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"\neverything adds up: {'yes' if all(row.adds_up for row in rows) else 'NO'}")
    return 0 if all(row.adds_up for row in rows) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 cameras for 8 s, within a minute")
    parser.add_argument("--json", action="store_true", help="print rows for machines")
    parser.add_argument(
        "--cameras", default="1,5,20", help="how many, in turn; none before the still ones: ''"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="for each number of cameras")
    parser.add_argument("--fps", type=int, default=5, help="frames a second of each camera")
    return parser.parse_args()


def make_videos(folder: Path, cameras: int, seconds: float, fps: int, *, people: bool = True) -> list[Path]:
    spec = spec_from_file_location("make_camera_videos", ROOT / "tools" / "make_camera_videos.py")
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    made: list[Path] = tool.make_videos(folder, cameras, seconds, fps, people=people)
    return made


def measure(
    server: CarpoolServer, videos: list[Path], seconds: float, fps: int, *, still: bool = False
) -> Row:
    before = computed_by(server)
    command = [
        str(Path(sys.executable).with_name("carpool")),
        "watch",
        *map(str, videos),
        "--url",
        server.url,
    ]
    command += ["--fps", str(fps), "--seconds", str(seconds), "--loop", "--task", "detect", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 120, check=False)
    if not done.stdout:
        raise LoadError(f"carpool watch: {done.stderr[-1000:]}")
    report = json.loads(done.stdout)
    total, cameras = report["total"], report["cameras"]
    by_server = computed_by(server) - before
    fields = {name: total[name] for name in Row.__dataclass_fields__ if name in total}
    return Row(
        cameras=len(cameras),
        fps_each=fps,
        still=still,
        seconds=report["seconds"],
        **fields,
        least_answered=min(one["answered"] for one in cameras),
        most_answered=max(one["answered"] for one in cameras),
        server_computed=by_server,
        adds_up=all(map(adds_up, (total, *cameras)))
        and all(total[name] == sum(one[name] for one in cameras) for name in ("read", "sent", *PARTS))
        and total["failed"] == 0
        and total["computed"] <= by_server <= total["answered"],
    )


def adds_up(one: dict[str, Any]) -> bool:
    return bool(
        one["read"] == one["sent"] + one["dropped"]
        and one["sent"] == sum(one[name] for name in PARTS)
        and one["answered"] == one["computed"] + one["cached"]
    )


def computed_by(server: CarpoolServer) -> int:
    """Requests that the engine has answered, by the server's own statistics."""
    with urllib.request.urlopen(f"{server.url}/v2/models/{MODEL}/stats", timeout=10) as reply:
        document = json.load(reply)
    return int(document["model_stats"][0]["inference_stats"]["success"]["count"])


def as_line(row: Row) -> str:
    return (
        f"{row.cameras:>4} cameras  {row.read:>6,} read = {row.sent:,} sent + {row.dropped:,} dropped;  "
        f"{row.answered:,} answered ({row.computed:,} computed, {row.cached:,} cached), "
        f"{row.replaced:,} replaced, {row.refused:,} refused, {row.failed:,} failed;  "
        f"{row.fps:.1f}/s, p50 {row.p50_ms:.0f} ms, p99 {row.p99_ms:.0f} ms;  "
        f"{row.least_answered}–{row.most_answered} a camera"
        f"{f'; {row.fps_each}/s each, still: {row.hits:.1%} hits' if row.still else ''}"
        f"{'' if row.adds_up else '   DOES NOT ADD UP'}"
    )


if __name__ == "__main__":
    run_program(main, "cameras", LoadError)
