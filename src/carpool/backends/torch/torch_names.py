"""Which tensor is which: the order of a network's inputs, and the names of what it answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from carpool.errors import ConfigError, ModelError, Unsupported

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
