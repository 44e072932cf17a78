"""Compiles the modules that pyproject.toml lists: mypyc writes C, and compilers run on it side by side.

    python tools/compile_modules.py FOLDER      # libraries in FOLDER/carpool/…, as they lie in a wheel
    python tools/compile_modules.py             # only whether there are a compiler and Python's headers

Nothing is written beside the sources of a clone. C and objects are kept in `build/objects`, or where
CARPOOL_OBJECTS says, by what they were made from: a second build of the same sources takes seconds.
CARPOOL_OPTIMISE is the compiler's level, 2 unless it is set; 0 is for those who only want to see it run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
MOST_KEPT = 4  # sources whose C is kept, and about as many builds' objects
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
MYPY = ["--no-site-packages", "--ignore-missing-imports", "--config-file="]  # no package changes what is made


def main(folder: Path) -> None:
    began = time.monotonic()
    check_compiler()
    kept = Path(os.environ.get("CARPOOL_OBJECTS") or ROOT / "build" / "objects").resolve()
    found = modules()
    place = written_c(found, kept)
    wrote = time.monotonic()
    build = Build(place, kept / "objects")
    libraries: list[tuple[str, list[str]]] = json.loads((place / "libraries.json").read_text())
    sources = sorted({each for _, of in libraries for each in of}, key=lambda each: -size(place / each))
    with ThreadPoolExecutor(cores()) as pool:
        objects = dict(zip(sources, pool.map(build.compiled, sources), strict=True))
        list(pool.map(lambda one: build.link([objects[each] for each in one[1]], folder / one[0]), libraries))
    forget_old(kept / "objects", MOST_KEPT * len(sources))
    took = time.monotonic() - wrote
    print(
        f"{len(found)} modules: C in {wrote - began:.0f} s, machine code in {took:.0f} s on {cores()} cores"
    )


def modules() -> list[Path]:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = project["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
    paths = {path for each in listed["include"] for path in ROOT.glob(each)}
    return sorted(path for path in paths if path.name not in listed["exclude"])


def cores() -> int:
    return len(os.sched_getaffinity(0))


def size(path: Path) -> int:
    return path.stat().st_size


def digest(parts: Iterable[bytes]) -> str:
    made = hashlib.sha256()
    for part in parts:
        made.update(len(part).to_bytes(8, "little") + part)
    return made.hexdigest()[:32]


def forget_old(folder: Path, most: int) -> None:
    for path in sorted(folder.iterdir(), key=lambda each: -each.stat().st_mtime)[most:]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# ── C ──


def written_c(found: Sequence[Path], kept: Path) -> Path:
    """The folder with the C of these modules. It depends on every source that they may import."""
    every = sorted(SOURCE.rglob("*.py"))
    names = [str(path.relative_to(SOURCE)) for path in found]
    paths = [str(path.relative_to(SOURCE)) for path in every]
    told = [sys.version, version("mypy"), *MYPY, *names, *paths]
    key = digest([*(each.encode() for each in told), *(path.read_bytes() for path in every)])
    place = kept / "c" / key
    if not (place / "libraries.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        write_c(names, place)
    place.touch()
    forget_old(kept / "c", MOST_KEPT)
    return place


def write_c(names: Sequence[str], place: Path) -> None:
    from mypyc.build import mypycify

    os.chdir(SOURCE)  # tracebacks then name files as they are found in an installation
    made = mypycify(
        [*MYPY, f"--cache-dir={os.devnull}", *names],
        multi_file=True,
        group_name="carpool",
        target_dir=str(place),
    )
    libraries = [
        (one.name.replace(".", "/") + SUFFIX, [str(Path(each).relative_to(place)) for each in one.sources])
        for one in made
    ]
    (place / "libraries.json").write_text(json.dumps(libraries))


# ── machine code ──


def setting(name: str) -> str:
    """As Python itself was built, unless the environment says otherwise."""
    return os.environ.get(name) or str(sysconfig.get_config_var(name) or "")


def include() -> str:
    return f"-I{sysconfig.get_path('include')}"


def check_compiler() -> None:
    """Says what is missing, before the C is written, which takes a minute."""
    compiler = shlex.split(setting("CC"))
    try:
        look = [*compiler, include(), "-E", "-x", "c", "-"]
        done = subprocess.run(look, input=b"#include <Python.h>", capture_output=True, check=False)
    except FileNotFoundError:
        raise SystemExit(f"no C compiler: {compiler[0]} is not here. Install gcc, or set CC.") from None
    if done.returncode:
        found = done.stderr.decode(errors="replace")
        raise SystemExit(f"{compiler[0]} does not find Python.h: install Python's headers.\n{found}")


class Build:
    """Compiles C of one folder into objects that are named by all that they were made from."""

    def __init__(self, place: Path, objects: Path) -> None:
        import mypyc

        objects.mkdir(parents=True, exist_ok=True)
        level = os.environ.get("CARPOOL_OPTIMISE", "2")
        runtime = Path(mypyc.__file__).parent / "lib-rt"
        given = ("CC", "CFLAGS", "CCSHARED")
        flags = [word for name in given for word in shlex.split(setting(name))]
        self._place, self._objects = place, objects
        self._flags = [*flags, f"-O{level}", "-g0", "-w"]
        self._include = ["-I.", f"-I{runtime}", include()]
        self._linker = shlex.split(setting("LDSHARED"))
        compiler = subprocess.run([flags[0], "--version"], capture_output=True, check=True).stdout
        headers = (path.read_bytes() for path in sorted(place.rglob("*.h")))
        self._key = digest([compiler, sys.version.encode(), version("mypy").encode(), *headers])

    def compiled(self, source: str) -> Path:
        words = (each.encode() for each in (self._key, *self._flags))
        path = self._objects / f"{digest([*words, (self._place / source).read_bytes()])}.o"
        if path.exists():
            path.touch()
        else:
            partial = path.with_suffix(f".{os.getpid()}.tmp")
            self._run([*self._flags, *self._include, "-c", source, "-o", str(partial)])
            partial.rename(path)
        return path

    def link(self, objects: Sequence[Path], library: Path) -> None:
        library.parent.mkdir(parents=True, exist_ok=True)
        self._run([*self._linker, "-s", *map(str, objects), "-o", str(library)])

    def _run(self, command: Sequence[str]) -> None:
        subprocess.run(command, cwd=self._place, check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the libraries are put")
    wanted = parser.parse_args().folder
    main(wanted.resolve()) if wanted is not None else check_compiler()
