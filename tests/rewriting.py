"""In a fresh clone every test file is compiled once, and not once by each of pytest's processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.assertion import rewrite


def rewrite_share(config: pytest.Config) -> None:
    """Compile this process's share of the test files, as importing them would.

    All of pytest's processes import all files in one order, so none would find what another has compiled.
    Their shares take them equally long: when one is through with its own, the others are nearly so.
    """
    given: dict[str, object] | None = getattr(config, "workerinput", None)
    if given is None or config.args != config.getini("testpaths"):  # alone, or few files
        return
    number, count = int(str(given["workerid"]).removeprefix("gw")), int(str(given["workercount"]))
    for file in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.stem + rewrite.PYC_TAIL)
        if not kept.exists() or kept.stat().st_mtime < file.stat().st_mtime:
            folder.mkdir(parents=True, exist_ok=True)
            stamp, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stamp, kept)
