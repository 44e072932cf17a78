"""The table [pytorch] of model.toml."""

from __future__ import annotations

import re

from carpool.config import rules
from carpool.config.model import PytorchSettings
from carpool.config.table import Table

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COMPILE_MODES = ("default", "max-autotune")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
_MODULE = re.compile(r"(?P<file>[^:]+\.py)(?::(?P<function>[A-Za-z_]\w*))?")
BUILD = "build"  # the function that a module file has, where none is named


def pytorch(table: Table | None) -> PytorchSettings:
    if table is None:
        return PytorchSettings()
    default = PytorchSettings()
    device = table.text("device") or default.device
    if not _DEVICE.fullmatch(device):
        raise table.error(
            "device", f'must be "auto", "cpu", "cuda" or like "cuda:1", not {rules.shown(device)}'
        )
    buckets = table.integers("buckets", 1, rules.MAX_BATCH) or ()
    weights = table.text("weights")
    return PytorchSettings(
        device=device,
        precision=table.text("precision", PRECISIONS) or default.precision,
        channels_last=table.flag("channels_last", False) if table.has("channels_last") else None,
        compile=_compile(table),
        graphs=table.flag("graphs", True) if table.has("graphs") else None,
        buckets=tuple(sorted(set(buckets))),
        module=_module(table),
        weights=None if weights is None else rules.check_inside(weights, table.where("weights")),
    )


def _compile(table: Table) -> str:
    if isinstance(table.data.get("compile"), str):
        return table.text("compile", COMPILE_MODES) or "off"
    return "default" if table.flag("compile", False) else "off"


def _module(table: Table) -> str | None:
    """A file of the version's folder and a function in it."""
    text = table.text("module")
    if text is None:
        return None
    found = _MODULE.fullmatch(text)
    if found is None:
        raise table.error(
            "module", f'must name a file and a function, like "model.py:build", not {rules.shown(text)}'
        )
    file = rules.check_inside(found["file"], table.where("module"))
    return f"{file}:{found['function'] or BUILD}"
