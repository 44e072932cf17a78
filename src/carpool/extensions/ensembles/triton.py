"""Reads Triton's `ensemble_scheduling`: the steps of an ensemble, and what is wrong with them by themselves.

What can be wrong beside the models that they name is for what loads those (`EnsembleGraph`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from carpool.config.model import Mode, ModelConfig, ModelStep
from carpool.config.rules import shown
from carpool.config.settings_part import SettingsPart, TritonPart
from carpool.core.objectives import Promise
from carpool.extensions.ensembles.settings import EnsembleSettings, EnsembleStep, ensemble_settings

if TYPE_CHECKING:
    from carpool.config.triton_text import TextSource

ENSEMBLE = "ensemble"
"""The platform, and what stands for a backend."""
MOST_STEPS = 256
SLO = "slo_ms"
"""The parameter that gives an ensemble a promise."""
_NOT_IN_ENSEMBLES: Mapping[str, str] = {
    "instance_group": "it runs nothing itself, its steps do",
    "optimization": "it runs nothing itself, its steps do",
    "model_warmup": "its steps are warmed up",
    "default_model_filename": "it has no file",
}
_AT = "ensemble_scheduling"


def read_ensemble(source: TextSource) -> EnsembleSettings | None:
    """Returns None for any other model. Every mistake names the field, and where it stands."""
    message = source.message
    if not message.HasField(_AT) and message.platform != ENSEMBLE:
        return None
    _check_kind(source)
    _check_declared(source)
    listed = message.ensemble_scheduling.step
    if not 1 <= len(listed) <= MOST_STEPS:
        many = f"{len(listed)} of them are too many" if listed else "step is missing"
        raise source.error(_AT, f"{_AT} needs 1 to {MOST_STEPS} steps; {many}")
    steps = tuple(_step(source, step, f"{_AT}.step[{number}]") for number, step in enumerate(listed))
    _check_tensors(source, steps)
    return EnsembleSettings(steps, message.ensemble_scheduling.max_inflight_requests)


def _check_kind(source: TextSource) -> None:
    message = source.message
    for field, given in (("backend", message.backend), ("platform", message.platform)):
        if given not in ("", ENSEMBLE if field == "platform" else ""):
            raise source.error(
                field,
                f'{field} must not be {shown(given)} in an ensemble: its platform is "{ENSEMBLE}", '
                "and it has no backend",
            )
    if not message.HasField(_AT):
        raise source.error("platform", f'platform "{ENSEMBLE}" needs {_AT}, which is missing')
    for field, why in _NOT_IN_ENSEMBLES.items():
        if message.HasField(field) if field == "optimization" else getattr(message, field):
            raise source.error(field, f"{field} cannot be given for an ensemble: {why}")


def _check_declared(source: TextSource) -> None:
    for kind in ("input", "output"):
        tensors = getattr(source.message, kind)
        if not tensors:
            raise source.error(_AT, f"an ensemble must declare what it takes and gives: {kind} is missing")
        for number, tensor in enumerate(tensors):
            if tensor.HasField("reshape"):
                at = f"{kind}[{number}].reshape"
                raise source.error(at, f"{kind}.reshape is not supported in an ensemble")


def read_promise(source: TextSource) -> Promise | None:
    """Returns the promise of the whole, as `parameters { key: "slo_ms" value { string_value: "100" } }` gives
    it."""
    text = source.message.parameters[SLO].string_value.strip() if SLO in source.message.parameters else ""
    if not text:
        return None
    try:
        slo_ms = float(text)
    except ValueError:
        slo_ms = 0.0
    if not 0 < slo_ms <= 1e7:
        raise source.error("parameters", f"parameters.{SLO} must be milliseconds above 0, not {shown(text)}")
    return Promise(slo_ms / 1e3, 1)


def _step(source: TextSource, step: Any, path: str) -> EnsembleStep:
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            raise source.error(path, f"{path} has no {field}")
    if step.model_version < -1:
        raise source.error(
            f"{path}.model_version", f"{path}.model_version must be a version, or -1 for the newest"
        )
    for side in ("input_map", "output_map"):
        for name, tensor in getattr(step, side).items():
            if not name or not tensor:
                raise source.error(f"{path}.{side}", f"{path}.{side} needs a key and a value")
    # A version of 0 is how the field is left out: Triton's own clients mean the newest.
    version = step.model_version if step.model_version > 0 else -1
    return EnsembleStep(step.model_name, version, _sorted(step.input_map), _sorted(step.output_map))


def _sorted(given: Any) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(given.items()))


def _check_tensors(source: TextSource, steps: tuple[EnsembleStep, ...]) -> None:
    """Each tensor has one writer and some reader, and every output is written in the end."""
    message = source.message
    inputs = [tensor.name for tensor in message.input]
    outputs = [tensor.name for tensor in message.output]
    written = Counter(tensor for step in steps for _, tensor in step.outputs)
    read = {tensor for step in steps for _, tensor in step.inputs}
    for number, step in enumerate(steps):
        at = f"{_AT}.step[{number}]"
        for name, tensor in step.outputs:
            if written[tensor] > 1 or tensor in inputs:
                also = "is an input of the ensemble" if tensor in inputs else "another output is mapped to it"
                raise source.error(
                    f"{at}.output_map", f"{at}.output_map: {shown(name)} cannot write {shown(tensor)}: {also}"
                )
            if tensor not in read and tensor not in outputs:
                said = f"{at}.output_map: no step reads the tensor {shown(tensor)}"
                raise source.error(f"{at}.output_map", said)
    for number, name in enumerate(inputs):
        if name not in read:
            raise source.error(f"input[{number}]", f"input {shown(name)}: no step reads it")
    for number, name in enumerate(outputs):
        if name not in written:
            raise source.error(f"output[{number}]", f"output {shown(name)}: no step writes it")
    _check_flow(source, steps, set(inputs), written)


def _check_flow(
    source: TextSource, steps: tuple[EnsembleStep, ...], known: set[str], written: Mapping[str, int]
) -> None:
    waiting = dict(enumerate(steps))
    while True:
        ready = [n for n, step in waiting.items() if known.issuperset(tensor for _, tensor in step.inputs)]
        if not ready:
            break
        for number in ready:
            known |= {tensor for _, tensor in waiting.pop(number).outputs}
    for number, step in waiting.items():
        at = f"{_AT}.step[{number}].input_map"
        never = [tensor for _, tensor in step.inputs if tensor not in known and tensor not in written]
        if never:
            why = f"the tensor {shown(never[0])} is no input of the ensemble, and no step writes it"
            raise source.error(at, f"{at}: {why}")
    for number, step in waiting.items():
        at = f"{_AT}.step[{number}].input_map"
        missing = next(tensor for _, tensor in step.inputs if tensor not in known)
        told = ", ".join(shown(tensor) for _, tensor in step.outputs)
        raise source.error(at, f"{at}: {told} is never written: {shown(missing)} waits for itself")


def ensemble_document(settings: EnsembleSettings) -> dict[str, object]:
    """Returns it as Triton answers it."""
    return {
        "step": [
            {
                "model_name": step.model,
                "model_version": step.version,
                "input_map": dict(step.inputs),
                "output_map": dict(step.outputs),
                "model_namespace": "",
            }
            for step in settings.steps
        ],
        "max_inflight_requests": settings.max_inflight,
    }


def _settled(source: TextSource, config: ModelConfig) -> ModelConfig:
    """Returns the settings with the models that are its steps, and with the promise of the whole."""
    settings, promise = ensemble_settings(config), read_promise(source)
    listed = () if settings is None else settings.steps
    steps = tuple(
        ModelStep(step.model, step.version, f"{config.name}: {_AT}.step[{number}].model_name")
        for number, step in enumerate(listed)
    )
    config = replace(config, backend=ENSEMBLE, steps=steps)
    return config if promise is None else replace(config, mode=Mode.PROMISE, policy=promise)


def _document(config: ModelConfig) -> Mapping[str, object]:
    settings = ensemble_settings(config)
    return {} if settings is None else {_AT: ensemble_document(settings)}


PART = SettingsPart(
    kind=EnsembleSettings,
    triton=TritonPart(read=read_ensemble, document=_document, settle=_settled, parameters=(SLO,)),
    changes_answers=True,
)
