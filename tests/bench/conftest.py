"""Benchmarks are scripts beside each other: their folder is looked in while they are imported, and no longer,
since some of them are called like folders of the tests."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

_FOLDER = str(Path(__file__).parents[2] / "benchmarks")

sys.path.insert(0, _FOLDER)
try:
    for _name in (
        "attacks.elements",
        "attacks.elements_rows",
        "attacks.fetches",
        "attacks.one_call",
        "fleet",
        "gpu",
        "hops",
        "overhead",
        "overload_real",
        "ray_fleet",
        "chip.cores",
        "chip.draw_processes",
        "chip.showing",
        "chip.watching",
        "load.disturbance",
        *(("zoo", "zoo2026", "zoo2026_heads") if find_spec("torch") else ()),
    ):
        importlib.import_module(_name)
finally:
    sys.path.remove(_FOLDER)
