"""What stands in a model's file, or beside it, about what the model is for. Nothing is run, and every length
is bounded: files come from strangers.

ONNX files hold pairs of texts in the protobuf field metadata_props, TorchScript archives hold files under
extra/. Exports of transformers and timm have their settings in JSON files beside the weights.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

_MOST_FIELDS = 100_000  # of an ONNX model: a handful, and a function each
_MOST_PAIRS = 256
_LONGEST_PAIR = 1 << 20
_LONGEST_JSON = 4 << 20
_METADATA_PROPS = 14  # of ModelProto; of a pair, the key is field 1 and the value field 2
_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5  # protobuf's wire types
_SETTINGS = ("config.json", "preprocessor_config.json", "meta.json")
_SAYS_NOTHING = ("model", "inference")  # of a file's name: then its folder's counts, which may be a version's


@dataclass(frozen=True, slots=True)
class FileMetadata:
    entries: Mapping[str, str] = field(default_factory=dict)  # in the model's file
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json beside it
    preprocessor: Mapping[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    meta: Mapping[str, Any] = field(default_factory=dict)  # meta.json: alphabets of readers
    name: str = ""  # of the file, or of the model's folder


def read_metadata(file: Path | None) -> FileMetadata:
    """What can be read; what is broken says nothing here, for whoever loads the model will say it."""
    if file is None:
        return FileMetadata()
    try:
        entries = _onnx(file) if file.suffix == ".onnx" else _extra_files(file)
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        entries = {}
    config, preprocessor, meta = (_json(file.parent / name) for name in _SETTINGS)
    return FileMetadata(entries, config, preprocessor, meta, _name(file))


def _name(file: Path) -> str:
    if file.stem not in _SAYS_NOTHING:
        return file.stem
    folder = file.absolute().parent
    return folder.parent.name if folder.name.isdigit() else folder.name


def _onnx(file: Path) -> dict[str, str]:
    """The graph, which is nearly all of the file, is stepped over."""
    found: dict[str, str] = {}
    with file.open("rb") as data:
        end = os.fstat(data.fileno()).st_size
        for _ in range(_MOST_FIELDS):
            if data.tell() >= end or len(found) >= _MOST_PAIRS:
                break
            number, kind = divmod(_varint(data), 8)
            if kind == _VARINT:
                _varint(data)
                continue
            length = _varint(data) if kind == _LENGTH else {_EIGHT: 8, _FOUR: 4}.get(kind)
            if length is None or length > end - data.tell():
                raise ValueError("this is no protobuf message")
            if number == _METADATA_PROPS and kind == _LENGTH and length <= _LONGEST_PAIR:
                key, value = _pair(data.read(length))
                found[key] = value
            else:
                data.seek(length, os.SEEK_CUR)
    return found


def _varint(data: BinaryIO) -> int:
    value = 0
    for shift in range(0, 64, 7):
        byte = data.read(1)
        if not byte:
            break
        value |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return value
    raise ValueError("this is no protobuf message")


def _pair(data: bytes) -> tuple[str, str]:
    texts = {1: "", 2: ""}
    view = io.BytesIO(data)
    while view.tell() < len(data):
        number, kind = divmod(_varint(view), 8)
        if kind != _LENGTH:
            raise ValueError("this is no pair of texts")
        texts[number] = view.read(_varint(view)).decode("utf-8", "replace")
    return texts[1], texts[2]


def _extra_files(file: Path) -> dict[str, str]:
    """Of a TorchScript archive: Ultralytics writes its metadata into config.txt, as JSON."""
    if not file.is_file() or not zipfile.is_zipfile(file):
        return {}
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("extra/config.txt")), None)
        if name is None or archive.getinfo(name).file_size > _LONGEST_PAIR:
            return {}
        document = json.loads(archive.read(name))
    if not isinstance(document, dict) or len(document) > _MOST_PAIRS:
        return {}
    return {str(key): value if isinstance(value, str) else repr(value) for key, value in document.items()}


def _json(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LONGEST_JSON:
            return {}
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
