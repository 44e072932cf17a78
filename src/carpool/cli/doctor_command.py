"""Implements `carpool doctor`: what is installed here, and what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from carpool.cli import show
from carpool.cli import verb_options as o

_MARKS = {"fine": "✓", "absent": "–", "note": "!", "wrong": "✗"}


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Check this machine for the server: packages, engines, devices, limits, ports.

        carpool doctor

    It checks what a server with the settings of the environment would use, and changes nothing. The exit
    code is 1 if something is wrong; `--json` is for a report.
    """

    as_json: o.Json = False

    def run(self) -> int:
        from carpool.lab.machine_check import State, check_machine

        with show.status("Looking …"):
            found = check_machine()
        wrong = [one for one in found if one.state is State.WRONG]
        if self.as_json:
            print(json.dumps({"wrong": len(wrong), "findings": [asdict(one) for one in found]}, indent=2))
            return 1 if wrong else 0
        area = ""
        rows = []
        for one in found:
            rows.append((one.area if one.area != area else "", _MARKS[one.state], one.name, one.says))
            area = one.area
        show.table(("", "", "", ""), rows, left=("",))
        for one in found:
            if one.advice and one.state in (State.NOTE, State.WRONG):
                show.paragraph(f"{one.name}: {one.says}. {one.advice[0].upper()}{one.advice[1:]}.", "  ! ")
        notes = sum(one.state is State.NOTE for one in found)
        said = f"{len(wrong)} wrong" if wrong else "Nothing is wrong"
        print(f"\n{said}; {show.count(notes, 'note')} above (!)." if notes else f"\n{said}.")
        return 1 if wrong else 0
