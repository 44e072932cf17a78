"""Opens model files of PyTorch: TorchScript, exported programs, and weights with the Python file that uses
them.

A pickle can run anything when it is opened, and weights are often passed around. So only files that need no
pickle of Python objects are opened; the Python file of a model is code by intent, and runs in this process.
"""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import warnings
import weakref
import zipfile
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from carpool.backends.python.python_worker import explain
from carpool.config.model import ModelConfig
from carpool.config.toml import BUILD
from carpool.errors import CarpoolError, ConfigError, ModelError, Unsupported
from carpool.extensions.torch.torch_onnx import ONNX, open_onnx

_MOST_ENTRIES = 1 << 16
_MOST_JSON = 256 << 20
_loads = count()  # two loads of a file are two modules
_WHOLE_LINE = 500  # characters of a library's message that an error repeats


def open_module(
    config: ModelConfig, file: Path, place: torch.device | None = None
) -> tuple[torch.nn.Module, Any]:
    """Returns the network, ready to answer, and the exported program where it came from one.

    Weights are on the CPU yet; `place` is where they will go, which is written into exported programs.
    """
    try:
        module, exported = _open(config, file, place or torch.device("cpu"))
    except CarpoolError:
        raise
    except Exception as error:  # what is wrong with a file can be anything
        raise ModelError(f"{config.name}: {file} cannot be loaded: {in_one_line(error)}") from None
    for parameter in module.parameters():
        parameter.requires_grad = False
    return module, exported


def _open(config: ModelConfig, file: Path, place: torch.device) -> tuple[torch.nn.Module, Any]:
    module = config.pytorch.module
    if module is None and file.suffix == ".py":
        module = f"{file.name}:{BUILD}"
    if module is not None:
        return _built(config, file, module).eval(), None
    if file.suffix == ONNX:
        return open_onnx(config, file).eval(), None
    kind = _kind(file)
    if kind == "script":
        with warnings.catch_warnings():  # which form a model comes in is not for us to judge
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(str(file), map_location="cpu").eval(), None  # type: ignore[no-untyped-call]
    if kind == "exported":
        _check_no_pickles(config, file)
        return _exported(file, place)
    raise ConfigError(
        f"{config.name}: {file.name} holds weights but no network: put a model.py with a function build(), "
        'which returns the network, beside it and set module = "model.py:build" in [pytorch]; or save the '
        "network itself with torch.jit.save or torch.export.save"
    )


def _exported(file: Path, place: torch.device) -> tuple[torch.nn.Module, Any]:
    with warnings.catch_warnings():  # some releases map the weights read-only, and warn of that, once
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        program = moved = torch.export.load(file)
    if place.type != "cpu":  # devices are written into exported programs, wherever they make tensors
        from torch.export.passes import move_to_device_pass  # since 2.6

        moved = move_to_device_pass(program, place)
    try:  # without the checks for what it was exported with: inputs may be of another precision
        return moved.module(check_guards=False), program
    except TypeError:  # older ones have none
        return moved.module(), program


def _kind(file: Path) -> str:
    """Returns the kind by what is in the archive; its name says little."""
    if not zipfile.is_zipfile(file):
        return "weights"
    with zipfile.ZipFile(file) as archive:
        names = _names(archive)
    inner = {name.partition("/")[2] for name in names} | set(names)
    if "constants.pkl" in inner:
        return "script"
    if "archive_format" in inner or "serialized_exported_program.json" in inner:
        return "exported"
    return "weights"


def _names(archive: zipfile.ZipFile) -> list[str]:
    """Returns the names of an archive, of which two that are alike are a trick: who checks the one may open
    the other."""
    names = archive.namelist()
    if len(names) > _MOST_ENTRIES or len(set(names)) < len(names):
        raise ModelError(f"{archive.filename}: its list of entries cannot be right")
    return names


def _check_no_pickles(config: ModelConfig, file: Path) -> None:
    """Whatever PyTorch would unpickle must be tensors and plain values."""
    with zipfile.ZipFile(file) as archive:
        for name in _suspects(archive):
            data = archive.read(name)
            try:
                if data:
                    torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            except Exception:  # any failure means that it is not only that
                raise ModelError(
                    f"{config.name}: {file.name} holds Python objects as a pickle ({name}), which could run "
                    "anything; export the program without them"
                ) from None


def _suspects(archive: zipfile.ZipFile) -> Iterable[str]:
    names = _names(archive)
    flagged: set[str] = set()
    for name in names:
        if "/aotinductor/" in name or name.endswith(".so"):
            raise ModelError(f"{archive.filename} holds compiled code ({name}), which could do anything")
        if name.endswith("_config.json"):
            if archive.getinfo(name).file_size > _MOST_JSON:
                raise ModelError(f"{archive.filename}: {name} is longer than {_MOST_JSON} bytes")
            flagged |= _flagged(json.loads(archive.read(name)))
    for name in names:
        last = name.rpartition("/")[2]
        if last.endswith((".pt", ".pkl")) or last in flagged or last.startswith(("custom_obj", "opaque")):
            yield name


def _flagged(document: Any) -> set[str]:
    """The payloads that a table of weights or constants says are pickled."""
    entries = document.get("config") if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        return set()
    return {
        str(entry.get("path_name")).rpartition("/")[2]
        for entry in entries.values()
        if isinstance(entry, dict) and entry.get("use_pickle") is not False
    }


def _built(config: ModelConfig, file: Path, module: str) -> torch.nn.Module:
    name, _, function = module.partition(":")
    code = file.parent / name
    if not code.is_file():
        raise ConfigError(f"{config.name}: pytorch.module names {name}, which is not in {file.parent}")
    spec = importlib.util.spec_from_file_location(f"carpool_network_{config.name}_{next(_loads)}", code)
    assert spec is not None  # for its name ends with .py
    assert spec.loader is not None
    built = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = built  # torch.compile looks there for what the network's code refers to
    forget = partial(sys.modules.pop, spec.name, None)
    try:
        spec.loader.exec_module(built)
        build = getattr(built, function, None)
        if not callable(build):
            raise ModelError(f"it has no function {function}()")
        network = build()
        if not isinstance(network, torch.nn.Module):
            raise ModelError(f"{function}() returned a {type(network).__name__} instead of a torch.nn.Module")
        weakref.finalize(network, forget).atexit = False
    except Exception as error:  # a user's code may raise anything
        forget()
        raise ModelError(f"{config.name}: {code}: {explain(error, code)}") from None
    if code != file:
        try:
            network.load_state_dict(dict(_weights(config, file)))
        except RuntimeError as error:
            raise ModelError(
                f"{config.name}: the weights of {file.name} do not fit the network: {in_one_line(error)}"
            ) from None
    return network


def _weights(config: ModelConfig, file: Path) -> Mapping[str, torch.Tensor]:
    if file.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError as error:
            raise Unsupported(
                f"{config.name}: needs safetensors (pip install safetensors): {error}"
            ) from None
        return dict(load_file(str(file)))
    try:
        held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # its own error is long, and speaks of switches that are not ours
        raise ModelError(
            f"{config.name}: {file.name} is not a file of tensors only, and a pickle of other objects is not "
            f"opened, since it could run anything: save network.state_dict() ({type(error).__name__})"
        ) from None
    if isinstance(held, Mapping) and isinstance(held.get("state_dict"), Mapping):
        held = held["state_dict"]
    if not isinstance(held, Mapping) or not all(isinstance(value, torch.Tensor) for value in held.values()):
        raise ModelError(f"{config.name}: {file.name} holds no state dict: save network.state_dict()")
    return held


def in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{text[:_WHOLE_LINE]}…" if len(text) > _WHOLE_LINE else text or type(error).__name__
