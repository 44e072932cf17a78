"""`carpool inspect`: what a model file is recognised as, and why."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from carpool.cli import show
from carpool.cli import verb_options as o

if TYPE_CHECKING:
    from carpool.lab.model_report import ModelReport, Tensor

Model = Annotated[Path, typer.Argument(help="A model file or a model's folder.", show_default=False)]
Task = Annotated[str, typer.Option(help="What it does with pictures, if you know.", metavar="TASK")]
Labels = Annotated[str, typer.Option(help="Its classes, one a line.", metavar="FILE")]
Size = Annotated[str, typer.Option(help="The size of its pictures: 640, or height,width.", metavar="PIXELS")]


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Say what a model is for, what that was told by, and the model.toml that would pin it.

        carpool inspect yolov8n.onnx

    The model is opened and run once on a picture of noise; nothing is served.
    """

    model: Model
    task: Task = ""
    labels: Labels = ""
    size: Size = ""
    as_json: o.Json = False

    def run(self) -> None:
        report = read_report(self.model, self.task, self.labels, self.size)
        if self.as_json:
            print(json.dumps(report.as_json(), indent=2))
            return
        show.table(("", ""), _facts(report).items(), left=("",))
        print()
        titles = ("tensor", "name", "datatype", "shape", "one picture gives")
        rows = [("input", *_cells(one)) for one in report.inputs]
        rows += [("output", *_cells(one)) for one in report.outputs]
        show.table(titles, rows, left=titles)
        print()
        for line in report.evidence:
            show.paragraph(line, "  • ")
        if report.ask:
            show.paragraph(f"It would be served as tensors: {report.ask}", "  ! ")
        print(f"\nmodel.toml (carpool init {self.model} writes it):\n\n{report.toml}", end="")


def read_report(model: Path, task: str, labels: str, size: str) -> ModelReport:
    from carpool.config.server import ServerSettings
    from carpool.lab.model_report import inspect_model

    return inspect_model(model, ServerSettings(task=task, labels=labels, size=size).pictures)


def _facts(report: ModelReport) -> dict[str, str]:
    names = ", ".join(report.labels[:5]) + (", …" if len(report.labels) > 5 else "")
    return {
        "model": report.model,
        "runs with": report.backend,
        "task": report.task or "not sure",
        **({"format": report.format} if report.format else {}),
        **({"labels": f"{len(report.labels)}: {names}"} if report.labels else {}),
    }


def _cells(one: Tensor) -> tuple[str, str, str, str]:
    return one.name, one.datatype, str(one.shape), "" if one.tried is None else str(one.tried)
