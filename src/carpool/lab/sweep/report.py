"""What a sweep leaves behind: report.html, the charts, results.json."""

from __future__ import annotations

import json
from pathlib import Path

from carpool.errors import InvalidInput
from carpool.lab.sweep.page import page
from carpool.lab.sweep.results import Results
from carpool.lab.sweep.sweep_report import draw_charts


def check_drawing() -> None:
    """Say so before the minutes of work, not after them."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidInput("the report needs matplotlib: pip install 'carpool[plot]'") from None


def write_report(results: Results, folder: Path) -> Path:
    """The page; everything else lies beside it, but it needs none of that."""
    found = folder / "report.html"
    try:
        (folder / "results.json").write_text(
            json.dumps(results.as_json(), indent=1, ensure_ascii=False), "utf-8"
        )
        charts = {name: file.read_text("utf-8") for name, file in draw_charts(results, folder).items()}
        found.write_text(page(results, charts), "utf-8")
    except OSError as error:
        raise InvalidInput(
            f"--out: cannot write to {folder}: {error.strerror or error}", field="--out"
        ) from None
    return found
