"""No test finds what another has kept: each has folders of its own for state and for caches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from carpool.config.server import server_settings, usual_folder

_ASKED = 'from carpool.config.server import usual_folder as f; print(f("state"), f("cache"), sep="\\n")'


def _folders_are_fresh() -> None:
    for of in ("state", "cache"):
        folder = usual_folder(of)
        assert not folder.is_relative_to(Path.home())
        assert not folder.exists()
        folder.mkdir(parents=True)  # which the other test would find


def test_what_one_test_keeps_another_does_not_find() -> None:
    _folders_are_fresh()


def test_what_another_test_keeps_one_does_not_find() -> None:
    _folders_are_fresh()


def test_processes_and_servers_of_a_test_have_its_folders() -> None:
    settings, _ = server_settings()
    assert (settings.state_dir, settings.cache_dir) == (usual_folder("state"), usual_folder("cache"))
    asked = subprocess.run([sys.executable, "-c", _ASKED], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == [str(usual_folder("state")), str(usual_folder("cache"))]
