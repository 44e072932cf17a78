"""A user's Python file as a model: finds what to call, hands over the inputs, makes arrays of the answer."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from carpool.errors import ModelError
from carpool.types import DATATYPES, Array, Datatype

_MODULE = "carpool_model"
_SHOWN = 500  # characters of an exception's message that an error repeats

# Plain Python numbers carry no datatype: each kind takes the declared one if that loses nothing by nature.
_FITS = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}


class UserModel:
    """`settings` is what `setup` gets; its tensors tell which names are inputs and how outputs are typed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._batched = settings["max_batch"] != 0
        self._outputs = {tensor["name"]: DATATYPES[tensor["datatype"]] for tensor in settings["outputs"]}
        module = _import(Path(settings["file"]))
        self._predict, setup = _entry_points(module)
        self._spread = _spreads(self._predict, [tensor["name"] for tensor in settings["inputs"]])
        if self._spread:
            _check_defaults(
                self._predict, [tensor["name"] for tensor in settings["inputs"] if tensor["optional"]]
            )
        if setup is not None:
            setup(dict(settings))

    def run(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> dict[str, Array]:
        answer = self._predict(**inputs) if self._spread else self._predict(dict(inputs))
        rows = len(next(iter(inputs.values()))) if self._batched and inputs else None
        outputs = self._named(answer, rows)
        missing = [name for name in wanted if name not in outputs]
        if missing:
            names = ", ".join(outputs) or "none"
            raise ModelError(f"the answer has no output {missing[0]!r}; it has {names}")
        return {name: self._array(name, outputs[name]) for name in wanted or outputs}

    def _named(self, answer: Any, rows: int | None) -> Mapping[str, Any]:
        if isinstance(answer, list) and rows is not None:
            if len(answer) != rows:
                raise ModelError(f"predict answered {len(answer)} results for a batch of {rows}")
            if answer and all(isinstance(item, Mapping) for item in answer):
                return {name: [item[name] for item in answer] for name in answer[0]}
        if isinstance(answer, Mapping):
            return answer
        if len(self._outputs) != 1:
            names = ", ".join(self._outputs) or "none are declared"
            kind = type(answer).__name__
            raise ModelError(f"predict answered a {kind}; answer a dict with the outputs' names ({names})")
        return dict.fromkeys(self._outputs, answer)

    def _array(self, name: str, value: Any) -> Array:
        """Whatever has a dtype goes out as it is: the engine says what does not fit what was declared."""
        declared = self._outputs.get(name)
        if declared is Datatype.BYTES:
            return np.asarray(value, dtype=object)
        array = np.asarray(value)
        if declared is None or declared is Datatype.BF16 or _has_dtype(value):
            return array
        if array.dtype.kind in _FITS and declared.dtype.kind in _FITS[array.dtype.kind]:
            return np.asarray(value, dtype=declared.dtype)
        return array


def _has_dtype(value: Any) -> bool:
    """True for arrays and tensors of any library, and for lists of them; a scalar is as good as a number."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and _has_dtype(value[0])
    return hasattr(value, "dtype") and not isinstance(value, np.generic)


def _import(file: Path) -> ModuleType:
    """The file as a module that finds its neighbours, and that pickle and dataclasses find in turn."""
    sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(_MODULE, file)
    if spec is None or spec.loader is None:
        raise ModelError("it is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _entry_points(module: ModuleType) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """`predict` and `setup` of the class Model, or else of the file itself."""
    home = module.Model() if hasattr(module, "Model") else module
    predict = getattr(home, "predict", None)
    if not callable(predict):
        raise ModelError("it has neither a class Model with a method predict nor a function predict")
    return predict, getattr(home, "setup", None)


def _spreads(predict: Callable[..., Any], inputs: Collection[str]) -> bool:
    """True when the parameters are the inputs, False when one parameter takes the dict of all inputs."""
    parameters = inspect.signature(predict).parameters
    required = [name for name, parameter in parameters.items() if _is_required(parameter)]
    named = [name for name in parameters if name in inputs]
    if named:
        strangers = ", ".join(sorted({*required, *inputs} - {*named}))
        if strangers:
            raise ModelError(f"the parameters of predict and the model's inputs differ in {strangers}")
        return True
    if len(required) > 1 or not parameters:
        raise ModelError("predict must take one argument, the dict of inputs, or one named like each input")
    return False


def _check_defaults(predict: Callable[..., Any], optional: Collection[str]) -> None:
    parameters = inspect.signature(predict).parameters
    for name in optional:
        if name in parameters and _is_required(parameters[name]):
            raise ModelError(
                f"the input {name!r} is optional: give its parameter of predict a default, like {name}=None"
            )


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def explain(error: BaseException, file: Path) -> str:
    """Type, message and where in the user's own code, in one line. The code itself is for the log only."""
    message = " ".join(str(error).split())[:_SHOWN]
    text = message if isinstance(error, ModelError) else f"{type(error).__name__}: {message}".rstrip(": ")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    if not own:
        return text
    return f"{text} ({file.name}:{own[-1].lineno}, in {own[-1].name})"
