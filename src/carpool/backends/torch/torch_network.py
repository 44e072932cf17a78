"""A network on a device: its weights in memory once, for all instances there, and compiled once."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from carpool.backends.device_memory import Ledger
from carpool.backends.torch_datatypes import PRECISIONS
from carpool.backends.torch_device import Device, Run, is_out_of_memory
from carpool.backends.torch_files import in_one_line, open_module
from carpool.backends.torch_names import call_for
from carpool.backends.torch_pipeline import Pipeline, compile_pipeline
from carpool.config.fingerprint import beside
from carpool.config.model import ModelConfig
from carpool.errors import ModelError

_COMPILE_S = 300.0  # for all batch sizes of a model: those that are not done by then run as they are

_log = logging.getLogger(__name__)
_shared: WeakValueDictionary[tuple[object, ...], Network] = WeakValueDictionary()
_sharing = threading.Lock()

Tell = Callable[[str], None]


class Network:
    def __init__(self, config: ModelConfig, file: Path, device: Device, ledger: Ledger | None) -> None:
        module, exported = open_module(config, file, device.place)
        precision = PRECISIONS[config.pytorch.precision]
        self.model = config.name
        self.weights = sum(
            tensor.numel() * (precision.itemsize if tensor.is_floating_point() else tensor.itemsize)
            for tensor in (*module.parameters(), *module.buffers())
        )
        if ledger is not None:
            ledger.check(config.name, self.weights, "its weights take")
            ledger.hold(id(self), config.name, self.weights)
            weakref.finalize(self, ledger.drop, id(self)).atexit = False
        names = [tensor.name for tensor in config.inputs]
        call = call_for(config.name, names, module, exported)
        module = module.to(device=device.place, dtype=precision)
        if config.pytorch.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.pipeline = Pipeline(config, module, call, device.place)
        device.wait()  # other instances use it from streams of their own
        self._names = [tensor.name for tensor in config.outputs]
        self._tf32 = _tf32(config) if device.place.type == "cuda" else None
        self._compiled = _compile(config, self.pipeline, module)
        self._sizes: set[int] = set()  # those that were compiled, or are not to be
        self._end = 0.0

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None and bool(self._sizes)

    def runs(self, rows: Sequence[torch.Tensor], size: int, *, plain: bool = False) -> Run:
        """The whole way from these rows to the outputs, for a program to repeat; `plain`: not compiled."""
        compiled = self._compiled if size in self._sizes and not plain else None
        call: Callable[..., Any] = self.pipeline if compiled is None else compiled

        def run() -> dict[str, torch.Tensor]:
            if self._tf32 is not None:  # switches of the whole process: each model sets its own
                torch.backends.cuda.matmul.allow_tf32 = self._tf32
                torch.backends.cudnn.allow_tf32 = self._tf32
            with torch.inference_mode():
                return dict(zip(self._names, call(*rows), strict=True))

        return run

    def compile_for(self, rows: Sequence[torch.Tensor], size: int, tell: Tell) -> None:
        """If it is to be, and there is time; what cannot be compiled runs as it is."""
        if self._compiled is None or size in self._sizes:
            return
        self._end = self._end or time.monotonic() + _COMPILE_S
        if time.monotonic() > self._end:
            _log.warning("%s: batches of %d are not compiled: it takes too long", self.model, size)
            return
        self.runs(rows, size)()  # as it is: what fails here is the network's fault, not the compiler's
        tell(f"compiling for batches of {size}")
        self._sizes.add(size)
        try:
            self.runs(rows, size)()
        except Exception as error:  # compilers fail in many ways
            if is_out_of_memory(error):
                raise
            _log.warning("%s: runs without torch.compile: %s", self.model, in_one_line(error))
            self._compiled = None


def network_for(config: ModelConfig, file: Path, device: Device, ledger: Ledger | None) -> Network:
    """The one that another instance on the same device has, or a new one."""
    used = config.pytorch
    key = (
        file,
        beside(file),
        device.place,
        config.name,
        config.inputs,
        config.outputs,
        config.image,
        config.max_batch,
        (used.precision, used.channels_last, used.compile, used.module, used.weights),
    )
    with _sharing:
        network = _shared.get(key)
        if network is None:
            try:
                network = _shared[key] = Network(config, file, device, ledger)
            except (RuntimeError, NotImplementedError) as error:
                if is_out_of_memory(error):
                    raise
                raise ModelError(
                    f"{config.name}: {file.name} cannot be moved to {device.name} in {used.precision}: "
                    f"{in_one_line(error)}"
                ) from None
    return network


def _tf32(config: ModelConfig) -> bool | None:
    precision = config.pytorch.precision
    return precision == "tf32" if precision in ("fp32", "tf32") else None


def _compile(config: ModelConfig, pipeline: Pipeline, module: torch.nn.Module) -> Callable[..., Any] | None:
    if config.pytorch.compile == "off":
        return None
    if isinstance(module, torch.jit.ScriptModule):
        _log.warning("%s: runs without torch.compile: TorchScript cannot be compiled", config.name)
        return None
    return compile_pipeline(pipeline, config.pytorch.compile)
