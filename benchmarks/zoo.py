"""Exports of vision models as people have them, and what each is recognised as.

Heads are rebuilt as small networks with random weights: what decides are names, shapes, values and metadata,
and those are as in real exports. Each is written to a file, with static and dynamic axes, and inspected as
`carpool serve` would. Where torchvision, timm and transformers are installed, networks of theirs come in too.

    python benchmarks/zoo.py            # about a minute
    python benchmarks/zoo.py --quick    # every kind of head once
    python benchmarks/zoo.py --json

Exit code 1 if any was recognised wrongly.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from carpool.lab.model_report import ModelReport, inspect_model
from zoo_exports import Export, exports

RIGHT, ASKS, TENSORS, WRONG = "recognised", "needs one setting", "served as tensors", "WRONG"


@dataclass(frozen=True)
class Row:
    export: str
    axes: str
    outputs: str
    result: str
    task: str
    setting: str  # the one that it needs
    why: str


def judge(export: Export, folder: Path) -> Row:
    file = export.write(folder)
    report = inspect_model(file)
    outputs = ", ".join(f"{one.name} {one.shape}" for one in report.outputs)
    why = (report.ask or "; ".join(report.evidence)).replace(str(folder), "…")
    result, task = TENSORS, report.task or ""
    if report.task is not None:
        result = RIGHT if not export.setting and export.fits(_plain(report)) else WRONG
    elif export.setting:
        (folder / "model.toml").write_text(f'file = "{file.name}"\n{export.setting}\n')
        again = inspect_model(file)
        result, task = (ASKS if export.fits(_plain(again)) else WRONG), again.task or ""
    elif export.expected:
        result = "not recognised"
    return Row(export.name, export.axes, outputs, result, task, export.setting, why)


def _plain(report: ModelReport) -> dict[str, object]:
    """What an expectation is held against: the task, its table, and how many labels."""
    import tomllib

    told = tomllib.loads(report.toml)
    table = told.get(report.task or "", {})
    return {"task": report.task, "labels": len(report.labels), **told.get("image", {}), **table}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="every kind of head once")
    parser.add_argument("--only", default="", help="exports whose name has this in it")
    given = parser.parse_args(arguments)
    rows = []
    made, missing = exports(quick=given.quick)
    for export in made:
        if given.only in export.name:
            with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
                rows.append(judge(export, Path(folder)))
    if given.json:
        print(json.dumps({"exports": [asdict(row) for row in rows], "missing": missing}, indent=2))
    else:
        _print(rows, missing)
    return 1 if any(row.result == WRONG for row in rows) else 0


def _print(rows: Sequence[Row], missing: Sequence[str]) -> None:
    print("| export | axes | result | task | the setting it needs |")
    print("|---|---|---|---|---|")
    for row in rows:
        setting = f"`{'; '.join(row.setting.splitlines())}`" if row.result == ASKS else ""
        print(f"| {row.export} | {row.axes} | {row.result} | {row.task} | {setting} |")
    counts = {kind: sum(row.result == kind for row in rows) for kind in dict.fromkeys(r.result for r in rows)}
    print(f"\n{len(rows)} exports: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    for line in missing:
        print(f"not here: {line}")
    for row in rows:
        if row.result not in (RIGHT, ASKS, TENSORS):
            print(f"{row.result}: {row.export} {row.axes}: {row.outputs}: {row.why}")


if __name__ == "__main__":
    sys.exit(main())
