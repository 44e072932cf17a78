"""Cascades in pipeline.toml: two steps, of which the second is asked where the first is not sure."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.errors import ConfigError
from carpool.extensions.pipelines.picture_graph import PictureGraph, StepFacts
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import EscalateSettings, PipelineSettings, pipeline_settings

ANIMALS = """slo_ms = 100
[[step]]
name = "quick"
model = "efficientnet_lite0"
[[step]]
name = "sure"
model = "vit_b16"
escalate = { from = "quick", by = "margin", below = 0.62 }
[answer]
from = "sure or quick"
under_load = "quick"
"""


def read(text: str = ANIMALS) -> PipelineSettings:
    found = pipeline_settings(pipeline_config(text, Path("animals/pipeline.toml"), "animals"))
    assert found is not None
    return found


def test_a_cascade_is_read() -> None:
    settings = read()
    assert settings.steps[1].escalate == EscalateSettings("quick", "margin", 0.62)
    assert settings.answer == ("sure", "quick")
    assert settings.under_load == "quick"
    graph = PictureGraph(settings)
    assert (graph.base, graph.order, graph.after) == (0, [0, 1], [None, 0])
    assert graph.following(0) == [1]
    plain = ANIMALS.partition("[answer]")[0]
    assert read(plain).answer == ("sure", "quick")
    assert read(plain).under_load == "refuse"


def test_the_steps_may_stand_in_any_order() -> None:
    head, first, second = ANIMALS.partition("[answer]")[0].split("[[step]]")
    graph = PictureGraph(read(f"{head}[[step]]{second}[[step]]{first}"))
    assert (graph.base, graph.order, graph.after) == (1, [1, 0], [1, None])


def test_the_big_answer_is_the_answer_where_there_is_one() -> None:
    graph = PictureGraph(read())
    assert graph.answer({}, {0: [{"classes": [1]}], 1: [{"classes": [2]}]}) == {"classes": [2]}
    assert graph.answer({}, {0: [{"classes": [1]}], 1: []}) == {"classes": [1]}
    assert graph.answer({}, {0: [{"classes": [1]}]}) == {"classes": [1]}


THIRD = '\n[[step]]\nname = "more"\nmodel = "m"\n[answer]'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('from = "quick", ', "", "8: step[1].escalate.from is missing"),
        ('by = "margin", ', "", "8: step[1].escalate.by is missing"),
        (", below = 0.62", "", "8: step[1].escalate.below is missing"),
        ("0.62", "1.5", "8: step[1].escalate.below must be"),
        ('"margin"', '"luck"', "8: step[1].escalate.by cannot be"),
        ('from = "quick"', 'from = "quik"', 'there is no other step "quik"; did you mean'),
        ('from = "quick"', 'from = "sure"', 'there is no other step "sure"'),
        ("below = 0.62", "under = 0.62", "8: step[1].escalate.under is unknown"),
        ("[answer]", THIRD, "8: step[1].escalate needs two steps"),
        ('"sure or quick"', '"quick or sure"', '10: answer.from must be "sure or quick" in a cascade'),
        ('"sure or quick"', '"quick"', '10: answer.from must be "sure or quick" in a cascade'),
        ('under_load = "quick"', 'under_load = "sure"', "11: answer.under_load needs to be refuse or quick"),
        ('under_load = "quick"', 'under_load = "drop"', "11: answer.under_load cannot be"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, words: str) -> None:
    assert old in ANIMALS
    with pytest.raises(ConfigError) as raised:
        read(ANIMALS.replace(old, new, 1))
    assert words in raised.value.message


@pytest.mark.parametrize(
    ("cheap", "big", "by", "words"),
    [
        ("classify", "detect", "margin", "a cascade has one task"),
        ("depth", "depth", "margin", "does not say how certain it is"),
        ("detect", "detect", "margin", "escalate.by must be confidence for detect"),
        ("read", "read", "entropy", "escalate.by must be confidence for read"),
    ],
)
def test_models_that_make_no_cascade_are_named(cheap: str, big: str, by: str, words: str) -> None:
    graph = PictureGraph(read(ANIMALS.replace("margin", by)))
    with pytest.raises(ConfigError) as raised:
        graph.check([StepFacts(cheap), StepFacts(big)])
    assert words in raised.value.message
    assert raised.value.message.startswith("animals/pipeline.toml:7: step sure.model")


def test_models_of_one_task_fit() -> None:
    PictureGraph(read()).check([StepFacts("classify"), StepFacts("classify")])
