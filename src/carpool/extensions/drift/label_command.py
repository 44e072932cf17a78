"""Implements `carpool label`: pictures that were kept for labelling become a data set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from carpool.cli import verb_options as o

Action = StrEnum("Action", ["export"])


@dataclass(frozen=True, kw_only=True)
class LabelVerb:
    """Make a data set of images that a server stored, with its responses as first labels.

    Uncertain images, and those on which two versions disagree, in one folder for a labelling tool:

        carpool label export /var/kept/doubtful /var/kept/disagreements --to round-1 --coco
    """

    action: Action = o.argument("The action.", metavar="export")
    folders: list[Path] = o.argument("Folders with an index.jsonl.", metavar="FOLDER…")
    to: Path = o.option(Path("labels"), "The output folder, new or empty.", metavar="FOLDER")
    coco: bool = o.option(False, "Also write the responses as COCO's annotations.json.")
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.cli.predict_output import coco
        from carpool.extensions.drift.label_export import export

        done = export(self.folders, self.to, coco if self.coco else None)
        if self.as_json:
            print(json.dumps(asdict(done), indent=2))
            return
        print(
            f"{done.pictures} images in {self.to}; {done.look_alikes} left out because they look like "
            "another of their source"
        )
        if done.unreadable:
            print(f"{done.unreadable} images cannot be read")
