"""The project's shape, kept by tests: imports go down, core is pure, files fit in a head, docs keep up."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "carpool"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Lower floors may be imported, higher ones and neighbours may not.
FLOORS = [
    {"types", "errors", "clock", "console"},
    {"core", "demo"},
    {"config", "sim", "memory"},
    {"backends", "vision", "wire", "observe"},
    {"link"},
    {"rollout", "registry", "quality", "cache", "pipelines"},
    {"engine", "frontend"},  # two processes: neither may load the other
    {"process"},
    {"runner", "lab", "cluster"},
    {"cli"},
]
FLOOR_OF = {part: floor for floor, parts in enumerate(FLOORS) for part in parts}
LEAVES = {"types", "errors", "clock"}
ENGINE = "carpool.engine.models.served carpool.core.scheduler carpool.backends"


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def carpool_parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("carpool.")}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_go_down(path: Path) -> None:
    here = part_of(path)
    if here in ("__init__", "__main__"):
        return
    assert here in FLOOR_OF, f"give {here} a floor in design and in this test"
    for there in carpool_parts(path) - {here, "__version__"}:
        assert there in FLOOR_OF, f"{path} imports carpool.{there}"
        same_leaf = here in LEAVES and there in LEAVES
        assert FLOOR_OF[there] < FLOOR_OF[here] or same_leaf, f"{here} must not import {there}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").glob("*.py")), ids=lambda path: path.name)
def test_core_is_pure(path: Path) -> None:
    allowed = sys.stdlib_module_names - {
        "time",
        "threading",
        "asyncio",
        "socket",
        "logging",
        "multiprocessing",
    }
    for name in imports(path):
        top = name.split(".")[0]
        if top == "carpool":
            assert name.split(".")[1] in {"core", *LEAVES}
        else:
            assert top in allowed, f"core must not import {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_fit_in_a_head(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 500  # cut by meaning, never to fit
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_no_grab_bags() -> None:
    assert not {path.stem for path in SOURCES} & {"utils", "util", "helpers", "manager", "common", "misc"}


def loaded_with(module: str) -> set[str]:
    """What an interpreter has loaded after this one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_carpool_stays_light() -> None:
    """A user's own app pays for numpy and little else."""
    heavy = {"onnxruntime", "matplotlib", "typer", "rich", "grpc", "uvloop", "torch", "cv2"}
    assert not heavy & loaded_with("carpool")


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        ("carpool.process.front_ends", ENGINE),
        ("carpool.frontend.http.app", f"{ENGINE} grpc"),
        ("carpool.frontend.grpc.grpc_server", ENGINE),
        ("carpool.process.start", "carpool.frontend.http.app carpool.frontend.grpc cv2 torch"),
        ("carpool.cli.serve_run", "carpool.engine.models.served carpool.frontend.http.app cv2 grpc torch"),
    ],
)
def test_a_process_loads_only_what_it_needs(process: str, spared: str) -> None:
    """Each process of a server is an interpreter that has to start, and keeps what it has loaded."""
    assert not set(spared.split()) & loaded_with(process)


def test_the_heart_is_covered_branch_by_branch(tmp_path: Path) -> None:
    """batcher, shedding and admission: 100 %, by their own unit tests alone."""
    heart = [PACKAGE / "core" / f"{name}.py" for name in ("batcher", "shedding", "admission")]
    tests = [ROOT / "tests" / "core" / f"test_{path.stem}.py" for path in heart]
    data = f"--data-file={tmp_path / 'coverage'}"
    python = [sys.executable, "-m"]
    include = "--include=" + ",".join(map(str, heart))
    run = [*python, "coverage", "run", "--branch", "--rcfile=/dev/null", data, include, "-m", "pytest", "-q"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
    run += ["-p", "no:cacheprovider", "-p", "no:xdist", *map(str, tests)]
    subprocess.run(run, cwd=ROOT, env=environment, check=True, capture_output=True)
    shown = [*python, "coverage", "report", "--rcfile=/dev/null", data, "--show-missing", "--fail-under=100"]
    done = subprocess.run(shown, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "100%" in done.stdout
