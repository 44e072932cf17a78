"""`carpool rollout` against a server in this process, and against none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cli_run import CliResult, run_cli
from extensions.rollout.staged import staged

HELD = "shadow = 0\ncanary = [0.1, 0.5]\ncanary_h = 48\n"


def rollout(*arguments: str) -> CliResult:
    return run_cli(["rollout", *arguments])


def words(result: CliResult) -> str:
    assert result.exit_code == 0, result.stderr
    return " ".join(result.stdout.split())


def test_status_says_in_sentences_what_is_waited_for(tmp_path: Path) -> None:
    with staged(tmp_path, HELD) as one:
        one.until("canary")
        url = ("--url", one.server.url)
        shown = words(rollout("status", "m", *url))
        assert re.search(r"m: canary, step 1 of 2; \d+ s of 48 h; 0 of 500 answers", shown)
        assert "Version 1 is stable, version 2 the candidate, which answers 10 % of the requests" in shown
        assert "disagreement: waits. nothing was compared yet" in shown
        assert "Possible actions: promote or pause or abort." in shown
        assert "canary, step 2 of 2" in words(rollout("promote", "m", *url))
        assert "paused in canary; by hand: lunch" in words(rollout("pause", "m", "--reason", "lunch", *url))
        assert json.loads(rollout("resume", "m", "--json", *url).stdout)["state"] == "canary"
        assert "Version 1 answers everything." in words(rollout("abort", "m", *url))
        history = words(rollout("history", "m", *url))
        assert "canary 2" in history
        assert "by hand" in history
        assert [line["to"] for line in json.loads(rollout("history", "m", "--json", *url).stdout)][-1] == (
            "rolled-back"
        )
        refused = rollout("promote", "m", *url)
        assert refused.exit_code == 1
        assert "possible actions: start or abort" in refused.stderr


def test_start_with_a_plan(tmp_path: Path) -> None:
    with staged(tmp_path, None, {1: "1"}) as one:
        url = ("--url", one.server.url)
        assert "nothing is being rolled out; version 1 answers." in words(rollout("status", "m", *url))
        one.add(2, "1")
        plan = ("--to", "2", "--shadow", "0", "--canary", "0.25", "--canary-h", "1", "--least", "3")
        assert "version 2 the candidate" in words(rollout("start", "m", *plan, *url))
        found = one.until("canary")
        assert found["plan"]["canary"] == [0.25]
        assert (found["plan"]["canary_h"], found["plan"]["least"]) == (1.0, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("abort",), "Missing argument"),
        (("abrt", "m"), "abrt"),
        (("abort", "m", "--to", "2"), "--to and the options of a plan go with start"),
        (("start", "m", "--canary", "a,b"), "--canary must be like 0.1,0.5"),
    ],
)
def test_mistakes_on_the_command_line(arguments: tuple[str, ...], said: str) -> None:
    result = rollout(*arguments)
    assert result.exit_code == 2
    assert said in result.stderr


def test_no_server() -> None:
    result = rollout("status", "m", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "is the server running?" in result.stderr
