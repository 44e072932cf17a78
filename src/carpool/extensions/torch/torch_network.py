"""Describes a network and its tensors: which is which, how they are converted on the way, and their
signature."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from carpool.backends.onnxruntime import read_signature
from carpool.config.model import (
    DYNAMIC,
    ImageSettings,
    ModelConfig,
    ModelSignature,
    TensorConfig,
    TensorSignature,
    values_on_device,
    values_told,
)
from carpool.config.repository import ModelVersion
from carpool.errors import ConfigError, ModelError, Unsupported
from carpool.extensions.torch.torch_device import DATATYPE_OF, FLOATS, PRECISIONS, TORCH_TYPES, carried
from carpool.extensions.torch.torch_files import in_one_line, open_module
from carpool.extensions.torch.torch_onnx import ONNX, OnnxNetwork
from carpool.types import DATATYPES, Datatype

# ---- which tensor is which: the order of a network's inputs, and the names of what it answers

_NUMBERED = re.compile(r".*__(\d{1,4})")
INPUT, OUTPUT = "INPUT__{}", "OUTPUT__{}"  # Triton's names for what has none

Named = tuple[str | None, torch.Tensor]


@dataclass(frozen=True, slots=True)
class CallingConvention:
    """Describes how a network takes its inputs: some by place, in this order, the others by name."""

    by_place: tuple[str, ...]
    by_name: tuple[str, ...] = ()


def numbers(names: Sequence[str]) -> list[int] | None:
    """Returns the numbers of names like INPUT__0, if all are numbered, each number once and none left out."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    places = [int(match[1]) for match in found if match]
    return places if sorted(places) == list(range(len(names))) else None


def call_for(model: str, names: Sequence[str], module: torch.nn.Module, exported: Any) -> CallingConvention:
    """Finds the inputs by their numbers, else by the names of the parameters, else in the order in which they
    are declared."""
    places = numbers(names)
    if places is not None:
        return CallingConvention(tuple(name for _, name in sorted(zip(places, names, strict=True))))
    if isinstance(module, OnnxNetwork):
        return CallingConvention(module.inputs)
    if exported is not None:
        by_place, by_name = exported_inputs(model, exported)
        return CallingConvention(tuple(by_place), tuple(by_name))
    known, required = _parameters(module)
    if set(names) <= set(known):
        missing = required - set(names)
        if missing:
            raise ConfigError(f'{model}: the network has the input "{min(missing)}", which is not declared')
        return CallingConvention((), tuple(names))
    return CallingConvention(tuple(names))


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
    if isinstance(module, torch.jit.ScriptModule):
        forward: Any = module.forward
        arguments = forward.schema.arguments[1:]
        known = [argument.name for argument in arguments]
        return known, {argument.name for argument in arguments if not argument.has_default_value()}
    parameters = inspect.signature(module.forward).parameters.values()
    usual = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return [p.name for p in usual], {p.name for p in usual if p.default is p.empty}


def flatten(answer: Any) -> list[Named]:
    """Returns every tensor of an answer, with the key of the dict or the field of the named tuple that holds
    it."""
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
    """Returns the keys, where there are keys and no two alike; else numbers."""
    if None not in keys and len(set(keys)) == len(keys):
        return [str(key) for key in keys]
    return [OUTPUT.format(number) for number in range(len(keys))]


def places_of(model: str, names: Sequence[str], keys: Sequence[str | None]) -> list[int]:
    """Returns where the outputs of these names are: by key, else by number, else in the order they are
    declared."""
    known = names_of(keys)
    if set(names) <= set(known):
        return [known.index(name) for name in names]
    matches = [_NUMBERED.fullmatch(name) for name in names]
    places = [int(match[1]) if match else -1 for match in matches]
    if -1 in places:
        places = list(range(len(names)))
    if max(places) >= len(keys):
        found, declared = ", ".join(known) or "none", ", ".join(names)
        raise ModelError(f"{model} answers {len(keys)} tensors ({found}), and {declared} are declared")
    return places


# ---- between the tensors that clients see and the network's own
# All of it is one module, so that it is compiled and captured as one.

Convert = Callable[[torch.Tensor], torch.Tensor]


def feeding(
    config: ModelConfig, network: Callable[..., Any], call: CallingConvention, place: torch.device
) -> Callable[..., Any]:
    """Calls a network with the inputs of the settings, in their order, as they are carried."""
    converts = [(tensor.name, _input(config, tensor, place)) for tensor in config.inputs]

    def feed(*given: torch.Tensor) -> Any:
        inputs = {name: convert(x) for (name, convert), x in zip(converts, given, strict=True)}
        by_name = {name: inputs[name] for name in call.by_name}
        return network(*(inputs[name] for name in call.by_place), **by_name)

    return feed


class AdaptedNetwork(torch.nn.Module):
    """Takes the inputs as they are carried, and answers the outputs of the settings likewise."""

    def __init__(
        self, config: ModelConfig, network: torch.nn.Module, call: CallingConvention, place: torch.device
    ) -> None:
        super().__init__()
        self.network = network
        self._feed = feeding(config, self._run, call, place)
        self._model = config.name
        self._outputs = config.outputs
        self._names = [tensor.name for tensor in config.outputs]
        self._places: list[int] = []

    def _run(self, *given: torch.Tensor, **named: torch.Tensor) -> Any:
        return self.network(*given, **named)  # which may be exchanged for its fused form

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = flatten(self._feed(*given))
        if not self._places:  # the first answer shows them; compilers come later
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
        tensor = tensor.contiguous()
        return tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor


def _input(config: ModelConfig, tensor: TensorConfig, place: torch.device) -> Convert:
    precision = PRECISIONS[config.pytorch.precision]
    values = _values(config.image, tensor, place) if config.image and values_on_device(config) else None
    bits = DATATYPES[tensor.datatype] is Datatype.BF16

    def convert(x: torch.Tensor) -> torch.Tensor:
        if bits:
            x = x.view(torch.bfloat16)
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
    """Computes (pixel × scale − mean) ÷ std, as one multiplication and one addition in single precision."""
    std = torch.tensor(image.std, dtype=torch.float64)
    mean = torch.tensor(image.mean, dtype=torch.float64)
    gain = torch.full_like(std, 1.0 if image.scale is None else image.scale) / std
    gain, bias = (part.float().reshape(-1, 1, 1).to(place) for part in (gain, -mean / std))
    told = image.layout or tensor.layout  # else planes, if the first of three dimensions can be channels
    side_by_side = told == "nhwc" if told else tensor.dims[-3] not in (1, 3)
    to_planes = side_by_side and image.layout != "nhwc"  # networks take planes, unless [image] says otherwise

    def values(x: torch.Tensor) -> torch.Tensor:
        planes = x.movedim(-1, -3) if side_by_side else x
        made = torch.addcmul(bias, planes.float(), gain)
        return made.movedim(-3, -1) if side_by_side and not to_planes else made

    return values


# ---- the signature that clients get: from an exported file, or by running the network once

_TRIED = 2  # images of the trial, so that the batch is distinguished from other dimensions
_CHANNELS = 3


def signature_of(config: ModelConfig, file: Path) -> ModelSignature:
    """Empty where the settings declare everything and the file says nothing more."""
    if file.suffix == ONNX and config.pytorch.module is None:
        found = read_signature(config, ModelVersion(1, file))
        return ModelSignature(
            _as_declared(config, config.inputs, found.inputs),
            _as_declared(config, config.outputs, found.outputs),
        )
    nothing_to_try = config.outputs if config.inputs else assumed_input(config) is None
    if nothing_to_try and not is_exported(config, file):
        return ModelSignature()  # where inputs are missing, it is then said that they must be declared
    module, exported = open_module(config, file)
    if exported is not None:
        return _exported(config, exported)
    return _tried(config, module)


def is_exported(config: ModelConfig, file: Path) -> bool:
    return file.suffix in (".pt2", ONNX) and config.pytorch.module is None


def assumed(config: ModelConfig, file: Path) -> ModelConfig:
    """Completes the settings: networks take floats, and pixels without declared values run from 0 to 1."""
    image = config.image
    if config.inputs or image is None or is_exported(config, file) or assumed_input(config) is None:
        return config
    return config if values_told(image) else replace(config, image=replace(image, scale=1 / 255))


def assumed_input(config: ModelConfig) -> TensorConfig | None:
    """Settings for pictures of a known size are enough: one input of bytes."""
    image = config.image
    if image is None or image.size is None:
        return None
    dims = (*image.size, _CHANNELS) if image.layout == "nhwc" else (_CHANNELS, *image.size)
    return TensorConfig(INPUT.format(0), Datatype.UINT8.value, dims)


def _exported(config: ModelConfig, exported: Any) -> ModelSignature:
    by_place, by_name = exported_inputs(config.name, exported)
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    inputs = [_found(config, name, nodes[name].meta["val"]) for name in (*by_place, *by_name)]
    answered = next(node for node in exported.graph.nodes if node.op == "output").args[0]
    count = len(exported.graph_signature.user_outputs)
    values = [node.meta["val"] for node in list(answered)[-count:] if isinstance(node, torch.fx.Node)]
    # The keys of a dict; nodes of the graph have names too, but those mean nothing to clients.
    spec = exported.call_spec.out_spec
    keys = spec.context if spec.type is dict else ()
    if len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
        keys = [OUTPUT.format(number) for number in range(len(values))]
    outputs = [_found(config, name, value) for name, value in zip(keys, values, strict=True)]
    return ModelSignature(
        _as_declared(config, config.inputs, inputs), _as_declared(config, config.outputs, outputs)
    )


def _found(config: ModelConfig, name: str, value: Any) -> TensorSignature:
    if not isinstance(value, torch.Tensor) or value.dtype not in DATATYPE_OF:
        raise Unsupported(f'{config.name}: "{name}" is not a tensor of the v2 protocol')
    datatype = DATATYPE_OF[value.dtype]
    if datatype in FLOATS:  # whichever the network computes with, unless the settings say otherwise
        datatype = Datatype.FP32
    shape = tuple(side if isinstance(side, int) else DYNAMIC for side in value.shape)
    symbols = tuple("" if isinstance(side, int) else str(side) for side in value.shape)
    return TensorSignature(name, datatype.value, shape, symbols=symbols)


def _as_declared(
    config: ModelConfig, declared: Sequence[TensorConfig], found: Sequence[TensorSignature]
) -> tuple[TensorSignature, ...]:
    """Returns the tensors with the names, floats and bytes of the settings, which are converted on the
    way."""
    places = numbers([tensor.name for tensor in declared])
    if places is not None and len(places) == len(found) and declared:
        by_place = sorted(zip(places, declared, strict=True), key=lambda pair: pair[0])
        found = [replace(tensor, name=told.name) for tensor, (_, told) in zip(found, by_place, strict=True)]
    by_name = {tensor.name: tensor for tensor in declared}
    return tuple(_converted(config, tensor, by_name) for tensor in found)


def _converted(
    config: ModelConfig, tensor: TensorSignature, declared: Mapping[str, TensorConfig]
) -> TensorSignature:
    told = declared.get(tensor.name)
    if told is None or tensor.datatype != Datatype.FP32.value:
        return tensor
    bytes_in = tensor.name in {t.name for t in config.inputs} and values_on_device(config)
    if not bytes_in and DATATYPES[told.datatype] not in FLOATS:
        return tensor
    shape, image = tensor.shape, config.image
    if bytes_in and image is not None and image.layout is None and len(shape) >= 3:
        turned = (*shape[-2:], shape[-3])
        if told.dims[-3:] == turned:  # pixels side by side for planes: they are turned on the device
            shape = (*shape[:-3], *turned)
    return replace(tensor, datatype=told.datatype, shape=shape)


def _tried(config: ModelConfig, module: torch.nn.Module) -> ModelSignature:
    assumed = assumed_input(config)
    inputs = config.inputs or ((assumed,) if assumed else ())
    batched = config.max_batch != 0
    found = _run_once(config, module, inputs, batched)
    names = names_of([key for key, _ in found])
    outputs = tuple(_found(config, name, tensor) for name, (_, tensor) in zip(names, found, strict=True))
    if batched:
        outputs = tuple(
            replace(tensor, shape=(DYNAMIC, *tensor.shape[1:])) if tensor.shape[:1] == (_TRIED,) else tensor
            for tensor in outputs
        )
    batch = (DYNAMIC,) if batched else ()
    given = (TensorSignature(tensor.name, tensor.datatype, (*batch, *tensor.dims)) for tensor in inputs)
    told = () if config.inputs else tuple(given)
    return ModelSignature(told, () if config.outputs else outputs)


def _run_once(
    config: ModelConfig, module: torch.nn.Module, inputs: Sequence[TensorConfig], batched: bool
) -> Sequence[Named]:
    """Runs the network on zeros, on the CPU, in full precision: only names and shapes matter."""
    plain = replace(config.pytorch, precision="fp32", channels_last=False)
    trial = replace(config, inputs=tuple(inputs), pytorch=plain)
    given = []
    for tensor in inputs:
        datatype = DATATYPES[tensor.datatype]
        if DYNAMIC in tensor.dims or datatype not in TORCH_TYPES:
            return []  # it is then said that the outputs must be declared
        shape = (_TRIED, *tensor.dims) if batched else tensor.dims
        given.append(torch.zeros(shape, dtype=carried(datatype)))
    call = call_for(config.name, [tensor.name for tensor in inputs], module, None)
    try:
        with torch.inference_mode():
            return flatten(feeding(trial, module.float(), call, torch.device("cpu"))(*given))
    except Exception as error:  # a network may raise anything
        raise ModelError(f"{config.name}: it cannot be run on zeros: {in_one_line(error)}") from None
