"""The example of docs/extending.md, installed as a package beside the server and used in all of its parts."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from extensions.installing import environment_with, install
from frontend.http.harness import post
from live.server import Live, error_of, infer_path, json_request, serving
from waiting import until

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "extension"
PAGE = ROOT / "docs" / "extending.md"
MOST_LINES = 80
MODEL = """
import os, time

def predict(x):
    open({begun!r}, "w").close()
    while not os.path.exists({free!r}):
        time.sleep(0.005)
    return x
"""
SETTINGS = """
backend = "python"
[[input]]
name = "x"
datatype = "FP32"
shape = [1]
[[output]]
name = "y"
datatype = "FP32"
shape = [1]
[limit]
at_once = 1
"""


def code_lines(path: Path) -> int:
    """Lines of a file that have code, without docstrings."""
    text = path.read_text("utf-8")
    left_out = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.string.strip()]
    docs = {token.start for token in tokens if token.type == tokenize.STRING and token.string[:3] == '"""'}
    return len({t.start[0] for t in tokens if t.type not in left_out and t.start not in docs})


@pytest.fixture(scope="module")
def installed_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text("utf-8"))["project"]
    points = project["entry-points"]["carpool.extensions"]
    install(EXAMPLE / "carpool_limit", folder, points, project["version"])
    return folder


@pytest.fixture(scope="module")
def environment(installed_at: Path) -> dict[str, str]:
    return environment_with(installed_at)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the model makes when it runs."""
    return tmp_path_factory.mktemp("gate") / "begun"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, begun: Path, environment: dict[str, str]
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "slow" / "1").mkdir(parents=True)
    free = begun.with_name("free")
    free.touch()
    (folder / "slow" / "1" / "model.py").write_text(MODEL.format(begun=str(begun), free=str(free)))
    (folder / "slow" / "model.toml").write_text(SETTINGS)
    (folder / "plain" / "1").mkdir(parents=True)
    (folder / "plain" / "1" / "model.py").write_text("def predict(x):\n    return x\n")
    (folder / "plain" / "model.toml").write_text(SETTINGS.partition("[limit]")[0])
    with serving(folder, folder=begun.parent, environment=environment) as running:
        yield running


def test_it_is_short_and_the_page_shows_all_of_it() -> None:
    files = sorted((EXAMPLE / "carpool_limit").glob("*.py"))
    assert sum(map(code_lines, files)) <= MOST_LINES
    page = PAGE.read_text("utf-8")
    for file in (*files, EXAMPLE / "pyproject.toml"):
        assert file.read_text("utf-8").strip() in page, file.name


def test_setting_wrapper_metric_and_route(server: Live, begun: Path) -> None:
    free = begun.with_name("free")
    free.unlink()
    begun.unlink(missing_ok=True)
    request = json_request([1.0], [1, 1])
    with server.connect() as first:
        try:
            first.send(post(infer_path("slow"), request))
            until(begun.exists, "the first request runs")
            with server.connect() as second:
                why = error_of(second.post(infer_path("slow"), request), 429, "limit")
                assert why["error"] == "1 requests for slow are under way; retry later"
                assert second.post(infer_path("plain"), request).status == 200
        finally:
            free.touch()
        assert first.response().status == 200
        assert first.post(infer_path("slow"), request).status == 200
    server.until_metric(1.0, "carpool_limit_rejected_total", model="slow")
    assert server.get_json("/v2/models/slow/limit") == {"name": "slow", "limit": {"at_once": 1}}
    assert server.get_json("/v2/models/plain/limit") == {"name": "plain", "limit": None}
    assert error_of(server.get("/v2/models/none/limit"), 404, "unknown-model")


def test_verb(server: Live, environment: dict[str, str]) -> None:
    assert "  limit    Show the limit" in carpool(environment, "--help").stdout
    done = carpool(environment, "limit", "slow", "--url", f"http://{server.url}")
    assert done.stdout == "{'name': 'slow', 'limit': {'at_once': 1}}\n", done.stderr


def test_a_mistake_in_its_table_names_the_key(
    tmp_path: Path, environment: dict[str, str], server: Live
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text("def predict(x):\n    return x\n")
    (tmp_path / "m" / "model.toml").write_text(SETTINGS.replace("at_once", "at_onec"))
    done = carpool(environment, "inspect", str(tmp_path / "m"))
    assert done.returncode != 0
    assert 'unknown key "limit.at_onec"; did you mean "at_once"?' in done.stderr


def carpool(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from carpool.cli.main import main; sys.argv[0] = 'carpool'; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        env=os.environ | environment | {"COLUMNS": "120"},
        capture_output=True,
        text=True,
        check=False,
    )
