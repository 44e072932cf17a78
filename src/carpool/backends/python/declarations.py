"""What a Python model's file declares about itself, read from its text without running it.

    INPUTS = {"image": ("UINT8", [224, 224, 3])}     # name: datatype, shape without the batch
    OUTPUTS = {"scores": ("FP32", [1000])}
    MAX_BATCH = 32                                   # 0: the shapes are whole, there is no batch dimension

All three are optional, stand at the top level of the file and are written out as plain values.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from carpool.config.model import DYNAMIC, ModelSignature, TensorSignature
from carpool.config.rules import MAX_BATCH, check_dims, nearest
from carpool.errors import ConfigError, ModelError
from carpool.types import DATATYPES

_TRITONS = "triton_python_backend_utils"
_FORM = '{"name": ("FP32", [3, 224, 224])}'


@dataclass(frozen=True, slots=True)
class Declarations:
    """Shapes are without the batch; `max_batch` None leaves the batch to the settings."""

    inputs: tuple[TensorSignature, ...] = ()
    outputs: tuple[TensorSignature, ...] = ()
    max_batch: int | None = None

    def signature(self, max_batch: int | None) -> ModelSignature:
        """Whole shapes; the settings' `max_batch`, where they say it, decides whether there is a batch."""
        unbatched = 0 in (max_batch, self.max_batch)
        return ModelSignature(
            tuple(_whole(tensor, unbatched) for tensor in self.inputs),
            tuple(_whole(tensor, unbatched) for tensor in self.outputs),
        )


def _whole(tensor: TensorSignature, unbatched: bool) -> TensorSignature:
    shape = tensor.shape if unbatched else (DYNAMIC, *tensor.shape)
    return TensorSignature(tensor.name, tensor.datatype, shape)


def read_declarations(file: Path | None) -> Declarations:
    """The declarations of one file; none of them where there is no file."""
    if file is None:
        return Declarations()
    module = _parse(file)
    _check_not_tritons(module, file)
    found = {name: (value, f"{file}:{value.lineno}: {name}") for name, value in _assignments(module)}
    return Declarations(
        _tensors(*found["INPUTS"]) if "INPUTS" in found else (),
        _tensors(*found["OUTPUTS"]) if "OUTPUTS" in found else (),
        _max_batch(*found["MAX_BATCH"]) if "MAX_BATCH" in found else None,
    )


def _check_not_tritons(module: ast.Module, file: Path) -> None:
    """Its author should hear what it is, and not that a package is missing which nobody can install."""
    for node in ast.walk(module):
        match node:
            case ast.ClassDef(name="TritonPythonModel"):
                sign = "has a class TritonPythonModel"
            case ast.Import(names=names) if any(name.name == _TRITONS for name in names):
                sign = f"imports {_TRITONS}"
            case ast.ImportFrom(module=source) if source == _TRITONS:
                sign = f"imports {_TRITONS}"
            case _:
                continue
        raise ConfigError(
            f"{file}:{node.lineno}: this is a model for Triton's Python backend (it {sign}), which cannot run"
            " here as it is: write execute(requests) as predict(inputs) of a class Model, which gets the"
            " whole batch as arrays; docs/coming-from-triton.md, Models for the Python backend, shows how"
        )


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise ModelError(f"{file}:{error.lineno or 1}: not a Python file: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as Python: {error}") from None


def _literal(value: ast.expr, where: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        raise ConfigError(f"{where}: must be written out as a plain value, without names or calls") from None


def _tensors(value: ast.expr, where: str) -> tuple[TensorSignature, ...]:
    declared = _literal(value, where)
    if not isinstance(declared, dict) or not all(isinstance(name, str) and name for name in declared):
        raise ConfigError(f"{where}: must look like {_FORM}")
    return tuple(_tensor(name, spec, f'{where}: "{name}"') for name, spec in declared.items())


def _tensor(name: str, spec: object, where: str) -> TensorSignature:
    match spec:
        case (str(datatype), [*items]) if all(type(item) is int for item in items):
            dims = cast(list[int], items)
        case _:
            raise ConfigError(f"{where} must be a datatype and a shape, like {_FORM}")
    if datatype not in DATATYPES:
        raise ConfigError(f'{where} has the unknown datatype "{datatype}"; {nearest(datatype, DATATYPES)}')
    return TensorSignature(name, datatype, check_dims(dims, where))


def _max_batch(value: ast.expr, where: str) -> int:
    number = _literal(value, where)
    if type(number) is not int or not 0 <= number <= MAX_BATCH:
        raise ConfigError(f"{where}: must be a whole number from 0 to {MAX_BATCH}")
    return number
