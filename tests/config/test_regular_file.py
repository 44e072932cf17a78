"""What stands where a file is expected is opened without waiting, and read only if it is a regular file."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.backends.python.declarations import read_declarations
from carpool.config.file_metadata import read_metadata
from carpool.config.fingerprint import content_digest, take_fingerprint
from carpool.config.regular_file import open_regular, read_regular
from carpool.config.repository import find_models
from carpool.config.settings_part import other_files
from carpool.engine.profile.profile_folder import ProfileFolder
from carpool.errors import CarpoolError
from carpool.extensions.drift.kept_pictures import read_index
from carpool.extensions.registry.settings import read_state
from carpool.extensions.rollout.disagreements import Disagreements
from carpool.extensions.rollout.rollout_file import read_record
from carpool.extensions.rollout.settings import KeepSettings
from carpool.extensions.rollout.settings_reader import read_rollout_toml
from carpool.frontend.access.key_files import read_keys
from carpool.frontend.access.tls import read_pair


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name in ("fifo", "socket", "/dev/zero", "."):
            with pytest.raises(OSError, match=r"regular file|a folder|such device"):
                open_regular(tmp_path / name)


def test_a_regular_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 3) == b"abc"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_regular(tmp_path / "file", 2)
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "nothing", 2)


# For each reader: the name that the FIFO has in the folder, and what reads it. None of them may wait.
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "model.toml": ("m/model.toml", lambda home: find_models([home])),
    "config.pbtxt": ("m/config.pbtxt", lambda home: find_models([home])),
    **{name: (f"m/{name}", lambda home: find_models([home])) for name in other_files()},
    "rollout.toml": ("rollout.toml", lambda home: read_rollout_toml(home / "rollout.toml")),
    "registry": (".registry.json", read_state),
    "beside the weights": ("config.json", lambda home: read_metadata(home / "model.pt")),
    "a version's files": ("1/weights", lambda home: content_digest(home / "1" / "model.onnx")),
    "all files": ("m/1/weights", lambda home: take_fingerprint(home / "m")),
    "keys": ("keys", lambda home: read_keys(str(home / "keys"), "")),
    "certificate": ("cert", lambda home: read_pair(str(home / "cert"), str(home / "cert"))),
    "state of a rollout": ("state.json", lambda home: read_record(home / "state.json")),
    "disagreements": ("d/index.jsonl", lambda home: Disagreements(KeepSettings(str(home)), "d")),
    "kept pictures": ("index.jsonl", read_index),
    "profile": ("p.json", lambda home: ProfileFolder(home).read("p.json")),
    "python": ("model.py", lambda home: read_declarations(home / "model.py")),
}


def test_a_fifo_holds_no_reader(tmp_path: Path) -> None:
    """Without the check, each of these waits for a writer that never comes."""
    for number, (name, read) in enumerate(READERS.values()):
        home = tmp_path / str(number)
        (home / name).parent.mkdir(parents=True)
        (home / "1").mkdir(exist_ok=True)
        (home / "1" / "model.onnx").write_bytes(b"")
        os.mkfifo(home / name)
        with contextlib.suppress(OSError, CarpoolError):
            read(home)
