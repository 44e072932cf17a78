"""A network on a device: its weights in memory once, for all instances there, and compiled once."""

from __future__ import annotations

import inspect
import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch

from carpool.backends.torch.device_sharing import Ledger
from carpool.backends.torch.torch_device import PRECISIONS, TORCH_TYPES, Device, Run, is_out_of_memory
from carpool.backends.torch.torch_files import in_one_line, open_module
from carpool.config.model import ImageSettings, ModelConfig, TensorConfig, values_on_device
from carpool.config.repository import beside
from carpool.errors import ConfigError, ModelError, Unsupported
from carpool.types import DATATYPES, Datatype

# ---- which tensor is which: the order of a network's inputs, and the names of what it answers


_NUMBERED = re.compile(r".*__(\d{1,4})")
INPUT, OUTPUT = "INPUT__{}", "OUTPUT__{}"  # Triton's names for what has none

Named = tuple[str | None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """How a network takes its inputs: some by place, in this order, the others by name."""

    by_place: tuple[str, ...]
    by_name: tuple[str, ...] = ()


def numbers(names: Sequence[str]) -> list[int] | None:
    """Of names like INPUT__0, if all are numbered, each number once and none left out."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    places = [int(match[1]) for match in found if match]
    return places if sorted(places) == list(range(len(names))) else None


def call_for(model: str, names: Sequence[str], module: torch.nn.Module, exported: Any) -> Call:
    """By their numbers, else by the names of the parameters, else in the order in which they are declared."""
    places = numbers(names)
    if places is not None:
        return Call(tuple(name for _, name in sorted(zip(places, names, strict=True))))
    if exported is not None:
        by_place, by_name = exported_inputs(model, exported)
        return Call(tuple(by_place), tuple(by_name))
    known, required = _parameters(module)
    if set(names) <= set(known):
        missing = required - set(names)
        if missing:
            raise ConfigError(f'{model}: the network has the input "{min(missing)}", which is not declared')
        return Call((), tuple(names))
    return Call(tuple(names))


def exported_inputs(model: str, exported: Any) -> tuple[list[str], list[str]]:
    """Those given by place and those given by name; the file has names for all of them."""
    names = [str(name) for name in exported.graph_signature.user_inputs]
    arguments, keywords = exported.call_spec.in_spec.children()
    count = arguments.num_children + keywords.num_children
    if count != len(names):
        raise Unsupported(
            f"{model}: its inputs are lists or dicts of tensors; export it with one tensor each"
        )
    return names[: arguments.num_children], names[arguments.num_children :]


def _parameters(module: torch.nn.Module) -> tuple[list[str], set[str]]:
    """All parameters of the network's forward, and those that must be given."""
    if isinstance(module, torch.jit.ScriptModule):
        forward: Any = module.forward
        arguments = forward.schema.arguments[1:]
        known = [argument.name for argument in arguments]
        return known, {argument.name for argument in arguments if not argument.has_default_value()}
    parameters = inspect.signature(module.forward).parameters.values()
    usual = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in usual], {p.name for p in usual if p.default is p.empty}


# ---- answers --------------------------------------------------------------------------------------------


def flatten(answer: Any) -> list[Named]:
    """Every tensor of an answer, with the key of the dict or the field of the named tuple that holds it."""
    if isinstance(answer, torch.Tensor):
        return [(None, answer)]
    if hasattr(answer, "_fields"):
        answer = answer._asdict()
    found: list[Named] = []
    if isinstance(answer, Mapping):
        for key, value in answer.items():
            found += [(key if isinstance(key, str) else name, tensor) for name, tensor in flatten(value)]
    elif isinstance(answer, tuple | list):
        for value in answer:
            found += flatten(value)
    return found


def names_of(keys: Sequence[str | None]) -> list[str]:
    """The keys, where there are keys and no two alike; else numbers."""
    if None not in keys and len(set(keys)) == len(keys):
        return [str(key) for key in keys]
    return [OUTPUT.format(number) for number in range(len(keys))]


def places_of(model: str, names: Sequence[str], keys: Sequence[str | None]) -> list[int]:
    """Where the outputs of these names are: by key, else by number, else in the order they are declared."""
    known = names_of(keys)
    if set(names) <= set(known):
        return [known.index(name) for name in names]
    matches = [_NUMBERED.fullmatch(name) for name in names]
    places = [int(match[1]) for match in matches if match]
    if len(places) < len(names):
        places = list(range(len(names)))
    if max(places) >= len(keys):
        found, declared = ", ".join(known) or "none", ", ".join(names)
        raise ModelError(f"{model} answers {len(keys)} tensors ({found}), and {declared} are declared")
    return places


# ---- between the tensors that clients see and the network's own
# All of it is one module, so that it is compiled and captured as one.


Convert = Callable[[torch.Tensor], torch.Tensor]


class Feed:
    """Calls a network with the inputs of the settings, in their order, as they are carried."""

    def __init__(
        self, config: ModelConfig, network: torch.nn.Module, call: Call, place: torch.device
    ) -> None:
        self._network = network
        self._call = call
        self._inputs = [tensor.name for tensor in config.inputs]
        self._converts = [_input(config, tensor, place) for tensor in config.inputs]

    def __call__(self, *given: torch.Tensor) -> Any:
        inputs = {
            name: convert(tensor)
            for name, convert, tensor in zip(self._inputs, self._converts, given, strict=True)
        }
        by_name = {name: inputs[name] for name in self._call.by_name}
        return self._network(*(inputs[name] for name in self._call.by_place), **by_name)


class Pipeline(torch.nn.Module):
    """Takes the inputs as they are carried, and answers the outputs of the settings likewise."""

    def __init__(
        self, config: ModelConfig, network: torch.nn.Module, call: Call, place: torch.device
    ) -> None:
        super().__init__()
        self.network = network
        self._feed = Feed(config, network, call, place)
        self._model = config.name
        self._outputs = config.outputs
        self._names = [tensor.name for tensor in config.outputs]
        self._batched = config.max_batch != 0
        self._places: list[int] = []

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = flatten(self._feed(*given))
        if not self._places:  # the first answer tells; compilers come later
            self._places = places_of(self._model, self._names, [key for key, _ in found])
        return tuple(
            self._answered(found[place][1], config)
            for place, config in zip(self._places, self._outputs, strict=True)
        )

    def _answered(self, tensor: torch.Tensor, config: TensorConfig) -> torch.Tensor:
        """Floats in the datatype that is declared; whatever else differs, the engine names."""
        datatype = DATATYPES[config.datatype]
        if tensor.is_floating_point() and TORCH_TYPES[datatype].is_floating_point:
            tensor = tensor.to(TORCH_TYPES[datatype])
        if config.reshape is not None:
            tensor = tensor.reshape((tensor.shape[0], *config.dims) if self._batched else config.dims)
        tensor = tensor.contiguous()
        return tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor


def _input(config: ModelConfig, tensor: TensorConfig, place: torch.device) -> Convert:
    precision = PRECISIONS[config.pytorch.precision]
    values = _values(config.image, tensor, place) if config.image and values_on_device(config) else None
    bits = DATATYPES[tensor.datatype] is Datatype.BF16
    batched = config.max_batch != 0

    def convert(x: torch.Tensor) -> torch.Tensor:
        if bits:
            x = x.view(torch.bfloat16)
        if tensor.reshape is not None:
            x = x.reshape((x.shape[0], *tensor.reshape) if batched else tensor.reshape)
        if values is not None:
            x = values(x)
        if not x.is_floating_point():
            return x
        x = x.to(precision)
        if config.pytorch.channels_last and x.dim() == 4:
            x = x.contiguous(memory_format=torch.channels_last)
        return x

    return convert


def _values(image: ImageSettings, tensor: TensorConfig, place: torch.device) -> Convert:
    """(pixel × scale − mean) ÷ std, as one multiplication and one addition in single precision."""
    std = torch.tensor(image.std, dtype=torch.float64)
    mean = torch.tensor(image.mean, dtype=torch.float64)
    gain = torch.full_like(std, 1.0 if image.scale is None else image.scale) / std
    gain, bias = (part.float().reshape(-1, 1, 1).to(place) for part in (gain, -mean / std))
    side_by_side = _layout(image, tensor) == "nhwc"
    to_planes = side_by_side and image.layout != "nhwc"  # networks take planes, unless [image] says otherwise

    def values(x: torch.Tensor) -> torch.Tensor:
        planes = x.movedim(-1, -3) if side_by_side else x
        made = torch.addcmul(bias, planes.float(), gain)
        return made.movedim(-3, -1) if side_by_side and not to_planes else made

    return values


def _layout(image: ImageSettings, tensor: TensorConfig) -> str:
    """Of the pixels as they come: told, or planes if the first of three dimensions can be channels."""
    told = image.layout or tensor.layout
    return told or ("nchw" if tensor.dims[-3] in (1, 3) else "nhwc")


def compile_pipeline(pipeline: Pipeline, mode: str) -> Callable[..., Any]:
    """Compiled anew for each batch size, when it first comes; CUDA graphs are ours, not the compiler's."""
    torch._dynamo.config.cache_size_limit = max(128, torch._dynamo.config.cache_size_limit)
    named = None if mode == "default" else f"{mode}-no-cudagraphs"
    return torch.compile(pipeline, dynamic=False, mode=named)


# ---- the network on a device


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
