"""Implements `carpool drift`: whether a model's traffic is still what it was, and what to compare it with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any
from urllib.parse import quote

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import write_file
from carpool.errors import InvalidInput

Action = StrEnum("Action", ["status", "learn", "reset"])


@dataclass(frozen=True, kw_only=True)
class DriftVerb(o.AsksServer):
    """Check whether a model's images and responses have changed.

    Show what changed, and which cameras are broken. The exit code is 1 while there is an alarm.

        carpool drift status detector

    Use the next 24 hours as the new reference:

        carpool drift learn detector --hours 24

    Save the reference, for reference = "usual.json" in the model.toml of other servers:

        carpool drift status detector --save usual.json
    """

    action: Action = o.argument("The action.", metavar="status|learn|reset")
    name: str = o.argument("The model.")
    url: o.ServerUrl = o.DEFAULT_URL
    version: str | None = o.option(None, "The version. Default: the one that serves.")
    hours: float = o.option(24.0, "learn: length of the reference, in hours.")
    save: Path | None = o.option(None, "status: write the reference to this file.", metavar="FILE.json")

    def run(self) -> int:
        from carpool.lab.load.facts import RunningServer

        if self.save is not None and self.action is not Action.status:
            raise InvalidInput(f"--save goes with status, not with {self.action}")
        server = RunningServer(self.url, self.trust())
        version = "" if self.version is None else f"/versions/{quote(self.version, safe='')}"
        path = f"/v2/models/{quote(self.name, safe='')}{version}/drift"
        if self.action is Action.status:
            document = server.get(f"{path}?reference=1" if self.save is not None else path)
        else:
            hours = {"hours": self.hours} if self.action is Action.learn else {}
            document = server.send(path, {"action": str(self.action), **hours})
        if self.save is not None:
            reference = document.pop("reference_file", None)
            if reference is None:
                raise InvalidInput("--save: the reference needs an admin key")
            write_file(self.save, json.dumps(reference))
        if self.as_json:
            print(json.dumps(document, indent=2))
        else:
            _print(document)
        return int(self.action is Action.status and _alarming(document))


def _alarming(document: dict[str, Any]) -> bool:
    return bool(document["alarms"]) or any(source["state"] for source in document["sources"])


def _print(document: dict[str, Any]) -> None:
    window, reference = document["window"], document["reference"]
    show.paragraph(f"{document['model']} version {document['version']}: {document['says']}.")
    so_far = f"{window['pictures']} images in {window['seconds'] / 60:.0f} min of {window['hours']:g} h"
    show.paragraph(f"Window: {so_far}; reference: {reference['pictures']} images.")
    judged = [line for line in document["measures"] if line["psi"] is not None]
    if judged:
        show.paragraph("")
        show.table(
            ("measure", "PSI", ""),
            [(line["what"], f"{line['psi']:.3f}", "alarm" if line["alarm"] else "") for line in judged],
            left=("measure", ""),
        )
    if document["sources"]:
        show.paragraph("")
        rows = [
            (one["source"], one["state"] or "well", ", ".join(one["alarms"]), f"{one['pictures']}")
            for one in document["sources"]
        ]
        show.table(("source", "state", "changed", "pictures"), rows, left=("source", "state", "changed"))
