"""Does `carpool optimize` make the demo's models cheaper, and does a server confirm it?

Copies of the demo models are optimized on crops of photos (400: at most 128 calibrate, 250 are held back),
within 250 ms and 0.5 points. Then the model as it is and its new version are served in turns, and `carpool
load` sends tensors at 1.5 times the capacity that was found: what is answered within the SLO is its capacity.
EfficientNet-Lite0 should gain 1.8 times and NanoDet 1.9 times, in ten minutes each on two cores. A third run,
calibrated on noise, should write nothing; neither should one with a least gain that no form reaches.

    python benchmarks/cheaper.py --photos DIR          # about half an hour, on an idle machine
    python benchmarks/cheaper.py --quick               # fewer images and rounds, from the demo's three photos
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

from carpool.demo import bundled_models, pictures
from carpool.errors import CarpoolError
from load.burst import LoadError
from load.carpool_server import carpool_server
from load.program import run_program

SLO_MS = 250
AIMS = {"efficientnet_lite0": 1.8, "nanodet": 1.9}
OVER = 1.5  # times the capacity that is sent
CROPS, HELD, ROUNDS, SECONDS = 400, 250, 3, 15
QUICK = (120, 60, 1, 5)
NOISE = 40
NO_FORM_GAINS = 20  # times
CARPOOL = str(Path(sys.executable).with_name("carpool"))


def main() -> int:
    args = parse_arguments()
    crops, held, rounds, seconds = QUICK if args.quick else (CROPS, HELD, ROUNDS, SECONDS)
    with tempfile.TemporaryDirectory(prefix="carpool-cheaper-") as name:
        home = Path(name)
        photos = sorted(args.photos.iterdir()) if args.photos else list(pictures())
        write_crops(photos, home / "crops", crops)
        write_noise(home / "noise", NOISE)
        found = {model: one_model(model, home, held, rounds, seconds) for model in args.model or AIMS}
    print(json.dumps(found, indent=2) if args.json else as_text(found))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path, help="folder of photos to cut crops from; default: the demo's")
    parser.add_argument("--model", action="append", choices=list(AIMS), help="this model alone")
    parser.add_argument("--quick", action="store_true", help="fewer images and one short round")
    parser.add_argument("--json", action="store_true", help="print one object for machines")
    return parser.parse_args()


def write_crops(photos: Sequence[Path], folder: Path, count: int) -> None:
    draw = random.Random(1)
    folder.mkdir()
    opened = [Image.open(photo).convert("RGB") for photo in photos]
    for number in range(count):
        photo = opened[number % len(opened)]
        scale = draw.uniform(0.45, 1.0)
        width, height = int(photo.width * scale), int(photo.height * scale)
        left, top = draw.randint(0, photo.width - width), draw.randint(0, photo.height - height)
        crop = photo.crop((left, top, left + width, top + height))
        crop.save(folder / f"{number:04}.jpg", quality=92)


def write_noise(folder: Path, count: int) -> None:
    draw = np.random.default_rng(1)
    folder.mkdir()
    for number in range(count):
        pixels = draw.integers(0, 12, (240, 320, 3), np.uint8)  # nearly black: ranges far too small
        Image.fromarray(pixels).save(folder / f"{number:04}.png")


def one_model(model: str, home: Path, held: int, rounds: int, seconds: int) -> dict[str, Any]:
    began = time.monotonic()
    found = optimized(model, home, held, "found")
    took = time.monotonic() - began
    folder = home / "found" / model
    noise = optimized(model, home, held, "noise", "--calibration", str(home / "noise"))
    shutil.copytree(home / "work-found" / model, home / "work-keep" / model)  # what was measured stays true
    keep = optimized(model, home, held, "keep", "--least-gain", str(NO_FORM_GAINS))
    result: dict[str, Any] = {
        "decision": found["decision"],
        "winner": found["winner"],
        "why": found["why"],
        "seconds": round(took, 1),
        "calibrated_on_noise": [form["why_not"] for form in noise["forms"] if form["precision"] == "int8"],
        "where_nothing_helps": keep["decision"],
        "aim": AIMS[model],
    }
    if not found["written"]:
        return result
    best = next(form for form in found["forms"] if form["name"] == found["winner"])
    rate = OVER * best["speed"]["capacity"]
    both = {version: alone(folder, version, home) for version in (1, found["written"])}
    goodput: dict[int, list[float]] = {version: [] for version in both}
    for turn in range(rounds):
        for version in list(both)[:: 1 if turn % 2 else -1]:
            goodput[version].append(served(both[version], rate, seconds))
    before, after = goodput.values()
    gains = [two / one for one, two in zip(before, after, strict=True)]
    return {
        **result,
        "loss": best["loss"],
        "found_gain": best["speed"]["gain"],
        "before_rps": before,
        "after_rps": after,
        "served_gain": round(median(gains), 3),
        "ok": median(gains) >= AIMS[model] and took <= 600,
    }


def optimized(model: str, home: Path, held: int, run: str, *more: str) -> dict[str, Any]:
    """Optimizes a copy of the model."""
    folder, work = home / run / model, home / f"work-{run}" / model
    shutil.copytree(bundled_models() / model, folder)
    given = ("--pictures", str(home / "crops"), "--held", str(held), "--slo-ms", str(SLO_MS))
    command = [CARPOOL, "optimize", str(folder), *given, "--work", str(work), "--json", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        raise LoadError(f"carpool optimize failed: {done.stderr[-500:]}") from None
    return found


def alone(folder: Path, version: int, home: Path) -> Path:
    """Returns a copy of the model with this version alone."""
    copy = home / f"only-{version}" / folder.name
    copy.mkdir(parents=True)
    for file in folder.iterdir():
        if file.is_file():
            shutil.copy(file, copy)
    shutil.copytree(folder / str(version), copy / str(version))
    return copy


def served(folder: Path, rate: float, seconds: int) -> float:
    """Responses a second within the SLO, of a server that gets more than it can do."""
    with carpool_server(folder, options=["--slo-ms", str(SLO_MS)]) as server:
        traffic = ("--rate", f"{rate:.1f}", "--duration", str(seconds), "--warmup", "3")
        command = [CARPOOL, "load", server.url, *traffic, "--slo-ms", str(SLO_MS), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout)["goodput_rps"])
    except (ValueError, KeyError):
        raise LoadError(f"carpool load failed: {done.stderr[-500:]}") from None


def as_text(found: dict[str, Any]) -> str:
    lines = []
    for model, one in found.items():
        lines.append(f"{model}: {one['decision']}, in {one['seconds']:g} s. {one['why']}")
        if "served_gain" in one:
            before, after = (
                ", ".join(f"{rps:.1f}" for rps in one[f"{when}_rps"]) for when in ("before", "after")
            )
            lines.append(
                f"  served within {SLO_MS} ms: {before}/s before, {after}/s after: "
                f"{one['served_gain']:.2f} × "
                f"(aim {one['aim']:g}: {'yes' if one['ok'] else 'NO'})"
            )
        lines += [f"  calibrated on noise: {why or 'accepted'}" for why in one["calibrated_on_noise"]]
        lines.append(f"  where nothing helps: {one['where_nothing_helps']}")
    return "\n".join(lines)


if __name__ == "__main__":
    run_program(main, "cheaper", LoadError, CarpoolError)
