"""Completes the settings of a model by what its file says, with which they have to agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from carpool.config.settings_part import (
    OwnTensors,
    as_seen,
    asked_by_file,
    check_extra,
    own_tensors,
)
from carpool.errors import ConfigError


def complete(config: ModelConfig, signature: ModelSignature) -> ModelConfig:
    """The settings with nothing left open: tensors, their shapes and the largest batch are all known.

    A backend that cannot read its file passes an empty signature; the settings must then declare the tensors.
    """
    config = asked_by_file(config, signature)
    if config.fixed_batch:
        signature = signature.with_any_rows(config.fixed_batch)
    signature = as_seen(config, signature)
    max_batch = _max_batch(config, signature)
    if config.max_batch is None and max_batch < 2 and signature.can_batch:
        config = replace(config, unbatched=signature.why_not_rows)
    batched = max_batch > 0
    for own in own_tensors(config):
        signature = _without_own(config, own, signature, batched)
    inputs = _merge(config, "input", config.inputs, signature.inputs, batched)
    outputs = _merge(config, "output", config.outputs, signature.outputs, batched)
    # Declaring some outputs only is a choice; an input that is not declared would never get a value.
    declared = {t.name for t in config.inputs}
    missing = [t.name for t in signature.inputs if t.name not in declared and not t.optional]
    if declared and missing:
        raise ConfigError(
            f'{config.name}: the model file has the input "{missing[0]}", which is not declared'
        )
    done = with_max_batch(config, max_batch, config.name)
    done = replace(done, inputs=inputs, outputs=outputs)
    check_extra(done)
    return done


def _without_own(
    config: ModelConfig, own: OwnTensors, signature: ModelSignature, batched: bool
) -> ModelSignature:
    """Returns the signature without what the server fills in and keeps, which the file must have as the
    settings say. What is kept may be declared as an output, too."""
    for is_input, tensors in ((True, own.inputs), (False, own.outputs)):
        found = {t.name: t for t in (signature.inputs if is_input else signature.outputs)}
        for wanted in tensors if found else ():
            _check_own(config, own.purpose, "input" if is_input else "output", wanted, found, batched)
    inputs = {tensor.name for tensor in own.inputs}
    kept = {tensor.name for tensor in own.outputs} - {tensor.name for tensor in config.outputs}
    return ModelSignature(
        tuple(t for t in signature.inputs if t.name not in inputs),
        tuple(t for t in signature.outputs if t.name not in kept),
    )


def _check_own(
    config: ModelConfig,
    purpose: str,
    kind: str,
    wanted: TensorConfig,
    found: Mapping[str, TensorSignature],
    batched: bool,
) -> None:
    where = f'{config.name}: the {kind} "{wanted.name}", for {purpose},'
    tensor = found.get(wanted.name)
    if tensor is None:
        raise ConfigError(f"{where} is not in the model file; {nearest(wanted.name, found)}")
    shape = tensor.shape[1:] if batched else tensor.shape
    fits = len(shape) == len(wanted.dims) and all(
        DYNAMIC in (d, s) or d == s for d, s in zip(wanted.dims, shape, strict=True)
    )
    if tensor.datatype != wanted.datatype or not fits:
        told = f"{wanted.datatype} {list(wanted.dims)}{' (without the batch)' if batched else ''}"
        raise ConfigError(f"{where} should be {told} and is {tensor.datatype} {list(shape)}")


def _max_batch(config: ModelConfig, signature: ModelSignature) -> int:
    tensors = signature.inputs + signature.outputs
    known = bool(tensors)
    if config.max_batch is None:
        declared = {t.name: len(_model_dims(t)) for t in config.inputs + config.outputs}
        # A declared shape that is as long as the file's includes the first dimension.
        whole = any(declared.get(t.name) == len(t.shape) for t in tensors)
        if known and not (signature.can_batch and not whole):
            return 0
        if known and signature.why_not_rows and not preferred(config.policy):
            return 1 if declared else 0
        return max(DEFAULT_MAX_BATCH, *preferred(config.policy), 1)
    if config.max_batch == 0 or not known or signature.can_batch:
        return config.max_batch
    if config.max_batch == 1 and all(t.shape[:1] in ((1,), (DYNAMIC,)) for t in tensors):
        return 1
    fixed = next(t for t in tensors if t.shape[:1] != (DYNAMIC,) and not t.optional)
    raise ConfigError(
        f"{config.name}: the settings allow batches of {config.max_batch}, but in the model file "
        f'"{fixed.name}" has the shape {list(fixed.shape)}; export the model with a dynamic first dimension, '
        "or set the largest batch to 0"
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
            said = f"{config.name}: the model file does not declare its {kind}s"
            if kind == "input" and kind_of(config.backend).values_on_device:
                raise ConfigError(
                    f"{said}; if it takes images, give their size, as --size 224 or as size in [image], "
                    "else declare them as [[input]] in model.toml"
                )
            python = f", or as {kind.upper()}S in model.py" if config.backend == "python" else ""
            raise ConfigError(
                f"{said}; declare each as [[{kind}]] in model.toml, with name, datatype and shape{python}"
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
