"""One server has the state of a model, and others are shown who that is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from carpool.extensions.rollout.state_claims import StateClaims


def test_a_claim_is_one_servers_until_its_end(tmp_path: Path) -> None:
    file = tmp_path / "rollouts" / "m.json"
    first, second = StateClaims("process 1"), StateClaims("process 2")
    assert [first.take(file), first.take(file), second.take(file)] == ["", "", "process 1"]
    assert second.take(tmp_path / "rollouts" / "n.json") == ""
    file.with_suffix(".lock").write_bytes(b"\x1b[2J")
    assert second.take(file) == "another process"
    first.close()
    assert second.take(file) == ""
    assert file.with_suffix(".lock").read_text() == "process 2"
    second.close()


def test_what_is_no_file_is_no_claim(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.lock")
    (tmp_path / "n.lock").symlink_to("elsewhere")
    for name in ("m.json", "n.json"):
        with pytest.raises(OSError, match=r"regular file|symbolic links"):
            StateClaims("process 1").take(tmp_path / name)
