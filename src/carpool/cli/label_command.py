"""`carpool label`: pictures that were kept for labelling become a data set."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from carpool.cli import verb_options as o

Action = StrEnum("Action", ["export"])


@dataclass(frozen=True, kw_only=True)
class LabelVerb:
    """Make a data set of the pictures that a server kept, with its answers to begin with.

    Doubtful pictures, and those that two versions disagree about, in one folder for a labelling tool:

        carpool label export /var/kept/doubtful /var/kept/disagreements --to round-1 --coco
    """

    action: Action = o.argument("What to do.", metavar="export")
    folders: list[Path] = o.argument("Folders with an index.jsonl.", metavar="FOLDER…")
    to: Path = o.option(Path("labels"), "A folder that is not there yet, or empty.", metavar="FOLDER")
    coco: bool = o.option(False, "Write the answers as COCO's annotations.json, too.")
    as_json: o.Json = False

    def run(self) -> None:
        from carpool.cli.predict_output import coco
        from carpool.drift.label_export import export

        done = export(self.folders, self.to, coco if self.coco else None)
        if self.as_json:
            print(json.dumps(asdict(done), indent=2))
            return
        print(f"{done.pictures} pictures in {self.to}; {done.look_alikes} look like another of their source")
        if done.unreadable:
            print(f"{done.unreadable} pictures cannot be read")
