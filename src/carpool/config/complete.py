"""Joins what the settings declare with what the model file says, and insists that the two agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from carpool.config.backend_kinds import kind_of
from carpool.config.model import (
    DEFAULT_MAX_BATCH,
    DYNAMIC,
    ModelConfig,
    ModelSignature,
    TensorConfig,
    TensorSignature,
)
from carpool.config.rules import check_tensor, nearest, preferred, with_max_batch
from carpool.errors import ConfigError


def complete(config: ModelConfig, signature: ModelSignature) -> ModelConfig:
    """The settings with nothing left open: tensors, their shapes and the largest batch are all known.

    A backend that cannot read its file passes an empty signature; the settings must then declare the tensors.
    """
    max_batch = _max_batch(config, signature)
    batched = max_batch > 0
    inputs = _merge(config, "input", config.inputs, signature.inputs, batched)
    outputs = _merge(config, "output", config.outputs, signature.outputs, batched)
    _check_all_fed(config, signature)
    done = with_max_batch(config, max_batch, config.name)
    return replace(done, inputs=inputs, outputs=outputs)


def _max_batch(config: ModelConfig, signature: ModelSignature) -> int:
    known = bool(signature.inputs or signature.outputs)
    if config.max_batch is None:
        if not known or (signature.can_batch and not _declared_whole(config, signature)):
            return max(DEFAULT_MAX_BATCH, *preferred(config.policy), 1)
        return 0
    if config.max_batch == 0 or not known or signature.can_batch:
        return config.max_batch
    if config.max_batch == 1 and all(t.shape[:1] in ((1,), (DYNAMIC,)) for t in _tensors(signature)):
        return 1
    fixed = next(t for t in _tensors(signature) if t.shape[:1] != (DYNAMIC,) and not t.optional)
    raise ConfigError(
        f"{config.name}: the settings allow batches of {config.max_batch}, but in the model file "
        f'"{fixed.name}" has the shape {list(fixed.shape)}; export the model with a dynamic first dimension, '
        "or set the largest batch to 0"
    )


def _tensors(signature: ModelSignature) -> tuple[TensorSignature, ...]:
    return signature.inputs + signature.outputs


def _declared_whole(config: ModelConfig, signature: ModelSignature) -> bool:
    """True when a declared shape is as long as the file's, so that it includes the first dimension."""
    declared = {t.name: t for t in config.inputs + config.outputs}
    return any(
        tensor.name in declared and len(_model_dims(declared[tensor.name])) == len(tensor.shape)
        for tensor in _tensors(signature)
    )


def _model_dims(tensor: TensorConfig) -> tuple[int, ...]:
    return tensor.dims if tensor.reshape is None else tensor.reshape


def _merge(
    config: ModelConfig,
    kind: str,
    declared: Sequence[TensorConfig],
    found: Sequence[TensorSignature],
    batched: bool,
) -> tuple[TensorConfig, ...]:
    if not found:
        if not declared:
            raise ConfigError(
                f"{config.name}: the model file does not say its {kind}s; declare them in the settings"
            )
        return tuple(declared)
    if not declared:
        return tuple(
            TensorConfig(t.name, t.datatype, t.shape[1:] if batched else t.shape, optional=t.optional)
            for t in found
        )
    by_name = {t.name: t for t in found}
    return tuple(_agree(config, kind, tensor, by_name, batched) for tensor in declared)


def _agree(
    config: ModelConfig, kind: str, tensor: TensorConfig, found: dict[str, TensorSignature], batched: bool
) -> TensorConfig:
    where = f'{config.name}: {kind} "{tensor.name}"'
    actual = found.get(tensor.name)
    _check_optional(config, tensor, actual, batched)
    if actual is None:
        raise ConfigError(f"{where} is declared but not in the model file; {nearest(tensor.name, found)}")
    if actual.datatype != tensor.datatype:
        raise ConfigError(f"{where} is declared {tensor.datatype} but is {actual.datatype} in the model file")
    shape = actual.shape[1:] if batched else actual.shape
    dims = _model_dims(tensor)
    if len(shape) != len(dims) or any(
        DYNAMIC not in (d, s) and d != s for d, s in zip(dims, shape, strict=True)
    ):
        without = " (without the batch)" if batched else ""
        raise ConfigError(f"{where} is declared {list(dims)} but is {list(shape)}{without} in the model file")
    if tensor.reshape is None:
        dims = tuple(s if d == DYNAMIC else d for d, s in zip(dims, shape, strict=True))
        return replace(tensor, dims=dims)
    return check_tensor(tensor, where, config.max_batch)


def _check_optional(
    config: ModelConfig, tensor: TensorConfig, actual: TensorSignature | None, batched: bool
) -> None:
    """A graph must have something to use in place of what a request leaves out; code can look for itself."""
    if not tensor.optional or actual is None or not kind_of(config.backend).gives_defaults:
        return
    where = f'{config.name}: input "{tensor.name}"'
    if not actual.optional:
        raise ConfigError(
            f"{where} is declared optional, but the model file has no default for it: export the model with"
            " an initializer of the same name, or leave optional out"
        )
    if batched and actual.shape[:1] != (DYNAMIC,):
        raise ConfigError(
            f"{where} is optional, and its default has the shape {list(actual.shape)}, which does not grow"
            " with a batch: set the largest batch to 0"
        )


def _check_all_fed(config: ModelConfig, signature: ModelSignature) -> None:
    """Declaring some outputs only is a choice; an input nobody declared would never get a value."""
    declared = {t.name for t in config.inputs}
    missing = [t.name for t in signature.inputs if t.name not in declared and not t.optional]
    if declared and missing:
        raise ConfigError(
            f'{config.name}: the model file has the input "{missing[0]}", which is not declared'
        )
