"""Small model folders for the engine's tests."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent


def fake(folder: Path, *, curve: str = "2+0.1", name: str = "fake", head: str = "slo_ms = 200") -> Path:
    """A model that only takes time."""
    model = folder / name
    model.mkdir(parents=True)
    (model / "model.toml").write_text(
        f'backend = "fake"\n{head}\nmax_batch = 8\n[fake]\ncurve = "{curve}"\n'
        '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [4]\n'
        '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [2]\n'
    )
    return model


def python(
    folder: Path, code: str, *, name: str = "model", head: str = "", shape: str = "[2]", max_batch: int = 8
) -> Path:
    """A Python model with one FP32 input `x` and one FP32 output `y`."""
    model = folder / name
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(dedent(code))
    (model / "model.toml").write_text(
        f'backend = "python"\nmax_batch = {max_batch}\n{head}\n'
        f'[[input]]\nname = "x"\ndatatype = "FP32"\nshape = {shape}\n'
        f'[[output]]\nname = "y"\ndatatype = "FP32"\nshape = {shape}\n'
    )
    return model
