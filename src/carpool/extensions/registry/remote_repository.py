"""Repositories that lie elsewhere, on disk: a model appears, or changes, whole or not at all.

ROOT/models/NAME          a link to the tree that is served: replaced by one rename
ROOT/trees/NAME/NUMBER/   a model as it was listed once; its files are links to the store's contents
ROOT/parts/DIGEST         a file that is being fetched: one that was left half is gone on with
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from hashlib import file_digest, sha256
from pathlib import Path
from typing import IO, Any

from carpool.config.regular_file import open_regular, read_regular
from carpool.config.remote_address import remote_address, shown_address
from carpool.config.repository import is_model_folder, version_folders
from carpool.config.server import ServerSettings, usual_folder
from carpool.errors import CarpoolError
from carpool.extensions.registry.remote_listing import (
    Budget,
    RemoteFile,
    RemoteFiles,
    RemoteListing,
    checked_path,
)
from carpool.extensions.registry.source import BadArtifacts, NotReady, Pin, PinnedFile, RegistryError
from carpool.extensions.registry.version_store import LEFT_S, VersionStore, write_document

_BLOCK = 16 << 20
_TRIES = 3  # of a model that changes while it is fetched
_KEYS = ".fetched.json"  # which file of a tree is which of the listing
_MOST_KEYS = 16 << 20
_ARCHIVE = "archive"  # what stands for all models of one

Tell = Callable[[str], None]


class RemoteModel:
    """Implements a `VersionSource`: one model of a repository, as it was listed. `shown` is the tree that is
    served now: what did not change is taken from there, as the very same files, so that it is not loaded
    again."""

    def __init__(
        self, remote: RemoteFiles, name: str, files: Sequence[RemoteFile], parts: Path, shown: Path
    ) -> None:
        self._remote, self._name, self._parts = remote, name, parts
        self._shown = shown
        self.files = tuple(files)

    @property
    def address(self) -> str:
        return f"{self._remote.shown}/{self._name}"

    def resolve(self, known: Pin | None = None) -> Pin:
        digest = sha256()
        for file in self.files:
            digest.update(repr((self._remote.shown, file.path, file.size, file.stamp, file.digest)).encode())
        number = int(digest.hexdigest()[:14], 16) + 1
        listed = tuple(PinnedFile(file.path, file.size) for file in self.files)
        return Pin(number, digest.hexdigest(), listed, self.address)

    def fetch(self, pin: Pin, folder: Path) -> None:
        self._take_what_is_there()
        parts = [self._fetched(file) for file in self.files]
        self._check_unchanged()
        for file, part in zip(self.files, parts, strict=True):
            target = folder / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
        keys = {self._part(file).name: file.path for file in self.files}
        write_document(folder / _KEYS, keys)

    def _take_what_is_there(self) -> None:
        try:
            keys = json.loads(read_regular(self._shown / _KEYS, _MOST_KEYS))
        except (OSError, ValueError):
            return
        for file in self.files:
            part = self._part(file)
            there = self._shown / str(keys.get(part.name, "-"))
            if there.is_file() and there.stat().st_size == file.size:
                part.unlink(missing_ok=True)
                with suppress(OSError):
                    part.hardlink_to(there)

    def write_back(
        self, pin: Pin, state: str, rollout: str = "", metrics: Mapping[str, float] | None = None
    ) -> None:
        """A store of files keeps no notes."""

    def point(self, pin: Pin) -> None:
        """Does nothing, since there are no addresses that move."""

    def _part(self, file: RemoteFile) -> Path:
        """Each path has its own, since a manifest may name one place twice and a part is moved away."""
        named = repr((self._remote.address, file.path, file.place, file.size, file.stamp)).encode()
        return self._parts / sha256(named).hexdigest()

    def part_names(self) -> set[str]:
        return {self._part(file).name for file in self.files}

    def _fetched(self, file: RemoteFile) -> Path:
        """Fetches it from where it was left: a part is of this very content, by its name."""
        part = self._part(file)
        if part.exists() and part.stat().st_size == file.size and not file.digest:
            return part
        with part.open("ab") as opened:
            size = opened.tell()
            for block in self._remote.blocks(file, size, _BLOCK):
                size += len(block)
                if not block or size > file.size:
                    break
                opened.write(block)
                if size == file.size:
                    break  # some servers send all of it, whatever part they are asked for
            opened.flush()
            os.fsync(opened.fileno())
        if size != file.size:
            part.unlink(missing_ok=True)
            raise BadArtifacts(f"{self.address}: {file.path} was received with {size} of {file.size} bytes")
        if file.digest and _digest(part) != file.digest:
            part.unlink(missing_ok=True)
            raise BadArtifacts(f"{self.address}: {file.path} is not what the manifest's sha256 says")
        return part

    def _check_unchanged(self) -> None:
        """A file that was replaced meanwhile may be half the old one and half the new one."""
        listed = self._remote.listing()
        now = listed.models.get(self._name, ()) if listed.archive is None else (listed.archive,)
        if set(now) == set(self.files):
            return
        for file in set(self.files) - set(now):
            self._part(file).unlink(missing_ok=True)
        raise NotReady(f"{self.address}: it changed while it was fetched")


class RemoteArchive(RemoteModel):
    """Represents all models in one file."""

    def __init__(self, remote: RemoteFiles, file: RemoteFile, parts: Path) -> None:
        super().__init__(remote, _ARCHIVE, (file,), parts, parts)
        self._budget = remote.budget

    def fetch(self, pin: Pin, folder: Path) -> None:
        super().fetch(pin, folder)
        packed = folder / self.files[0].path
        try:
            _unpack(packed, folder, self._budget, self.address)
        except (zipfile.BadZipFile, tarfile.TarError, NotImplementedError, EOFError, RuntimeError) as error:
            raise BadArtifacts(f"{self.address}: it cannot be unpacked: {type(error).__name__}") from None
        packed.unlink()


def _unpack(packed: Path, folder: Path, budget: Budget, address: str) -> None:
    """Names are checked and bytes counted: what an archive says of itself is not believed."""
    left = budget.bytes
    for count, (name, opened) in enumerate(_entries(packed, address), 1):
        target = folder / checked_path(name, address)
        if count > budget.files or target == packed or target.exists():
            raise BadArtifacts(f"{address}: too many files, or {name[:80]!r} twice")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as written:
            while block := opened.read(1 << 20):
                left -= len(block)
                if left < 0:
                    raise BadArtifacts(f"{address}: unpacked it is more than remote_gb allows")
                written.write(block)


def _entries(packed: Path, address: str) -> Iterator[tuple[str, IO[bytes]]]:
    """Plain files; hidden ones and folders are passed over, and links are refused."""
    if packed.suffix == ".zip":
        with zipfile.ZipFile(packed) as archive:
            for entry in archive.infolist():
                if not (entry.is_dir() or _hidden(entry.filename)):
                    with archive.open(entry) as opened:
                        yield entry.filename, opened
        return
    with tarfile.open(packed, "r:*") as tar:
        for member in tar:
            name = member.name.removeprefix("./")
            if member.isdir() or _hidden(name):
                continue
            opened_member = tar.extractfile(member) if member.isreg() else None
            if opened_member is None:
                raise BadArtifacts(f"{address}: {name[:80]!r} is no plain file")
            yield name, opened_member


def _hidden(name: str) -> bool:
    last = name.rpartition("/")[2]
    return last.startswith(".") and ".." not in name.split("/")


class RemoteRepository:
    """Represents one address, and the folder in which its models appear. All of it blocks."""

    def __init__(
        self, address: str, cache_dir: Path, budget: Budget, options: Mapping[str, Any] | None = None
    ) -> None:
        self._files = RemoteFiles(address, budget, options)
        self.shown = shown_address(address)
        self._root = cache_dir / "remote" / sha256(address.encode()).hexdigest()[:16]
        self._store = VersionStore(cache_dir / "remote" / "contents")
        self.folder = self._root / "models"

    def refresh(self, tell: Tell = lambda _: None, *, wait: bool = True) -> list[str]:
        """Make the folder what the address holds now; what could not be taken, in words. What was there
        before then stays. Raises only where the address as a whole cannot be read."""
        for name in ("trees", "parts"):
            (self._root / name).mkdir(parents=True, exist_ok=True)
        with self._alone(wait=wait) as alone:
            if not alone:
                return []  # another process is at it
            listing = self._files.listing()
            if listing.archive is None:
                self.folder.mkdir(exist_ok=True)
            return self._take(listing, tell)

    @contextmanager
    def _alone(self, *, wait: bool) -> Iterator[bool]:
        """Locks the repository, since servers of one machine may share a cache."""
        with (self._root / "lock").open("w") as lock:
            try:
                flock(lock, LOCK_EX if wait else LOCK_EX | LOCK_NB)
            except OSError:
                yield False
                return
            yield True

    def _take(self, listing: RemoteListing, tell: Tell) -> list[str]:
        complaints = []
        names = [_ARCHIVE] if listing.archive else sorted(listing.models)
        for name in names:
            try:
                self._bring(name, listing, tell)
            except (RegistryError, OSError) as error:
                complaints.append(_words(error, self.shown))
        if listing.archive is None:
            for path in self.folder.iterdir():  # those that are gone there
                if path.is_symlink() and path.name not in listing.models:
                    path.unlink()
                    with suppress(OSError):
                        os.utime(self._root / "trees" / path.name)  # its tree stays for a while
        self._remove_unlisted(names, listing)
        return complaints

    def _source(self, name: str, listing: RemoteListing) -> RemoteModel:
        parts = self._root / "parts"
        if listing.archive is not None:
            return RemoteArchive(self._files, listing.archive, parts)
        return RemoteModel(self._files, name, listing.models[name], parts, self.folder / name)

    def _remove_unlisted(self, names: Sequence[str], listing: RemoteListing) -> None:
        """Removes parts that no file of the listing goes on with, and trees of models that are gone for
        long."""
        wanted = {part for name in names for part in self._source(name, listing).part_names()}
        with suppress(OSError):
            for part in (self._root / "parts").iterdir():
                if part.name not in wanted:
                    part.unlink(missing_ok=True)
            for home in (self._root / "trees").iterdir():
                if home.name not in names and time.time() - home.stat().st_mtime > LEFT_S:
                    shutil.rmtree(home, ignore_errors=True)

    def _bring(self, name: str, listing: RemoteListing, tell: Tell) -> None:
        home = self._root / "trees" / name
        for attempt in range(_TRIES):
            source = self._source(name, listing)
            pin = source.resolve()
            if not self._store.has(pin, home):
                tell(f"fetching {source.address}, {pin.bytes / 1e6:,.1f} MB")
            try:
                tree = self._store.bring(source, pin, home)
                break
            except NotReady:
                listing = self._files.listing()
                if attempt == _TRIES - 1 or (listing.archive is None and name not in listing.models):
                    raise
        self._show(name, tree, whole=listing.archive is not None)
        self._tidy(home, keep=tree)

    def _show(self, name: str, tree: Path, *, whole: bool) -> None:
        """Shows it by one rename of a link: a reader sees the old tree or the new one."""
        if whole:
            tree = _repository_in(tree)
        link = self.folder if whole else self.folder / name
        target = os.path.relpath(tree, link.parent)
        if link.is_symlink() and str(link.readlink()) == target:
            return
        new = self._root / f"link.{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(link)

    def _tidy(self, home: Path, keep: Path) -> None:
        """The tree before this one stays, for a process that is reading it."""
        trees = version_folders(home)
        others = {number: path.stat().st_mtime for number, path in trees.items() if path != keep}
        before = max(others, key=lambda number: others[number], default=int(keep.name))
        for number in others.keys() - {before}:
            shutil.rmtree(home / str(number), ignore_errors=True)
        self._store.tidy(home, {int(keep.name), before})


def _repository_in(tree: Path) -> Path:
    """Returns the folder of the repository, since archives often hold one folder with everything in it."""
    inside = [path for path in tree.iterdir() if not path.name.startswith(".")]
    single = len(inside) == 1 and inside[0].is_dir() and not is_model_folder(inside[0])
    return inside[0] if single and not is_model_folder(tree) else tree


def _digest(path: Path) -> str:
    with open_regular(path) as file:
        return file_digest(file, "sha256").hexdigest()


def _words(error: Exception, shown: str) -> str:
    if isinstance(error, CarpoolError):
        return error.message
    reason = error.strerror if isinstance(error, OSError) else ""
    return f"{shown}: cannot be written: {reason or type(error).__name__}"


class Remotes:
    """Holds those among the paths that a server was given."""

    def __init__(self, paths: Sequence[str | Path], cache_dir: Path | None, budget: Budget) -> None:
        cache = cache_dir or usual_folder("cache")
        addresses = dict.fromkeys(filter(None, map(remote_address, paths)))
        self.repositories = {one: RemoteRepository(one, cache, budget) for one in addresses}

    @classmethod
    def of(cls, settings: ServerSettings) -> Remotes:
        budget = Budget(int(settings.option("remote_gb") * 1e9), settings.option("remote_files"))
        return cls(settings.models, settings.cache_dir, budget)

    def folders(self, paths: Sequence[Path]) -> list[Path]:
        """Returns the paths, with a folder in place of each address."""
        found = []
        for path in paths:
            address = remote_address(path)
            found.append(path if address is None else self.repositories[address].folder)
        return found

    def refresh(self, tell: Tell = lambda _: None, *, wait: bool = True) -> list[str]:
        """Refreshes all of them, and returns what could not be taken, in words."""
        complaints = []
        for repository in self.repositories.values():
            try:
                complaints += repository.refresh(tell, wait=wait)
            except (CarpoolError, OSError) as error:
                complaints.append(_words(error, repository.shown))
        return complaints
