"""What `make wheel` compiles keeps to what mypyc can compile rightly: it says nothing of most of this, and
a server that was built so falls over when it starts, or later."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
KEYWORDS = {  # of GCC, which have an underscore more; mypyc puts one before each name
    *("_alignof", "_asm", "_attribute", "_complex", "_const", "_imag", "_inline", "_label", "_real"),
    *("_restrict", "_signed", "_thread", "_typeof", "_volatile"),
}
MAY_HAVE_OTHERS = "allow_interpreted_subclasses=True"
ORDINARY = "native_class=False"


@cache
def compiled() -> frozenset[Path]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    hook = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    found = set[Path]()
    for pattern in hook["include"]:
        matched = [path for path in ROOT.glob(pattern) if path.name not in hook["exclude"]]
        assert matched, f"pyproject.toml: there is no {pattern}"
        found.update(matched)
    return frozenset(found)


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in tree(path).body if isinstance(node, ast.ClassDef))


def said(of: ast.ClassDef) -> str:
    return " ".join(map(ast.unparse, of.decorator_list))


def imported(path: Path) -> dict[str, str]:
    """By the name that it has here: module and name of what was imported."""
    return {
        one.asname or one.name: f"{node.module}.{one.name}"
        for node in tree(path).body
        if isinstance(node, ast.ImportFrom) and node.module
        for one in node.names
    }


def test_no_interpreted_class_inherits_from_a_compiled_one() -> None:
    closed = {
        f"{name_of(path)}.{one.name}"
        for path in compiled()
        for one in classes(path)
        if MAY_HAVE_OTHERS not in said(one) and ORDINARY not in said(one)
    }
    modules = set(map(name_of, compiled()))
    wrong = []
    for path in set(SOURCE.rglob("*.py")) - compiled():
        if modules.isdisjoint(re.findall(r"^from (\S+) import ", path.read_text(), re.MULTILINE)):
            continue  # the trees of all files are millions of objects
        here = imported(path)
        for one in classes(path):
            bases = {here.get(ast.unparse(base).partition("[")[0], "") for base in one.bases}
            wrong += [f"{name_of(path)}.{one.name} inherits from {base}" for base in bases & closed]
    assert wrong == [], "compile it too, or mark its base with mypyc_attr"


def test_named_tuples_name_no_class_that_comes_later() -> None:
    wrong = []
    for path in compiled():
        lines = {one.name: one.lineno for one in classes(path)}
        for one in classes(path):
            if "NamedTuple" not in map(ast.unparse, one.bases):
                continue
            for field in (each for each in one.body if isinstance(each, ast.AnnAssign)):
                names = {each.id for each in ast.walk(field.annotation) if isinstance(each, ast.Name)}
                wrong += [f"{one.name}: {name}" for name in names if lines.get(name, 0) > one.lineno]
    assert wrong == [], "a null pointer when it is imported"


def test_no_attribute_is_called_like_a_keyword_of_the_compiler() -> None:
    wrong = [
        f"{name_of(path)}: {node.attr}"
        for path in compiled()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in KEYWORDS
    ]
    assert wrong == [], "its C does not compile"


def test_what_is_held_weakly_is_an_ordinary_class() -> None:
    wrong = [
        one.name
        for path in compiled()
        for one in classes(path)
        if "__weakref__" in ast.unparse(one) and ORDINARY not in said(one)
    ]
    assert wrong == []


def test_nothing_is_made_without_its_constructor() -> None:
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in compiled()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "__new__"
    ]
    assert wrong == [], "a compiled class runs its constructor there, too"


def test_no_property_stands_for_an_attribute_of_its_base() -> None:
    """Compiled methods of the base read the attribute."""
    wrong = [name_of(path) for path in compiled() if "type: ignore[override]" in path.read_text()]
    assert wrong == []


def test_no_compiled_error_has_a_reason_of_its_class() -> None:
    """Where the base is interpreted, its own is read: the reason is an argument of the constructor."""
    wrong = [
        f"{name_of(path)}.{one.name}"
        for path in compiled()
        for one in classes(path)
        if any(isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "reason" for each in one.body)
    ]
    assert wrong == []


def test_no_arguments_are_passed_on_as_they_came_to_a_base() -> None:
    """`super().__init__(*given)` hands it one tuple."""
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in compiled()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("super().") and starred(node)
    ]
    assert wrong == []


def starred(call: ast.Call) -> bool:
    return any(isinstance(each, ast.Starred) for each in call.args)


def test_nobody_waits_where_something_was_raised() -> None:
    """What was raised is kept by the thread, not by the coroutine: while one waits, others' is there. A
    finally then goes on as if nothing had been raised, and returns None, or raises what another caught."""
    wrong = []
    for path in compiled():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Try):
                behind = [*node.finalbody, *(each for one in node.handlers for each in one.body)]
                waits = holds(behind, ast.Await) or holds(behind, ast.Yield)
                wrong += [f"{name_of(path)}:{node.lineno}"] * waits
    assert wrong == [], "wait behind it"


def test_no_function_calls_two_kinds_of_errors_the_same() -> None:
    """What a name is first for is its type for all of the function: the second handler raises TypeError."""
    wrong = []
    for path in compiled():
        for made in ast.walk(tree(path)):
            if not isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            kinds: dict[str, set[str]] = {}
            for caught in (each for each in of_function(made) if isinstance(each, ast.ExceptHandler)):
                if caught.name is not None and caught.type is not None:
                    kinds.setdefault(caught.name, set()).add(ast.unparse(caught.type))
            wrong += [f"{name_of(path)}.{made.name}: {name}" for name, of in kinds.items() if len(of) > 1]
    assert wrong == []


def of_function(node: ast.AST) -> Iterator[ast.AST]:
    """What is in it, but not in functions within it."""
    for each in ast.iter_child_nodes(node):
        if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield each
            yield from of_function(each)


def holds(nodes: Sequence[ast.AST], kind: type[ast.AST]) -> bool:
    return any(isinstance(each, kind) for node in nodes for each in ast.walk(node))
