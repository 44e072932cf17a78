"""How the interpreter of a process behaves: its collector, its threads, and when it ends."""

from __future__ import annotations

import ctypes
import gc
import signal
import sys

_PR_SET_PDEATHSIG = 1
_COLLECT_AT = (20_000, 20, 50)
_SWITCH_S = 1e-4
"""How long a thread keeps the interpreter while another wants it. A model's thread asks for it after each
call into its device, and with Python's 5 ms a GPU waits for the others (docs/gpu.md)."""


def spare_the_collector() -> None:
    """What is loaded now stays, and requests leave no cycles behind: looking for some is time lost."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AT)


def switch_often() -> None:
    sys.setswitchinterval(_SWITCH_S)


def belong_to_parent() -> None:
    """Ends with the process that started us, at once and in every case, and only then.

    A terminal or a service manager may signal the whole group: when to stop is for the parent to say. A
    handler that does nothing, rather than SIG_IGN, since children of ours would inherit that.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
