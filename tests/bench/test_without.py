"""tools/without.py: a copy of the checkout without an extension."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_a_copy_has_neither_its_folder_nor_its_tests_nor_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import without

    try:
        names = without.with_dependents("deploy")
        assert names == ["deploy", "ray"]  # which needs it
        without.copy_without(names, tmp_path)
    finally:
        del sys.modules["without"]
    package = tmp_path / "src" / "carpool"
    assert (package / "extension.py").read_bytes() == (ROOT / "src" / "carpool" / "extension.py").read_bytes()
    assert not (package / "extensions" / "ray").exists()
    assert not (tmp_path / "tests" / "extensions" / "deploy").exists()
    listed = {
        node.value
        for node in ast.walk(ast.parse((tmp_path / without.LIST).read_text("utf-8")))
        if isinstance(node, ast.Constant)
    }
    assert "torchserve" in listed
    assert not listed & {"deploy", "ray"}
