"""Reads what stands in a model's file, or beside it, about what the model is for. Nothing is run, and every
length is bounded: files come from strangers.

ONNX files hold pairs of texts in the protobuf field metadata_props, TorchScript archives hold files under
extra/. Exports of transformers and timm have their settings in JSON files beside the weights.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carpool.config.first_layers import GraphStart, read_graph_start
from carpool.config.onnx_outputs import Shapes, read_shapes
from carpool.config.protobuf_fields import fields_in, walk
from carpool.config.regular_file import open_regular, read_regular

_MOST_PAIRS = 256
_LONGEST_PAIR = 1 << 20
_LONGEST_JSON = 4 << 20
_GRAPH, _METADATA_PROPS = 7, 14  # of ModelProto; of a pair, the key is field 1 and the value field 2
_SETTINGS = ("config.json", "preprocessor_config.json", "meta.json", "open_clip_config.json")
_SAYS_NOTHING = ("model", "inference")  # of a file's name: then its folder's counts, which may be a version's


@dataclass(frozen=True, slots=True)
class FileMetadata:
    entries: Mapping[str, str] = field(default_factory=dict)  # in the model's file
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json beside it
    preprocessor: Mapping[str, Any] = field(default_factory=dict)  # preprocessor_config.json
    meta: Mapping[str, Any] = field(default_factory=dict)  # meta.json: alphabets of readers
    name: str = ""  # of the file, or of the model's folder
    start: GraphStart = field(default_factory=GraphStart)  # what an ONNX file itself does to pixels
    open_clip: Mapping[str, Any] = field(default_factory=dict)  # open_clip_config.json
    inputs: Shapes = field(default_factory=dict)  # of an ONNX file, with the batch
    outputs: Shapes = field(default_factory=dict)


def read_metadata(file: Path | None, folder: Path | None = None) -> FileMetadata:
    """Returns what can be read; what is broken is not reported here, for loading the model will report it.
    JSON beside the file counts before that in the model's `folder`."""
    if file is None:
        return FileMetadata()
    entries: dict[str, str] = {}
    start = GraphStart()
    inputs: Shapes = {}
    outputs: Shapes = {}
    with suppress(OSError, ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError):
        if file.suffix == ".onnx":
            entries, start = _onnx(file)
            inputs, outputs = read_shapes(file)
        else:
            entries = _extra_files(file)
    places = [file.parent] if folder is None else [file.parent, folder]
    config, preprocessor, meta, open_clip = (_first_json(places, name) for name in _SETTINGS)
    named = _name(file)
    return FileMetadata(entries, config, preprocessor, meta, named, start, open_clip, inputs, outputs)


def _first_json(places: Sequence[Path], name: str) -> dict[str, Any]:
    return next((found for place in places if (found := _json(place / name))), {})


def _name(file: Path) -> str:
    if file.stem not in _SAYS_NOTHING:
        return file.stem
    folder = file.absolute().parent
    return folder.parent.name if folder.name.isdigit() else folder.name


def _onnx(file: Path) -> tuple[dict[str, str], GraphStart]:
    """Nearly all of the file is the graph, of which little is read."""
    found: dict[str, str] = {}
    start = GraphStart()
    with open_regular(file) as data:
        for number, length in walk(data, os.fstat(data.fileno()).st_size):
            if number == _METADATA_PROPS and length <= _LONGEST_PAIR and len(found) < _MOST_PAIRS:
                pair = dict(fields_in(data.read(length)))
                key, value = (pair.get(field, b"").decode("utf-8", "replace") for field in (1, 2))
                found[key] = value
            elif number == _GRAPH:
                with suppress(ValueError, IndexError):
                    start = read_graph_start(data, length)
    return found, start


def _extra_files(file: Path) -> dict[str, str]:
    """Returns those of a TorchScript archive: Ultralytics writes its metadata into config.txt, as JSON."""
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
        document = json.loads(read_regular(file, _LONGEST_JSON))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
