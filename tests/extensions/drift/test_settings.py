"""`[drift]` of model.toml."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool.config.model import ModelConfig
from carpool.config.server import server_settings
from carpool.config.toml import toml_config
from carpool.errors import ConfigError
from carpool.extensions.drift.settings import DriftSettings, UncertainSettings, drift_settings
from carpool.link.typed_json import read_document, write_document


def read(text: str) -> ModelConfig:
    return toml_config(text, Path("models/m/model.toml"))


def test_all_of_it_and_nothing_of_it() -> None:
    assert read("").extra == {}
    assert drift_settings(read("[drift]")) == DriftSettings()
    told = read(
        '[drift]\nsample = 1\nwindow_h = 24\nreference = "first-48h"\npsi = 0.1\n'
        'uncertain = { folder = "kept", score = [0.2, 0.6], margin = 0.2, per_hour = 5, mb = 1 }'
    )
    doubtful = UncertainSettings("kept", (0.2, 0.6), 0.2, 5, 1.0)
    settings = drift_settings(told)
    assert settings == DriftSettings(1.0, 24.0, "first-48h", 0.1, doubtful)
    assert settings is not None
    assert (settings.learn_s, settings.reference_file) == (48 * 3600.0, "")
    assert DriftSettings(reference="usual.json").reference_file == "usual.json"
    assert read_document(ModelConfig, write_document(told)) == told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("drift = 1", "drift must be a table"),
        ("[drift]\nsampel = 1", 'did you mean "sample"'),
        ("[drift]\nsample = 0", "drift.sample must be above 0 and at most 1"),
        ("[drift]\nsample = 1.5", "drift.sample must be above 0 and at most 1"),
        ("[drift]\nsample = nan", "drift.sample must be"),
        ("[drift]\nwindow_h = 0", "drift.window_h must be"),
        ("[drift]\npsi = 0", "drift.psi must be above 0"),
        ('[drift]\nreference = "last-24h"', 'like "first-24h", with 0.01 to 2160 hours, or a .json file'),
        ('[drift]\nreference = "first-0h"', 'like "first-24h"'),
        ('[drift]\nreference = "first-0.001h"', "with 0.01 to 2160 hours"),
        ('[drift]\nreference = "first-9999h"', "with 0.01 to 2160 hours"),
        ('[drift]\nreference = "../usual.json"', "inside the model's folder"),
        ('[drift]\nreference = "/etc/usual.json"', "inside the model's folder"),
        ("[drift]\nuncertain = 1", "drift.uncertain must be a table"),
        ("[drift]\nuncertain = { folders = 'x' }", 'did you mean "folder"'),
        ("[drift]\nuncertain = { folder = '../x' }", "drift.uncertain.folder"),
        ("[drift]\nuncertain = { score = 0.5 }", "the lowest and the highest score"),
        ("[drift]\nuncertain = { score = [0.6, 0.5] }", "the lowest and the highest score"),
        ("[drift]\nuncertain = { score = [0.6, 1.5] }", "the lowest and the highest score"),
        ("[drift]\nuncertain = { per_hour = 0 }", "drift.uncertain.per_hour must be"),
        ("[drift]\nuncertain = { mb = 0 }", "drift.uncertain.mb must be above 0"),
        ("sample = 0.1", "it belongs in [drift]"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(text)
    assert words in str(error.value)


def test_where_state_is_kept() -> None:
    assert server_settings({}, {"HOME": "/h"})[0].state_dir == Path("/h/.local/state/carpool")
    assert server_settings({}, {"CARPOOL_STATE_DIR": "/s"})[0].state_dir == Path("/s")


def test_a_reference_may_take_less_than_an_hour() -> None:
    settings = DriftSettings(reference="first-0.015h")
    assert (settings.learn_s, settings.reference_file) == (54.0, "")
