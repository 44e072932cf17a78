"""The examples run, and the pages for newcomers are true: their commands work and print what they show."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import carpool
from later import later

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
PAGES = [
    ROOT / "README.md",
    EXAMPLES / "README.md",
    *(
        DOCS / f"{name}.md"
        for name in ("README", "quickstart", "pictures", "video", "text", "python", "scheduling")
    ),
    *(DOCS / f"{name}.md" for name in ("coming-from", "conformance", "faults")),
    *sorted((DOCS / "tutorials").glob("*.md")),
]
RUNNABLE = [page for page in PAGES if "```console" in page.read_text("utf-8")]
TO_THE_DIGIT = (
    "README.md",
    "quickstart.md",
    "coming-from.md",
    "text.md",
    *(page.name for page in (DOCS / "tutorials").glob("*.md")),
)
"""Pages whose numbers are what came out, and whose commands leave no complaint in a log. Of the others the
words are compared."""
AT_ONCE = ("python.md",)  # `make conformance` runs the other pages, too
SECONDS = 180  # for anything to end that should take a few, on cores that other tests keep busy

SERVERS_OWN = ("carpool serve", "make serve")
REFUSED = re.compile(r"cannot-finish|overload|given-up|errors\.(Refused|DeadlineExceeded)|cannot be met")
READY = re.compile(r" supervisor\S* ready ")  # in the log
COMPLAINT = re.compile(r"^.*(?:error|traceback).*$", re.IGNORECASE | re.MULTILINE)
NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
TRIES = 10
ASKS = ("ask_with_tritonclient.py", "batch_sizes.py")
IN_A_TOOL = ("cvat_agent.py", "frigate_kserve.py")  # their tools load them: tests/extensions


def name_of(page: Path) -> str:
    """Names those that `pytest -m conformance -k tutorial tests/test_examples.py` follows alone."""
    followed = page.parent.name == "tutorials" or page.name in ("quickstart.md", "text.md", "video.md")
    return f"tutorial-{page.name}" if followed else page.name


@dataclass(frozen=True)
class Step:
    """One command of a page and what the page says that it prints. `note` stands before it and says what may
    differ: the numbers, or all but the titles of rows."""

    command: str
    output: str
    note: str


def steps(page: Path) -> list[Step]:
    blocks = re.findall(r"(<!-- [^\n]+ -->\n)?```console\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    found = []
    for note, block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, rest = _split(part)
            found.append(Step(command.replace(".venv/bin/", ""), rest, note))
    return found


def _split(part: str) -> tuple[str, str]:
    """A command goes on after a backslash, and until its quotes are closed."""
    lines = part.splitlines(keepends=True)
    count = 1
    while lines[count - 1].endswith("\\\n") or "".join(lines[:count]).count("'") % 2:
        count += 1
    return "".join(lines[:count]).strip(), "".join(lines[count:])


def environment(folder: Path) -> dict[str, str]:
    """Of somebody who has just begun: nothing is set, and no model was measured before."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {name: value for name, value in os.environ.items() if not name.startswith(("CARPOOL_", "PYTEST_"))}
    cache = {"CARPOOL_CACHE_DIR": str(folder / "cache")}
    return own | cache | {"PATH": path, "COLUMNS": "200", "PYTHONWARNINGS": "error"}


def clone(folder: Path) -> Path:
    """What a clone has, in a folder with nothing else in it."""
    made = folder / "clone"
    if not made.exists():
        made.mkdir()
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name not in ("build", "dist"):
                (made / entry.name).symlink_to(entry)
    return made


class Server:
    """`carpool serve` as a page starts it, but on free ports of the loopback, which its log tells."""

    def __init__(self, command: str, folder: Path) -> None:
        self.http = self.metrics = 0
        self._folder = folder
        self._command = self.here(command).replace("make serve", "carpool serve").split()
        self._log = (folder / "log").open("w+")
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        given = ["--host", "127.0.0.1", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
        return subprocess.Popen(
            [*self._command, *given],
            cwd=clone(self._folder),
            env=environment(self._folder) | {"PYTHONWARNINGS": ""},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def here(self, text: str) -> str:
        """A text of a page, with its addresses and its temporary folder as they are in this test."""
        text = text.replace("localhost:8000", f"127.0.0.1:{self.http}").replace("/tmp/", f"{self._folder}/")
        return text.replace("localhost:8002", f"127.0.0.1:{self.metrics}")

    def wait_ready(self) -> None:
        deadline = time.monotonic() + SECONDS
        while not self._is_ready():
            if self._process.poll() is not None and "cannot be met" in self._said():
                self._promise_more_time()
                deadline = time.monotonic() + 2 * SECONDS  # more can be promised, so more is measured
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(0.05)

    def _promise_more_time(self) -> None:
        """A machine that is busy with others cannot keep what the demo models promise; a minute it can."""
        assert "--slo-ms" not in self._command, self._said()
        self._command += ["--slo-ms", "60000"]
        self._process.communicate()
        self._log.close()
        self._log = (self._folder / "log").open("w+")
        self._process = self._start()

    def _is_ready(self) -> bool:
        listening = re.search(r" listening .*http=(\d+) metrics=(\d+)", self._said())
        if listening is None:
            return False
        self.http, self.metrics = int(listening[1]), int(listening[2])
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.http}/v2/health/ready", timeout=5).close()
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False
        return READY.search(self._said()) is not None  # the front ends are up before what is printed is

    def _said(self) -> str:
        return (self._folder / "log").read_text()

    def stop(self) -> str:
        """Ends it as a user would; what it printed to standard output."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            printed, _ = self._process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            raise
        finally:
            self._log.close()
        assert self._process.returncode == 0, self._said()
        return printed

    def complaints(self) -> list[str]:
        return COMPLAINT.findall(self._said())


@contextmanager
def serving(command: str, folder: Path) -> Iterator[Server]:
    server = Server(command, folder)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def run(command: str, folder: Path, *, quietly: bool = False) -> str:
    """What it prints, `quietly` with no complaint. On a machine that is busy for a moment it may be refused,
    as it should: then again."""
    for _ in range(TRIES):
        done = _once(command, folder)
        if done.returncode == 0 or not REFUSED.search(done.stderr):
            break
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert not (quietly and COMPLAINT.findall(done.stderr)), done.stderr
    return done.stdout


def _once(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=clone(folder),
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def plain(text: str) -> str:
    """Without what differs from machine to machine: spaces, ports, where the clone lies, and promises that
    may grow."""
    text = re.sub(r"file=@\S*/pictures/", "file=@…/pictures/", text)
    text = re.sub(r"(localhost|127\.0\.0\.1)(:\d+)?", "host", text)
    text = re.sub(r"promises [\d,]+ ms", "promises … ms", text)
    return " ".join(text.split())


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def titles(text: str) -> list[str]:
    """Of rows and columns of tables: what begins with a letter, before two spaces."""
    return re.findall(r"^[^\W\d][^\n]*?(?=  )", text, re.MULTILINE)


def has_same_words(printed: str, shown: str) -> bool:
    return NUMBER.sub("#", plain(printed)) == NUMBER.sub("#", plain(shown))


def check_same(printed: str, shown: str, *, numbers: bool = True) -> None:
    """Word by word, and numbers to a thousandth: processors sum in orders of their own."""
    said, expected = plain(printed), plain(shown)
    assert NUMBER.sub("#", said) == NUMBER.sub("#", expected)
    if not numbers:
        return
    came, stands = (list(map(_number, NUMBER.findall(text))) for text in (said, expected))
    assert came == pytest.approx(stands, rel=1e-3, abs=1e-6), printed


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name) if page.name in AT_ONCE else later(page, name=name_of(page))
        for page in RUNNABLE
    ],
)
def test_every_command_of_a_page_works_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    server: Server | None = None
    banner, exactly = "", page.name in TO_THE_DIGIT

    def stop() -> None:
        if server is not None:
            assert plain(banner) in plain(server.stop())
            assert not (exactly and server.complaints())

    try:
        for step in steps(page):
            if step.command.startswith(SERVERS_OWN):
                stop()
                banner = step.output
                server = Server(step.command, tmp_path)
                server.wait_ready()
            elif "--compare" not in step.command:  # a quarter of a minute: see the test of that page
                _check(step, server, tmp_path, exactly=exactly)
    except BaseException:
        if server is not None:
            server.stop()
        raise
    stop()


def _check(step: Step, server: Server | None, folder: Path, *, exactly: bool) -> None:
    command = step.command.replace("/tmp/", f"{folder}/") if server is None else server.here(step.command)
    if server is not None and any(name in command for name in ASKS):
        command += f" --url 127.0.0.1:{server.http}"
    if "batch_sizes.py" in command:
        command += " --requests 5"
    for _ in range(TRIES):
        printed = run(command, folder, quietly=exactly).replace(f"{folder}/", "/tmp/")
        refused = REFUSED.search(printed) and not REFUSED.search(step.output)
        early = "rollout status" in command and not has_same_words(printed, step.output)  # still loading
        if not (refused or early):
            break
    if step.command.startswith("carpool simulate"):
        assert printed.split() == step.output.split()  # virtual time: exactly so
    elif step.note and "the numbers" not in step.note:
        assert bool(printed) == bool(step.output)
        if exactly:
            assert {*titles(step.output)} <= {*titles(printed)}, (
                printed
            )  # and others, where some were refused
    else:
        check_same(printed, step.output, numbers=exactly and not step.note)


@pytest.mark.conformance
def test_the_tutorial_shows_what_the_simulator_says(tmp_path: Path) -> None:
    page = (DOCS / "tutorials" / "first-slo.md").read_text("utf-8")
    said = json.loads(run("carpool simulate --curve 4+1 --slo-ms 50 --load 3 --json", tmp_path))
    promise = {line[:26].strip(): line[26:].split()[0] for line in page.splitlines() if line[26:].strip()}
    assert promise["within the SLO (goodput)"] == f"{said['goodput_rps']:,.1f}"
    assert promise["… of offered (attainment)"] == f"{said['attainment']:.1%}".rstrip("%")
    assert promise["p99 of answered"] == f"{said['p99_ms']:.1f}"
    assert promise["mean batch"] == f"{said['mean_batch']:.1f}"


@pytest.mark.conformance
@pytest.mark.parametrize("page", ["scheduling.md", "planning.md"])
def test_pages_show_what_the_simulator_and_the_planner_say(page: str, tmp_path: Path) -> None:
    """In virtual time, so to the digit. A recording of traffic is not kept beside the page."""
    shown = [step for step in steps(DOCS / page) if step.output and "trace:" not in step.command]
    made = [step for step in shown if step.command.startswith(("carpool simulate", "carpool plan"))]
    assert made
    for step in made:
        said, expected = run(step.command, tmp_path).split(), step.output.split()
        if expected[-1] == "…":  # the page goes no further
            expected.pop()
            said = said[: len(expected)]
        assert said == expected


@pytest.mark.conformance
def test_a_file_of_ones_own_is_served_as_the_readme_says(tmp_path: Path) -> None:
    """Nothing says what this one is for: it is served, and who sends a picture hears which option would."""
    readme = (ROOT / "README.md").read_text("utf-8")
    inspect, serve = re.findall(r"\.venv/bin/(carpool (?:inspect|serve) resnet50\.onnx[^`\n]*)", readme)[::-1]
    run(f"python examples/make_vision_repository.py {tmp_path}/models", tmp_path)
    (tmp_path / "models/scenes/1/model.onnx").rename(clone(tmp_path) / "resnet50.onnx")
    assert "classify" in run(inspect, tmp_path)
    with serving(serve, tmp_path) as server:
        ask = "curl -s -F file=@src/carpool/demo/pictures/chelsea.jpg localhost:8000/classify"
        assert "give --task to carpool serve" in run(server.here(ask), tmp_path)


def test_make_serve_is_what_the_pages_take_it_for() -> None:
    recipe = re.search(r"^serve:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert recipe
    assert recipe[1].split() == ["$(BIN)/carpool", "serve"]


PROGRAMS = [path.name for path in sorted(EXAMPLES.glob("*.py")) if path.name not in (*ASKS, *IN_A_TOOL)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_runs(name: str, tmp_path: Path) -> None:
    made = tmp_path / "made" if name.startswith("make_") else ""
    assert run(f"python examples/{name} {made}", tmp_path).strip()


def test_every_program_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    kept = [path for path in EXAMPLES.glob("[a-z]*") if path.name != "ruff.toml"]
    assert kept
    assert all(f"({path.name}" in listed for path in kept)


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)


DECLARES = ("BackendKind(", "(VisionTask)")  # what an entry point names
ASKS_A_SERVER = ("demo/pictures", "InferenceServerClient")
CODE = [(page.name, code) for page in PAGES for code in code_blocks(page)]


def code_case(number: int, page: str, code: str) -> object:
    name = f"{page}-{number}"
    if any(word in code for word in ASKS_A_SERVER):
        return later(code, name=name)
    return pytest.param(code, id=name)


@pytest.mark.parametrize("code", [code_case(number, *case) for number, case in enumerate(CODE)])
def test_code_on_the_pages_is_real(code: str, tmp_path: Path) -> None:
    """It is part of an example, or a model, or a client, or something to register, or a program that runs."""
    if any(code in path.read_text("utf-8") for path in EXAMPLES.rglob("*.py")):
        return
    program = tmp_path / "model.py"
    if "INPUTS =" in code:
        program.write_text(code)
        _ask_zeros(program)
    elif ASKS_A_SERVER[0] in code:
        with serving("carpool serve src/carpool/demo/models --slo-ms 5000", tmp_path) as server:
            program.write_text(server.here(code))
            assert "cat" in run(f"python {program}", tmp_path)
    elif ASKS_A_SERVER[1] in code:
        with serving("carpool serve examples/python_model --slo-ms 5000", tmp_path) as server:
            program.write_text(server.here(code))
            assert code.split("# ")[-1].split("\n")[0] in run(f"python {program}", tmp_path)
    elif any(word in code for word in DECLARES):
        program.write_text(code)
        run(f"python {program}", tmp_path)
    else:
        program.write_text(code)
        assert run(f"python {program}", tmp_path).strip()


def _ask_zeros(program: Path) -> None:
    import asyncio

    async def story() -> None:
        async with carpool.Engine(program) as engine:
            [served] = engine.served.values()
            shapes = {
                spec.name: np.zeros([abs(n) for n in spec.shape], spec.datatype.dtype)
                for spec in served.signature.inputs
            }
            assert await engine.infer(served.name, shapes)

    asyncio.run(story())


LINKED = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), EXAMPLES / "README.md", ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", LINKED, ids=lambda page: f"{page.parent.name}-{page.name}")
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text("utf-8")):
        path, _, anchor = target.partition("#")
        goal = page if not path else (page.parent / path).resolve()
        assert goal.exists(), target
        if anchor:
            assert anchor in anchors(goal), target


def anchors(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen = [plain[:at].count(name) for at, name in enumerate(plain)]  # those before it of the same name
    return {f"{name}-{before}" if before else name for name, before in zip(plain, seen, strict=True)}


def test_pages_that_the_program_names_are_there() -> None:
    """In messages and in comments: `docs/page.md`, also with an anchor."""
    named = {
        found
        for file in (ROOT / "src").rglob("*")
        if file.suffix in (".py", ".toml", ".md", ".js", ".html")
        for found in re.findall(r"\bdocs/([\w/-]+\.md)(?:#([\w-]+))?", file.read_text("utf-8"))
    }
    assert len(named) > 10
    for page, anchor in named:
        assert (DOCS / page).exists(), page
        assert not anchor or anchor in anchors(DOCS / page), f"{page}#{anchor}"
