"""Compares an ensemble with its models: whether they fit together, and what a request needs of them.

Pure: tensors are arrays, models are signatures. What runs them is ensemble_route.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from carpool.config.model import ModelConfig
from carpool.config.rules import shown
from carpool.engine.routes.stepped_route import GraphStep
from carpool.errors import ConfigError, ModelError
from carpool.extensions.ensembles.settings import EnsembleSettings, ensemble_settings
from carpool.types import DATATYPES, Array, Signature, TensorSpec

_AT = "ensemble_scheduling.step"


class EnsembleGraph:
    """Holds the steps in an order in which each comes after those that it reads from."""

    def __init__(self, config: ModelConfig) -> None:
        settings = ensemble_settings(config)
        assert settings is not None
        self.name = config.name
        self.batched = bool(config.max_batch)
        self.inputs = tuple(tensor.name for tensor in config.inputs)
        self.outputs = tuple(tensor.name for tensor in config.outputs)
        self.steps = _in_order(settings)
        self._writer = {tensor: step.number for step in self.steps for _, tensor in step.outputs}
        self._by_number = {step.number: step for step in self.steps}

    def needed(self, wanted: Sequence[str]) -> Mapping[int, tuple[str, ...]]:
        """Returns the steps without which these outputs would not be there, by number and in order, each with
        those of its outputs that are read: its model need not make the others. None named: all outputs."""
        wanted = wanted or self.outputs
        waiting, found = [self._writer[name] for name in wanted], set[int]()
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += self._by_number[number].after
        steps = [step for step in self.steps if step.number in found]
        read = {tensor for step in steps for _, tensor in step.inputs}.union(wanted)
        return {step.number: tuple(name for name, tensor in step.outputs if tensor in read) for step in steps}


def _in_order(settings: EnsembleSettings) -> tuple[GraphStep, ...]:
    writer = {tensor: n for n, step in enumerate(settings.steps) for _, tensor in step.outputs}
    waiting = [
        GraphStep(
            number,
            step.model,
            step.version,
            step.inputs,
            step.outputs,
            tuple(sorted({writer[tensor] for _, tensor in step.inputs if tensor in writer})),
        )
        for number, step in enumerate(settings.steps)
    ]
    ordered: list[GraphStep] = []
    while waiting:
        done = {step.number for step in ordered}
        ready = [step for step in waiting if done.issuperset(step.after)]
        assert ready, "the settings were checked"
        ordered += ready
        waiting = [step for step in waiting if step not in ready]
    return tuple(ordered)


# ---- whether the models fit together -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Told:
    """Describes a tensor as the ensemble's settings or one of its models declare it."""

    whose: str
    spec: TensorSpec
    batched: bool

    @property
    def full(self) -> tuple[int, ...]:
        return (-1, *self.spec.shape) if self.batched else self.spec.shape


def check_models(config: ModelConfig, signatures: Sequence[Signature]) -> None:
    """Raises what is wrong. `signatures` are those of the steps' models, in the order of the settings."""
    settings = ensemble_settings(config)
    assert settings is not None
    batched = bool(config.max_batch)
    told: dict[str, _Told] = {}
    for own in (*config.inputs, *config.outputs):
        spec = TensorSpec(own.name, DATATYPES[own.datatype], own.dims, own.optional)
        told[own.name] = _Told(f"the ensemble's own {own.name}", spec, batched)
    for number, (step, signature) in enumerate(zip(settings.steps, signatures, strict=True)):
        at = f"{config.name}: {_AT}[{number}]"
        if signature.max_batch and (config.max_batch or 0) > signature.max_batch:
            raise ConfigError(
                f"{at}.model_name: max_batch_size {config.max_batch} of the ensemble is more than the "
                f"{signature.max_batch} that {step.model} takes",
                field="max_batch_size",
            )
        _check_names(at, step.model, dict(step.inputs), dict(step.outputs), signature)
        for side, pairs, specs in (
            ("input_map", step.inputs, signature.input_named),
            ("output_map", step.outputs, signature.output_named),
        ):
            for name, tensor in pairs:
                one = _Told(f"{step.model}.{name}", specs[name], signature.max_batch > 0)
                _check_alike(f"{at}.{side}: tensor {shown(tensor)}", told.setdefault(tensor, one), one)


def _check_names(
    at: str, model: str, inputs: Mapping[str, str], outputs: Mapping[str, str], signature: Signature
) -> None:
    for name in inputs:
        if name not in signature.input_named:
            raise ConfigError(f"{at}.input_map: {model} has no input {shown(name)}", field="input_map")
    for name, spec in signature.input_named.items():
        if name not in inputs and not spec.optional:
            said = f"{at}.input_map: nothing is mapped to the input {shown(name)} of {model}"
            raise ConfigError(said, field="input_map")
    for name in outputs:
        if name not in signature.output_named:
            raise ConfigError(f"{at}.output_map: {model} has no output {shown(name)}", field="output_map")


def _check_alike(at: str, one: _Told, other: _Told) -> None:
    """Shapes must agree as they are, or with their batch dimensions: a tensor may go from a model that takes
    batches to one that takes none. What is open is checked when a request comes."""
    mine, theirs = one.spec.datatype.value, other.spec.datatype.value
    if mine != theirs:
        said = f"{at} is {mine} for {one.whose}, and {theirs} for {other.whose}"
        raise ConfigError(f"{said}: data_type must be the same", field="data_type")
    if not _fit(one.spec.shape, other.spec.shape) and not _fit(one.full, other.full):
        said = f"{at} is {list(one.full)} for {one.whose}, and {list(other.full)} for {other.whose}"
        raise ConfigError(f"{said}: dims must fit together", field="dims")


def _fit(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(-1 in (a, b) or a == b for a, b in zip(one, other, strict=True))


# ---- from one model to the next ----------------------------------------------------------------------------


def handed_over(array: Array, spec: TensorSpec, batched: bool, where: str) -> Array:
    """The tensor as a model (or the ensemble's answer) has it that takes batches, or none: as it is where its
    whole shape fits; else with a leading 1, or without one. Never a copy."""
    expected = spec.full_shape(1 if batched else 0)
    if _fit(expected, array.shape):
        return array
    if batched and _fit(spec.shape, array.shape):
        return array[None]
    if not batched and array.shape[:1] == (1,) and _fit(expected, array.shape[1:]):
        return array.reshape(array.shape[1:])
    raise ModelError(
        f"{where} needs the shape {list(expected)}, and the tensor has {list(array.shape)}",
        reason="model-error",
    )
