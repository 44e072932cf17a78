"""Repositories that lie elsewhere: what appears on disk is whole, whatever the other side does."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry

from absent import rows
from carpool.config.fingerprint import take_fingerprint
from carpool.config.remote_address import remote_address, shown_address
from carpool.config.repository import find_models
from carpool.errors import ConfigError
from carpool.extensions.registry import remote_listing
from carpool.extensions.registry.remote_listing import Budget, RemoteFiles
from carpool.extensions.registry.remote_repository import RemoteRepository, Remotes
from carpool.extensions.registry.source import BadArtifacts, NotInRegistry, RegistryDown
from carpool.extensions.registry.version_store import LEFT_S

TOML = b'backend = "fake"\nmax_batch = 4\n[fake]\ncurve = "1+1"\n'
ADDRESS = "memory://bucket/models"


@pytest.fixture
def bucket() -> Iterator[Any]:
    """A store in this process; every test has it for itself."""
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    fs.pipe({"/bucket/models/a/model.toml": TOML, "/bucket/models/a/1/weights.bin": b"one"})
    fs.pipe({"/bucket/models/b/model.toml": TOML, "/bucket/models/b/1/weights.bin": b"two"})
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


def repository(cache: Path, address: str = ADDRESS, budget: Budget | None = None) -> RemoteRepository:
    return RemoteRepository(address, cache, budget or Budget())


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for place in folder.iterdir()
        for path in place.resolve().rglob("*")
        if path.is_file() and not path.name.startswith(".")
        for path in [place / path.relative_to(place.resolve())]
    }


def test_a_path_of_the_command_line_may_be_an_address() -> None:
    assert remote_address(Path("s3://bucket/models")) == "s3://bucket/models"
    assert remote_address(Path("https://host:8443/models.tar.gz")) == "https://host:8443/models.tar.gz"
    assert remote_address(Path("models/s3")) is None
    assert remote_address("models:/detector@champion") is None
    assert shown_address("https://me:secret@host/a.zip?signature=abc") == "https://host/a.zip"


def test_models_appear_with_their_files(bucket: Any, tmp_path: Path) -> None:
    told: list[str] = []
    found = repository(tmp_path)
    assert found.refresh(told.append) == []
    assert contents(found.folder) == {
        "a/model.toml": TOML,
        "a/1/weights.bin": b"one",
        "b/model.toml": TOML,
        "b/1/weights.bin": b"two",
    }
    assert len(told) == 2
    sources, _ = find_models([found.folder])
    assert [source.config.name for source in sources] == ["a", "b"]


def test_what_did_not_change_is_neither_fetched_nor_loaded_again(bucket: Any, tmp_path: Path) -> None:
    found = repository(tmp_path)
    found.refresh()
    before = take_fingerprint(found.folder / "a"), take_fingerprint(found.folder / "b")
    bucket.pipe({"/bucket/models/a/2/weights.bin": b"new"})
    told: list[str] = []
    found.refresh(told.append)
    assert len(told) == 1
    after = take_fingerprint(found.folder / "a"), take_fingerprint(found.folder / "b")
    assert before[1] == after[1]
    assert before[0].of(1) == after[0].of(1)
    assert set(after[0].versions) == {1, 2}
    told.clear()
    found.refresh(told.append)
    assert told == []


def test_models_that_are_gone_there_go_here(bucket: Any, tmp_path: Path) -> None:
    found = repository(tmp_path)
    found.refresh()
    bucket.rm("/bucket/models/b", recursive=True)
    found.refresh()
    assert [path.name for path in found.folder.iterdir()] == ["a"]


def test_a_folder_may_be_one_model_and_a_file_too(bucket: Any, tmp_path: Path) -> None:
    one = repository(tmp_path, f"{ADDRESS}/a")
    one.refresh()
    assert set(contents(one.folder)) == {"a/model.toml", "a/1/weights.bin"}
    bucket.pipe({"/bucket/net.onnx": b"graph"})
    file = repository(tmp_path, "memory://bucket/net.onnx")
    file.refresh()
    assert contents(file.folder) == {"net/1/model.onnx": b"graph"}


class Killed(BaseException):
    """The process ends here."""


def test_a_fetch_that_was_killed_is_gone_on_with(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.extensions.registry.remote_repository._BLOCK", 10)
    whole = bytes(range(100))
    bucket.pipe({"/bucket/models/a/1/weights.bin": whole})
    asked: list[int] = []
    read = remote_listing.RemoteFiles.blocks

    def killed_soon(self: RemoteFiles, file: Any, start: int, length: int) -> Iterator[bytes]:
        for number, block in enumerate(read(self, file, start, length)):
            if file.size == 100 and start == 0 and number == 4:
                raise Killed
            yield block

    monkeypatch.setattr(RemoteFiles, "blocks", killed_soon)
    found = repository(tmp_path)
    with pytest.raises(Killed):
        found.refresh()
    assert list(found.folder.iterdir()) == []  # nothing is half there

    def counted(self: RemoteFiles, file: Any, start: int, length: int) -> Iterator[bytes]:
        asked.append(start if file.size == 100 else -1)
        yield from read(self, file, start, length)

    monkeypatch.setattr(RemoteFiles, "blocks", counted)
    assert repository(tmp_path).refresh() == []
    assert 40 in asked
    assert contents(found.folder)["a/1/weights.bin"] == whole


def test_a_model_that_changes_under_the_fetch_is_fetched_again(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = remote_listing.RemoteFiles.blocks
    times = 0

    def replaced(self: RemoteFiles, file: Any, start: int, length: int) -> Iterator[bytes]:
        nonlocal times
        blocks = list(read(self, file, start, length))
        if file.place == "/bucket/models/a/1/weights.bin" and (times := times + 1) <= most:
            bucket.pipe({"/bucket/models/a/1/weights.bin": f"{times:03}".encode()})
        yield from blocks

    monkeypatch.setattr(RemoteFiles, "blocks", replaced)
    most = 1
    found = repository(tmp_path)
    assert found.refresh() == []
    assert contents(found.folder)["a/1/weights.bin"] == b"001"
    times, most = 0, 99
    bucket.pipe({"/bucket/models/a/1/weights.bin": b"xxx"})
    complaints = found.refresh()
    assert "changed while" in complaints[0]
    assert contents(found.folder)["a/1/weights.bin"] == b"001"  # what serves goes on


def test_a_file_that_comes_short_is_no_model(bucket: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(RemoteFiles, "blocks", lambda self, file, start, length: iter([b"x"]))
    found = repository(tmp_path)
    complaints = found.refresh()
    assert "was received with" in complaints[0]
    assert list(found.folder.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/bucket/models/a/../../x",
        "/bucket/models/a/\x07",
        "/elsewhere/x",
        "/bucket/models/a\\b",
    ],
)
def test_names_that_lead_elsewhere_are_refused(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    listed = [{"name": name, "type": "file", "size": 1}]
    monkeypatch.setattr(type(bucket), "ls", lambda self, path, detail=True, **more: listed)
    with pytest.raises(BadArtifacts):
        repository(tmp_path).refresh()


@pytest.mark.parametrize("size", [-1, None, "3", True, 1 << 61])
def test_sizes_are_numbers(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: object
) -> None:
    listed = [{"name": "/bucket/models/a", "type": "file", "size": size}]
    monkeypatch.setattr(type(bucket), "ls", lambda self, path, detail=True, **more: listed)
    with pytest.raises(BadArtifacts, match="size"):
        repository(tmp_path).refresh()


def test_budgets(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(BadArtifacts, match="remote_gb"):
        repository(tmp_path, budget=Budget(bytes=50)).refresh()
    with pytest.raises(BadArtifacts, match="remote_files"):
        repository(tmp_path, budget=Budget(files=3)).refresh()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_the_budget_is_of_the_whole_address(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Every folder holds fewer than are allowed, and all of them far more."""
    listed: list[str] = []

    def ls(_self: Any, path: str, **_more: Any) -> list[dict[str, Any]]:
        listed.append(path)
        deep = path.count("/") > 5
        names = [(f"d{number}", "directory") for number in range(0 if deep and kind == "file" else 5)]
        names += [(f"f{number}", "file") for number in range(5 if kind == "file" else 0)]
        return [{"name": f"{path}/{name}", "type": found, "size": 0} for name, found in names]

    monkeypatch.setattr(type(bucket), "ls", ls)
    with pytest.raises(BadArtifacts, match="remote_files"):
        repository(tmp_path, budget=Budget(files=10)).refresh()
    assert len(listed) <= 12


def test_what_is_left_of_fetches_is_removed(bucket: Any, tmp_path: Path) -> None:
    found = repository(tmp_path)
    found.refresh()
    root = found.folder.parent
    (root / "parts" / ("0" * 64)).write_bytes(b"half of a file that is not listed any more")
    bucket.pipe({"/bucket/models/a/1/weights.bin": b"new"})
    bucket.rm("/bucket/models/b", recursive=True)
    found.refresh()
    assert list((root / "parts").iterdir()) == []
    assert (root / "trees" / "b").is_dir()  # somebody may be reading it
    long_ago = time.time() - 2 * LEFT_S
    store = tmp_path / "remote" / "contents"
    for path in [root / "trees" / "b", *store.rglob("*")]:
        os.utime(path, (long_ago, long_ago))
    before = len(list((store / "versions").iterdir()))
    found.refresh()
    assert not (root / "trees" / "b").exists()
    for path in store.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    found.refresh()
    assert len(list((store / "versions").iterdir())) == before - 1
    assert b"two" not in [path.read_bytes() for path in (store / "sha256").glob("*/*")]


def test_folders_without_end(bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(bucket),
        "ls",
        lambda self, path, detail=True, **more: [{"name": f"{path}/d", "type": "directory", "size": 0}],
    )
    with pytest.raises(BadArtifacts):
        repository(tmp_path).refresh()


def test_errors_tell_neither_keys_nor_words_of_the_store(
    bucket: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, path: str, detail: bool = True, **more: Any) -> None:
        raise RuntimeError("key=SECRET")

    monkeypatch.setattr(type(bucket), "ls", fail)
    with pytest.raises(RegistryDown) as told:
        repository(tmp_path, "memory://me:SECRET@bucket/models?token=SECRET").refresh()
    assert "SECRET" not in told.value.message


def test_nothing_there_and_nothing_to_read_it_with(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(NotInRegistry):
        repository(tmp_path, "memory://bucket/nothing").refresh()
    pytest.importorskip("fsspec")
    complaints = Remotes(["gs://bucket/models"], tmp_path, Budget()).refresh()
    if complaints and "missing" in complaints[0]:
        assert "carpool[remote]" in complaints[0]


# ---- over HTTP: an archive, or a manifest


@dataclass
class Site:
    files: dict[str, bytes] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)  # of which only half is sent
    asked: list[str] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            made.asked.append(self.path)
            data = made.files.get(self.path)
            if data is None:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
            self.send_header("Content-Type", "application/octet-stream")
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if self.path in made.cut else data)

        def log_message(self, *words: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield made
    server.shutdown()
    server.server_close()
    thread.join()


def packed(kind: str, files: dict[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(out, "w") as archive:
            for name, data in files.items():
                archive.writestr(name, data)
        return out.getvalue()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(info)
    return out.getvalue()


@pytest.mark.parametrize("kind", ["zip", "tar.gz"])
def test_an_archive(site: Site, tmp_path: Path, kind: str) -> None:
    site.files[f"/m.{kind}"] = packed(kind, {"models/a/model.toml": TOML, "models/a/1/x": b"1"})
    found = repository(tmp_path, f"{site.url}/m.{kind}")
    assert found.refresh() == []
    assert (found.folder / "a" / "1" / "x").read_bytes() == b"1"
    site.files[f"/m.{kind}"] = packed(kind, {"models/a/model.toml": TOML, "models/a/2/x": b"22"})
    assert found.refresh() == []
    assert (found.folder / "a" / "2" / "x").read_bytes() == b"22"
    assert not (found.folder / "a" / "1").exists()


@pytest.mark.parametrize(
    "data",
    [
        packed("tar.gz", {"../x": b"1"}),
        packed("tar.gz", {"/etc/x": b"1"}),
        packed("tar.gz", {"a/x": b"1"}, link="a/link"),
        packed("tar.gz", {"a/x": b"0" * 100_000}),
        b"<html>not an archive</html>",
    ],
    ids=["above", "from the root", "a link", "a bomb", "a page"],  # an archive's bytes have the time in them
)
def test_archives_that_are_not_taken(site: Site, tmp_path: Path, data: bytes) -> None:
    site.files["/m.tar.gz"] = data
    found = repository(tmp_path, f"{site.url}/m.tar.gz", Budget(bytes=50_000))
    assert len(found.refresh()) == 1
    assert not found.folder.exists()


def manifest(**files: object) -> bytes:
    return json.dumps({"files": [{"path": path, **said} for path, said in files.items()]}).encode()  # type: ignore[dict-item]


def test_a_manifest(site: Site, tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
    site.files |= {"/r/a/model.toml": TOML, "/r/a/1/x": b"weights"}
    listed = {"a/model.toml": {"size": len(TOML)}, "a/1/x": {"size": 7, "sha256": digest}}
    site.files["/r/index.json"] = manifest(**listed)
    found = repository(tmp_path, f"{site.url}/r/index.json")
    assert found.refresh() == []
    assert contents(found.folder) == {"a/model.toml": TOML, "a/1/x": b"weights"}
    site.files["/r/a/1/x"] = b"other!!"
    listed["a/1/x"] = {"size": 7, "sha256": "0" * 64}
    site.files["/r/index.json"] = manifest(**listed)
    assert "sha256" in found.refresh()[0]
    assert contents(found.folder)["a/1/x"] == b"weights"


def test_a_manifest_may_name_one_place_twice(site: Site, tmp_path: Path) -> None:
    site.files["/weights"] = b"weights"
    one, other = ({"size": 7, "url": "/weights"} for _ in range(2))
    site.files["/index.json"] = manifest(**{"a/1/x": one, "a/2/x": other, "b/1/x": one})
    found = repository(tmp_path, f"{site.url}/index.json")
    assert found.refresh() == []
    assert contents(found.folder) == dict.fromkeys(("a/1/x", "a/2/x", "b/1/x"), b"weights")


@pytest.mark.parametrize(
    "data",
    [
        b"<!doctype html><p>Sign in",
        b"[]",
        b'{"files": 3}',
        b'{"files": [{"path": "../x", "size": 1}]}',
        b'{"files": [{"path": "a/x"}]}',
        b'{"files": [{"path": "a/x", "size": 1, "url": "http://elsewhere.example/x"}]}',
        b'{"files": [{"path": "a/x", "size": 1, "sha256": "no"}]}',
        b"[" * 100_000,
    ],
)
def test_manifests_that_are_none(site: Site, tmp_path: Path, data: bytes) -> None:
    site.files["/index.json"] = data
    with pytest.raises(BadArtifacts):
        repository(tmp_path, f"{site.url}/index.json").refresh()


def test_a_server_that_cuts_off(site: Site, tmp_path: Path) -> None:
    site.files["/m.zip"] = packed("zip", {"a/1/x": b"1" * 1000})
    site.cut.add("/m.zip")
    found = repository(tmp_path, f"{site.url}/m.zip")
    assert len(found.refresh()) == 1
    assert not found.folder.exists()
    site.cut.clear()
    assert found.refresh() == []
    assert (found.folder / "a" / "1" / "x").read_bytes() == b"1" * 1000


def test_what_is_no_address() -> None:
    with pytest.raises(ConfigError):
        RemoteFiles("nonsense://x", Budget()).listing()


class Hub(MemoryFileSystem):  # type: ignore[misc]
    """A stand-in for the hub: repositories of models in this process."""

    protocol = "hf"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('hf://').strip('/')}"


@pytest.fixture
def hub() -> Iterator[Any]:
    fsspec.register_implementation("hf", Hub, clobber=True)
    fs = Hub(skip_instance_cache=True)
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    yield fs
    _registry.pop("hf", None)


@pytest.mark.parametrize(
    ("there", "expected"),
    [
        (["onnx/model.onnx", "onnx/model_quantized.onnx"], ["model.onnx"]),
        (["model.onnx", "model.onnx_data", "model.safetensors"], ["model.onnx", "model.onnx_data"]),
        *rows("torch", (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"])),
    ],
)
def test_a_model_on_the_hub(there: list[str], expected: list[str], hub: Any, tmp_path: Path) -> None:
    beside = ["config.json", "preprocessor_config.json"]
    hub.pipe({f"/owner/net/{name}": name.encode() for name in (*there, *beside, "README.md")})
    address = remote_address("hf:owner/net")
    assert address == "hf://owner/net"
    found = repository(tmp_path, address)
    assert found.refresh() == []
    assert sorted(contents(found.folder)) == sorted(f"net/{name}" for name in (*expected, *beside))
    backend = "transformers" if expected == ["model.safetensors"] else "onnxruntime"
    assert [one.config.backend for one in find_models([found.folder])[0]] == [backend]


def test_a_hub_without_what_can_be_served_says_what_is_missing(hub: Any, tmp_path: Path) -> None:
    hub.pipe({"/owner/net/pytorch_model.bin": b"x", "/owner/net/config.json": b"{}"})
    with pytest.raises(NotInRegistry, match=r"none of model\.onnx, onnx/model\.onnx, model\.safetensors"):
        repository(tmp_path, "hf://owner/net").refresh()
    hub.pipe({"/owner/many/a/model.toml": TOML, "/owner/many/a/1/weights.bin": b"one"})
    found = repository(tmp_path, "hf://owner/many")
    assert found.refresh() == []
    assert sorted(contents(found.folder)) == ["a/1/weights.bin", "a/model.toml"]
