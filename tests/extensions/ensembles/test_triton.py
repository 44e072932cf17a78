"""Ensembles in config.pbtxt: every mistake that Triton's own tests make in a file alone names its field.

Those that need other models to be seen are in tests/extensions/ensembles/test_ensemble_graph.py and
tests/engine/test_ensemble_loading.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.model import Mode, ModelConfig
from carpool.config.triton import pbtxt_config
from carpool.config.triton_document import config_document
from carpool.core.objectives import Promise
from carpool.errors import ConfigError
from carpool.extensions.ensembles.settings import ensemble_settings
from engine.ensembles import promise, step, text

FIRST = step("one", [("x", "in")], [("y", "mid")])
LAST = step("ten", [("x", "mid")], [("y", "out")])


def read(settings: str) -> ModelConfig:
    return pbtxt_config(settings, Path("/models/chain/config.pbtxt"))[0]


def test_the_steps_are_read() -> None:
    config = read(text(FIRST, step("ten", [("x", "mid")], [("y", "out")], version=2)))
    settings = ensemble_settings(config)
    assert settings is not None
    first, last = settings.steps
    assert (first.model, first.version, first.inputs) == ("one", -1, (("x", "in"),))
    assert (last.model, last.version, last.outputs) == ("ten", 2, (("y", "out"),))
    assert config.backend == "ensemble"
    assert config.mode is Mode.EAGER


def test_the_platform_may_be_left_out() -> None:
    assert read(text(FIRST, LAST).replace('platform: "ensemble"', "")).asks("ensembles")


def test_a_parameter_gives_the_whole_a_promise() -> None:
    config = read(text(FIRST, LAST, more=promise(120)))
    assert config.mode is Mode.PROMISE
    assert isinstance(config.policy, Promise)
    assert config.policy.slo == pytest.approx(0.12)


@pytest.mark.parametrize("wrong", ["soon", "0", "-3", "nan", "1e99"])
def test_a_promise_must_be_milliseconds(wrong: str) -> None:
    more = f'parameters {{ key: "slo_ms" value {{ string_value: "{wrong}" }} }}'
    with pytest.raises(ConfigError, match=r"parameters\.slo_ms"):
        read(text(FIRST, LAST, more=more))


def test_clients_read_it_as_triton_tells_it() -> None:
    document = config_document(read(text(FIRST, LAST)))
    assert document["platform"] == "ensemble"
    assert document["backend"] == ""
    assert document["instance_group"] == []
    assert "dynamic_batching" not in document
    scheduling = document["ensemble_scheduling"]
    assert isinstance(scheduling, dict)
    assert scheduling["step"][1] == {
        "model_name": "ten",
        "model_version": -1,
        "input_map": {"x": "mid"},
        "output_map": {"y": "out"},
        "model_namespace": "",
    }


def without(what: str, settings: str) -> str:
    assert what in settings
    return settings.replace(what, "", 1)


GOOD = text(FIRST, LAST)
NAMELESS = FIRST.replace('model_name: "one"', "")
SPLIT = step("three", [("x", "in")], [("a", "out"), ("b", "spare")])
WRONG = {  # by the name that Triton's tests have for it: the settings, and what the message must name
    "ensemble_scheduling_no_set": (GOOD[: GOOD.index("ensemble_scheduling")], "needs ensemble_scheduling"),
    "has_backend": (GOOD + 'backend: "onnxruntime"', "backend must not be"),
    "instance_group_set": (GOOD + "instance_group { count: 1 }", "instance_group cannot be given"),
    "model_warm_up_set": (GOOD + 'model_warmup { name: "w" }', "model_warmup cannot be given"),
    "optimization_set": (GOOD + "optimization { priority: PRIORITY_MAX }", "optimization cannot be given"),
    "no_step": (text(), "ensemble_scheduling needs 1 to 256 steps; step is missing"),
    "no_step_2": (without("\n\n", text()), "step is missing"),
    "no_model_name": (text(FIRST, NAMELESS), r"step\[1\] has no model_name"),
    "no_input_map": (text(FIRST, step("ten", [], [("y", "out")])), r"step\[1\] has no input_map"),
    "no_output_map": (text(FIRST, step("ten", [("x", "mid")], [])), r"step\[1\] has no output_map"),
    "output_to_tensor_overmapped": (text(FIRST, FIRST, LAST), r"step\[0\].output_map.*cannot write \"mid\""),
    "redundant_tensor_as_input": (
        text(FIRST, step("ten", [("x", "mid"), ("z", "nowhere")], [("y", "out")])),
        r"step\[1\].input_map: the tensor \"nowhere\" is no input",
    ),
    "redundant_tensor_as_output": (text(SPLIT), r"step\[0\].output_map: no step reads the tensor \"spare\""),
    "tensor_to_input_overmapped": (
        text(FIRST, step("two", [("x", "in")], [("y", "lost")]), LAST),
        r"step\[1\].output_map: no step reads the tensor \"lost\"",
    ),
    "unreachable_input": (text(FIRST, LAST, inputs=("in", "more")), 'input "more": no step reads it'),
    "unreachable_output": (text(FIRST, LAST, outputs=("out", "more")), 'output "more": no step writes it'),
    "unreachable_output_2": (
        text(FIRST, LAST, step("self", [("x", "more")], [("y", "more")]), outputs=("out", "more")),
        r"step\[2\].input_map: \"more\" is never written",
    ),
    "unreachable_output_3": (
        text(FIRST, LAST, step("one", [("x", "unwritten")], [("y", "more")]), outputs=("out", "more")),
        r"step\[2\].input_map: the tensor \"unwritten\" is no input",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_told_with_its_field_and_its_place(name: str) -> None:
    settings, said = WRONG[name]
    with pytest.raises(ConfigError, match=said) as caught:
        read(settings)
    assert caught.value.message.startswith("/models/chain/config.pbtxt:")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (GOOD.replace('platform: "ensemble"', 'platform: "onnxruntime_onnx"'), "platform must not be"),
        (text(FIRST, LAST.replace("-1", "-2")), "model_version must be"),
        (text(FIRST, LAST.replace("step {", 'step { model_namespace: "n" ')), "model_namespace is not"),
        (text(step("one", [("x", "in")], [("y", "in")]), outputs=("in",)), "is an input of the ensemble"),
        (
            text(
                step("a", [("x", "b"), ("w", "in")], [("y", "a")]),
                step("b", [("x", "a")], [("y", "b")]),
                outputs=("b",),
            ),
            "waits for itself",
        ),
        (text(*[FIRST] * 300), "300 of them are too many"),
        (text(FIRST, LAST, inputs=()), "input is missing"),
        (GOOD.replace("dims: [ 3 ] }", "dims: [ 3 ] reshape { shape: [ 1, 3 ] } }", 1), "reshape is not"),
        (GOOD + 'default_model_filename: "m.onnx"', "default_model_filename cannot be given"),
        (text(step("one", [("x", "")], [("y", "out")])), "needs a key and a value"),
    ],
)
def test_other_mistakes_are_told_too(settings: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(settings)
