"""Models built once into the user's cache: whole or not there at all, and built again when damaged."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from carpool.demo.recipes import Recipe
from carpool.demo.sources import find_source, require_extra, sha256
from carpool.errors import Unavailable

Tell = Callable[[str], None]

_RECORD = "digests.json"
_LOCK_SECONDS = 180


def prepare(recipe: Recipe, cache: Path, tell: Tell) -> Path:
    """The model's folder, ready to serve: as it lies in the cache, or built now."""
    folder = cache / recipe.name
    if is_whole(recipe, folder):
        return folder
    require_extra(recipe)
    cache.mkdir(parents=True, exist_ok=True)
    with _alone(cache):
        if is_whole(recipe, folder):
            return folder  # another process was quicker
        for left in cache.glob(".building-*"):  # by one that was killed
            shutil.rmtree(left, ignore_errors=True)
        tell(f"Preparing {recipe.name} (once, into {cache}) …")
        with TemporaryDirectory(prefix=".building-", dir=cache) as scratch:
            built = Path(scratch) / "new"
            _build(recipe, built, Path(scratch))
            if folder.exists() or folder.is_symlink():
                folder.rename(Path(scratch) / "old")
            built.rename(folder)
    return folder


def is_whole(recipe: Recipe, folder: Path) -> bool:
    """Every file is there, as it was built, from the recipe of today."""
    try:
        record = json.loads((folder / _RECORD).read_text("utf-8"))
        files = dict(record["files"])
        if record["recipe"] != recipe.fingerprint() or "1/model.onnx" not in files:
            return False
        return all(sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, TypeError, KeyError):
        return False


def _build(recipe: Recipe, folder: Path, scratch: Path) -> None:
    source = find_source(recipe, scratch)
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(recipe.onnx(source.weights))
    for licence in source.licences:
        shutil.copyfile(licence, folder / licence.name)
    for name, data in recipe.settings().items():
        (folder / name).write_bytes(data)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {path.relative_to(folder).as_posix(): sha256(path) for path in files}
    record = {"recipe": recipe.fingerprint(), "files": digests}
    (folder / _RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")


@contextmanager
def _alone(cache: Path) -> Iterator[None]:
    """One process builds; the others wait for it, but not forever."""
    until = time.monotonic() + _LOCK_SECONDS
    with (cache / ".lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise Unavailable(f"another process has been building in {cache} for too long") from None
                time.sleep(0.05)
        yield
