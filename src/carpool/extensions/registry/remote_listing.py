"""Lists the files at an address like s3://bucket/models: their names, their sizes, and what shows that one
has changed.

Everything that is read there is hostile until checked: names, sizes, amounts, and whether it is JSON at all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from carpool.config.backend_kinds import files_of
from carpool.config.remote_address import shown_address
from carpool.config.repository import PBTXT, TOML, VERSION, WEIGHTS, is_model_file
from carpool.errors import ConfigError
from carpool.extensions.registry.source import BadArtifacts, NotInRegistry, RegistryDown

_DEEPEST = 12
_LONGEST_PATH, _LONGEST_NAME = 1024, 255
_MOST_MANIFEST = 4 << 20
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
_STAMPS = ("ETag", "etag", "generation", "blob_id", "oid", "md5Hash", "Content-MD5", "LastModified")
_LATER_STAMPS = ("Last-Modified", "last_modified", "updated", "mtime", "created")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OWNER_AND_NAME = 3  # slashes in hf://owner/name
_HUB_MODELS = (
    ("model.onnx", "model.onnx_data"),
    ("onnx/model.onnx", "onnx/model.onnx_data"),
    ("model.safetensors",),
)
_HUB_SETTINGS = ("config.json", "preprocessor_config.json")
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits what one address may hold."""

    bytes: int = 64 << 30
    files: int = 10_000


class RemoteFile(NamedTuple):
    """`path` is where it goes, relative; `place` where it comes from, in the file system's own words."""

    path: str
    size: int
    stamp: str
    place: str
    digest: str = ""  # sha256, where a manifest says so


class RemoteListing(NamedTuple):
    """Lists files by the model's name. An archive is one file, of which nothing more is known before it is
    here."""

    models: Mapping[str, tuple[RemoteFile, ...]]
    archive: RemoteFile | None = None


class RemoteFiles:
    """Represents one address, over fsspec. Its keys come from where each store's own tools look for them, and
    are in no message: errors are named by their kind."""

    def __init__(self, address: str, budget: Budget, options: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self.shown = shown_address(address)
        self.budget = budget
        self._options = dict(options or {})

    def _open(self) -> tuple[Any, str]:
        scheme = urlsplit(self.address).scheme
        try:
            import fsspec

            fs, root = fsspec.core.url_to_fs(self.address, use_listings_cache=False, **self._options)
        except ImportError:
            package = _PACKAGES.get(scheme)
            needs = f"pip install 'carpool[remote]'{f' {package}' if package else ''}"
            raise ConfigError(f"{self.shown}: {scheme}:// needs a package that is missing: {needs}") from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"{self.shown}: it is no address: {_kind(error)}") from None
        return fs, root.rstrip("/")

    def listing(self) -> RemoteListing:
        fs, root = self._open()
        try:
            return self._listing(fs, root)
        except FileNotFoundError:
            raise NotInRegistry(f"{self.shown}: it does not exist, or the server does not respond") from None
        except PermissionError:
            raise RegistryDown(f"{self.shown}: it may not be read with the keys that were found") from None
        except (ConfigError, BadArtifacts, NotInRegistry, RegistryDown):
            raise
        except Exception as error:  # every store has errors of its own
            raise RegistryDown(f"{self.shown}: cannot be listed: {_kind(error)}") from None

    def _listing(self, fs: Any, root: str) -> RemoteListing:
        over_http = urlsplit(self.address).scheme in ("http", "https")
        path = urlsplit(root).path if over_http else root
        name = path.rsplit("/", 1)[-1]
        if over_http and not name.endswith(_ARCHIVES):
            return RemoteListing(self._by_model(self._manifest(fs, root), ""))
        if name.endswith(_ARCHIVES) or is_model_file(Path(name)):
            info = fs.info(root)
            if over_http or info.get("type") == "file":
                file = RemoteFile(name, _size(info, self.shown), _stamp(info), root)
                self._check([file])
                if name.endswith(_ARCHIVES):
                    return RemoteListing({}, file)
                stem, suffix = PurePosixPath(name).stem, PurePosixPath(name).suffix
                return RemoteListing({stem: (file._replace(path=f"1/model{suffix}"),)})
        files = list(self._walk(fs, root, "", Counter()))
        if urlsplit(self.address).scheme == "hf" and self.address.count("/") == _OWNER_AND_NAME:
            files = self._of_hub(files)
        return RemoteListing(self._by_model(files, name.partition("@")[0]))

    def _walk(self, fs: Any, root: str, inside: str, seen: Counter[str]) -> Iterator[RemoteFile]:
        """Hidden files are left out. `seen` counts files and folders of the whole address, each of which may
        be as many as the budget's files, so that a listing has an end."""
        for info in fs.ls(f"{root}/{inside}".rstrip("/"), detail=True):
            full = str(info.get("name", "")).rstrip("/")
            if full.lstrip("/") == f"{root}/{inside}".strip("/"):
                continue  # the mark of a folder
            path = full.lstrip("/").removeprefix(root.strip("/")).lstrip("/")
            if PurePosixPath(path).name.startswith(".") and ".." not in path.split("/"):
                continue
            checked_path(path, self.shown)
            if path.rpartition("/")[0] != inside.rstrip("/"):
                raise BadArtifacts(f"{self.shown}: the listing of {inside or '/'!r} names {path[:80]!r}")
            folder = info.get("type") == "directory"
            kind = "folders" if folder else "files"
            seen[kind] += 1
            if seen[kind] > self.budget.files:
                raise self._too_many(kind)
            if not folder:
                yield RemoteFile(path, _size(info, f"{self.shown}: {path}"), _stamp(info), full)
                continue
            if path.count("/") >= _DEEPEST:
                raise BadArtifacts(f"{self.shown}: folders are more than {_DEEPEST} deep")
            yield from self._walk(fs, root, f"{path}/", seen)

    def _manifest(self, fs: Any, root: str) -> list[RemoteFile]:
        """Reads {"files": [{"path": "detector/1/model.onnx", "size": 123, "sha256": "…"}]}, beside it or at
        `url`, on the same host."""
        with fs.open(root, "rb", block_size=0) as opened:
            data = opened.read(_MOST_MANIFEST + 1)
        try:
            document = json.loads(data if len(data) <= _MOST_MANIFEST else b"")
            entries = document["files"]
            if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
                raise TypeError
        except (ValueError, KeyError, TypeError, RecursionError):
            looks = "HTML" if data.lstrip()[:1] == b"<" else "something else"
            raise BadArtifacts(
                f"{self.shown}: https:// takes an archive ({', '.join(_ARCHIVES)}) or a manifest, JSON with "
                f'"files"; this is {looks}'
            ) from None
        whole, files = sha256(data).hexdigest(), []
        if len(entries) > self.budget.files:
            raise self._too_many()
        for entry in entries:
            path = checked_path(str(entry.get("path", "")), self.shown)
            digest = str(entry.get("sha256", "")).lower()
            if digest and not _DIGEST.fullmatch(digest):
                raise BadArtifacts(f"{self.shown}: the sha256 of {path!r} is none")
            place = urljoin(self.address, str(entry.get("url") or path))
            if urlsplit(place).netloc.rpartition("@")[2] != urlsplit(self.address).netloc.rpartition("@")[2]:
                raise BadArtifacts(f"{self.shown}: {path!r} would be fetched from another host")
            stamp = digest or whole
            files.append(RemoteFile(path, _size(entry, f"{self.shown}: {path}"), stamp, place, digest))
        return files

    def _of_hub(self, files: list[RemoteFile]) -> list[RemoteFile]:
        """Returns, of a model on the hub, what is served: an ONNX file where there is one, else weights with
        their settings. The rest are other formats of the same, and pages. Repositories of models stay so."""
        there = {file.path: file for file in files}
        chosen = next((names for names in _HUB_MODELS if names[0] in there), None)
        named = {PBTXT, TOML, *files_of(None)}
        ours = any(PurePosixPath(path).name in named for path in there if path.count("/") > 0)
        if {PBTXT, TOML} & there.keys() or (chosen is None and ours):
            return files
        if chosen is None:
            kinds = ", ".join(names[0] for names in _HUB_MODELS)
            raise NotInRegistry(
                f"{self.shown}: none of {kinds} is there: convert its weights to safetensors, or export them"
            )
        return [
            there[path]._replace(path=PurePosixPath(path).name)
            for path in (*chosen, *_HUB_SETTINGS)
            if path in there
        ]

    def _by_model(self, files: list[RemoteFile], name: str) -> dict[str, tuple[RemoteFile, ...]]:
        """Takes a folder that is a model itself, or one with a folder for each model."""
        self._check(files)
        tops = {file.path.partition("/")[0] for file in files if "/" in file.path}
        plain = {file.path for file in files if "/" not in file.path}
        if plain & {PBTXT, TOML, WEIGHTS, *files_of(None)} or any(VERSION.fullmatch(top) for top in tops):
            return {checked_path(name or "model", self.shown): tuple(sorted(files))}
        models: dict[str, list[RemoteFile]] = {}
        for file in files:
            model, slash, inside = file.path.partition("/")
            if slash:
                models.setdefault(model, []).append(file._replace(path=inside))
        if not models:
            raise NotInRegistry(f"{self.shown}: no models: each has a folder there")
        return {model: tuple(sorted(found)) for model, found in models.items()}

    def _check(self, files: list[RemoteFile]) -> None:
        if len(files) > self.budget.files:
            raise self._too_many()
        total = sum(file.size for file in files)
        if total > self.budget.bytes:
            raise BadArtifacts(
                f"{self.shown}: {total / 1e9:,.1f} GB, and remote_gb allows {self.budget.bytes / 1e9:,.1f}"
            )
        paths = {file.path.lower() for file in files}
        if len(paths) != len(files):
            raise BadArtifacts(f"{self.shown}: two files have the same name")

    def _too_many(self, kind: str = "files") -> BadArtifacts:
        return BadArtifacts(f"{self.shown}: more {kind} than remote_files allows, {self.budget.files:,}")

    def blocks(self, file: RemoteFile, start: int, length: int) -> Iterator[bytes]:
        """Yields the file's bytes from `start` on. The caller counts them."""
        fs, _ = self._open()
        try:
            for at in range(start, file.size, length):
                yield fs.cat_file(file.place, start=at, end=min(at + length, file.size))
        except FileNotFoundError:
            raise NotInRegistry(f"{self.shown}: {file.path} is gone") from None
        except Exception as error:
            raise RegistryDown(f"{self.shown}: {file.path} cannot be read: {_kind(error)}") from None


def checked_path(path: str, where: str) -> str:
    """Returns a path that is relative, plain, and inside; or it is refused."""
    parts = path.split("/")
    sound = (
        0 < len(path) <= _LONGEST_PATH
        and path.isprintable()
        and "\\" not in path
        and len(parts) <= _DEEPEST
        and all(part and part != "." and part != ".." and len(part) <= _LONGEST_NAME for part in parts)
        and not any(part.startswith(".") for part in parts)
    )
    if not sound:
        raise BadArtifacts(f"{where}: the name {path[:80]!r} leads elsewhere, or is none")
    return path


def _size(info: Mapping[str, Any], what: str) -> int:
    size = info.get("size")
    if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size < 1 << 60:
        raise BadArtifacts(f"{what}: its size is not given")
    return size


def _stamp(info: Mapping[str, Any]) -> str:
    """Returns what the store says of its content; quotes around it are some servers' habit."""
    found = (info.get(name) for name in (*_STAMPS, *_LATER_STAMPS))
    return str(next((value for value in found if value), "")).strip('"')[:200]


def _kind(error: BaseException) -> str:
    """Returns the kind without its words: a store's errors may quote an address with its key."""
    return type(error).__name__
