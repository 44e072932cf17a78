"""`pipeline.toml`: what it says, and that every mistake is told with its line and the nearest key."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from carpool.config.model import Mode, SpecificVersions
from carpool.config.repository import find_models
from carpool.config.triton_document import config_document
from carpool.core.objectives import Promise
from carpool.errors import ConfigError
from carpool.extensions.pipelines.pipeline_toml import pipeline_config
from carpool.extensions.pipelines.settings import (
    CropSettings,
    PipelineSettings,
    StepKeepSettings,
    pipeline_settings,
    read_document,
)

STREET = """\
slo_ms = 120
keep_px = 800

[[step]]
name = "find"
model = "nanodet"
keep = { labels = ["car", "person"], score = 0.4, most = 8 }

[[step]]
name = "kind"
model = "lite0"
version = 3
each = "find.boxes"
crop = { pad = 0.1, square = true, least = 16 }

[answer]
attach = { kind = "find.boxes" }
if_late = "without"
"""
PATH = Path("/models/street/pipeline.toml")


def read(text: str) -> PipelineSettings:
    settings = pipeline_settings(pipeline_config(text, PATH, "street"))
    assert settings is not None
    return settings


def test_all_that_it_says() -> None:
    config = pipeline_config(STREET, PATH, "street")
    settings = pipeline_settings(config)
    assert settings is not None
    find, kind = settings.steps
    assert (find.name, find.model, find.version, find.each) == ("find", "nanodet", -1, None)
    assert find.keep == StepKeepSettings(("car", "person"), 0.4, 8)
    assert (kind.each, kind.version) == (("find", "boxes"), 3)
    assert kind.crop == CropSettings(0.1, True, 16)
    assert (settings.answer, settings.if_late, settings.keep_px) == (("find",), "without", 800)
    assert (config.mode, config.policy) == (Mode.PROMISE, Promise(0.12, 1))
    assert config.needs == ("nanodet", "lite0")
    assert settings.at(1) == f"{PATH}:11: step kind.model"


def test_front_ends_read_what_the_engine_writes() -> None:
    settings = read(STREET)
    assert read_document(json.loads(json.dumps(asdict(settings)))) == settings


def test_lines_that_are_straightened() -> None:
    text = STREET.replace("find.boxes", "find.regions").replace(
        "{ pad = 0.1, square = true, least = 16 }",
        "{ rectify = true, height = 32, widths = [320, 160], stretch = 1.2 }",
    )
    crop = read(text).steps[1].crop
    assert (crop.rectify, crop.height, crop.widths, crop.stretch) == (True, 32, (160, 320), 1.2)


def test_clients_can_read_its_steps() -> None:
    document = config_document(pipeline_config(STREET, PATH, "street"))
    assert (document["platform"], document["backend"], document["instance_group"]) == ("pipeline", "", [])
    shown = json.loads(document["parameters"]["pipeline"]["string_value"])  # type: ignore[index]
    assert [step["each"] for step in shown["step"]] == ["", "find.boxes"]


def test_a_folder_of_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "street"
    folder.mkdir()
    (folder / "pipeline.toml").write_text("versions = [2]\n" + STREET)
    (folder / "2").mkdir()
    (source,), _ = find_models([tmp_path])
    assert source.config.versions == SpecificVersions((2,))
    assert [(version.number, version.file) for version in source.versions] == [(2, None)]
    (folder / "model.toml").write_text("")
    with pytest.raises(ConfigError, match=r"both model.toml and pipeline.toml"):
        find_models([tmp_path])


def changed(old: str, new: str) -> str:
    assert old in STREET
    return STREET.replace(old, new)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (changed("least", "leest"), '14: step[1].crop.leest is unknown; did you mean "least"?'),
        (changed("slo_ms = 120", "slo_may_grow = true"), "1: slo_may_grow needs slo_ms: without an SLO"),
        (changed("slo_ms", "slo"), '1: slo is unknown; did you mean "slo_ms"?'),
        (changed("each =", "eech ="), '13: step[1].eech is unknown; did you mean "each"?'),
        (changed('"find.boxes"\ncrop', '"fnd.boxes"\ncrop'), '13: step[1].each there is no step "fnd"'),
        (changed('"find.boxes"\ncrop', '"kind.boxes"\ncrop'), "13: step[1].each goes round in a circle"),
        (changed('"find.boxes"\ncrop', '"find.cars"\ncrop'), '13: step[1].each must be "STEP.boxes" or'),
        (changed("most = 8", "most = 101"), "7: step[0].keep.most must be 1 to 100, not 101"),
        (changed("keep_px = 800", "keep_px = 9999"), "2: keep_px must be 64 to 4096"),
        (changed('"nanodet"', '"street"'), '6: step[0].model "street" is the pipeline itself'),
        (changed('name = "kind"', 'name = "find"'), '"find" is given twice'),
        (
            changed('name = "kind"', 'name = "score"'),
            '10: step[1].name "score" is already a field of responses',
        ),
        (changed('model = "lite0"\n', ""), "step[1].model is missing"),
        (changed('{ kind = "find.boxes" }', '{ kind = "find" }'), "17: answer.attach kind belongs to"),
        (changed("{ kind =", "{ kid ="), 'cannot be attached; did you mean "kind"?'),
        (changed('"without"', '"later"'), "18: answer.if_late cannot be"),
        (changed('each = "find.boxes"\n', ""), "step[1].crop needs each"),
        (changed("pad = 0.1", "pad = -1"), "14: step[1].crop.pad must be 0 or more"),
        (changed("square = true", "rectify = true"), "does not go with rectify"),
        (changed("pad = 0.1, square = true, least = 16", "rectify = true"), "needs quadrilaterals"),
        (changed("square = true", "height = 48"), "needs rectify = true"),
        (changed("square = true", "stretch = 1.2"), "needs rectify = true"),
        (changed("[answer]", '[answer]\nfrom = "kind"'), '17: answer.from "kind" cannot be it'),
        (
            changed("[answer]", '[answer]\nunder_load = "find"'),
            "answer.under_load needs a step with escalate",
        ),
        (changed("slo_ms = 120", "slo_ms = 0"), "1: slo_ms must be above 0"),
        (changed("slo_ms = 120", "slo_ms = ["), "pipeline.toml: "),
        ("slo_ms = 10\n", "step must be 1 to 8 tables [[step]], not 0"),
        ("\n".join(f'[[step]]\nname = "s{n}"\nmodel = "m"' for n in range(9)), "not 9"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(text)
    assert str(PATH) in str(raised.value)
    assert words in str(raised.value)


def test_what_a_parser_would_build_is_limited_before() -> None:
    for text, line, why in (
        (f"\n{'.'.join(['a'] * 20_000)} = 1", 2, "a key of more than 32 parts"),
        ("[[a]]\n" * 60_000, 50_001, "more than 100000 values"),
    ):
        with pytest.raises(ConfigError) as found:
            pipeline_config(text, Path("m/pipeline.toml"), "m")
        assert str(found.value).startswith(f"m/pipeline.toml:{line}: {why}")
