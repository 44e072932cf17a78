"""Whether the models of an ensemble fit together, what a request needs of them, how tensors are handed on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from carpool.config.model import ModelConfig, TensorConfig
from carpool.config.triton import pbtxt_config
from carpool.errors import ConfigError, ModelError
from carpool.extensions.ensembles.ensemble_graph import EnsembleGraph, check_models, handed_over
from carpool.types import Datatype, Signature, TensorSpec
from engine.ensembles import step, text


def config_of(*steps: str, max_batch: int = 8, outputs: tuple[str, ...] = ("out",)) -> ModelConfig:
    settings = text(*steps, max_batch=max_batch, outputs=outputs)
    return pbtxt_config(settings, Path("/models/chain/config.pbtxt"))[0]


def model(
    name: str = "m",
    *,
    inputs: tuple[str, ...] = ("x",),
    outputs: tuple[str, ...] = ("y",),
    dims: tuple[int, ...] = (3,),
    max_batch: int = 8,
    datatype: Datatype = Datatype.FP32,
    optional: tuple[str, ...] = (),
) -> Signature:
    def specs(names: tuple[str, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(n, datatype, dims, n in optional) for n in names)

    return Signature(name, specs(inputs), specs(outputs), max_batch)


CHAIN = config_of(step("one", [("x", "in")], [("y", "mid")]), step("ten", [("x", "mid")], [("y", "out")]))


def test_models_that_fit_are_fine() -> None:
    check_models(CHAIN, [model(), model()])
    check_models(CHAIN, [model(max_batch=64), model(dims=(-1,))])


WRONG = {  # by the name that Triton's tests have for it
    "invalid_batch_size": (
        [model(), model(max_batch=2)],
        r"max_batch_size 8 .* more than the 2",
        "max_batch_size",
    ),
    "inconsistent_data_type": (
        [model(), model(datatype=Datatype.INT32)],
        r"step\[1\].input_map: tensor \"mid\" is FP32 for one.y, and INT32 for ten.x",
        "data_type",
    ),
    "inconsistent_shape": (
        [model(), model(dims=(3, 3, 3))],
        r"step\[1\].input_map: tensor \"mid\" is \[-1, 3\] .* \[-1, 3, 3, 3\]",
        "dims",
    ),
    "invalid_input_map": (
        [model(inputs=("z",)), model()],
        r"step\[0\].input_map: one has no input",
        "input_map",
    ),
    "invalid_output_map": (
        [model(), model(outputs=("z",))],
        r"step\[1\].output_map: ten has no output",
        "output_map",
    ),
    "unmapped_input": (
        [model(), model(inputs=("x", "z"))],
        r"step\[1\].input_map: nothing is mapped to the input \"z\" of ten",
        "input_map",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_models_that_do_not_fit_are_told_with_the_field(name: str) -> None:
    signatures, said, field = WRONG[name]
    with pytest.raises(ConfigError, match=said) as caught:
        check_models(CHAIN, signatures)
    assert caught.value.field == field


def test_an_optional_input_need_not_be_mapped() -> None:
    check_models(CHAIN, [model(), model(inputs=("x", "z"), optional=("z",))])


def test_a_model_without_batches_fits_with_the_batch_in_its_shape_or_without_one() -> None:
    check_models(CHAIN, [model(), model(dims=(-1, 3), max_batch=0)])
    check_models(CHAIN, [model(), model(dims=(3,), max_batch=0)])
    check_models(replace(CHAIN, max_batch=0), [model(), model(max_batch=0)])


def diamond() -> EnsembleGraph:
    return EnsembleGraph(
        config_of(
            step("join", [("a", "left"), ("b", "right")], [("total", "out"), ("product", "more")]),
            step("one", [("x", "in")], [("y", "left")]),
            step("ten", [("x", "in")], [("y", "right")]),
            step("extra", [("x", "left")], [("y", "side")]),
            outputs=("out", "more", "side"),
        )
    )


def test_steps_come_after_those_that_they_read_from() -> None:
    graph = diamond()
    assert [step.model for step in graph.steps] == ["one", "ten", "join", "extra"]
    assert [step.after for step in graph.steps] == [(), (), (1, 2), (1,)]


@pytest.mark.parametrize(
    ("wanted", "needed"),
    [
        ((), ["one", "ten", "join", "extra"]),
        (("side",), ["one", "extra"]),
        (("out",), ["one", "ten", "join"]),
        (("more", "side"), ["one", "ten", "join", "extra"]),
    ],
)
def test_steps_that_no_wanted_output_needs_are_left_out(wanted: tuple[str, ...], needed: list[str]) -> None:
    graph = diamond()
    found = graph.needed(wanted)
    assert [step.model for step in graph.steps if step.number in found] == needed


def test_outputs_that_nobody_reads_are_not_asked_for() -> None:
    graph = diamond()
    assert list(graph.needed(("out",)).values())[-1] == ("total",)


SPEC = TensorSpec("x", Datatype.FP32, (3,))


@pytest.mark.parametrize(
    ("given", "batched", "shape"),
    [
        ((2, 3), True, (2, 3)),
        ((3,), True, (1, 3)),
        ((3,), False, (3,)),
        ((1, 3), False, (3,)),
    ],
)
def test_a_leading_1_is_added_or_taken_away(
    given: tuple[int, ...], batched: bool, shape: tuple[int, ...]
) -> None:
    array = np.zeros(given, np.float32)
    found = handed_over(array, SPEC, batched, "x")
    assert found.shape == shape
    assert np.shares_memory(found, array)


def test_a_whole_shape_that_fits_passes_as_it_is() -> None:
    spec = TensorSpec("x", Datatype.FP32, (-1, 3))
    assert handed_over(np.zeros((5, 3), np.float32), spec, False, "x").shape == (5, 3)


@pytest.mark.parametrize(("given", "batched"), [((2, 3), False), ((2, 4), True), ((4,), True), ((), False)])
def test_what_does_not_fit_is_told(given: tuple[int, ...], batched: bool) -> None:
    with pytest.raises(ModelError, match="input x needs the shape"):
        handed_over(np.zeros(given, np.float32), SPEC, batched, "input x")


def test_tensors_of_the_ensemble_itself_count_as_well() -> None:
    config = replace(CHAIN, outputs=(TensorConfig("out", "INT64", (3,)),))
    with pytest.raises(ConfigError, match="out"):
        check_models(config, [model(), model()])
