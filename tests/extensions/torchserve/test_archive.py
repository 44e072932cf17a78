"""TorchServe's archives: what becomes of good ones, and that bad ones reach nothing."""

from __future__ import annotations

import json
import stat
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from absent import needs
from carpool.config.repository import find_models
from carpool.errors import ConfigError
from carpool.extensions.torchserve.archive import unpacked

NETWORK = "import torch\nclass Net(torch.nn.Module):\n    pass\n"
NAMES = json.dumps({"0": ["n01440764", "tench"], "2": ["n01443537", "gold\nfish"]})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def archive(folder: Path, files: Mapping[str, str | bytes], **model: str) -> Path:
    path = folder / f"{model.get('modelName', 'net')}.mar"
    manifest = {"runtime": "python", "model": {"modelName": "net", "modelVersion": "2.1", **model}}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, content in files.items():
            made.writestr(name, content)
    return path


def settings_of(path: Path) -> str:
    return (unpacked(path) / "model.toml").read_text()


@needs("torch")
def test_a_scripted_classifier(tmp_path: Path) -> None:
    files = {"weights.pt": b"script", "index_to_name.json": NAMES}
    path = archive(tmp_path, files, serializedFile="weights.pt", handler="image_classifier")
    (source,), _ = find_models([path])
    config = source.config
    assert (config.name, config.backend, config.task) == ("net", "pytorch", "classify")
    assert [version.number for version in source.versions] == [2]
    assert source.versions[0].file is not None
    assert source.versions[0].file.read_bytes() == b"script"
    assert config.image is not None
    assert (config.image.size, config.image.resize, config.image.crop) == ((224, 224), "crop", 0.875)
    assert (config.path / "labels.txt").read_text() == "tench\n1\ngold fish\n"
    assert unpacked(path) == config.path, "once"


@needs("torch")
def test_a_store_of_archives_beside_folders(tmp_path: Path) -> None:
    archive(tmp_path, {"a.onnx": b"graph"}, modelName="a", serializedFile="a.onnx", handler="own.py")
    archive(tmp_path, {"b.pt": b"script"}, modelName="b", serializedFile="b.pt", handler="object_detector")
    (tmp_path / "c" / "1").mkdir(parents=True)
    (tmp_path / "c" / "1" / "model.onnx").write_bytes(b"graph")
    found, _ = find_models([tmp_path])
    kinds = {one.config.name: (one.config.backend, one.config.task) for one in found}
    assert kinds == {"a": ("onnxruntime", None), "b": ("pytorch", "detect"), "c": ("onnxruntime", None)}


@needs("torch")
def test_code_of_a_network_is_read_and_not_run(tmp_path: Path) -> None:
    files = {"net.py": NETWORK, "net.pth": b"weights"}
    path = archive(tmp_path, files, serializedFile="net.pth", modelFile="net.py", handler="image_classifier")
    (source,), _ = find_models([path])
    assert source.config.pytorch.module == "net.py:Net"
    assert source.config.pytorch.weights == "net.pth"


@pytest.mark.parametrize(
    ("files", "model", "said"),
    [
        ({"../out.pt": b""}, {}, "not a file within its folder"),
        ({"/out.pt": b""}, {}, "not a file within its folder"),
        ({"a/../../out.pt": b""}, {}, "not a file within its folder"),
        ({"a\\out.pt": b""}, {}, "not a file within its folder"),
        ({"net.pt": b""}, {"modelName": "../net"}, "cannot be a model's name"),
        ({"net.pt": b""}, {}, "names no serializedFile"),
        ({"net.pt": b""}, {"serializedFile": "other.pt"}, "is not in it"),
        ({"net.pt": b""}, {"serializedFile": "../net.pt"}, "is not in it"),
        ({"n.pth": b"", "n.py": "x = 1"}, {"serializedFile": "n.pth", "modelFile": "n.py"}, "one class"),
        (
            {"n.pth": b"", "n.py": "x ="},
            {"serializedFile": "n.pth", "modelFile": "n.py"},
            "not a Python file",
        ),
        ({"net.pt": b"\0" * (24 << 20)}, {"serializedFile": "net.pt"}, "unpacked size is too large"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_left(
    tmp_path: Path, cache: Path, files: Mapping[str, bytes], model: Mapping[str, str], said: str
) -> None:
    home = tmp_path / "store"
    home.mkdir()
    named = {**model, "modelName": "net"} if "/" in model.get("modelName", "") else model
    path = archive(home, files, **named)
    if named is not model:
        path.unlink()
        with zipfile.ZipFile(path, "w") as made:
            made.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": dict(model)}))
    with pytest.raises(ConfigError, match=said):
        find_models([path])
    assert not list((cache / "archives").glob("*")), "nothing is left"
    assert {one.name for one in tmp_path.iterdir()} == {"store", "cache"}


def test_links_and_names_twice_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "net.mar"
    link = zipfile.ZipInfo("net.pt")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    for entry in (link, "MAR-INF/MANIFEST.json"):
        with zipfile.ZipFile(path, "w") as made, warnings.catch_warnings(action="ignore"):
            made.writestr("MAR-INF/MANIFEST.json", '{"model": {"serializedFile": "net.pt"}}')
            made.writestr(entry, "/etc/passwd")
        with pytest.raises(ConfigError, match=r"not a file within|is given twice"):
            unpacked(path)


@pytest.mark.parametrize("content", [b"no zip", b""])
def test_what_is_no_archive_is_told(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "net.mar"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="the archive cannot be read"):
        unpacked(path)


def test_a_handler_cannot_write_settings(tmp_path: Path) -> None:
    path = archive(tmp_path, {"n.onnx": b""}, serializedFile="n.onnx", handler='x"\nslo_ms = 1\n')
    assert "\nslo_ms" not in settings_of(path)
