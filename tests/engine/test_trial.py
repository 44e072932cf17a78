"""A model looked at before it is measured: every engine is run once on noise, and says what it fixes."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from carpool.config.model import ClassifySettings, ModelConfig, TensorConfig
from carpool.config.presets import PictureChoice
from carpool.engine.loading.trial import read_labels
from carpool.errors import ConfigError
from carpool.lab.batch_profile import ProfileQuestion, profile
from carpool.lab.model_report import ModelReport, inspect_model
from carpool.types import Datatype, Signature, TensorSpec
from vision.classifiers import classifier

CLASSIFY = PictureChoice(task="classify")
FIXED = "the file fixes the batch to 1, so requests cannot be batched; export with a dynamic first dimension"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is found of a file is kept for all servers of a user, also by another version of the code."""
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))


def activation(report: ModelReport) -> str | None:
    import tomllib

    return ClassifySettings(**tomllib.loads(report.toml)["classify"]).activation


@pytest.mark.parametrize("softmax", [True, False])
def test_litert_gets_no_second_softmax(softmax: bool, tmp_path: Path) -> None:
    tflite_models = pytest.importorskip("backends.tflite_models")
    file = tflite_models.classifier(tmp_path / "m.tflite", softmax=softmax)
    report = inspect_model(file, CLASSIFY)
    assert activation(report) == ("none" if softmax else "softmax")  # means of noise are fractions, too
    assert report.outputs[0].tried == [3]
    assert any("add up to 1" in line for line in report.evidence) == softmax


@pytest.mark.parametrize(("softmax", "expected"), [(True, "none"), (False, "softmax")])
def test_torchscript_and_openvino_too(softmax: bool, expected: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    quiet = pytest.importorskip("extensions.torch.torch_models").quiet

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, x: object) -> object:
            made = 10 * x.mean((2, 3)) - 5 * torch.tensor([1.0, 0.0, 2.0])  # type: ignore[attr-defined]
            return made.softmax(1) if softmax else made

    file = tmp_path / "m.pt"
    quiet(lambda: torch.jit.save(torch.jit.trace(Net(), torch.rand(1, 3, 16, 16)), str(file)))
    assert activation(inspect_model(file, PictureChoice(task="classify", size=(16, 16)))) == expected
    openvino = pytest.importorskip("openvino")
    openvino.save_model(
        openvino.convert_model(classifier(tmp_path / "v.onnx", softmax=softmax)), tmp_path / "v.xml"
    )
    assert activation(inspect_model(tmp_path / "v.xml", CLASSIFY)) == expected


def test_torchscript_says_that_a_size_is_enough(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    quiet = pytest.importorskip("extensions.torch.torch_models").quiet
    from carpool.errors import ConfigError

    file = tmp_path / "m.pt"
    quiet(lambda: torch.jit.save(torch.jit.trace(torch.nn.Flatten(), torch.rand(1, 3, 16, 16)), str(file)))
    with pytest.raises(ConfigError, match="--size 224"):
        inspect_model(file)


def test_a_fixed_batch_is_named_and_profile_gives_that_reason(tmp_path: Path) -> None:
    file = classifier(tmp_path / "m.onnx", batch=1)
    assert not any(FIXED in line for line in inspect_model(file).evidence)  # it is rewritten
    (tmp_path / "model.toml").write_text('file = "m.onnx"\nmax_batch = 0\n')
    assert any(FIXED in line for line in inspect_model(file).evidence)
    notes = profile(ProfileQuestion(file, repeats=2, instances=1, threads=1)).notes
    assert any(FIXED in note for note in notes)
    assert not any("The time is spent per image" in note for note in notes)


@pytest.mark.parametrize(
    ("shape", "max_batch", "why"),
    [
        ((1, 3, 8, 8), 0, FIXED),
        ((-1, 3, 8, 8), 0, "its settings say max_batch = 0"),
        ((3, 8, 8), 1, "its settings say max_batch = 1"),
        ((8,), 0, "its tensors have no batch dimension"),
        ((3, 8, 8), 8, ""),
    ],
)
def test_why_requests_are_not_batched(shape: tuple[int, ...], max_batch: int, why: str) -> None:
    found = Signature("m", (TensorSpec("x", Datatype.FP32, shape),), (), max_batch).why_unbatched()
    assert found.startswith(why)
    assert bool(found) == bool(why)


def test_every_task_that_is_possible_is_named(tmp_path: Path) -> None:
    report = inspect_model(classifier(tmp_path / "m.onnx", output="features"))
    assert report.task is None
    assert 'set task = "classify" or "embed"' in report.ask
    assert '# task = "classify"  # or "embed"' in report.toml


def test_a_labels_file_holds_as_many_lines_as_there_can_be_classes(tmp_path: Path) -> None:
    """What is too much is rejected before a list is made of it: every front end would have that."""
    output = TensorConfig("y", "FP32", (1000,))
    config = ModelConfig(name="m", path=tmp_path, outputs=(output,), labels="labels.txt")
    file = tmp_path / "labels.txt"
    for text, known in (("cat\r\ndog\n", ["cat", "dog"]), ("x\n" * 20_000, ["x"] * 20_000)):
        file.write_text(text, newline="")
        assert read_labels(config) == {"y": known}
    for text, why in (
        ("\n" * 1_000_000, "has 1000001 lines, and at most 66536 can be labels of an output of [1000]"),
        ("\v" * 100_000, "has 100001 lines"),
        ("x" * (5 << 20), "too large for labels"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(why)):
            read_labels(config)
    varying = replace(config, outputs=(replace(output, dims=(-1,)),))
    file.write_text("x\n" * 100_000)
    assert len(read_labels(varying)["y"]) == 100_000
    file.write_text("x\n" * 300_000)
    with pytest.raises(ConfigError, match="at most 262144"):
        read_labels(varying)
