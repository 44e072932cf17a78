"""What a Python model's file says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.cases import python_file, settings
from carpool import backends
from carpool.backends.python.declarations import Declarations, read_declarations
from carpool.config.model import TensorSignature
from carpool.config.repository import ModelVersion
from carpool.errors import ConfigError

WHOLE = """
    raise SystemExit("reading does not run the file")
    INPUTS: dict = {"image": ("UINT8", [-1, 3]), "mask": ("BOOL", ())}
    OUTPUTS = {"scores": ["FP32", [10]]}
    MAX_BATCH = 16
"""


def read(folder: Path, source: str) -> Declarations:
    return read_declarations(python_file(folder, source))


def test_declarations_are_read_without_running_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, WHOLE)
    assert found.inputs == (TensorSignature("image", "UINT8", (-1, 3)), TensorSignature("mask", "BOOL", ()))
    assert found.outputs == (TensorSignature("scores", "FP32", (10,)),)
    assert found.max_batch == 16


def test_a_file_need_not_declare_anything(tmp_path: Path) -> None:
    assert read(tmp_path, "def predict(x): return x") == Declarations() == read_declarations(None)


@pytest.mark.parametrize(
    ("own", "settings_say", "first"), [(None, None, -1), (16, 8, -1), (0, None, 10), (None, 0, 10)]
)
def test_shapes_start_with_the_batch_unless_someone_says_there_is_none(
    own: int | None, settings_say: int | None, first: int
) -> None:
    declared = Declarations(outputs=(TensorSignature("y", "FP32", (10,)),), max_batch=own)
    assert declared.signature(settings_say).outputs[0].shape[0] == first


@pytest.mark.parametrize(("declared", "expected"), [("MAX_BATCH = 5", 5), ("", 32), ("MAX_BATCH = 0", 0)])
def test_the_files_largest_batch_counts_where_the_settings_are_silent(
    tmp_path: Path, declared: str, expected: int
) -> None:
    file = python_file(
        tmp_path, f'INPUTS = {{"x": ("FP32", [3])}}\nOUTPUTS = {{"y": ("FP32", [3])}}\n{declared}'
    )
    config = backends.describe(settings("python", file), ModelVersion(1, file))
    assert config.max_batch == expected
    assert (config.inputs[0].dims, config.policy.max_batch) == ((3,), max(expected, 1))


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("\nINPUTS = make()", r"model\.py:2: INPUTS: must be written out as a plain value"),
        ("INPUTS = ['x']", r"INPUTS: must look like"),
        ("INPUTS = {3: ('FP32', [])}", r"INPUTS: must look like"),
        ("OUTPUTS = {'y': 'FP32'}", r'OUTPUTS: "y" must be a datatype and a shape'),
        ("OUTPUTS = {'y': ('FP32', [1.5])}", r'"y" must be a datatype and a shape'),
        ("OUTPUTS = {'y': ('FP31', [1])}", r'unknown datatype "FP31"; did you mean "FP32"'),
        ("OUTPUTS = {'y': ('FP32', [0])}", r"a dimension must be 1 or more"),
        ("MAX_BATCH = -1", r"MAX_BATCH: must be a whole number from 0 to 65536"),
        ("MAX_BATCH = True", r"MAX_BATCH: must be a whole number"),
        ("MAX_BATCH = 2 ** 3", r"must be written out"),
    ],
)
def test_a_wrong_declaration_is_named_with_its_line(tmp_path: Path, source: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        read(tmp_path, source)


@pytest.mark.parametrize(
    ("code", "tritons", "completes"),
    [
        ("class TritonPythonModel:\n    def auto_complete_config(config): ...\n", True, True),
        ("try:\n    class TritonPythonModel: ...\nfinally: ...\n", True, False),
        ("from shared import Model as TritonPythonModel\n", True, False),
        ("class Model: ...\ndef auto_complete_config(config): ...\n", False, False),
    ],
)
def test_a_model_for_tritons_python_backend_is_known_by_its_class(
    tmp_path: Path, code: str, tritons: bool, completes: bool
) -> None:
    declared = read(tmp_path, code)
    assert (declared.tritons, declared.completes) == (tritons, completes)
