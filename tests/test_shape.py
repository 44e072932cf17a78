"""The project's shape, kept by tests: imports go down, names are unique, core is pure."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

import measures
from absent import ABSENT
from arrows import ARROWS, arrows
from carpool.extensions import BUILT_IN, installed
from docstrings import statements, statements_in

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "carpool"
OF_EXTENSIONS = sorted((PACKAGE / "extensions").glob("*/**/*.py"))
SOURCES = sorted(set(PACKAGE.rglob("*.py")).difference(OF_EXTENSIONS))

# Which other folders the files of a folder may import: a folder by its path, a file beside them by its name.
# Everybody may import his own folder, and LEAVES. `__init__` is the package's public face. What is below
# `extensions` may import every folder of the server, and no folder imports it: see the tests of extensions.
LEAVES = {"types", "errors", "compiling", "extension", "extensions"}
ENGINE = "carpool.engine.models.served carpool.core.scheduler carpool.backends"
MAY_IMPORT: Mapping[str, str] = {
    "__init__": "client engine engine/run",
    "backends": "config core",
    "backends/hosted": "backends backends/python config",
    "backends/python": "backends config memory observe",
    "cli": "client config core demo engine/profile frontend frontend/access lab "
    "lab/evaluate lab/load lab/sweep link observe process ray "
    "sim vision vision/plans",
    "client": "vision wire",
    "config": "core wire/proto",
    "console": "",
    "core": "",
    "demo": "",
    "engine": "backends config core engine/fleet engine/loading engine/models engine/profile "
    "engine/routes engine/run link memory observe vision vision/plans",
    "engine/control": "config core engine engine/loading link memory observe",
    "engine/fleet": "backends/python config core engine/loading engine/models engine/profile "
    "engine/routes engine/run link memory observe",
    "engine/loading": "backends config core engine/profile engine/run link memory observe "
    "vision vision/plans vision/tasks",
    "engine/models": "backends config core engine/loading engine/profile engine/routes "
    "engine/run link observe vision/plans",
    "engine/profile": "backends config core engine/run link memory observe",
    "engine/routes": "config core engine/run link observe",
    "engine/run": "backends config core link memory observe wire",
    "frontend": "config core frontend/calls frontend/pictures link memory observe wire",
    "frontend/access": "config observe",
    "frontend/calls": "config frontend/clients frontend/pictures link memory observe vision wire",
    "frontend/clients": "core",
    "frontend/grpc": "config core frontend frontend/access frontend/calls "
    "frontend/clients frontend/http frontend/pictures link memory observe wire "
    "wire/proto",
    "frontend/http": "config console core frontend frontend/access frontend/calls "
    "frontend/clients frontend/pictures link memory observe vision vision/tasks wire",
    "frontend/pictures": "config core frontend/clients link memory observe vision "
    "vision/plans vision/tasks wire",
    "lab": "backends config core engine/loading engine/profile engine/run memory sim vision vision/plans",
    "lab/evaluate": "client config engine engine/fleet vision",
    "lab/load": "sim wire wire/proto",
    "lab/sweep": "config core demo engine/profile lab lab/load link sim",
    "link": "config core memory observe wire",
    "memory": "",
    "observe": "core",
    "process": "config engine engine/control engine/fleet engine/loading engine/models engine/profile "
    "frontend frontend/access frontend/calls frontend/clients frontend/grpc frontend/http "
    "frontend/pictures link memory observe wire",
    "ray": "",
    "sim": "core",
    "vision": "config",
    "vision/plans": "config vision vision/tasks",
    "vision/tasks": "config vision",
    "wire": "",
    "wire/proto": "",
}

# What no request passes. Nothing that serves imports it, and a verb does when it runs.
LAB = {"extensions/cameras", "extensions/deploy", "extensions/optimize", "extensions/ray", "lab", "ray"}


def name_of(path: Path) -> str:
    """As it is imported: `core.queue`; a folder's `__init__` has the folder's name."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def folder_of(path: Path) -> str:
    inside = path.relative_to(PACKAGE)
    if inside.parts[0] == "extensions":
        return "/".join(inside.parts[: len(inside.parts) - 1][:2])
    return str(inside.parent) if len(inside.parts) > 1 else inside.stem


MODULES = {name_of(path): path for path in (*SOURCES, *OF_EXTENSIONS)}


@dataclass(frozen=True)
class Source:
    """What the tests ask of a file; its tree, of which all together are millions of objects, is not kept."""

    imports: tuple[str, ...]  # full names, also of what is imported inside functions
    imports_to_run: tuple[str, ...]  # without those for types alone
    classes: tuple[str, ...]  # without those that describe documents, which clients know by these names


@cache
def source_of(path: Path) -> Source:
    tree = ast.parse(path.read_text("utf-8"))
    return Source(
        tuple(imports(tree, path)), tuple(imports(tree, path, for_types=False)), tuple(classes_of(tree))
    )


def imports(tree: ast.Module, path: Path, *, for_types: bool = True) -> Iterator[str]:
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where things come from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not for_types and isinstance(node, ast.If) and is_for_types(node.test):
            waiting += node.orelse
        else:
            waiting += statements_in(node)


def is_for_types(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imported_files(path: Path, *, for_types: bool = True) -> set[str]:
    """Those of the package itself, by name."""
    found = set()
    source = source_of(path)
    for name in source.imports if for_types else source.imports_to_run:
        if name.startswith("carpool."):
            inside = name.removeprefix("carpool.")
            while inside and inside not in MODULES:
                inside = inside.rpartition(".")[0]
            found |= {inside}
    return found - {"", name_of(path)}


def test_imports_only_go_where_they_may() -> None:
    unknown = {folder_of(path) for path in SOURCES} - MAY_IMPORT.keys() - LEAVES - {"__main__"}
    assert unknown == set(), "give it a line in MAY_IMPORT"
    wrong = []
    for path in SOURCES:
        here = folder_of(path)
        allowed = {here, *LEAVES, *MAY_IMPORT.get(here, "").split()}
        for name in imported_files(path):
            there = folder_of(MODULES[name])
            if there not in allowed and here != "__main__" and not there.startswith("extensions/"):
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_folders_are_layers() -> None:
    """What a folder may import never comes back to it, also not for types alone."""
    graph = {
        folder: [name for name in allowed.split() if name in MAY_IMPORT]
        for folder, allowed in MAY_IMPORT.items()
    }
    assert list(circles(graph)) == []


def test_few_files_are_read_together() -> None:
    """Also where they know each other for their types alone."""
    graph = {name: imported_files(path) for name, path in MODULES.items()}
    assert [found for found in circles(graph) if len(found.split()) > 3] == []


def test_the_server_imports_fewer_features() -> None:
    """Not inside functions and not for types alone: a process finds extensions by their manifests."""
    inside = {name: str(path.relative_to(PACKAGE)) for name, path in MODULES.items()}
    found = arrows(
        {inside[name]: [inside[one] for one in imported_files(path)] for name, path in MODULES.items()}
    )
    assert found == ARROWS, "cut what is new, and take what was cut out of tests/arrows.py"


def test_an_extension_imports_others_only_if_it_needs_them() -> None:
    found = []
    for path in OF_EXTENSIONS:
        here = folder_of(path)
        needed = {f"extensions/{name}" for name in installed()[path.parts[len(PACKAGE.parts) + 1]].needs}
        for name in imported_files(path):
            folder = folder_of(MODULES[name])
            if folder.startswith("extensions/") and folder not in {here, *needed}:
                found.append(f"{name_of(path)} imports {name}")
    assert found == []


def test_every_folder_of_an_extension_has_its_line() -> None:
    folders = {path.parts[len(PACKAGE.parts) + 1] for path in OF_EXTENSIONS}
    assert folders == {one.name for one in BUILT_IN}


def test_nothing_that_serves_may_import_the_lab() -> None:
    def outermost(folders: Iterable[str]) -> set[str]:
        return {folder.partition("/")[0] for folder in folders}

    users = [here for here, there in MAY_IMPORT.items() if LAB & outermost(there.split())]
    assert outermost(users) - LAB == {"cli"}


def test_verbs_import_the_lab_when_they_run() -> None:
    files = [*(PACKAGE / "cli").glob("*_command.py"), *(PACKAGE / "extensions").glob("*/*command.py")]
    verbs = {f"carpool.{name_of(path)}" for path in files}
    loaded = loaded_with(", ".join(sorted(verbs)))
    assert verbs <= loaded
    folders = {verb.rpartition(".")[0] for verb in verbs}
    assert not {name for name in loaded if is_of_the_lab(name)} - verbs - folders


def is_of_the_lab(module: str) -> bool:
    inside = f"{module.removeprefix('carpool.').replace('.', '/')}/"
    return module.startswith("carpool.") and any(inside.startswith(f"{folder}/") for folder in LAB)


def test_no_file_imports_itself_by_way_of_others() -> None:
    found = set(circles({name: imported_files(path, for_types=False) for name, path in MODULES.items()}))
    assert found == set()


def test_so_many_groups_of_files_import_each_other() -> None:
    """Imports for types alone count: who reads one of these files has to read the others."""
    graph = {name: imported_files(path) for name, path in MODULES.items()}
    assert len(list(circles(graph))) == measures.CIRCLES, measures.WORSE_OR_BETTER


def circles(graph: Mapping[str, Iterable[str]]) -> Iterator[str]:
    """Groups of files of which each one reaches all the others."""
    reached = {name: reach(graph, name) for name in graph}
    grouped: set[str] = set()
    for name in sorted(graph):
        if name in reached[name] and name not in grouped:
            group = {other for other in reached[name] if name in reached[other]}
            grouped |= group
            yield " ".join(sorted(group))


def reach(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def test_circles_are_found() -> None:
    graph = {"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"], "e": []}
    assert list(circles(graph)) == ["b c"]


def test_every_file_has_a_name_of_its_own() -> None:
    names = Counter(path.stem for path in SOURCES if path.stem != "__init__")
    assert {name for name, count in names.items() if count > 1} == set()


# Excepted are names that others gave: Triton's of its Python models, those of arrays that Python programs get
# for the documents of /openapi.json, and the class that a worker process looks for.
NO_SERVER = LAB | {"cli", "client", "demo", "sim"}
NAMED_BY_OTHERS = (
    "backends/hosted/",
    "backends/python/triton_python_backend_utils.py",
    "vision/python_pictures.py",
)


def test_a_class_name_means_one_thing_in_a_server() -> None:
    files: dict[str, list[str]] = {}
    for path in SOURCES:
        inside = str(path.relative_to(PACKAGE))
        if inside.partition("/")[0] not in NO_SERVER and not inside.startswith(NAMED_BY_OTHERS):
            for name in source_of(path).classes:
                files.setdefault(name, []).append(inside)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


def classes_of(tree: ast.Module) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.ClassDef) and "TypedDict" not in map(ast.unparse, node.bases):
            yield node.name


# What extensions have that is like core: laws without a clock.
PURE = (
    "sequences/law.py",
    "sequences/pinned.py",
    "streams/places.py",
    *(f"text/{name}.py" for name in ("text_job", "text_scheduler", "lengths")),
)


def test_core_is_pure() -> None:
    impure = {"time", "threading", "asyncio", "socket", "logging", "multiprocessing"}
    allowed = sys.stdlib_module_names - impure | {"carpool"}
    of_extensions = [PACKAGE / "extensions" / name for name in PURE if name.partition("/")[0] not in ABSENT]
    pure = [*(PACKAGE / "core").rglob("*.py"), *of_extensions]
    found = [(path.name, name) for path in pure for name in source_of(path).imports]
    assert [(file, name) for file, name in found if name.split(".")[0] not in allowed] == []


def test_what_the_engine_calls_back_is_given_to_constructors() -> None:
    """Where a function is assigned to another object's attribute, only a search tells who listens. Requests
    are the exception: they say themselves who has them, and who is to be told."""
    files = [path for path in SOURCES if folder_of(path).startswith(("engine", "lab/evaluate", "process"))]
    trees = {path: ast.parse(path.read_text("utf-8")) for path in files}
    methods = {
        node.name
        for tree in trees.values()
        for kind in statements(tree)
        if isinstance(kind, ast.ClassDef)
        for node in kind.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.decorator_list
    }
    hooks = [f"{name_of(path)}: {hook}" for path, tree in trees.items() for hook in hooks_set(tree, methods)]
    assert hooks == []


def hooks_set(tree: ast.Module, methods: set[str]) -> Iterator[str]:
    functions = {
        node.name for node in statements(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and is_function(node.value, functions, methods):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) not in (
                    "self",
                    "work",
                    "child",
                ):
                    yield ast.unparse(node)


def is_function(value: ast.expr, functions: set[str], methods: set[str]) -> bool:
    """As far as can be seen where it stands; an object that has some is one, too."""
    match value:
        case ast.Lambda() | ast.Name("self") | ast.Call(ast.Name("partial")):
            return True
        case ast.Name(name):
            return name in functions
        case ast.Attribute(_, name):
            return name in methods
    return False


def test_hooks_are_found() -> None:
    code = "a.b = lambda: 0; a.b = self; a.b = self.told; a.b = here; a.b = partial(f, 1); a.b = self.data"
    tree = ast.parse(f"def here(): ...\n{code}; self.b = here; work.done = here; a = here")
    assert len(list(hooks_set(tree, {"told"}))) == 5


def test_no_grab_bags() -> None:
    assert not {path.stem for path in SOURCES} & {"utils", "util", "helpers", "manager", "common", "misc"}


def test_tests_wait_with_one_helper() -> None:
    """`until` in tests/waiting.py has a bound, and says what it has waited for."""
    waiting = ROOT / "tests" / "waiting.py"
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "tests").rglob("*.py")
        if path != waiting and "conformance" not in path.parts
        if "sleep" in (text := path.read_text("utf-8")) and "while" in text
        for node in statements(ast.parse(text))
        if isinstance(node, ast.While) and all(map(is_sleep, node.body))
    ]
    assert found == []


def is_sleep(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and ast.unparse(node.value).partition("(")[0].endswith("sleep")


def loaded_with(module: str) -> set[str]:
    """What an interpreter has loaded after this one."""
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_carpool_stays_light() -> None:
    """A user's own app pays for numpy and little else."""
    heavy = {"onnxruntime", "matplotlib", "rich", "grpc", "uvloop", "torch", "cv2"}
    assert not heavy & loaded_with("carpool")


@pytest.mark.parametrize(
    ("process", "spared"),
    [
        ("carpool.process.front_ends", ENGINE),
        ("carpool.frontend.http.app", f"{ENGINE} grpc"),
        ("carpool.frontend.grpc.grpc_server", f"{ENGINE} grpc"),
        ("carpool.process.start", "carpool.frontend.http.app carpool.frontend.grpc cv2 torch"),
        (
            "carpool.process.supervisor",
            "carpool.engine.models.served carpool.frontend.http.app cv2 grpc torch",
        ),
        ("carpool.cli.main", "numpy rich orjson uvloop asyncio email http.client carpool.config carpool.lab"),
    ],
)
def test_a_process_loads_only_what_it_needs(process: str, spared: str) -> None:
    """Each process of a server is an interpreter that has to start, and keeps what it has loaded."""
    assert not set(spared.split()) & loaded_with(process)


@pytest.mark.conformance
@pytest.mark.interpreted  # what is compiled has no lines to count
def test_the_heart_is_covered_branch_by_branch(tmp_path: Path) -> None:
    """batcher and admission: 100 %, by their own unit tests alone."""
    heart = [PACKAGE / "core" / f"{name}.py" for name in ("batcher", "admission")]
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
