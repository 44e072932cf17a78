"""`carpool compile`: the file it writes is the one that a server finds, with the profile in it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
import torch

from carpool.config.repository import ModelSource, find_models
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.model_profile import ProfileStore
from carpool.errors import InvalidInput
from carpool.extensions.torch import compiled_model, found_compiled, torch_programs
from carpool.extensions.torch.compiled_model import compile_model

CODE = """
    import torch


    class Double(torch.nn.Module):
        def forward(self, x):
            return x * 2


    def build():
        return Double()
"""
SETTINGS = """
    backend = "pytorch"
    max_batch = 2
    [pytorch]
    device = "cpu"
    module = "model.py:build"
    compile = {compile}
    [[input]]
    name = "x"
    datatype = "FP32"
    shape = [2]
    [[output]]
    name = "y"
    datatype = "FP32"
    shape = [2]
"""


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A stand-in; the list gets the artifacts that are loaded."""
    loaded: list[bytes] = []
    monkeypatch.setattr(torch, "compile", lambda pipeline, **_: lambda *rows: pipeline(*rows))
    monkeypatch.setattr(torch_programs.Programs, "_timed", lambda _self, _program: 0.001)
    monkeypatch.setattr(compiled_model, "saved_artifacts", lambda: b"code")
    monkeypatch.setattr(found_compiled, "load_artifacts", loaded.extend)
    return loaded


def model_in(folder: Path, compiles: str = "true") -> ModelSource:
    (folder / "m" / "1").mkdir(parents=True)
    (folder / "m" / "1" / "model.py").write_text(dedent(CODE))
    (folder / "m" / "model.toml").write_text(dedent(SETTINGS).format(compile=compiles))
    found, _ = find_models([folder])
    return found[0]


@pytest.mark.parametrize("later", ["true", '"before-ready"'])
def test_a_server_finds_what_was_compiled_ahead(tmp_path: Path, compiler: list[bytes], later: str) -> None:
    source = model_in(tmp_path)
    done = compile_model(source, None, lambda _: None)
    assert done.file.parent == tmp_path / "m" / "1"
    assert [(one.size, one.why_not) for one in done.sizes] == [(1, ""), (2, "")]

    text = (tmp_path / "m" / "model.toml").read_text().replace("compile = true", f"compile = {later}")
    (tmp_path / "m" / "model.toml").write_text(text)
    found, _ = find_models([tmp_path])
    config, version = found[0].config, found[0].versions[-1]
    loading = Loading(config, version, ProfileStore(tmp_path / "cache"), behind=True)
    ready = loading.prepare(lambda _: None)
    try:
        assert loading.compiled is not None
        assert loading.compiled.sizes == (1, 2)
        if later == "true":
            assert compiler == [], "it is read when it is needed, which is behind the traffic"
            assert loading.compiled.profile is not None, "measured with the same settings on this machine"
            loading.bring_artifacts()
        assert compiler == [b"code"]
    finally:
        ready.close()


def test_a_model_that_is_not_to_be_compiled_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="set compile = true"):
        compile_model(model_in(tmp_path, "false"), None, lambda _: None)


def test_a_size_that_is_slower_compiled_stays_as_it_is(
    tmp_path: Path, compiler: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.001, 0.002, 0.003, 0.001, 0.001])
    monkeypatch.setattr(torch_programs.Programs, "_timed", lambda _self, _program: next(times))
    assert compiler == []
    done = compile_model(model_in(tmp_path), tmp_path / "out", lambda _: None)
    why = {one.size: one.why_not for one in done.sizes}
    assert why == {1: "it is not faster: 2 ms compiled, and 1 ms as it is", 2: ""}
