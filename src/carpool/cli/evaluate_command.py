"""Implements `carpool evaluate`: how good a model is on labelled pictures, and whether this version is worse
than that one."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.evaluate.evaluation import Evaluation, VersionGap, VersionScore
    from carpool.lab.evaluate.subjects import Ask

_PATIENCE_S = 60.0  # for retries of an image that is rejected
_MOST_FAILURES = 5
_MOST_CLASSES = 20
_IN_WORDS = {"top1": "top-1 accuracy", "top5": "top-5 accuracy", "miou": "mean IoU"}


@dataclass(frozen=True, kw_only=True)
class Evaluate(o.AsksServer):
    """Measure a model's accuracy on labelled images, or compare two versions.

    A running server, with boxes labelled as in COCO:

        carpool evaluate http://localhost:8000 --data val.json --pictures val/

    Is version 2 worse than version 1? The exit code is 1 if it is, by more than --tolerate.

        carpool evaluate models/detector --data val.json --pictures val/ --version 2 --against 1

    Classes, with the images of each in a folder of its name:

        carpool evaluate classifier.onnx --data val/
    """

    target: str = o.argument(
        "A running server, or a model file, a model folder, or a repository with --model.",
        metavar="URL|MODEL",
        envvar=o.URL_VARIABLE,
    )
    data: Path | None = o.option(
        None,
        "The labels: COCO's .json, a .csv with file and label, a folder for each class, or of masks.",
        metavar="FILE|DIR",
    )
    pictures: Path | None = o.option(
        None, "Folder of the images, if the labels do not contain them.", metavar="DIR"
    )
    model: str | None = o.option(None, "Which model of a server or a repository.")
    version: str | None = o.option(None, "The version. Default: the newest.")
    against: str | None = o.option(None, "Version to compare it with, on the same images.")
    tolerate: float = o.option(0.005, "Largest accepted loss of accuracy against --against.")
    names: Path | None = o.option(
        None, "A .csv with the model's name of each class of the data: a line is data,model.", metavar="FILE"
    )
    score: float = o.option(0.001, "Boxes: lowest score of a result.", min=0.0, max=1.0)
    iou: float | None = o.option(
        None,
        "Boxes: overlap (IoU) above which the box with the lower score is dropped, in place of the "
        "model's own.",
        min=0.0,
        max=1.0,
    )
    at_once: int = o.option(4, "Number of concurrent requests.", min=1, max=64)

    def run(self) -> int:
        """Exits with 1 if it is worse, or if a picture was not answered."""
        from carpool.lab.evaluate.evaluation import evaluate, measure_of
        from carpool.lab.evaluate.labelled_data import read_data, read_names

        if self.data is None:
            raise InvalidInput("--data is needed: the file with the labels, like val.json")
        tolerate = o.number("--tolerate", self.tolerate, most=1.0)
        if self.against is not None and self.against == self.version:
            raise InvalidInput(f"--against: version {self.against} would be compared with itself")
        with show.status("reading the labels"):
            names = {} if self.names is None else read_names(self.names)
            measure = measure_of(read_data(self.data, self.pictures), names, self.score, self.iou)
        versions = [self.version or "", *([self.against] if self.against is not None else [])]
        with ExitStack() as stack:
            subjects = self._subjects(measure.task, versions, stack)
            with show.steps("Asking", len(measure.files) * len(versions)) as step:
                found = evaluate(measure, subjects, at_once=self.at_once, tolerate=tolerate, step=step)
        if self.as_json:
            print(json.dumps(asdict(found), indent=2, ensure_ascii=False))
        else:
            _print(found)
        _tell_failures(found)
        return 1 if found.failed or (found.gap is not None and found.gap.worse) else 0

    def _subjects(
        self, task: str, versions: list[str], stack: ExitStack
    ) -> list[AbstractContextManager[Ask]]:
        from carpool.lab.evaluate.subjects import asked_server, loaded_model

        model = self.model or ""
        if "://" not in self.target:
            from carpool.config.server import server_settings

            kept = server_settings()[0].cache_dir
            return [loaded_model(Path(self.target), model, version, kept) for version in versions]
        client = stack.enter_context(self.client("URL", self.target, _PATIENCE_S, self.at_once))
        return [asked_server(client, task, model, version) for version in versions]


def _print(found: Evaluation) -> None:
    both = [found.scored] if found.against is None else [found.scored, found.against]
    titles = ("", *(f"version {one.version}" if one.version else one.model for one in both))
    rows = [
        (_IN_WORDS.get(name, name), *(f"{one.figures[name]:.4f}" for one in both)) for name in both[0].figures
    ]
    rows += [
        ("p50", *(f"{one.p50_ms:.1f} ms" for one in both)),
        ("p99", *(f"{one.p99_ms:.1f} ms" for one in both)),
    ]
    print(f"{found.scored.model}, {found.pictures:,} images")
    show.table(titles, rows, left=("",))
    show.table(("class", *titles[1:]), _class_rows(both), left=("class",))
    for note in found.notes:
        show.paragraph(note)
    if found.gap is not None and found.against is not None:
        show.paragraph(_verdict(found.gap, found.scored, found.against))


def _class_rows(both: list[VersionScore]) -> list[tuple[str, ...]]:
    """Returns all of them, or those that are worst: with two versions, those that lose the most."""
    first, last = both[0].per_class, both[-1].per_class

    def worst(name: str) -> float:
        return first[name] - last.get(name, 0.0) if len(both) > 1 else first[name]

    chosen = sorted(first, key=worst)[:_MOST_CLASSES] if len(first) > _MOST_CLASSES else list(first)
    rows = [(name, *(f"{one.per_class.get(name, 0.0):.4f}" for one in both)) for name in chosen]
    if len(chosen) < len(first):
        rows.append((f"… the {len(chosen)} worst of {len(first)}; --json has all", *("" for _ in both)))
    return rows


def _verdict(gap: VersionGap, scored: VersionScore, against: VersionScore) -> str:
    name = _IN_WORDS.get(gap.figure, gap.figure)
    between = f"{gap.difference:+.4f} (95 %: {gap.low:+.4f} to {gap.high:+.4f})"
    if gap.worse:
        sure = "" if gap.sure else ", though this may be chance with so few images"
        what = f"worse than the {gap.tolerate:g} that are tolerated{sure}"
    else:
        what = (
            "not worse"
            if gap.sure
            else ("not worse on these images, though more images could show a difference")
        )
    return f"Version {scored.version} against {against.version}, {name}: {between}: {what}."


def _tell_failures(found: Evaluation) -> None:
    for file, why in list(found.failed.items())[:_MOST_FAILURES]:
        print(f"carpool: {file}: {why if why.isprintable() else repr(why)}", file=sys.stderr)
    if len(found.failed) > _MOST_FAILURES:
        print(f"carpool: {len(found.failed)} images were not answered and are left out", file=sys.stderr)
