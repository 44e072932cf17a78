"""Implements `carpool cascade`: from which certainty on the cheap model of a cascade answers, and whether it
pays."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carpool.cli import shared_options as shared
from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import write_file
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.extensions.cascades.cascade_curve import Point
    from carpool.extensions.cascades.cascade_samples import Sample, TwoModels
    from carpool.extensions.cascades.cascade_tuning import Costs, Tuned
    from carpool.extensions.pipelines.settings import PipelineSettings

Action = StrEnum("Action", ["tune"])
By = StrEnum("By", ["margin", "confidence", "entropy"])
_LOSS = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*(%?)")
_ROWS = 10
_BAR = 24
_ESCALATE = re.compile(r"^(\s*escalate\s*=\s*\{)([^}\n]*)(\}.*)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class CascadeVerb:
    """Find the threshold of a cascade, by running both of its models on images.

    From labelled images, with a loss of accuracy of at most 0.5 percentage points. The threshold is written
    into models/animals/pipeline.toml:

        carpool cascade tune models/animals --pictures val/ --labels val.csv --loss 0.5%

    Without labels, the large model counts as right:

        carpool cascade tune models/animals --pictures val/

    From a sample that was saved with --record, or made by another program:

        carpool cascade tune --recorded sample.jsonl --costs 5.7,86.7 --loss 0%
    """

    action: Action = o.argument("The action.", metavar="tune")
    pipeline: Path | None = o.argument(
        "Folder of the cascade's pipeline.toml, beside those of its models.",
        default=None,
        metavar="PIPELINE",
    )
    pictures: Path | None = o.option(None, "Folder of images for both models, at least 300.", metavar="DIR")
    labels: Path | None = o.option(
        None, "A .csv with file and label: each image's class, or its text.", metavar="FILE"
    )
    recorded: Path | None = o.option(None, "File with a sample, in place of images.", metavar="FILE")
    record: Path | None = o.option(None, "Save the sample to this file.", metavar="FILE")
    costs: str | None = o.option(
        None,
        "Time per image of the cheap and of the large model, in ms. Default: measure them.",
    )
    loss: str = o.option(
        "0.5%", "Largest accepted loss of accuracy against the large model alone, in percent."
    )
    sure: bool = o.option(False, "Apply the limit to other images of this kind, with a confidence of 95 %.")
    by: By | None = o.option(None, "Measure of certainty. Default: the simplest that keeps as many.")
    dry_run: bool = o.option(False, "Do not write the threshold into pipeline.toml.")
    plot: Path | None = o.option(
        None, "Plot accuracy and cost over the share that the cheap model answers.", metavar="FILE.png"
    )
    at_once: int = o.option(4, "Number of concurrent requests.", min=1, max=64)
    as_json: o.Json = False

    def run(self) -> int:
        """Exits with 1 if it is not worth it: then nothing is written."""
        from carpool.extensions.cascades.cascade_tuning import tune

        shared.drawing(self.plot)
        loss = _loss(self.loss)
        sample = self._sample()
        costs = _costs(self.costs) or sample.costs
        if costs is None:
            raise InvalidInput("--costs is needed: the sample does not say what an image costs")
        by = "" if self.by is None else self.by.value
        found = tune(sample.pictures, costs, labelled=sample.labelled, loss=loss, sure=self.sure, by=by)
        if self.record is not None:
            write_file(self.record, sample.document())
        written = self.pipeline is not None and not self.dry_run and not found.why_not
        if written:
            assert self.pipeline is not None
            write_threshold(self.pipeline / "pipeline.toml", found.by, found.point.below)
        if self.plot is not None:
            from carpool.lab.plots import cascade_curve

            with o.blamed_on("--plot"):
                cascade_curve(self.plot, _drawn(found), found.point.share, found.labelled)
        if self.as_json:
            print(json.dumps(document(found, written=written), indent=2))
        else:
            _print(found, self.pipeline if written else None)
        for file, why in list(sample.failed.items())[:5]:
            print(f"carpool: {file}: {why}", file=sys.stderr)
        return 1 if found.why_not else 0

    def _sample(self) -> Sample:
        from carpool.extensions.cascades.cascade_samples import Labels, read_sample, sampled
        from carpool.lab.evaluate.labelled_data import NamedPictures, read_data

        if self.recorded is not None:
            if self.pictures is not None or self.labels is not None:
                raise InvalidInput("--recorded is a sample: leave out --pictures and --labels")
            with o.blamed_on("--recorded"):
                return read_sample(self.recorded)
        if self.pipeline is None or self.pictures is None:
            raise InvalidInput("give PIPELINE and --pictures, or --recorded")
        models = two_models(self.pipeline)
        labels = None
        if self.labels is not None:
            try:
                data = read_data(self.labels, self.pictures)
            except InvalidInput as error:
                raise InvalidInput(error.message.replace("--data", "--labels")) from None
            if not isinstance(data, NamedPictures):
                raise InvalidInput("--labels must be a .csv with file and label")
            files, labels = list(data.files), Labels(data)
        else:
            from carpool.cli.predict_command import pictures

            files = pictures([str(self.pictures)])
        enough(len(files))
        from carpool.config.server import server_settings

        kept = server_settings()[0].cache_dir
        with show.steps("Asking", len(files)) as step:
            return sampled(models, files, labels, kept, at_once=self.at_once, step=step)


# ---- what was asked


def _loss(text: str) -> float:
    found = _LOSS.fullmatch(text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else -1.0
    if not 0 <= value < 1:
        raise InvalidInput(f"--loss must be like 0.5% or 0.005, not {text!r}")
    return value


def _costs(text: str | None) -> Costs | None:
    from carpool.extensions.cascades.cascade_tuning import Costs

    if text is None:
        return None
    found = shared.numbers("--costs", text, example="like 5.7,86.7", at_most="2", above=0, most=1e7)
    if len(found) != 2:
        raise InvalidInput("--costs must be two: the cheap model's and the large one's, like 5.7,86.7")
    return Costs(found[0] / 1e3, found[1] / 1e3)


def enough(pictures: int) -> None:
    """Checks the number of pictures before the work, not after it."""
    from carpool.extensions.cascades.cascade_tuning import LEAST_SAMPLES

    if pictures < LEAST_SAMPLES:
        raise InvalidInput(f"--pictures: {pictures} are too few: at least {LEAST_SAMPLES} are needed")


def _cascade_settings(folder: Path) -> tuple[PipelineSettings, float]:
    from carpool.extensions.pipelines.pipeline_toml import PIPELINE_TOML, read_pipeline
    from carpool.extensions.pipelines.settings import pipeline_settings

    file = folder / PIPELINE_TOML
    if not file.is_file():
        raise InvalidInput(f"PIPELINE: there is no {file}")
    config = read_pipeline(file, folder.resolve().name)
    settings = pipeline_settings(config)
    assert settings is not None
    return settings, getattr(config.policy, "slo", float("inf"))


def two_models(folder: Path) -> TwoModels:
    from carpool.extensions.cascades.cascade_samples import TwoModels

    settings, slo = _cascade_settings(folder)
    big = next((step for step in settings.steps if step.escalate is not None), None)
    if big is None or big.escalate is None:
        raise InvalidInput(f"{settings.file} is no cascade: none of its steps has escalate")
    cheap = settings.steps[settings.numbered(big.escalate.source)]
    return TwoModels(folder.resolve().parent, cheap.model, big.model, slo)


# ---- what is left behind


def write_threshold(file: Path, by: str, below: float) -> None:
    """Into the one line that has it; everything else stays as it is."""
    from carpool.extensions.cascades.cascade_tuning import rounded_down

    text = file.read_text("utf-8")
    values = {"by": f'"{by}"', "below": f"{rounded_down(below):.6f}".rstrip("0").rstrip(".")}

    def renewed(match: re.Match[str]) -> str:
        inside = match[2]
        for key, value in values.items():
            inside, times = re.subn(rf"(\b{key}\s*=\s*)[^,\s]+", rf"\g<1>{value}", inside)
            if not times:
                inside = f"{inside.rstrip().rstrip(',')}, {key} = {value} "
        return f"{match[1]}{inside}{match[3]}"

    made, times = _ESCALATE.subn(renewed, text)
    if times != 1:
        raise InvalidInput(
            f"{file} has no line like escalate = {{ … }} that could be changed: write by = {values['by']}, "
            f"below = {values['below']} into it yourself"
        )
    write_file(file, made)


# ---- what people and programs see


def document(found: Tuned, *, written: bool) -> dict[str, Any]:
    point, costs = found.point, found.costs
    return {
        "worth_it": not found.why_not,
        "why_not": found.why_not,
        "by": found.by,
        "below": point.below,
        **_figures(point, costs),
        "labelled": found.labelled,
        "pictures": point.pictures,
        "cheap_accuracy": found.curve.cheap,
        "big_accuracy": found.curve.big,
        "cheap_ms": costs.cheap * 1e3,
        "big_ms": costs.big * 1e3,
        "ratio": costs.ratio,
        "break_even": costs.break_even,
        "written": written,
        "warnings": list(found.warnings),
        "kept_by_measure": {name: other.share for name, other in found.others.items()},
        "curve": [{"below": one.below, **_figures(one, costs)} for one in _tenths(found)],
    }


def _figures(point: Point, costs: Costs) -> dict[str, float]:
    return {
        "kept": point.share,
        "accuracy": point.accuracy,
        "loss": point.loss,
        "loss_at_most": point.loss_at_most if point.kept else 0.0,
        "cost_ms": costs.of(point.share) * 1e3,
        "times_cheaper": costs.saving(point.share),
    }


def _tenths(found: Tuned) -> list[Point]:
    """Returns points about a tenth apart, with the chosen one."""
    points = found.curve.points
    chosen = {id(found.point): found.point}
    for number in range(_ROWS + 1):
        wanted = number / _ROWS * found.point.pictures
        nearest = min(points, key=lambda point: abs(point.kept - wanted))
        chosen[id(nearest)] = nearest
    return sorted(chosen.values(), key=lambda point: point.kept)


def _drawn(found: Tuned) -> list[tuple[float, float, float]]:
    """(kept, accuracy, times the cost of the big model alone) of every point."""
    costs = found.costs
    return [(one.share, one.accuracy, costs.of(one.share) / costs.big) for one in found.curve.points]


def _print(found: Tuned, written: Path | None) -> None:
    point, costs, curve = found.point, found.costs, found.curve
    right = "accuracy" if found.labelled else "agreement"
    show.paragraph(
        f"{point.pictures:,} images{'' if found.labelled else ', without labels'}. Alone, the cheap model "
        f"is right in {show.percent(curve.cheap)} at {costs.cheap * 1e3:.3g} ms per image, the large one "
        f"in {show.percent(curve.big)} at {costs.big * 1e3:.3g} ms: {costs.ratio:.1f} times the cost."
    )
    low = min(one.accuracy for one in curve.points)
    high = max(one.accuracy for one in curve.points)
    rows = []
    for one in _tenths(found):
        bar = "█" * round(_BAR * (one.accuracy - low) / max(high - low, 1e-9))
        at_most = show.percent(one.loss_at_most) if one.kept else "–"
        rows.append(
            (
                "→" if one is point else "",
                show.percent(one.share),
                f"{one.below:.4f}" if one.kept else "",
                f"{one.accuracy:.4f}",
                f"{100 * one.loss:+.2f} %",
                at_most,
                f"{costs.saving(one.share):.2f} ×",
                bar,
            )
        )
    titles = ("", "kept", "from", right, "loss", "at most", "cheaper", " ")
    show.table(titles, rows, left=("", " "))
    others = ", ".join(f"{name} {show.percent(one.share)}" for name, one in found.others.items())
    if len(found.others) > 1:
        show.paragraph(f"Kept within {show.percent(found.loss)} of loss, by measure: {others}.")
    for warning in found.warnings:
        show.paragraph(warning, "· ")
    if found.why_not:
        show.paragraph(f"Not worth it: {found.why_not}.")
        return
    show.paragraph(
        f"By {found.by}, below {point.below:.4f}: {show.percent(point.share)} are kept, {right} "
        f"{point.accuracy:.4f}, {found.saving:.1f} times cheaper than the large model alone; it must keep "
        f"at least {show.percent(costs.break_even)} to save anything."
    )
    if written is not None:
        show.paragraph(
            f"Written into {written / 'pipeline.toml'}; it takes effect when the pipeline is loaded again."
        )
