"""What benchmarks and tools take from the package is there, also where they import it only when they run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from docstrings import statements

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path for folder in ("benchmarks", "tools") for path in (ROOT / folder).rglob("*.py"))


def test_what_a_script_imports_is_there() -> None:
    missing = {str(script.relative_to(ROOT)): [*missing_imports(script)] for script in SCRIPTS}
    assert {script: names for script, names in missing.items() if names} == {}


def missing_imports(script: Path) -> Iterator[str]:
    for node in statements(ast.parse(script.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "carpool":
            try:
                module = import_module(str(node.module))
            except ModuleNotFoundError as error:
                if str(error.name).startswith("carpool"):
                    yield str(error.name)
                continue  # it needs a library that is not installed here
            for alias in node.names:
                if not hasattr(module, alias.name) and find_spec(f"{node.module}.{alias.name}") is None:
                    yield f"{node.module}.{alias.name}"
