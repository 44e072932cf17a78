"""`carpool init`: a model.toml to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.inspect_command import Labels, Model, Size, Task, read_report
from carpool.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a commented model.toml beside a model, with what was recognised of it.

        carpool init yolov8n.onnx

    Classes that stand in the model's own metadata are written to labels.txt.
    """

    model: Model
    task: Task = ""
    labels: Labels = ""
    size: Size = ""
    force: bool = o.option(False, "Write over what is there.", name="--force")

    def run(self) -> None:
        if not self.model.exists():
            raise InvalidInput(f"{self.model}: no such file or folder")
        folder = self.model if self.model.is_dir() else self.model.parent
        target, names = folder / "model.toml", folder / "labels.txt"
        if target.exists() and not self.force:
            raise InvalidInput(f"{target} is there already: --force writes over it")
        report = read_report(self.model, self.task, self.labels, self.size)
        written = [target]
        if report.labels and (self.force or not names.exists()):
            names.write_text("".join(f"{' '.join(label.split())}\n" for label in report.labels), "utf-8")
            written.append(names)
        target.write_text(report.toml, "utf-8")
        print(f"Wrote {' and '.join(map(str, written))}.")
        if report.ask:
            show.paragraph(report.ask, "  ! ")
