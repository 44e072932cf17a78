"""TorchServe's model archives: a `.mar` becomes a model's folder, once, in the cache.

An archive comes from elsewhere: no entry may leave its folder, be a link or take more room than archives do.
What its manifest says decides the settings. Its handler is code for TorchServe and is not run: what the usual
ones do to pictures is a setting here, and the others' models are served as tensors.
"""

from __future__ import annotations

import ast
import json
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path, PurePosixPath
from typing import Any

from carpool.config import rules
from carpool.config.python_source import read_module
from carpool.config.regular_file import read_regular
from carpool.config.server import usual_folder
from carpool.errors import CarpoolError, ConfigError

MANIFEST = "MAR-INF/MANIFEST.json"
_INDEX = "index_to_name.json"
_LABELS = "labels.txt"
_MOST_ENTRIES = 1000
_MOST_BYTES = 16 << 30
_MOST_TIMES = 20  # as large as the archive, and a little: weights do not shrink, text does by less
_AND_BYTES = 16 << 20
_MOST_JSON = 4 << 20
_MOST_NAMES = 1 << 20
_BLOCK = 1 << 20
_CLASSIFIER = """task = "classify"
{labels}
[image]  # as TorchServe's handler prepares images
size = [224, 224]
resize = "crop"
crop = 0.875
scale = {scale}
mean = [0.485, 0.456, 0.406]
std = [0.229, 0.224, 0.225]
"""
_HANDLERS = {"image_classifier": "classify", "object_detector": "detect", "image_segmenter": "segment"}


def unpacked(archive: Path) -> Path:
    """Returns the folder of the model in this archive, named like the model. Raises what is wrong with it."""
    try:
        seen = archive.stat()
        stamp = f"{archive.resolve()}\0{seen.st_size}\0{seen.st_mtime_ns}\0{seen.st_ino}"
        home = usual_folder("cache") / "archives" / blake2b(stamp.encode(), digest_size=12).hexdigest()
        found = [folder for folder in home.iterdir() if folder.is_dir()] if home.is_dir() else []
        if found:
            return found[0]
        home.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=home.parent))
        try:
            _unpack(archive, part)
            part.rename(home)
        except OSError:
            if not home.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
        return next(folder for folder in home.iterdir() if folder.is_dir())
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ConfigError(f"{archive}: the archive cannot be read: {error}") from None
    except CarpoolError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # of the disk, or of a zip with a password
        raise ConfigError(f"{archive}: cannot be unpacked: {error}") from None


def _unpack(archive: Path, part: Path) -> None:
    with zipfile.ZipFile(archive) as opened:
        entries = _checked(archive, opened)
        if MANIFEST not in entries:
            raise ConfigError(f"{archive}: it has no {MANIFEST}: torch-model-archiver writes one")
        model = _model_of(archive, _json(opened, entries[MANIFEST]))
        name = rules.check_name(str(model.get("modelName", archive.stem)), str(archive))
        version = part / name / str(_version(model.get("modelVersion")))
        left = min(_MOST_BYTES, _MOST_TIMES * archive.stat().st_size + _AND_BYTES)
        for entry in entries.values():
            if not entry.filename.startswith("MAR-INF/"):
                left -= _write(archive, opened, entry, version / entry.filename, left)
    _write_settings(archive, part / name, version, model)


def _checked(archive: Path, opened: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Files by name: nothing of the archive is written before all of it was looked at."""
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in opened.infolist():
        name, parts = entry.filename, PurePosixPath(entry.filename).parts
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if entry.is_dir():
            continue
        plain = name == "/".join(parts) and ".." not in parts and "\\" not in name and name.isprintable()
        if not plain or not parts or kind not in (0, stat.S_IFREG) or len(name) > rules.MAX_FILE_NAME:
            raise ConfigError(f"{archive}: the entry {rules.shown(name)} is not a file within its folder")
        if name in entries or len(entries) >= _MOST_ENTRIES:
            raise ConfigError(f"{archive}: {rules.shown(name)} is given twice, or there are too many entries")
        entries[name] = entry
    return entries


def _write(archive: Path, opened: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, most: int) -> int:
    """Returns its size, which is counted: what an entry says of it is not believed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with opened.open(entry) as source, target.open("xb") as written:
        while block := source.read(_BLOCK):
            size += len(block)
            if size > most:
                raise ConfigError(f"{archive}: its unpacked size is too large for an archive of this size")
            written.write(block)
    return size


def _json(opened: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Any:
    with opened.open(entry) as source:
        text = source.read(_MOST_JSON + 1)
    if len(text) > _MOST_JSON:
        raise ConfigError(f"{opened.filename}: {entry.filename} is longer than {_MOST_JSON} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{opened.filename}: {entry.filename} is not JSON: {error}") from None


def _model_of(archive: Path, manifest: Any) -> Mapping[str, Any]:
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, dict):
        raise ConfigError(f"{archive}: its {MANIFEST} has no model")
    return model


def _version(said: object) -> int:
    """1.0 is 1: versions are whole numbers here."""
    whole = str(said).partition(".")[0]
    return int(whole) if whole.isdigit() and 0 < int(whole[:19]) < 10**18 else 1


# ---- the settings ------------------------------------------------------------------------------------------


def _write_settings(archive: Path, folder: Path, version: Path, model: Mapping[str, Any]) -> None:
    file = str(model.get("serializedFile") or "")
    if not file:
        raise ConfigError(
            f"{archive}: its manifest names no serializedFile, and its handler cannot be run here: write a "
            "model.py (docs/coming-from.md#torchserve)"
        )
    if "/" in file or not (version / file).is_file():
        raise ConfigError(f"{archive}: the file {rules.shown(file)} of its manifest is not in it")
    said = json.dumps([archive.name, str(model.get("handler", ""))[:80]])  # on one line, whatever it holds
    lines = [f"# written from an archive; its handler is not run: {said}"]
    onnx = file.endswith(".onnx")
    lines.append(f'backend = "{"onnxruntime" if onnx else "pytorch"}"')
    code = str(model.get("modelFile") or "")
    eager = bool(code) and not onnx
    if not eager:
        target = version / ("model.onnx" if onnx else "model.pt")
        (version / file).rename(target)
    labels = _write_labels(folder, version)
    task = _HANDLERS.get(str(model.get("handler", "")))
    if task == "classify":
        lines.append(_CLASSIFIER.format(labels=labels, scale=1 / 255))
    else:
        lines += [f'task = "{task}"'] if task else []
        lines += [labels] if labels else []
    if eager:
        network = _network(archive, version, code)
        lines += ["[pytorch]", f"module = {json.dumps(network)}", f"weights = {json.dumps(file)}"]
    (folder / "model.toml").write_text("\n".join(lines) + "\n", "utf-8")


def _write_labels(folder: Path, version: Path) -> str:
    """Reads index_to_name.json: {"0": ["n01440764", "tench"]} or {"0": "tench"}, one a line in their
    order."""
    file = version / _INDEX
    try:
        found = json.loads(read_regular(file, _MOST_JSON))
        named = {int(number): name[-1] if isinstance(name, list) else name for number, name in found.items()}
        if max(named) >= _MOST_NAMES:
            return ""
        names = [str(named.get(number, number)) for number in range(max(named) + 1)]
    except (OSError, ValueError, AttributeError, IndexError, TypeError, RecursionError):
        return ""  # it is the handler's, and may be anything
    lines = (" ".join(name.split()) for name in names)
    (folder / _LABELS).write_text("\n".join(lines) + "\n", "utf-8")
    return f'labels = "{_LABELS}"'


def _network(archive: Path, version: Path, code: str) -> str:
    """Returns the one class of the file that TorchServe would make a network of, found without running it."""
    file = version / code
    if "/" in code or not file.is_file():
        raise ConfigError(f"{archive}: the file {rules.shown(code)} of its manifest is not in it")
    try:
        module = read_module(read_regular(file, _MOST_JSON), code)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{archive}: {code} is not a Python file: {error}") from None
    classes = [node.name for node in module.body if isinstance(node, ast.ClassDef) and node.bases]
    if len(classes) != 1:
        found = ", ".join(classes) or "none"
        raise ConfigError(f"{archive}: {code} should hold one class of a network, as for TorchServe: {found}")
    return f"{code}:{classes[0]}"
