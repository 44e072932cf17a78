"""The hosts of the benchmark are at public addresses, in a network that nothing else sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from attacks import elements_rows, fetches
from attacks.attacker import Ports
from attacks.elements_rows import AFTERWARDS, Row
from carpool.frontend.http.picture_fetch import is_public
from load.burst import LoadError

BENCHMARKS = Path(fetches.__file__).parents[1]
FETCH = """
import socket, sys, urllib.request
from attacks import fetches, own_network
try:
    with fetches.hosts():
        assert socket.gethostbyname("slow.example") == fetches.SLOW
        with urllib.request.urlopen("http://good.example/a.jpg", timeout=30) as answer:
            assert answer.read()[:2] == b"\\xff\\xd8"
    print("fetched")
except own_network.NoNetwork as reason:
    print("skipped:", reason)
"""


def test_a_picture_comes_from_a_public_address() -> None:
    assert all(map(is_public, (*fetches.HOSTS.values(), fetches.NAME_SERVER)))
    command = [sys.executable, "-c", FETCH]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=60, check=True)
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    assert done.stdout == "fetched\n"


def test_of_the_fetches_a_tenth_may_be_late() -> None:
    late = {"http": 3, "fetches": 2, AFTERWARDS: 2}
    sent = {"http": 160, "fetches": 20, AFTERWARDS: 19}
    row = Row("any", late, sent, 100.0, 110.0, 100.0, 0, 5, None, 3, 400.0)
    assert row.failures == [f"late over {AFTERWARDS}"]


def test_a_row_that_cannot_be_measured_says_why_and_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Row("good", {"http": 0}, {"http": 160}, 100.0, 110.0, 100.0, 0, 5, None, 3, 400.0)

    def measure(_pid: int, _ports: object, name: str, _seconds: float) -> Row:
        if name == "bad":
            raise LoadError("the honest client did not end")
        return row

    monkeypatch.setattr(elements_rows, "measure", measure)
    told: list[str] = []
    found = elements_rows.measure_all(1, Ports(0, 0, 0), ["bad", "good"], 1.0, told.append)
    assert found == [{"attack": "bad", "skipped": "the honest client did not end"}, row.as_json()]
    assert elements_rows.as_text(found).splitlines() == told
