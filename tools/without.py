"""Removes an extension from a copy of this checkout, and looks whether nothing else went with it.

    python tools/without.py NAME …   these; what needs them goes with them
    python tools/without.py --all    each by itself
    python tools/without.py --day    two that the date chooses

In the copy, the extension's folder, its tests, its line in extensions/__init__.py, a module of its name, such
as carpool.ray, and the lines about its metrics in docs/metrics.md are gone. Then no file of the package
imports it, `carpool serve` answers a photo with the demo models, and those tests of the server pass that take
little time (TESTS), with the tests of the extensions that are left. The table has a row for each extension,
with what failed below it. The exit status is 1 if something failed. --tests PATH … runs other tests; the
copies are removed.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST, METRICS = "src/carpool/extensions/__init__.py", "docs/metrics.md"
TESTS = (
    *("tests/extensions", "tests/config", "tests/link", "tests/observe"),
    *(f"tests/engine/test_{name}.py" for name in ("engine", "driver", "loading", "control", "model_control")),
    *(f"tests/frontend/http/test_app_{name}.py" for name in ("routes", "infer", "images", "control")),
    *("tests/frontend/grpc/test_infer.py", "tests/test_shape.py"),
)

_LINKED_BYTES = 1 << 16  # larger files are shared with the copy: nothing changes them in place
_READY_S = 180.0
_CLASSIFIER = "efficientnet_lite0"  # of the demo, where another one may be loaded first
_TESTS_S, _DAY_S = 1200.0, 400.0  # of each extension: two that the date chooses take a few minutes
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py)", re.MULTILINE)


@dataclass
class Row:
    """Describes what is left when an extension is gone."""

    name: str
    imports: list[str] = field(default_factory=list)  # files that still name its folder
    serves: str = ""  # why the demo was not served; empty: it was
    tests: str = ""  # the last line of pytest
    failed: list[str] = field(default_factory=list)  # files with tests that fail now

    @property
    def good(self) -> bool:
        return not (self.imports or self.serves or self.failed)


def extensions() -> dict[str, ast.Call]:
    """Returns the calls of `Extension` in the list, by name, as they stand there."""
    tree = ast.parse((ROOT / LIST).read_text("utf-8"))
    [built_in] = [
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "BUILT_IN"
    ]
    assert isinstance(built_in, ast.Tuple)
    calls = [one for one in built_in.elts if isinstance(one, ast.Call)]
    return {str(_given(call, "name")): call for call in calls}


def _given(call: ast.Call, name: str) -> object:
    found = [ast.literal_eval(one.value) for one in call.keywords if one.arg == name]
    return found[0] if found else ()


def with_dependents(name: str) -> list[str]:
    """Returns the extension and those that need it, directly or not."""
    found = [name]
    for one in found:
        needs = {other: _given(call, "needs") for other, call in extensions().items()}
        found += [other for other, needed in needs.items() if one in needed and other not in found]  # type: ignore[operator]
    return found


def copy_without(names: Sequence[str], folder: Path) -> None:
    """Copies what git knows of this checkout, without these extensions."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    gone = tuple(
        place
        for name in names
        for place in (
            f"src/carpool/extensions/{name}/",
            f"src/carpool/{name}.py",
            f"tests/extensions/{name}/",
        )
    )
    for file in filter(None, files):
        if not file.startswith(gone) and (ROOT / file).is_file():
            there = folder / file
            there.parent.mkdir(parents=True, exist_ok=True)
            copy = _link if (ROOT / file).stat().st_size > _LINKED_BYTES else shutil.copy2
            copy(ROOT / file, there)
    for test in (folder / "tests").rglob("*.py"):  # what imports a feature is one of its tests
        if _of_tests(names).search(test.read_text("utf-8")):
            test.unlink()
    lines = (folder / LIST).read_text("utf-8").splitlines(keepends=True)
    for name in names:
        call = extensions()[name]
        lines[call.lineno - 1 : call.end_lineno] = [""] * len(lines[call.lineno - 1 : call.end_lineno])
    (folder / LIST).write_text("".join(lines), "utf-8")
    listed = "".join(str(_given(extensions()[name], "metrics") or "") for name in names)
    metrics = [line.split()[0] for line in listed.splitlines() if line]
    page = folder / METRICS
    rows = page.read_text("utf-8").splitlines(keepends=True)
    page.write_text("".join(row for row in rows if not any(metric in row for metric in metrics)), "utf-8")


def _of_tests(names: Sequence[str]) -> re.Pattern[str]:
    """Returns what finds imports of these extensions, or of what their tests share, at the top of a file."""
    either = "|".join(names)
    inside = rf"(?:carpool\.)?extensions\.(?:{either})\b|(?:carpool\.)?extensions import (?:{either})\b"
    return re.compile(rf"^(?:from|import) (?:{inside})|^from {inside}", re.MULTILINE)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def imports(names: Sequence[str], folder: Path) -> list[str]:
    wanted = re.compile(
        rf"\bcarpool\.extensions\.(?:{'|'.join(names)})\b|extensions import (?:{'|'.join(names)})\b"
    )
    sources = sorted((folder / "src").rglob("*.py"))
    return [str(path.relative_to(folder)) for path in sources if wanted.search(path.read_text("utf-8"))]


def serves(folder: Path, environment: dict[str, str]) -> str:
    """Serves the demo and asks it once; returns why that failed."""
    code = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
    options = ("serve", *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"), "--slo-ms", "60000")
    log = folder / "server.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            [sys.executable, "-P", "-c", code, *options],
            cwd=folder,
            env=environment,
            stdout=file,
            stderr=file,
        )
    try:
        return _asked(server, log, folder)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _asked(server: subprocess.Popen[bytes], log: Path, folder: Path) -> str:
    picture = (folder / "src/carpool/demo/pictures/coffee.jpg").read_bytes()
    end = time.monotonic() + _READY_S
    why = "it did not listen"
    while time.monotonic() < end and server.poll() is None:
        listening = re.search(r" listening .*http=(\d+)", log.read_text(errors="replace"))
        if listening is not None:
            url = f"http://127.0.0.1:{listening[1]}/models/{_CLASSIFIER}/predict"
            request = urllib.request.Request(url, picture, {"Content-Type": "image/jpeg"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return "" if b"espresso" in answer.read() else "it saw no coffee"
            except OSError as error:  # it may still load
                why = str(error)
                with suppress(AttributeError):
                    why = error.read().decode()[:200]  # type: ignore[attr-defined]
        time.sleep(0.2)
    if server.poll() is not None:
        return log.read_text(errors="replace").strip().rpartition("\n")[2][-200:]
    return why


def tested(
    tests: Sequence[str], folder: Path, environment: dict[str, str], limit_s: float
) -> tuple[str, list[str]]:
    """Returns pytest's last line, and the files with tests that fail."""
    paths = [test for test in tests if (folder / test).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-n", "2"]
    command += ["--dist", "loadfile", "--continue-on-collection-errors", *paths]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", [f"more than one, perhaps: they took over {limit_s:g} s"]
    said = done.stdout.strip()
    failed = sorted(set(_SUMMARY.findall(said)))
    if done.returncode and not failed:
        failed = [(said + done.stderr)[-400:]]
    return said.rpartition("\n")[2].strip("= "), failed


def without(name: str, tests: Sequence[str], limit_s: float) -> Row:
    names = with_dependents(name)
    with tempfile.TemporaryDirectory(prefix="w-") as made:  # sockets below it have short names
        folder = Path(made)
        copy_without(names, folder)
        own = {key: value for key, value in os.environ.items() if not key.startswith(("CARPOOL_", "PYTEST_"))}
        more = {"PYTHONPATH": str(folder / "src"), "TMPDIR": made, "WITHOUT_EXTENSIONS": " ".join(names)}
        environment = own | more
        row = Row(" ".join(names), imports(names, folder))
        row.serves = serves(folder, environment)
        row.tests, row.failed = tested(tests, folder, environment, limit_s)
    return row


def show(row: Row) -> None:
    served = "no" if row.serves else "yes"
    print(f"{row.name:24} {len(row.imports):7}  {served:6}  {len(row.failed):5}  {row.tests}", flush=True)


def explain(row: Row) -> None:
    for file in row.imports:
        print(f"{row.name}: {file} imports it")
    if row.serves:
        print(f"{row.name}: the demo was not served: {row.serves}")
    for file in row.failed:
        print(f"{row.name}: tests fail in {file}")


def main() -> int:
    known = list(extensions())
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*known, []])
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--day", action="store_true")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="PATH")
    given = parser.parse_args()
    names = known if given.all else given.names
    if given.day:
        names = random.Random(datetime.now(UTC).toordinal()).sample(known, 2)
    print(f"{'without':24} imports  serves  files  tests")
    rows = {}
    for name in names:
        rows[name] = without(name, given.tests, _DAY_S if given.day else _TESTS_S)
        show(rows[name])
        explain(rows[name])
    return int(not all(row.good for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
