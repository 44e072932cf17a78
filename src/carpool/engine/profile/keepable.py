"""Whether a promise can be kept by what was measured; where the settings allow it, one that can."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, log10

from carpool.config.model import ModelConfig
from carpool.core.curve import BatchCurve
from carpool.core.numerals import numeral
from carpool.core.policy import Promise
from carpool.errors import ConfigError

LEAST = 2.2
"""Times a single image: who arrives just after another began waits for that one, and a little is lost."""


def keepable(config: ModelConfig, curve: BatchCurve) -> tuple[ModelConfig, str]:
    """The settings to serve with, and in words what became of the promise. Raises where it cannot be kept."""
    policy = config.policy
    if not isinstance(policy, Promise):
        return config, ""
    alone, slo = curve.times[1], policy.slo
    if config.slo_may_grow and slo < LEAST * alone:
        grown = _rounded_up(LEAST * alone)
        takes = f"one image takes {numeral(alone * 1e3)} ms here"
        said = f"Promised: {numeral(grown * 1e3)} ms instead of {numeral(slo * 1e3)}, since {takes}."
        return replace(config, policy=replace(policy, slo=grown)), said
    if alone > slo:
        raise ConfigError(
            f"{config.name}: one image takes {numeral(alone * 1e3)} ms here, so slo_ms = {slo * 1e3:g} "
            f"cannot be kept; promise at least {numeral(LEAST * alone * 1e3)} ms"
        )
    return config, ""


def _rounded_up(seconds: float) -> float:
    """To two digits: a promise is a number that people say."""
    step = 10.0 ** (floor(log10(seconds)) - 1)
    return ceil(seconds / step) * step
