"""Sentences for clients name no folders of the server's machine."""

from __future__ import annotations

import pytest

from carpool.engine.engine_host import hide_paths, without_paths
from carpool.errors import ConfigError


@pytest.mark.parametrize(
    ("sentence", "said"),
    [
        ("/tmp/carpool-model-x1/m/1/model.onnx: bad", "…/1/model.onnx: bad"),
        ("m: /home/alice/secret/config.pbtxt, line 3", "m: …/config.pbtxt, line 3"),
        ("cannot read '/etc/passwd'", "cannot read '…/passwd'"),
        ("send it to /v2/models/m/infer", "send it to /v2/models/m/infer"),
        ("3/4 of http://localhost:8000/etc/x", "3/4 of http://localhost:8000/etc/x"),
        ("no path at all", "no path at all"),
    ],
)
def test_paths_are_cut(sentence: str, said: str) -> None:
    assert without_paths(sentence) == said


def test_folders_with_any_name_are_cut() -> None:
    assert without_paths("/srv/my models/m/config.pbtxt: no", ("/srv/my models",)) == "…/m/config.pbtxt: no"


def test_an_error_keeps_what_else_it_says() -> None:
    error = hide_paths(ConfigError("/tmp/a/b: no", field="x"))
    assert (error.message, str(error), error.field) == ("…/b: no", "…/b: no", "x")
