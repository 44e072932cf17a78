"""CONTRIBUTING asks ten questions: each answer is a line of a function in one of four files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "carpool"
FILES = ("frontend/http/app.py", "frontend/calls/request.py", "engine/run/driver.py", "core/batcher.py")
ROW = re.compile(r"^\| [^|]+\? \| [^|]+ \| `(\w+\.py)`, `(\w+)`: `([^`]+)` \|$", re.MULTILINE)


def functions(file: Path) -> dict[str, str]:
    text = file.read_text("utf-8")
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_each_answer_is_a_line_of_its_function() -> None:
    found = {Path(name).name: functions(PACKAGE / name) for name in FILES}
    rows = ROW.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(rows) == 10
    assert {file for file, _, _ in rows} == set(found), "each file answers one"
    for file, function, line in rows:
        lines = found[file][function].splitlines()
        assert any(line in one for one in lines), f"{file}, {function} has no line {line}"
