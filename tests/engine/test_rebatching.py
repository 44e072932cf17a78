"""Files whose batch is fixed: rewritten and proven, or refused with the reason."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from carpool import backends
from carpool.backends.backend import Placement
from carpool.config.onnx_batches import NoBatch, with_any_batch
from carpool.config.presets import PictureChoice
from carpool.config.repository import find_models
from carpool.engine.loading import rebatching
from carpool.engine.loading.trial import Examined, examine
from carpool.lab.model_report import inspect_model
from carpool.types import Array
from cli_run import run_cli
from engine.fixed_batches import CLASSES, SIDE, attention, blind, over_the_batch, with_token

RANDOM = np.random.default_rng(8)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))
    rebatching._made.cache_clear()


def examined(file: Path) -> Examined:
    [source], _ = find_models([file])
    return examine(PictureChoice().applied(source.config), source.versions[-1])


def ran(found: Examined, pictures: Array) -> Array:
    backend = backends.load(found.config, found.version, Placement(threads=1))
    try:
        return backend.run({"images": pictures}, ())["logits"]
    finally:
        backend.close()


@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("batch", [1, 8])
def test_a_batch_answers_what_the_file_answers_to_each(batch: int, constants: bool, tmp_path: Path) -> None:
    file = attention(tmp_path / "m.onnx", batch, constants=constants)
    found = examined(file)
    assert (found.config.max_batch, found.config.unbatched) == (32, "")
    assert f"its file fixes the batch to {batch}; with 3 changed Reshapes" in found.seen.claims.lines[-1]
    assert found.version.file != file
    pictures = RANDOM.random((5, 3, SIDE, SIDE)).astype(np.float32)
    session = rebatching._session(file.read_bytes())
    singles = [session.run(None, {"images": np.repeat(one[None], batch, 0)})[0][0] for one in pictures]
    np.testing.assert_allclose(ran(found, pictures), singles, atol=1e-5)
    onnx.checker.check_model(onnx.load(str(found.version.file)), full_check=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_token, "rewritten it fails with a batch of 3"),
        (over_the_batch, 'rewritten its output "logits" is another in a batch than alone'),
        (blind, "its answers to different noise are the same, which proves nothing"),
    ],
)
def test_what_is_not_proven_stays_as_it_is(make: Callable[[Path], Path], reason: str, tmp_path: Path) -> None:
    file = make(tmp_path / "m.onnx")
    found = examined(file)
    assert found.version.file == file
    assert found.config.max_batch == 0
    assert f"the file fixes the batch to 1, and {reason}" in found.config.unbatched
    shown = "\n".join(inspect_model(file).evidence)
    assert reason in shown
    assert "Ultralytics: dynamic=True, RF-DETR: dynamic_batch=True" in shown


def test_smaller_batches_are_filled_up_where_a_larger_one_is_fixed(tmp_path: Path) -> None:
    file = with_token(tmp_path / "m.onnx", 8)
    found = examined(file)
    assert (found.config.max_batch, found.config.unbatched, found.version.file) == (8, "", file)
    assert found.seen.claims.lines[-1].endswith("smaller batches are filled up to 8")
    pictures = RANDOM.random((8, 3, SIDE, SIDE)).astype(np.float32)
    whole = rebatching._session(file.read_bytes()).run(None, {"images": pictures})[0]
    for rows in (1, 3, 8):
        np.testing.assert_allclose(ran(found, pictures[:rows]), whole[:rows], atol=1e-6)
    report = inspect_model(file)
    assert (report.inputs[0].shape, report.unbatched) == ([-1, 3, SIDE, SIDE], "")
    (tmp_path / "model.toml").write_text('file = "m.onnx"\nmax_batch = 3\n')
    assert examined(tmp_path).config.max_batch == 3


def test_inspect_writes_the_file(tmp_path: Path) -> None:
    target = tmp_path / "any.onnx"
    shown = run_cli(["inspect", str(attention(tmp_path / "m.onnx")), "--rebatch", str(target)])
    assert "3 different inputs in one answered what each answers alone" in " ".join(shown.stdout.split())
    assert examined(target).version.file == target
    assert examined(target).config.max_batch == 32
    for file, why in ((with_token(tmp_path / "t.onnx"), "dynamic_batch=True"), (target, "it fixes no batch")):
        refused = run_cli(["inspect", str(file), "--rebatch", str(tmp_path / "no.onnx")])
        assert refused.exit_code != 0
        assert why in " ".join(refused.stderr.split())
    assert not (tmp_path / "no.onnx").exists()


def test_what_was_found_once_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = attention(tmp_path / "good.onnx"), with_token(tmp_path / "bad.onnx")
    first = examined(good), examined(bad)
    rebatching._made.cache_clear()
    monkeypatch.setattr(rebatching, "_refused", lambda *_: pytest.fail("it was tried again"))
    assert examined(good).version == first[0].version
    assert examined(bad).config.unbatched == first[1].config.unbatched


def test_a_file_that_another_server_removed_is_made_again(tmp_path: Path) -> None:
    """All servers of a user share the folder: this process still knows where it was."""
    file = attention(tmp_path / "m.onnx")
    made = examined(file).version.file
    assert made is not None
    made.unlink()
    assert examined(file).version.file == made
    assert made.is_file()


def test_the_files_that_were_used_longest_ago_are_removed(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.onnx").touch()
        if number >= 10:  # the others were used just now: a server may be about to open them
            os.utime(tmp_path / f"{number}.onnx", (number, number))
    rebatching._forget(tmp_path)
    left = {int(one.stem) for one in tmp_path.iterdir()}
    assert left == {*range(10), *range(34, 40)}


def test_settings_that_want_single_requests_have_them(tmp_path: Path) -> None:
    file = attention(tmp_path / "m.onnx")
    for most in (0, 1):
        (tmp_path / "model.toml").write_text(f'file = "m.onnx"\nmax_batch = {most}\n')
        assert examined(tmp_path).version.file == file
    (tmp_path / "model.toml").write_text('file = "m.onnx"\nmax_batch = 6\n')
    assert examined(tmp_path).config.max_batch == 6


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "file" / "cache"))
    found = examined(attention(tmp_path / "m.onnx"))
    assert "the rewritten file cannot be stored" in found.config.unbatched
    assert ran(found, np.zeros((1, 3, SIDE, SIDE), np.float32)).shape == (1, CLASSES)


def test_an_output_whose_first_dimension_is_open(tmp_path: Path) -> None:
    """As exporters leave it where they lose track of shapes; one that is no batch is refused by the proof."""
    model = onnx.load(str(attention(tmp_path / "m.onnx")))
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    onnx.save(model, str(tmp_path / "open.onnx"))
    found = examined(tmp_path / "open.onnx")
    assert (found.config.max_batch, found.config.unbatched) == (32, "")
    assert ran(found, np.zeros((3, 3, SIDE, SIDE), np.float32)).shape == (3, CLASSES)
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    with pytest.raises(NoBatch, match='its input "images" does not begin with 1'):
        with_any_batch(model.SerializeToString(), 1)


def test_weights_in_files_of_their_own(tmp_path: Path) -> None:
    model = onnx.load(str(attention(tmp_path / "m.onnx")))
    onnx.save(model, str(tmp_path / "w.onnx"), save_as_external_data=True, size_threshold=100)
    assert "its weights are in files of their own" in examined(tmp_path / "w.onnx").config.unbatched


def test_bytes_that_are_no_model(tmp_path: Path) -> None:
    data = attention(tmp_path / "m.onnx").read_bytes()
    with pytest.raises(NoBatch, match="does not begin with 4"):
        with_any_batch(data, 4)
    random = np.random.default_rng(2)
    for _ in range(300):
        broken = bytearray(data[: random.integers(1, len(data))])
        broken[random.integers(0, len(broken))] = random.integers(0, 256)
        try:
            with_any_batch(bytes(broken), 1)
        except ValueError:
            continue
