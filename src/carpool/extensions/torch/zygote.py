"""Imports packages for the zygote of runners. A device that is in use before a fork cannot be used after it,
so that what an import does to one is looked for: runners are then started as fresh processes.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

from carpool.link.zygote_process import import_all

_STARTS_DEVICES = ("torch._inductor",)
"""What initialises CUDA when it is imported: processes that compile import it themselves."""
_IN_USE = "/dev/nvidia-uvm"  # open in every process that has initialised CUDA


def bring_packages(names: Sequence[str], aside: bool) -> str:
    """Imports what models do; returns why nothing can be forked any more, if so."""
    import_all([name for name in names if not name.startswith(_STARTS_DEVICES)], aside=aside)
    gc.collect()
    return "one of the imported packages has initialised CUDA" if device_is_used() else ""


def device_is_used(files: Path = Path("/proc/self/fd")) -> bool:
    for file in files.iterdir():
        try:
            if str(file.readlink()) == _IN_USE:
                return True
        except OSError:
            """It was the listing's own."""
    return False
