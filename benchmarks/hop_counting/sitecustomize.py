"""Loaded by every Python of a server that benchmarks/hops.py starts: notes the calls into Carpool's files.

The folder in HOPS_FOLDER holds the switch, a file of two bytes: whether to note, and the number of the
window. When the number changes, what was noted is written down for whoever counts, and noting starts afresh.
"""

import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path

_FOLDER = Path(os.environ["HOPS_FOLDER"])
_PACKAGE = os.environ["HOPS_PACKAGE"]
_LOOK_EVERY_S = 0.002
_noted: list[tuple[int, str, str]] = []  # appended to by all threads, which the GIL allows; swapped by one

with (_FOLDER / "switch").open("r+b") as _file:
    _switch = mmap.mmap(_file.fileno(), 2)


def _note(frame, event, _argument):  # called for every event of every thread: as short as can be
    if event == "call" and _switch[0]:
        name = frame.f_code.co_filename
        if name.startswith(_PACKAGE):
            _noted.append((threading.get_ident(), name, frame.f_code.co_qualname))


def _report() -> None:
    global _noted
    window = _switch[1]
    while True:
        if _switch[1] != window:
            window, noted, _noted = _switch[1], _noted, []
            partial = _FOLDER / f"{os.getpid()}.partial"
            partial.write_text(json.dumps(noted))
            partial.rename(_FOLDER / f"{window}.{os.getpid()}.json")
        time.sleep(_LOOK_EVERY_S)


def _begin() -> None:
    """In every process, also in one that is forked: threads are not."""
    _noted.clear()
    threading.Thread(target=_report, daemon=True).start()
    (_FOLDER / f"{os.getpid()}.counted").touch()


_begin()
os.register_at_fork(after_in_child=_begin)
threading.setprofile(_note)
sys.setprofile(_note)
