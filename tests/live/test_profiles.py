"""Profiles with real processes: kept from one start to the next, and watched while it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine import repositories
from live.server import Live, infer_path, json_request, serving

PATIENCE_S = 120.0
CODE = """
import pathlib
import time

def predict(x):
    time.sleep(0.4 if pathlib.Path({flag!r}).exists() else 0.2)
    return x
"""


@pytest.fixture(name="model")
def a_model_that_sleeps(tmp_path: Path) -> Path:
    """Asleep it takes as long on a busy machine as on a quiet one; twice as long while there is a flag.

    It sleeps so long that the tens of milliseconds until a busy machine wakes it are not a tenth of that.
    """
    code = CODE.format(flag=str(tmp_path / "slow"))
    return repositories.python(tmp_path / "models", code, head="slo_ms = 5000", max_batch=4)


VERBOSE = {"CARPOOL_LOG_LEVEL": "debug"}


def told(server: Live) -> list[str]:
    names = ("profile-measured", "profile-reused", "profile-unreadable", "profile-outdated")
    return [name for name in names if server.events(name)]


def choices(server: Live) -> list[str]:
    found: list[str] = server.get_json("/console/live")["models"][0]["choices"]
    return found


def is_disturbed(found: list[str]) -> bool:
    """Others used the machine: such a profile is measured again when it is calm, and not judged before."""
    return any(words in choice for choice in found for words in ("Provisional: ", ", since "))


@pytest.mark.conformance  # tests/engine/test_loading.py asks the same without processes, on any machine
def test_a_profile_is_kept_checked_and_given_up(model: Path, tmp_path: Path) -> None:
    with serving(model, folder=tmp_path, environment=VERBOSE) as server:
        assert told(server) == ["profile-measured"]
        first = choices(server)
        assert any("Under load" in choice for choice in first)
    with serving(model, folder=tmp_path, environment=VERBOSE) as server:
        again = choices(server)
        if not is_disturbed(first + again):
            assert told(server) == ["profile-reused"]
            (reused,) = [choice for choice in again if choice not in first]
            assert "was used again" in reused
            assert [choice for choice in again if choice is not reused] == first
    (kept,) = (tmp_path / "cache" / "profiles").iterdir()
    kept.write_bytes(b"\xff\x00 not JSON")
    with serving(model, frontends=0, folder=tmp_path, environment=VERBOSE) as server:
        assert told(server) == ["profile-measured", "profile-unreadable"]
        first = choices(server)
    (tmp_path / "slow").touch()
    with serving(model, frontends=0, folder=tmp_path, environment=VERBOSE) as server:
        if not is_disturbed(first + choices(server)):
            assert told(server) == ["profile-measured", "profile-outdated"]
    file = model / "1" / "model.py"
    file.write_text(file.read_text() + "\n# another model\n")
    with serving(model, frontends=0, folder=tmp_path, environment=VERBOSE) as server:
        assert told(server) == ["profile-measured"]
    assert not (model / "cache").exists()
    assert len(list((tmp_path / "cache" / "profiles").iterdir())) == 2


def requests(server: Live) -> Iterator[None]:
    """One after the other, until somebody has seen enough."""
    end = time.monotonic() + PATIENCE_S
    with server.connect() as client:
        while time.monotonic() < end:
            answer = client.post(infer_path("model"), json_request([1.0, 2.0], [1, 2]))
            assert answer.status == 200
            yield
    raise AssertionError("it never came true")


@pytest.mark.conformance
def test_a_machine_that_slows_down_is_told_of_and_when_it_is_over(model: Path, tmp_path: Path) -> None:
    with serving(model, folder=tmp_path, environment=VERBOSE) as server:
        assert server.metric("carpool_speed_ratio", model="model") == 1.0
        (tmp_path / "slow").touch()
        slow = factor_once(server, lambda factor: factor > 1.6)
        assert server.metric("carpool_speed_ratio", model="model") > 1.2
        (tmp_path / "slow").unlink()
        calm = factor_once(server, lambda factor: factor < 0.7 * slow)
        assert calm == 1.0 or is_disturbed(choices(server))  # a profile measured beside others may be off


def factor_once(server: Live, is_it: Callable[[float], bool]) -> float:
    """Ask until the drift that was logged last is such."""
    for _ in requests(server):
        told = [event["factor"] for event in server.events("profile-drift")][-1:]
        if told and is_it(told[0]):
            return float(told[0])
    raise AssertionError("unreachable")
