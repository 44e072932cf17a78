"""Lists the files and functions of the package that are long. It reports; nothing fails."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "carpool"
LONG_FILE, LONG_FUNCTION = 500, 60


def main() -> None:
    total = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text("utf-8")
        lines = text.count("\n")
        total += lines
        name = path.relative_to(PACKAGE)
        if lines > LONG_FILE:
            print(f"{lines:6}  {name}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG_FUNCTION:
                    print(f"{length:6}  {name}: {node.name}")
    print(f"{total:6}  lines in all")


if __name__ == "__main__":
    main()
