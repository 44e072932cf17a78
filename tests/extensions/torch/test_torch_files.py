"""Files that are no models, or that want more than to be a model."""

from __future__ import annotations

import gc
import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from carpool.config.toml import toml_config
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.extensions.torch.torch_files import _built
from extensions.torch import torch_models as tm
from extensions.torch.torch_models import CODE, INPUT, OUTPUTS

DECLARED = "max_batch = 2\n" + INPUT + OUTPUTS
MODULE = '[pytorch]\nmodule = "model.py:build"\n'


class Trap:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self._mark,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


def refused(tmp_path: Path, text: str, files: dict[str, Any], match: str, kind: type[CarpoolError]) -> None:
    with pytest.raises(kind, match=match):
        tm.load(tm.folder(tmp_path, text, files))


def test_weights_alone_are_no_network(tmp_path: Path) -> None:
    refused(
        tmp_path, DECLARED, {"model.pt": tm.write_weights}, r'set module = "model\.py:build"', ConfigError
    )


@pytest.mark.parametrize("old", [False, True])
def test_a_pickle_is_not_opened(old: bool, tmp_path: Path, mark: Path) -> None:
    def write(file: Path) -> None:
        held = {"conv.weight": torch.zeros(1), "trap": Trap(mark)}
        torch.save(held, file, _use_new_zipfile_serialization=not old)

    files = {"model.pt": write, "model.py": CODE}
    refused(tmp_path, DECLARED + MODULE, files, "save network.state_dict", ModelError)
    assert not mark.exists()


def test_a_pickled_network_is_not_opened(tmp_path: Path) -> None:
    files = {"model.pt": lambda file: torch.save(tm.net(), file), "model.py": CODE}
    refused(tmp_path, DECLARED + MODULE, files, "could run anything: save network.state_dict", ModelError)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ({"conv.weight": torch.zeros(2, 3, 3, 3)}, "do not fit the network: .*Missing key"),
        ([torch.zeros(1)], "holds no state dict"),
        ({"epoch": 3}, "holds no state dict"),
    ],
)
def test_weights_that_do_not_fit_are_explained(content: Any, match: str, tmp_path: Path) -> None:
    files = {"model.pt": lambda file: torch.save(content, file), "model.py": CODE}
    refused(tmp_path, DECLARED + MODULE, files, match, ModelError)


def test_a_checkpoint_with_a_state_dict_is_understood(tmp_path: Path) -> None:
    files = {
        "model.pt": lambda file: torch.save({"state_dict": tm.net().state_dict()}, file),
        "model.py": CODE,
    }
    backend = tm.load(tm.folder(tmp_path, DECLARED + MODULE, files))
    assert backend.alive
    backend.close()


@pytest.mark.parametrize(
    ("code", "match"),
    [
        ("def build(): return 3", r"build\(\) returned a int instead"),
        ("x = 1", r"has no function build\(\)"),
        ("def build(): return 1 / 0", r"ZeroDivisionError.*model\.py:1, in build"),
        ("def build(:", r"SyntaxError"),
    ],
)
def test_a_network_in_python_that_is_none(code: str, match: str, tmp_path: Path) -> None:
    files = {"model.pt": tm.write_weights, "model.py": code}
    refused(tmp_path, DECLARED + MODULE, files, match, ModelError)


def test_a_networks_code_can_be_found_for_as_long_as_it_lives(tmp_path: Path) -> None:
    """torch.compile asks for it by its name."""
    code = """
        import torch

        class Doubles(torch.nn.Module):
            def forward(self, x):
                return 2 * x

        def build():
            return Doubles()
        """
    (tmp_path / "model.py").write_text(dedent(code))
    config = replace(toml_config(DECLARED + MODULE, tmp_path / "model.toml"), name="doubles")
    network = _built(config, tmp_path / "model.py", "model.py:build")
    name = type(network).__module__
    assert sys.modules[name].build is not None
    assert type(_built(config, tmp_path / "model.py", "model.py:build")).__module__ != name
    del network
    gc.collect()
    assert not [one for one in sys.modules if one.startswith("carpool_network_doubles")]
    (tmp_path / "model.py").write_text("raise ValueError")
    with pytest.raises(ModelError):
        _built(config, tmp_path / "model.py", "model.py:build")
    assert not [one for one in sys.modules if one.startswith("carpool_network_doubles")]


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    text = DECLARED + '[pytorch]\nmodule = "net.py"\n'
    refused(tmp_path, text, {"model.pt": tm.write_weights}, r"names net\.py, which is not in", ConfigError)


def rewritten(file: Path, change: Callable[[str, bytes], bytes | None], more: dict[str, bytes]) -> None:
    """An exported program with its entries changed."""
    tm.write_exported(file)
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    home = next(iter(entries)).partition("/")[0]
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in entries.items():
            changed = change(name, data)
            if changed is not None:
                archive.writestr(name, changed)
        for name, data in more.items():
            archive.writestr(f"{home}/{name}", data)


def trapped(mark: Path) -> bytes:
    saved = io.BytesIO()
    torch.save((Trap(mark),), saved)
    return saved.getvalue()


@pytest.mark.parametrize("where", ["sample", "weight", "constant", "code", "twice"])
def test_an_exported_program_may_not_bring_pickles_or_code(where: str, tmp_path: Path, mark: Path) -> None:
    trap = trapped(mark)

    def change(name: str, data: bytes) -> bytes | None:
        if where == "sample" and name.endswith("sample_inputs/model.pt"):
            return trap
        if where == "weight" and name.endswith("weights/weight_0"):
            return trap
        if where == "weight" and name.endswith("weights_config.json"):
            return data.replace(b'"use_pickle": false', b'"use_pickle": true', 1)
        if where == "constant" and name.endswith("constants_config.json"):
            return json.dumps(
                {"config": {"c": {"path_name": "opaque_obj_0", "is_param": False, "use_pickle": True}}}
            ).encode()
        return data

    more = {
        "constant": {"data/constants/opaque_obj_0": pickle.dumps(Trap(mark))},
        "code": {"data/aotinductor/model/x.so": b"\x7fELF"},
    }.get(where, {})

    def write(file: Path) -> None:
        rewritten(file, change, more)
        if where == "twice":
            with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
                archive.writestr(archive.namelist()[0], b"other")

    match = {"code": "compiled code", "twice": "cannot be right"}.get(where, "as a pickle")
    refused(tmp_path, "", {"model.pt2": write}, match, ModelError)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04garbage", b"x" * 1000])
def test_rubbish_is_an_error_in_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    with pytest.raises(CarpoolError) as caught:
        tm.load(tm.folder(tmp_path, DECLARED, {name: lambda file: file.write_bytes(content)}))
    assert "\n" not in caught.value.message


def test_a_script_that_is_cut_off_is_an_error(tmp_path: Path) -> None:
    def write(file: Path) -> None:
        tm.write_script(file)
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2])

    with pytest.raises(CarpoolError):
        tm.load(tm.folder(tmp_path, DECLARED, {"model.pt": write}))
