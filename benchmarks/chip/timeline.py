"""A time line of the device: the same backends as in the server, kept busy with JPEGs, seen by the profiler.

python -m chip.timeline MODEL_FOLDER OUT.png PHOTO…
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.backends.backend import RunsEncoded
from carpool.config.repository import find_models
from carpool.engine.loading.loading import Loading

WINDOW_S = 1.0
CLOSER_S = 0.1  # of it, to see what overlaps
BATCH = 64
TOGETHER_MS = 0.05  # kernels of one batch follow each other faster than that
KINDS = {
    "copy to the device": "#4c78a8",
    "copy to the host": "#72b7b2",
    "decode": "#f58518",
    "resize": "#e45756",
    "model": "#54a24b",
}


def kind_of(event: dict[str, Any]) -> str | None:
    name, category = str(event.get("name", "")).lower(), event.get("cat")
    if category == "gpu_memcpy":
        return "copy to the host" if "dtoh" in name else "copy to the device"
    if category != "kernel":
        return None
    if "jpeg" in name or "idct" in name or "ycc" in name or "ycbcr" in name:
        return "decode"
    return "resize" if "resize" in name or "fill_pictures" in name else "model"


def profile(
    backends: Sequence[RunsEncoded], files: Sequence[np.ndarray], seconds: float
) -> list[dict[str, Any]]:
    """Events of the device while every instance runs one batch after the other."""
    stop = threading.Event()
    batch = [files[number % len(files)] for number in range(BATCH)]

    def work(backend: RunsEncoded) -> None:
        while not stop.is_set():
            backend.run_encoded(batch, ())

    threads = [threading.Thread(target=work, args=(backend,)) for backend in backends]
    for thread in threads:
        thread.start()
    time.sleep(1.0)
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profiler.export_chrome_trace(file.name)
        return list(json.loads(Path(file.name).read_text())["traceEvents"])


def spans(events: list[dict[str, Any]]) -> dict[str, list[tuple[int, float, float]]]:
    """By kind: stream, begin and length in ms."""
    found: dict[str, list[tuple[int, float, float]]] = {kind: [] for kind in KINDS}
    for event in events:
        kind = kind_of(event)
        if kind is not None and "dur" in event:
            stream = int(event["args"].get("stream", 0))
            found[kind].append((stream, event["ts"] / 1e3, event["dur"] / 1e3))
    begin = min((at for rows in found.values() for _, at, _ in rows), default=0.0)
    return {kind: [(stream, at - begin, long) for stream, at, long in rows] for kind, rows in found.items()}


def bars(rows: Sequence[tuple[int, float, float]], together: float) -> list[tuple[float, float]]:
    """Begin and length in ms, with those in one that follow each other closely."""
    found: list[tuple[float, float]] = []
    for _, at, long in sorted(rows, key=lambda row: row[1]):
        if found and at <= sum(found[-1]) + together:
            begin = found[-1][0]
            found[-1] = begin, max(sum(found[-1]), at + long) - begin
        else:
            found.append((at, long))
    return found


def busy(rows: Sequence[tuple[int, float, float]]) -> float:
    """Milliseconds in which at least one of them runs."""
    return sum(long for _, long in bars(rows, 0.0))


def draw(found: dict[str, list[tuple[int, float, float]]], target: Path, title: str) -> None:
    """The whole window above, and its last part closer."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    instances = sorted({stream for stream, _, _ in found["model"]})
    lanes = {stream: number for number, stream in enumerate(instances)}  # the decoder's share one more
    figure, both = plt.subplots(2, figsize=(12, 2.4 + 1.4 * len(instances)))
    for axes in both:
        for kind, rows in found.items():
            for number in range(len(instances) + 1):
                mine = [row for row in rows if lanes.get(row[0], len(instances)) == number]
                label = None if number else kind
                drawn = bars(mine, TOGETHER_MS)
                axes.broken_barh(drawn, (number - 0.35, 0.7), color=KINDS[kind], label=label)
        names = [f"instance {number + 1}" for number in range(len(instances))]
        axes.set_yticks(range(len(names) + 1), [*names, "decoder"])
    whole, closer = both
    whole.set_xlim(0, 1e3 * WINDOW_S)
    closer.set_xlim(1e3 * (WINDOW_S - CLOSER_S), 1e3 * WINDOW_S)
    whole.set_title(title)
    closer.set_xlabel("ms")
    closer.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=len(KINDS), frameon=False)
    figure.tight_layout()
    figure.savefig(target, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("photos", type=Path, nargs="+")
    given = parser.parse_args()
    sources, _ = find_models([given.model], gpus=torch.cuda.device_count())
    source, version = sources[0], sources[0].versions[0]
    ready = Loading(source.config, version).prepare(lambda _: None)
    files = [np.frombuffer(path.read_bytes(), np.uint8) for path in given.photos]
    try:
        found = spans(profile(ready.backends, files, 1.1 * WINDOW_S))  # type: ignore[arg-type]
    finally:
        ready.close()
    length = max((at + long for rows in found.values() for _, at, long in rows), default=0.0)
    everything = [row for rows in found.values() for row in rows]
    shares = {kind: round(busy(rows) / length, 3) for kind, rows in found.items() if length}
    shares["anything"] = round(busy(everything) / length, 3) if length else 0.0
    draw(
        found,
        given.target,
        f"{given.model.name}, {len(ready.backends)} instances, JPEGs in batches of {BATCH}",
    )
    print(json.dumps({"ms": round(length, 1), "busy": shares}))


if __name__ == "__main__":
    main()
