"""Reads what a Python model's file declares about itself from its text, without running it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from carpool.config.model import DYNAMIC, ModelConfig, ModelSignature, TensorSignature
from carpool.config.python_source import read_module
from carpool.config.regular_file import read_regular
from carpool.config.rules import MAX_BATCH, check_dims, nearest
from carpool.errors import ConfigError, ModelError
from carpool.types import DATATYPES

_TRITONS_CLASS = "TritonPythonModel"
_MOST_SOURCE = 16 << 20
_FORM = '{"name": ("FP32", [3, 224, 224])}'


@dataclass(frozen=True, slots=True)
class Declarations:
    """Shapes are without the batch; `max_batch` None leaves the batch to the settings."""

    inputs: tuple[TensorSignature, ...] = ()
    outputs: tuple[TensorSignature, ...] = ()
    max_batch: int | None = None
    tritons: bool = False  # it is a model for Triton's Python backend
    completes: bool = False  # and completes its settings itself
    calls: tuple[str, ...] = ()  # other models that it names where it makes requests

    def signature(self, max_batch: int | None) -> ModelSignature:
        """Returns whole shapes; the settings' `max_batch`, where they say it, decides whether there is a
        batch."""
        if 0 in (max_batch, self.max_batch):
            return ModelSignature(self.inputs, self.outputs)
        inputs, outputs = (
            tuple(replace(tensor, shape=(DYNAMIC, *tensor.shape)) for tensor in tensors)
            for tensors in (self.inputs, self.outputs)
        )
        return ModelSignature(inputs, outputs)


def read_declarations(file: Path | None) -> Declarations:
    """Returns the declarations of one file; none of them where there is no file."""
    if file is None:
        return Declarations()
    try:
        module = read_module(read_regular(file, _MOST_SOURCE), str(file))
    except SyntaxError as error:
        raise ModelError(f"{file}:{error.lineno or 1}: not a Python file: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot be read as Python: {error}") from None
    told: dict[str, ast.expr] = {}
    for statement in module.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ) if name in _READERS:
                told[name] = value
    found: dict[str, Any] = {}
    for name, value in told.items():
        where = f"{file}:{value.lineno}: {name}"
        found[name] = _READERS[name](_literal(value, where), where)
    tritons = any(_is_tritons(node) for node in ast.walk(module))
    completes = tritons and any(
        isinstance(node, ast.FunctionDef) and node.name == "auto_complete_config" for node in ast.walk(module)
    )
    inputs, outputs = found.get("INPUTS", ()), found.get("OUTPUTS", ())
    calls = dict.fromkeys(name for node in ast.walk(module) for name in _called(node))
    return Declarations(inputs, outputs, found.get("MAX_BATCH"), tritons, completes, tuple(calls))


def _is_tritons(node: ast.AST) -> bool:
    """Returns whether it is the class of a model for Triton's Python backend, or its name from elsewhere."""
    match node:
        case ast.ClassDef(name=name) if name == _TRITONS_CLASS:
            return True
        case ast.ImportFrom(names=names):
            return any(_TRITONS_CLASS in (alias.name, alias.asname) for alias in names)
    return False


def _called(node: ast.AST) -> list[str]:
    """Returns the model that a request is for, where its name is written out."""
    if not isinstance(node, ast.Call):
        return []
    named = [one.value for one in node.keywords if one.arg == "model_name"]
    return [one.value for one in named if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def callees(config: ModelConfig, file: Path | None) -> tuple[tuple[str, ...], str]:
    """Returns the models that this one asks, and who says so: its parameter `calls`, or else its code."""
    told = config.parameters.get("calls", "")
    if told:
        return tuple(name.strip() for name in str(told).split(",") if name.strip()), "its parameter calls"
    return (read_declarations(file).calls if config.backend == "python" else ()), "its code"


def _literal(value: ast.expr, where: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        raise ConfigError(f"{where}: must be written out as a plain value, without names or calls") from None


def _tensors(declared: object, where: str) -> tuple[TensorSignature, ...]:
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


def _max_batch(number: object, where: str) -> int:
    if type(number) is not int or not 0 <= number <= MAX_BATCH:
        raise ConfigError(f"{where}: must be a whole number from 0 to {MAX_BATCH}")
    return number


_READERS: Mapping[str, Callable[[Any, str], Any]] = {
    "INPUTS": _tensors,
    "OUTPUTS": _tensors,
    "MAX_BATCH": _max_batch,
}
