"""Lists what there is to run models with: one description of each backend, which everything else asks.

A description is data, so that settings can be checked where no runtime is installed; `home` names the module
that does the work. A package adds a backend with an entry point in the group carpool.backends that leads to a
BackendKind of the entry point's name: docs/python.md.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Literal

from carpool.errors import ConfigError, Unsupported

GROUP = "carpool.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """Represents one backend.

    `home` is a module with `load(config, version, placement)`, which makes an instance, and
    `read_signature(config, version)`. It may have `describe`, `devices` and `device_names` as well, for what
    the runtime settles itself (carpool.backends.backend). Empty: the name is known, but nothing runs it.
    """

    name: str
    home: str
    suffixes: tuple[str, ...] = ()  # of the files that it can run
    at_home: tuple[str, ...] = ()  # those of them that are its own when the settings name no backend
    inside: str = ""  # the file to open where a model is a folder; else it has the folder's own name
    gives_way: bool = False  # not installed: files of other backends are taken, as if these were not there
    needs_file: bool = True
    platforms: tuple[str, ...] = ()  # Triton's names for it; clients are told the first
    package: str = ""  # that has to be installed; profiles belong to one version of it
    imports: str = ""  # what is imported of it: looked for, without importing it, before anything else
    extra: str = ""  # of Carpool, with which pip installs it
    process: Literal["engine", "worker", "runner"] = "engine"
    """Where its instances run: in the engine, each in a worker process, or all in the runner of the GPUs."""
    on_gpus: bool = False  # runs on nothing else
    threaded: bool = False  # runs on as many threads as it is given
    in_pieces: bool = True  # False: is called with every batch as it was formed, also where less is faster
    reshapes: bool = True  # False: it looks at no shapes, or takes no `reshape`
    gives_defaults: bool = False  # an optional input needs a default in the model file
    values_on_device: bool = False
    """It can make values of a picture's bytes, and boxes of outputs, on its device: `home` has
    `fill_pictures`, `decodes_pictures` and `kept_boxes` (backends/torch/pytorch.py)."""
    pictures_on_device: bool = False  # can take encoded pictures
    parameters: tuple[str, ...] | None = None  # of the settings that have an effect; None: any may
    table: bool = False  # its table in model.toml says that the model is for it
    extension: str = ""  # the name of the extension that it asks for, if any
    homes: Mapping[str, str] = field(default_factory=dict)
    """By an extension's name, the module that runs models which ask for it, where that is not `home`."""

    def missing(self) -> str:
        """Returns a sentence where its package is not installed, else nothing. This is cheap: nothing is
        imported."""
        if not self.imports or installed(self.imports):
            return ""
        told = f"'carpool[{self.extra}]'" if self.extra else self.package
        return f'the backend "{self.name}" needs {self.package}, which is not installed: pip install {told}'

    def module(self, extension: str = "") -> Any:
        """Returns the code, imported now: of models that ask for this extension, if they have a module of
        their own."""
        if not self.home:
            served = ", ".join(sorted(kind.name for kind in kinds().values() if kind.home))
            raise Unsupported(f'there is no backend "{self.name}" yet; there are {served}')
        return importlib.import_module(self.homes.get(extension, self.home))


@cache
def installed(module: str) -> bool:
    """Remembered: every folder of a repository asks, and every entry of sys.path is looked at."""
    return importlib.util.find_spec(module) is not None


_BUILT_IN = (
    BackendKind(
        name="onnxruntime",
        home="carpool.backends.onnxruntime",
        suffixes=(".onnx",),
        at_home=(".onnx",),
        platforms=("onnxruntime_onnx",),
        package="onnxruntime",
        imports="onnxruntime",
        threaded=True,
        gives_defaults=True,
        parameters=("intra_op_thread_count", "inter_op_thread_count"),
    ),
    BackendKind(
        name="pytorch",
        home="carpool.backends.torch.pytorch",
        suffixes=(".pt", ".pt2", ".torchscript", ".py", ".pth", ".safetensors"),
        at_home=(".pt", ".pt2", ".torchscript"),
        platforms=("pytorch_libtorch", "torch_aoti"),
        package="torch",
        imports="torch",
        extra="torch",
        process="runner",
        threaded=True,
        reshapes=False,
        values_on_device=True,
        pictures_on_device=True,
        parameters=(),
        extension="torch",
        table=True,
    ),
    BackendKind(
        name="onnx_torch",
        home="carpool.backends.torch.pytorch",
        suffixes=(".onnx",),
        package="onnx",
        imports="onnx",
        extra="onnx-torch",
        process="runner",
        threaded=True,
        reshapes=False,
        values_on_device=True,
        pictures_on_device=True,
        parameters=(),
        extension="torch",
    ),
    BackendKind(
        name="openvino",
        home="carpool.backends.openvino",
        suffixes=(".xml", ".onnx", ".tflite"),
        at_home=(".xml",),
        package="openvino",
        imports="openvino",
        extra="openvino",
        threaded=True,
        parameters=("INFERENCE_NUM_THREADS", "INFERENCE_PRECISION_HINT", "TARGET_DEVICE"),
    ),
    BackendKind(
        name="litert",
        home="carpool.backends.hosted",
        suffixes=(".tflite",),
        at_home=(".tflite",),
        package="ai-edge-litert",
        imports="ai_edge_litert",
        extra="litert",
        process="worker",
        threaded=True,
        parameters=("quantized",),
    ),
    BackendKind(
        name="tensorflow",
        home="carpool.backends.hosted",
        suffixes=(".savedmodel",),
        at_home=(".savedmodel",),
        inside="saved_model.pb",
        gives_way=True,
        platforms=("tensorflow_savedmodel",),
        package="tensorflow",
        imports="tensorflow",
        process="worker",
        threaded=True,
        parameters=(),
    ),
    BackendKind(
        name="tensorrt",
        home="carpool.backends.hosted",
        suffixes=(".plan", ".engine"),
        at_home=(".plan", ".engine"),
        gives_way=True,
        platforms=("tensorrt_plan",),
        package="tensorrt",
        imports="tensorrt",
        process="worker",
        on_gpus=True,
        parameters=(),
    ),
    BackendKind(
        name="transformers",
        home="carpool.backends.hosted",
        suffixes=(".safetensors",),
        package="transformers",
        imports="transformers",
        process="worker",
        threaded=True,
        parameters=(),
    ),
    BackendKind(
        name="python",
        home="carpool.backends.python.python_backend",
        suffixes=(".py",),
        at_home=(".py",),
        process="worker",
        in_pieces=False,  # its author counts on the batch
    ),
    BackendKind(
        name="fake",
        home="carpool.backends.fake",
        needs_file=False,
        in_pieces=False,
        reshapes=False,
        pictures_on_device=True,
        homes={"text": "carpool.extensions.text.fake_stepper"},
        table=True,
    ),
)


@cache
def kinds() -> Mapping[str, BackendKind]:
    """Returns all of them by name: those of this package first, then those of others, which can replace
    none."""
    found = {kind.name: kind for kind in _BUILT_IN}
    for point in entry_points(group=GROUP):
        try:
            kind = point.load()
        except Exception as error:  # whatever goes wrong while somebody else's package is imported
            raise ConfigError(
                f"the backend {point.name} ({point.value}) cannot be imported: {error}"
            ) from None
        if not isinstance(kind, BackendKind) or kind.name != point.name or kind.name in found:
            raise ConfigError(
                f"the backend {point.name} ({point.value}) must be a BackendKind of that name, "
                "which no other backend has"
            )
        found[kind.name] = kind
    return found


def kind_of(backend: str | None) -> BackendKind:
    """Returns what is known of a backend; an unknown one runs nothing."""
    return kinds().get(backend or "") or BackendKind(name=backend or "", home="")


def files_of(backend: str | None) -> tuple[str, ...]:
    """Returns the names of files that are looked for: those of one backend, or of every one."""
    asked = [kind for kind in _looked_for() if backend in (None, kind.name)]
    own = tuple(f"model{suffix}" for kind in asked for suffix in kind.at_home)
    return own if own or backend is None else tuple(f"model{s}" for kind in asked for s in kind.suffixes)


def home_of(suffix: str) -> str | None:
    return next((kind.name for kind in _looked_for() if suffix in kind.at_home), None)


def _looked_for() -> list[BackendKind]:
    return [kind for kind in kinds().values() if not (kind.gives_way and kind.missing())]


def backend_of_platform(platform: str) -> str | None:
    return next((kind.name for kind in kinds().values() if platform in kind.platforms), None)
