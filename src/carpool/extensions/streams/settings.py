"""Says what does not go with a decoupled model, which gives any number of responses to a request."""

from __future__ import annotations

from carpool.config.model import ModelConfig
from carpool.config.settings_part import SettingsPart
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import ConfigError


def _check(config: ModelConfig) -> None:
    """Raises what only holds where a request has exactly one response."""
    promises = isinstance(config.policy, Promise)
    on_device = config.image is not None and config.image.decode == "device"
    reshaped = any(tensor.reshape is not None for tensor in config.inputs + config.outputs)
    ordered = isinstance(config.policy, FixedBatching) and config.policy.preserve_ordering
    other = config.backend or "this one"
    unfit = {
        f"it is for Python models; {other} gives one response to each request": config.backend != "python",
        "slo_ms is the latency of a single response; leave it out for this model": promises,
        "preserve_ordering needs requests with exactly one response": ordered,
        'image.decode = "device" is for models with one response per image; leave it out': on_device,
        "reshape is not supported; declare the tensors as the model has them": reshaped,
    }
    for why, given in unfit.items():
        if given:
            raise ConfigError(f"{config.name}: decoupled: {why}", field="decoupled")


PART = SettingsPart(check=_check)
