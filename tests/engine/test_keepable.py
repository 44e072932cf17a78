"""A promise is kept, grows where it may, or is refused with the number that could be promised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config.model import Mode, ModelConfig, eager_policy
from carpool.core.curve import BatchCurve
from carpool.core.objectives import Promise
from carpool.engine.profile.model_profile import LEAST, keepable
from carpool.errors import ConfigError


def promised(slo: float, *, grows: bool) -> ModelConfig:
    policy = Promise(slo=slo, max_batch=1)
    return ModelConfig(
        name="model", path=Path(), mode=Mode.PROMISE, policy=policy, slo_may_grow=grows, max_batch=1
    )


def curve_of(seconds: float) -> BatchCurve:
    return BatchCurve.measured([(1, seconds)], 1)


def test_a_promise_that_can_be_kept_stays_as_it_is() -> None:
    for grows in (False, True):
        config = promised(0.5, grows=grows)
        assert keepable(config, curve_of(0.1)) == (config, "")


def test_one_that_cannot_be_kept_is_refused_with_what_could_be() -> None:
    with pytest.raises(ConfigError, match=r"one image takes 4,680 ms here, so slo_ms = 2500 .* 10,296 ms"):
        keepable(promised(2.5, grows=False), curve_of(4.68))


def test_one_that_may_grow_grows_and_says_so() -> None:
    config, said = keepable(promised(2.5, grows=True), curve_of(4.68))
    assert config.policy.slo == pytest.approx(11.0)  # type: ignore[union-attr]
    assert said == "SLO: 11,000 ms instead of 2,500, since one image takes 4,680 ms here."


@given(st.floats(1e-4, 100), st.floats(1e-4, 100))
def test_it_grows_no_more_than_it_must(slo: float, alone: float) -> None:
    config, said = keepable(promised(slo, grows=True), curve_of(alone))
    grown = config.policy.slo  # type: ignore[union-attr]
    assert grown >= min(LEAST * alone, slo) * (1 - 1e-9)
    assert grown >= slo
    assert grown <= max(slo, 1.11 * LEAST * alone)
    assert bool(said) == (grown > slo)


def test_without_a_promise_nothing_changes() -> None:
    config = replace(promised(1.0, grows=False), mode=Mode.EAGER, policy=eager_policy())
    assert keepable(config, curve_of(5.0)) == (config, "")
