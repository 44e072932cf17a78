"""Lists what there is to run models with: one description of each backend, which everything else asks.

A description is data, so that settings can be checked where no runtime is installed; `home` names the module
that does the work. A package adds a backend with an entry point in the group carpool.backends that leads to a
BackendKind of the entry point's name: docs/python.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from carpool import extensions
from carpool.errors import ConfigError, Unsupported
from carpool.extension import BackendKind

__all__ = ["BackendKind", "backend_of_platform", "files_of", "home_of", "kind_of", "kinds", "module_of"]

GROUP = "carpool.backends"


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
        asks_models=False,
        parameters=("intra_op_thread_count", "inter_op_thread_count"),
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
        table=True,
    ),
)


@cache
def kinds() -> Mapping[str, BackendKind]:
    """Returns all of them by name, in the order in which they are looked for: those of this package and of
    extensions, then those of others, which can replace none."""
    listed = [*_BUILT_IN]
    for kind in (kind for one in extensions.installed().values() for kind in one.kinds):
        places = [place for place, one in enumerate(listed, 1) if one.name == kind.after]
        listed.insert(places[0] if places else len(listed), kind)
    found = {kind.name: kind for kind in listed}
    for point in entry_points(group=GROUP):
        try:
            kind = point.load()
        except Exception as error:  # whatever goes wrong while another project's package is imported
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


def module_of(kind: BackendKind, extension: str = "") -> Any:
    """Returns the code of a backend, imported now: for models that ask for this extension, its own module
    where it has one."""
    if not kind.home:
        served = ", ".join(sorted(one.name for one in kinds().values() if one.home))
        raise Unsupported(f'there is no backend "{kind.name}" yet; there are {served}')
    own = extensions.installed()[extension] if extension else None
    if own is not None and kind.name in own.homes:
        return importlib.import_module(own.whole(own.homes[kind.name]))
    return importlib.import_module(kind.home)


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
