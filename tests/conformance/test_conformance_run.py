"""The parts of `make conformance` that need no server: reading reports, saying what is missing, the page."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from conformance import examples, perf_analyzer, run
from conformance.flavours import Flavour
from conformance.perf_analyzer import Point, RunError, SetupError
from conformance.runs import every_run
from conformance.show import CallRow, Got, RunRow, as_document, as_markdown, call_cells, run_cells
from conformance.table import every_case, missing, unknown

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text("utf-8")
HEAD = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency\n"
)
LINE = "8,2708.02,271,1501,563,31,440,97,0,2602,3991,4716,7753\n"
POINT = Point("8", 2708.02, 7753, 563, 31, 440, 97)


def program(folder: Path, report: str, code: int = 0) -> Path:
    """Something that behaves as perf_analyzer does: its last argument is the report to write."""
    (folder / "report").write_text(report)
    path = folder / "perf_analyzer"
    path.write_text(
        f'#!/bin/sh\nfor last; do :; done\ncp "{folder}/report" "$last"\necho words\nexit {code}\n'
    )
    path.chmod(0o755)
    return path


def test_a_report_is_read(tmp_path: Path) -> None:
    assert perf_analyzer.run(program(tmp_path, HEAD + LINE), [], tmp_path / "out.csv") == [POINT]


@pytest.mark.parametrize(
    ("report", "code", "complaint"),
    [
        (HEAD + LINE, 99, "exit code 99: words"),
        (HEAD, 0, "its report is empty"),
        ("Concurrency,Inferences/Second\n8,100\n", 0, "no column 'p99 latency'"),
        (HEAD + LINE.replace(",440,", ",0,"), 0, "no time in compute infer at 8"),
    ],
    ids=["it failed", "no rows", "no split", "an empty split"],
)
def test_a_run_that_shows_nothing_is_a_failure(
    tmp_path: Path, report: str, code: int, complaint: str
) -> None:
    with pytest.raises(RunError, match=complaint):
        perf_analyzer.run(program(tmp_path, report, code), [], tmp_path / "out.csv")


def test_a_library_that_only_root_can_install_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path, "")
    (tmp_path / "libcudart.so.12").touch()
    monkeypatch.setattr("ctypes.util.find_library", lambda _name: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SetupError, match="apt-get install libb64-0d"):
        perf_analyzer.install(tmp_path)


def test_a_package_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "no network")
    monkeypatch.setattr(subprocess, "run", lambda *_arguments, **_options: failed)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(SetupError, match=r"tritonclient==2\.47\.0: no network"):
        perf_analyzer.install(tmp_path)


@pytest.mark.parametrize("flavour", Flavour, ids=lambda flavour: flavour.value)
def test_the_table_has_every_method_of_the_client(flavour: Flavour) -> None:
    """A new version of tritonclient with a new method fails here: add a row that says what it does."""
    assert missing(flavour) == set()


def test_the_table_has_no_method_that_no_client_has() -> None:
    assert unknown() == set()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ([], {"calls", "load", "tests", "extensions"}),
        (["--ci"], {"calls", "tests"}),
        (["--only", "tests"], {"tests"}),
        (["--ci", "--only", "load"], {"load"}),
    ],
)
def test_parts_are_chosen(monkeypatch: pytest.MonkeyPatch, arguments: list[str], wanted: set[str]) -> None:
    monkeypatch.setattr("sys.argv", ["make conformance", *arguments])
    assert run._wanted(run._arguments()) == wanted


@pytest.mark.parametrize("status", [0, 1])
def test_long_tests_that_fail_are_a_failure(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    commands: list[list[str]] = []

    def pretended(command: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr("sys.argv", ["make conformance", "--ci", "--only", "tests"])
    monkeypatch.setattr(subprocess, "run", pretended)
    assert run.main() == status
    assert " -m pytest -m (conformance or hypothesis) and not exhaustive " in " ".join(commands[0])


def test_failures_stand_out() -> None:
    case = every_case()[0]
    row = CallRow(case, {Flavour.HTTP: Got(True, "true"), Flavour.GRPC: Got(False, "a | b")})
    assert call_cells(row)[3:] == ["✓", "–", "NO", "–", "a | b"]
    failed = RunRow(every_run()[0], (), "exit code 99")
    assert run_cells(failed)[0][3] == "FAILED"
    assert "a \\| b" in as_markdown([row], [failed])
    document = as_document([row], [failed], {})
    assert document["calls"][0]["got"]["grpc"] == {"good": False, "said": "a | b"}
    assert document["perf_analyzer"][0]["error"] == "exit code 99"


def test_the_page_has_every_call_and_every_run() -> None:
    for case in every_case():
        cells = call_cells(CallRow(case, dict.fromkeys(case.flavours, Got(True, ""))))
        assert f"| {' | '.join(cells[:7])} |" in PAGE
    for one in every_run():
        assert f"| {one.protocol} | {one.model} | {one.what} |" in PAGE


@pytest.mark.parametrize(
    ("name", "code", "output", "good"),
    [
        ("simple_http_infer_client.py", 0, "PASS: infer\n", True),
        ("simple_http_infer_client.py", 1, "PASS: infer\n", False),
        ("simple_http_sequence_sync_infer_client.py", 1, "[501] sequences are not offered: …\n", False),
        ("simple_http_sequence_sync_infer_client.py", 0, "PASS: Sequence\n", True),
        ("simple_grpc_cudashm_client.py", 1, "ModuleNotFoundError: No module named 'cuda'\n", True),
        ("simple_grpc_cudashm_client.py", 1, "connection refused\n", False),
    ],
)
def test_an_example_runs_to_the_end_or_gets_the_documented_refusal(
    name: str, code: int, output: str, good: bool
) -> None:
    assert examples.judged(name, examples.expected_refusal(name), code, output).good is good


def test_a_folder_without_examples_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"no examples like simple_\*\.py"):
        examples.find(tmp_path)


def test_tests_that_the_page_names_are_there() -> None:
    """Of Triton's own cases, each of which says what does the same here."""
    page = (run.ROOT / "docs" / "conformance.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    there = {
        name
        for file in (run.ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert not named - there
    cases = [row.split("|") for row in page[page.index("## Triton's own cases") :].splitlines() if "|" in row]
    applies = [(row[1], row[3]) for row in cases if row[2].strip().startswith("yes")]
    assert len(applies) > 40
    assert not [case for case, here in applies if "`test_" not in here]
