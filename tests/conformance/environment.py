"""Environments below .venv/conformance, with packages that some tests need and the project does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / ".venv" / "conformance"
_INSTALL_S = 1800.0


def install(
    name: str,
    what: str,
    *runs: Sequence[str],
    before: Callable[[Path], None] | None = None,
    after: Callable[[Path], None] | None = None,
    besides: Sequence[str] = (),
    own_python: bool = True,
) -> Path:
    """Makes the environment `name` unless it is there as it is wanted; returns its folder.

    Each of `runs` is what one call of `pip install` is given: packages, mostly. `before` and `after` do the
    rest in that folder, which `besides` names. Without `own_python` there is a folder of packages alone.
    """
    folder = FOLDER / name
    done, wanted = folder / ".installed", " ".join([word for run in runs for word in run] + [*besides])
    if done.is_file() and done.read_text() == wanted:
        return folder
    python = folder / "bin" / "python" if own_python else Path(sys.executable)
    try:
        if own_python:
            run(sys.executable, "-m", "venv", str(folder))
        if before is not None:
            before(folder)
        for words in runs:
            pip(python, "install", *words)
        if after is not None:
            after(folder)
    except (subprocess.SubprocessError, OSError) as error:
        sys.exit(f"conformance: {what} could not be installed: {error}\n(--ci goes without)")
    done.write_text(wanted)
    return folder


def pip(python: Path, *words: str) -> None:
    run(str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", *words)


def run(*command: str, folder: Path | None = None) -> str:
    """Returns what it says; what it complains of is shown."""
    done = subprocess.run(
        command, check=True, timeout=_INSTALL_S, cwd=folder, stdout=subprocess.PIPE, text=True
    )
    return done.stdout
