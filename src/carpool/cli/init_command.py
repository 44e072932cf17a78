"""Implements `carpool init`: a model.toml to begin with."""

from __future__ import annotations

from dataclasses import dataclass

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.inspect_command import Labels, Model, Preset, Size, Task, choice_of, read_report
from carpool.cli.written_files import write_file
from carpool.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class Init:
    """Write a commented model.toml beside a model, with what was recognised.

        carpool init yolov8n.onnx
        carpool init resnet50.onnx --preset torchvision

    Class names in the model's metadata are written to labels.txt.
    """

    model: Model
    task: Task = ""
    labels: Labels = ""
    size: Size = ""
    preset: Preset = ""
    force: bool = o.option(False, "Add what was found to an existing model.toml. Its settings do not change.")

    def run(self) -> None:
        from carpool.lab.model_report import one_model, read_before
        from carpool.lab.settings_file import LABELS, check_whose, refers_to_labels

        if not self.model.exists():
            raise InvalidInput(f"{self.model}: no such file or folder")
        folder = self.model if self.model.is_dir() else self.model.parent
        target, names = folder / "model.toml", folder / LABELS
        if target.exists() and not self.force:
            raise InvalidInput(f"{target} exists already: --force adds what it lacks")
        config = one_model(self.model).config
        check_whose(read_before(config), config)
        report = read_report(self.model, choice_of(self.task, self.labels, self.size, self.preset))
        written = [target]
        if report.labels and refers_to_labels(report.toml) and not names.exists():
            write_file(names, "".join(f"{' '.join(label.split())}\n" for label in report.labels))
            written.append(names)
        write_file(target, report.toml)
        print(f"Wrote {' and '.join(map(str, written))}.")
        if report.ask or report.assumed:
            show.paragraph(report.ask or report.evidence[-1], "  ! ")
