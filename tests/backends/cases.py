"""The same small models for every backend, so that one suite of tests can ask the same of all of them."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from backends import onnx_models
from backends.tensorflow_models import saved
from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.model import FakeSettings, ModelConfig, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.extension import importable

# The head of a Python model with one input and one output.
X_TO_Y = 'INPUTS = {"x": ("FP32", [3])}\nOUTPUTS = {"y": ("FP32", [3])}\n'

Specs = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, datatype, shape without the batch


@dataclass(frozen=True)
class Case:
    """How one backend comes by the models that the contract is tested with."""

    name: str
    arithmetic: Callable[[Path], backends.Backend]  # x FP32 [-1, 3] → double [-1, 3], total [-1, 1]
    identity: Callable[[Path, str], backends.Backend]  # x of this datatype [-1, 3] → y
    endless: Callable[[Path], backends.Backend]  # x FP32 [-1, 3] → y, never
    computes: bool = True  # False: answers zeros, whatever comes in
    refuses: tuple[str, ...] = ()  # datatypes that it says it does not carry
    identities: Callable[..., backends.Backend] | None = None
    """Of a folder and datatypes: x_FP32 → y_FP32 and so on in one model, where each instance is a process."""

    def __str__(self) -> str:
        return self.name


def settings(name: str, file: Path | None, inputs: Specs = (), outputs: Specs = ()) -> ModelConfig:
    return ModelConfig(
        name="model",
        path=file.parent if file else Path(),
        backend=name,
        inputs=tuple(TensorConfig(*spec) for spec in inputs),
        outputs=tuple(TensorConfig(*spec) for spec in outputs),
    )


def load(config: ModelConfig, file: Path | None, *, threads: int = 1) -> backends.Backend:
    version = ModelVersion(1, file)
    return backends.load(backends.describe(config, version), version, Placement(threads=threads))


def load_file(file: Path, *, threads: int = 1, backend: str = "onnxruntime") -> backends.Backend:
    return load(settings(backend, file), file, threads=threads)


def load_tflite(kind: str, folder: Path, *more: str) -> backends.Backend:
    made = importlib.import_module(
        "backends.tflite_models"
    )  # its library may be missing where GPUs are tested
    return load_file(getattr(made, kind)(folder / "model.tflite", *more), backend="litert")


def python_file(folder: Path, source: str) -> Path:
    file = folder / "model.py"
    file.write_text(textwrap.dedent(source))
    return file


def load_python(folder: Path, source: str) -> backends.Backend:
    file = python_file(folder, source)
    return load(settings("python", file), file)


def load_fake(inputs: Specs, outputs: Specs, curve: str = "0.1+0.1") -> backends.Backend:
    config = replace(settings("fake", None, inputs, outputs), fake=FakeSettings(curve))
    return load(config, None)


_X: Specs = (("x", "FP32", (3,)),)
_Y: Specs = (("y", "FP32", (3,)),)
_SUMS: Specs = (("double", "FP32", (3,)), ("total", "FP32", (1,)))

_PYTHON_ARITHMETIC = """
    INPUTS = {"x": ("FP32", [3])}
    OUTPUTS = {"double": ("FP32", [3]), "total": ("FP32", [1])}

    class Model:
        def predict(self, inputs):
            x = inputs["x"]
            return {"double": x + x, "total": x.sum(axis=1, keepdims=True)}
"""
_PYTHON_ENDLESS = """
    INPUTS = {"x": ("FP32", [3])}
    OUTPUTS = {"y": ("FP32", [3])}

    def predict(inputs):
        while True:
            pass
"""


def _python_identity(folder: Path, datatype: str) -> backends.Backend:
    source = f"""
        INPUTS = {{"x": ("{datatype}", [3])}}
        OUTPUTS = {{"y": ("{datatype}", [3])}}

        def predict(inputs):
            return inputs["x"]
    """
    return load_python(folder, source)


def _python_identities(folder: Path, *datatypes: str) -> backends.Backend:
    source = f"""
        INPUTS = { ({f"x_{name}": (name, [3]) for name in datatypes}) }
        OUTPUTS = { ({f"y_{name}": (name, [3]) for name in datatypes}) }

        def predict(inputs):
            return {{name.replace("x_", "y_"): array for name, array in inputs.items()}}
    """
    return load_python(folder, source)


# The same as a model for Triton's Python backend: `compute` makes outputs of the array x.
TRITONS = """
    import triton_python_backend_utils as pb_utils

    def answer(request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        found = compute(x)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in found.items()])

    class TritonPythonModel:
        def execute(self, requests):
            return [answer(request) for request in requests]
"""


def load_tritons(folder: Path, compute: str, inputs: Specs, outputs: Specs) -> backends.Backend:
    source = f"{textwrap.dedent(TRITONS)}\n\ndef compute(x):\n{textwrap.indent(compute, '    ')}\n"
    file = python_file(folder, source)
    return load(settings("python", file, inputs, outputs), file)


CASES = (
    Case(
        "onnxruntime",
        lambda folder: load_file(onnx_models.arithmetic(folder / "model.onnx")),
        lambda folder, datatype: load_file(onnx_models.identity(folder / "model.onnx", datatype)),
        lambda folder: load_file(onnx_models.endless(folder / "model.onnx")),
    ),
    Case(
        "openvino",
        lambda folder: load_file(onnx_models.arithmetic(folder / "model.onnx"), backend="openvino"),
        lambda folder, datatype: load_file(
            onnx_models.identity(folder / "model.onnx", datatype), backend="openvino"
        ),
        lambda folder: load_file(onnx_models.lengthy(folder / "model.onnx"), backend="openvino"),
        refuses=("BYTES",),
    ),
    Case(
        "litert",
        lambda folder: load_tflite("arithmetic", folder),
        lambda folder, datatype: load_tflite("identity", folder, datatype),
        lambda folder: load_tflite("endless", folder),
        refuses=("BF16",),
        identities=lambda folder, *datatypes: load_tflite("identities", folder, *datatypes),
    ),
    Case(
        "python",
        lambda folder: load_python(folder, _PYTHON_ARITHMETIC),
        _python_identity,
        lambda folder: load_python(folder, _PYTHON_ENDLESS),
        identities=_python_identities,
    ),
    Case(
        "triton-python",
        lambda folder: load_tritons(
            folder, "return {'double': x + x, 'total': x.sum(axis=1, keepdims=True)}", _X, _SUMS
        ),
        lambda folder, datatype: load_tritons(
            folder, "return {'y': x}", (("x", datatype, (3,)),), (("y", datatype, (3,)),)
        ),
        lambda folder: load_tritons(folder, "while True: pass", _X, _Y),
    ),
    Case(
        "fake",
        lambda folder: load_fake(_X, _SUMS),
        lambda folder, datatype: load_fake((("x", datatype, (3,)),), (("y", datatype, (3,)),)),
        lambda folder: load_fake(_X, _Y, curve="900000+1"),
        computes=False,
    ),
)
if importable("tensorflow"):  # as in the environment of `make engines`
    CASES += (
        Case(
            "tensorflow",
            lambda folder: load_file(saved("arithmetic"), backend="tensorflow"),
            lambda folder, datatype: load_file(saved(datatype), backend="tensorflow"),
            lambda folder: load_file(saved("endless"), backend="tensorflow"),
            refuses=("BF16",),
        ),
    )
