"""Exports of vision models as people have them, and what each is recognised as.

Heads are rebuilt as small networks with random weights: what decides are names, shapes, values and metadata,
and those are as in real exports. Each is written to a file, with static and dynamic axes, and inspected as
`carpool serve` would. `make engines` installs torchvision, timm, transformers, Keras and skl2onnx into an
environment of their own: there networks of theirs come in too.

    .venv/conformance/engines/bin/python benchmarks/zoo.py    # minutes
    python benchmarks/zoo.py            # without what is not installed
    python benchmarks/zoo.py --quick    # every kind of head once
    python benchmarks/zoo.py --json

A photo then goes into each: the input must be what the library's own preprocessing makes of it (cosine at
least 0.999), or what is assumed must be announced.

Exit code 1 if any was recognised wrongly, or sees pixels wrongly without a word.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from carpool.config.model import values_on_device
from carpool.config.presets import PictureChoice
from carpool.demo import pictures
from carpool.engine.loading.trial import Examined
from carpool.errors import CarpoolError
from carpool.lab.model_report import ModelReport, inspect_model, look_at, one_model
from carpool.vision.decode import decode
from carpool.vision.plans.settings import VisionSettings
from carpool.vision.transforms import Transform
from zoo_exports import Export, Reference, exports

RIGHT, ASKS, TENSORS, WRONG = "recognised", "needs one setting", "served as tensors", "WRONG"
EQUAL, ASSUMED, SILENT = "equal", "assumed", "SILENTLY WRONG"
_CLOSE = 0.999  # cosine between the input that Carpool makes of a photo and the library's own


@dataclass(frozen=True)
class Row:
    export: str
    axes: str
    outputs: str
    result: str
    task: str
    setting: str  # the one that it needs
    why: str
    pixels: str = ""  # whether the input is the library's own
    cosine: float | None = None  # the lowest of the photos
    preset: str = ""  # the one that makes them so, where it is assumed


def judge(export: Export, folder: Path) -> Row:
    file, named = export.write(folder), False
    try:
        report = inspect_model(file)
    except CarpoolError as error:  # a refusal that names the option
        named = bool(export.refusal) and export.refusal in error.message
        if not named or not export.again:
            return Row(export.name, export.axes, "", WRONG, "", export.refusal, error.message)
        file = export.again(folder)
        report = inspect_model(file)
    outputs = ", ".join(f"{one.name} {one.shape}" for one in report.outputs)
    why = (report.ask or "; ".join(report.evidence)).replace(str(folder), "…")
    result, task = TENSORS, report.task or ""
    if named:
        result = ASKS if export.fits(_plain(report)) else WRONG
    elif report.task is not None:
        result = RIGHT if not export.setting and export.fits(_plain(report)) else WRONG
    elif export.setting:
        (folder / "model.toml").write_text(f'file = "{file.name}"\n{export.setting}\n')
        report = inspect_model(file)
        result, task = (ASKS if export.fits(_plain(report)) else WRONG), report.task or ""
    elif export.expected:
        result = "not recognised"
    row = Row(export.name, export.axes, outputs, result, task, export.setting or export.refusal, why)
    return row if not task or result == WRONG else _with_pixels(row, export, file, report.assumed)


def _with_pixels(row: Row, export: Export, file: Path, assumed: tuple[str, ...]) -> Row:
    """What is assumed is announced, and needs the preset; what is not must be the library's own."""
    preset, reference = export.preset if assumed else "", export.own_way
    if "resize" in assumed and "mean" not in assumed and export.fit:  # with it all is known
        (file.parent / "model.toml").write_text(f'file = "{file.name}"\n{export.fit}\n')
        row = replace(row, setting=export.fit)
    elif assumed and not (preset and reference):
        return replace(row, pixels=ASSUMED)
    if reference is None:
        return replace(row, pixels=SILENT)
    found, described = look_at(one_model(file), PictureChoice(preset=preset or None))
    assert described.vision is not None
    if described.vision.assumed:  # a preset does not settle it
        return replace(row, pixels=ASSUMED, preset=preset)
    cosine = min(_cosine(found, described.vision, reference, photo) for photo in _photos())
    right = ASSUMED if assumed else EQUAL
    pixels = right if cosine >= _CLOSE else SILENT
    return replace(row, pixels=pixels, cosine=round(cosine, 5), preset=preset)


def _photos() -> Iterator[bytes]:
    """As they are, and three times as large: shrinking shows the kernel."""
    for file in pictures():
        with Image.open(file) as opened:
            large = opened.convert("RGB").resize((opened.width * 3, opened.height * 3))
        packed = io.BytesIO()
        large.save(packed, "JPEG", quality=92)
        yield from (file.read_bytes(), packed.getvalue())


def _cosine(found: Examined, vision: VisionSettings, reference: Reference, photo: bytes) -> float:
    transform = Transform(vision.image, vision.input, "zoo")
    made = np.zeros(transform.shape, transform.dtype)
    transform.prepare(decode(photo, reduction=transform.reduction), made)
    planes = made if vision.image.layout == "nchw" else made.transpose(2, 0, 1)
    image = found.config.image
    if image is not None and values_on_device(found.config):
        scale = np.float64(image.scale or 1.0)
        mean, std = (np.array(part).reshape(-1, 1, 1) for part in (image.mean, image.std))
        planes = (planes * scale - mean) / std
    with Image.open(io.BytesIO(photo)) as opened:
        wanted = reference(opened.convert("RGB"), *planes.shape[1:])
    return float((planes * wanted).sum() / np.linalg.norm(planes) / np.linalg.norm(wanted))


def _plain(report: ModelReport) -> dict[str, object]:
    """What an expectation is held against: the task, its table, and how many labels."""
    import tomllib

    told = tomllib.loads(report.toml)
    table = told.get(report.task or "", {})
    return {"task": report.task, "labels": len(report.labels), **told.get("image", {}), **table}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="every kind of head once")
    parser.add_argument("--only", default="", help="exports whose name has this in it")
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while they export
        rows, missing = _judged(given.quick, given.only)
    if given.json:
        print(json.dumps({"exports": [asdict(row) for row in rows], "missing": missing}, indent=2))
    else:
        _print(rows, missing)
    return 1 if any(row.result == WRONG or row.pixels == SILENT for row in rows) else 0


def _judged(quick: bool, only: str) -> tuple[list[Row], list[str]]:
    rows: list[Row] = []
    made, missing = exports(quick=quick)
    chosen = [export for export in made if only in export.name]
    for number, export in enumerate(chosen, 1):
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            rows.append(row := judge(export, Path(folder)))
        print(f"{number}/{len(chosen)} {row.export}: {row.result} {row.pixels}".rstrip(), flush=True)
    return rows, missing


def _print(rows: Sequence[Row], missing: Sequence[str]) -> None:
    print("| export | axes | result | task | the setting it needs | pixels | cosine |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        setting = f"`{'; '.join(row.setting.splitlines())}`" if row.result == ASKS else ""
        pixels = f"{row.pixels}; `{row.preset}` is right" if row.preset else row.pixels
        cosine = "" if row.cosine is None else f"{row.cosine:.4f}"
        print(f"| {row.export} | {row.axes} | {row.result} | {row.task} | {setting} | {pixels} | {cosine} |")
    counts = {kind: sum(row.result == kind for row in rows) for kind in dict.fromkeys(r.result for r in rows)}
    print(f"\n{len(rows)} exports: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    seen = {kind: sum(row.pixels == kind for row in rows) for kind in (EQUAL, ASSUMED, SILENT)}
    print(f"pixels: {', '.join(f'{count} {kind}' for kind, count in seen.items())}")
    for line in missing:
        print(f"not here: {line}")
    for row in rows:
        if row.result not in (RIGHT, ASKS, TENSORS) or row.pixels == SILENT:
            print(f"{row.result}: {row.export} {row.axes}: {row.outputs}: {row.why}")


if __name__ == "__main__":
    sys.exit(main())
