"""Requests share a batch only where each gets the answer that it would get alone. Every engine is asked, when
a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.config.model import ModelConfig, ModelSignature, TensorSignature
from carpool.config.repository import find_models
from carpool.engine.loading.batch_proof import RULE, must_be_proven, prove
from carpool.engine.loading.loading import Loading, Ready
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Measuring, Point
from carpool.engine.profile.model_profile import Profile, ProfileStore, read_profile
from carpool.errors import ModelError
from carpool.link.typed_json import as_json
from carpool.types import Array, Datatype, Signature, TensorSpec

row_graphs = pytest.importorskip("engine.row_graphs")

NAMES = "in the file, the first axis of"
Make = Callable[[Path], Path]


def load(make: Make, folder: Path, settings: str = "", cache: Path | None = None) -> Ready:
    """Loads a model as a server does, and closes it."""
    if not (folder / "m").exists():
        (folder / "m" / "1").mkdir(parents=True)
        make(folder / "m" / "1" / "model.onnx")
    (folder / "m" / "model.toml").write_text(settings)
    sources, _ = find_models([folder], gpus=0)
    (source,) = sources
    loading = Loading(source.config, source.versions[-1], ProfileStore.of(cache))
    loading.check()
    ready = loading.prepare(lambda _: None)
    ready.close()
    return ready


@pytest.mark.parametrize("which", row_graphs.MIXED)
def test_rows_that_meet_run_alone(which: str, tmp_path: Path) -> None:
    ready = load(lambda path: row_graphs.mixed(path, which), tmp_path)
    assert (ready.signature.max_batch, ready.config.policy.max_batch) == (1, 1), ready.config.unbatched
    assert "batch of" in ready.config.unbatched
    assert ready.config.parameters["carpool_unbatched"] == ready.signature.unbatched
    assert any("so each request runs alone" in said for said in ready.choices)


def test_rows_that_do_not_meet_share_a_batch(tmp_path: Path) -> None:
    for number, which in enumerate(row_graphs.RIGHT):
        ready = load(lambda path, which=which: row_graphs.right(path, which), tmp_path / str(number))  # type: ignore[misc]
        assert (ready.signature.max_batch, ready.config.unbatched) == (32, ""), which
        assert ready.profile.proof.rule == RULE


@pytest.mark.parametrize("backend", ["openvino", "onnx_torch"])
def test_every_engine_is_asked(backend: str, tmp_path: Path) -> None:
    pytest.importorskip({"openvino": "openvino", "onnx_torch": "torch"}[backend])
    settings = f'backend = "{backend}"\n'
    mixed = load(lambda path: row_graphs.mixed(path, "attention between rows"), tmp_path / "1", settings)
    assert (mixed.signature.max_batch, bool(mixed.config.unbatched)) == (1, True)
    right = load(lambda path: row_graphs.right(path, "a soft maximum"), tmp_path / "2", settings)
    assert (right.signature.max_batch, right.config.unbatched) == (32, "")


def test_a_lite_file_too(tmp_path: Path) -> None:
    tflite_models = pytest.importorskip("backends.tflite_models")
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    tflite_models.brightness(folder / "model.tflite")
    ready = load(lambda path: path, tmp_path)
    assert (ready.signature.max_batch, ready.config.unbatched) == (32, "")


def test_a_network_of_torch_that_normalises_over_the_batch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    quiet = pytest.importorskip("extensions.torch.torch_models").quiet

    class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self, *, over_batch: bool) -> None:
            super().__init__()
            self.layer = torch.nn.Conv2d(3, 4, 3)
            self.over_batch = over_batch

        def forward(self, x: Any) -> Any:
            made = self.layer(x)
            return (
                torch.nn.functional.batch_norm(made, None, None, None, None, True)
                if self.over_batch
                else made
            )

    for training in (True, False):
        folder = tmp_path / str(training) / "m" / "1"
        folder.mkdir(parents=True)
        net = Net(over_batch=training)
        network = quiet(partial(torch.jit.trace, net, torch.rand(2, 3, 8, 8)))
        quiet(partial(torch.jit.save, network, str(folder / "model.pt")))
        tensors = "".join(
            f'[[{side}]]\nname = "{side.upper()}__0"\ndatatype = "FP32"\nshape = {shape}\n'
            for side, shape in (("input", [3, 8, 8]), ("output", [4, 6, 6]))
        )
        ready = load(lambda path: path, tmp_path / str(training), f"max_batch = 8\n{tensors}")
        assert ready.signature.max_batch == (1 if training else 8), ready.config.unbatched


# ---- what the file says of its axes


def test_towers_have_no_batch_in_common(tmp_path: Path) -> None:
    ready = load(row_graphs.two_towers, tmp_path)
    assert (ready.signature.max_batch, ready.config.policy.max_batch) == (0, 1)
    assert ready.signature.input_named["pixel_values"].shape == (-1, 3, 8, 8)
    assert NAMES in ready.config.unbatched
    assert not ready.profile.proof.rule  # there is nothing to prove


def test_unnamed_towers_are_found_out(tmp_path: Path) -> None:
    ready = load(lambda path: row_graphs.two_towers(path, named=False), tmp_path)
    assert ready.signature.max_batch == 1
    assert ready.config.unbatched == (
        'the output "logits_per_image" is [2, 2] for a batch of 2, and [1, 1] for one request'
    )


def test_settings_do_not_make_a_batch_of_what_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ready = load(row_graphs.two_towers, tmp_path, "max_batch = 8\n")
    assert (ready.signature.max_batch, ready.config.policy.max_batch) == (1, 1)
    assert "batches-off" in [record.message.partition(" ")[0] for record in caplog.records] or caplog.text


def test_settings_may_accept_a_little(tmp_path: Path) -> None:
    def quantised(path: Path) -> Path:
        return row_graphs.quantised(path)

    ready = load(quantised, tmp_path)
    assert (ready.signature.max_batch, 0 < ready.profile.proof.off < 0.05) == (1, True), ready.profile.proof
    ready = load(quantised, tmp_path, "max_batch = 8\n")
    assert (ready.signature.max_batch, ready.config.unbatched) == (8, "")
    assert any("max_batch asks for batches" in said for said in ready.choices)


def test_settings_of_single_requests_need_no_proof(tmp_path: Path) -> None:
    ready = load(row_graphs.two_towers, tmp_path, "max_batch = 1\n")
    assert (ready.signature.max_batch, ready.config.unbatched, ready.profile.proof.rule) == (1, "", 0)


def test_a_number_of_a_row_points_into_the_batch(tmp_path: Path) -> None:
    names = load(row_graphs.points, tmp_path / "1")
    assert (names.signature.max_batch, NAMES in names.config.unbatched) == (0, True)
    index = load(lambda path: row_graphs.points(path, named=False), tmp_path / "2")
    assert index.config.unbatched == 'the input "image_index" points at rows of the batch'
    proven = load(lambda path: row_graphs.points(path, named=False, index="which"), tmp_path / "3")
    assert (proven.signature.max_batch, "depends on the other" in proven.config.unbatched) == (1, True)
    insists = load(lambda path: row_graphs.points(path, named=False), tmp_path / "4", "max_batch = 4\n")
    assert (insists.signature.max_batch, bool(insists.config.unbatched)) == (1, True)


def tensor(name: str, *symbols: str, datatype: str = "FP32") -> TensorSignature:
    return TensorSignature(name, datatype, (-1,) * len(symbols), symbols=symbols)


@pytest.mark.parametrize(
    ("inputs", "outputs", "said"),
    [
        ((tensor("x", "batch", "n"),), (tensor("y", "batch", "n"),), ""),
        ((tensor("x", "unk__653"),), (tensor("y", "unk__654"),), ""),
        ((tensor("x", "batch"),), (tensor("y", "Gemmy_dim_0"),), ""),
        ((tensor("x", "batch"),), (tensor("y", ""),), ""),
        ((tensor("x", "batch"),), (tensor("y", "y_0"), tensor("z", "z_dynamic_axes_1")), ""),
        ((tensor("x", "batch"), tensor("z", "other")), (tensor("y", "batch"),), NAMES),
        ((tensor("x", "batch"),), (tensor("y", "2*batch"),), NAMES),
        ((tensor("x", "batch", "batch"),), (tensor("y", "batch"),), "also axis 1"),
        ((tensor("x", "n"), tensor("batch_idx", "n", datatype="INT64")), (tensor("y", "n"),), "points at"),
        ((tensor("x", "n"), tensor("class_index", "n", datatype="INT64")), (tensor("y", "n"),), ""),
    ],
)
def test_what_a_file_says(
    inputs: tuple[TensorSignature, ...], outputs: tuple[TensorSignature, ...], said: str
) -> None:
    why = ModelSignature(inputs, outputs).why_not_rows
    assert (said in why) if said else not why


# ---- what is remembered


def test_what_the_proof_runs_first_warms_up_for_the_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a slow network the first run of a measurement does not count, unless it ran before."""
    seen: list[tuple[bool, bool]] = []
    points = Measuring.points

    def look(measuring: Measuring, *arguments: Any) -> Measured:
        seen.append((measuring.rows is not None, measuring.warm))
        return points(measuring, *arguments)

    monkeypatch.setattr(Measuring, "points", look)
    load(lambda path: row_graphs.right(path, next(iter(row_graphs.RIGHT))), tmp_path)
    assert (True, True) in seen
    assert (True, False) not in seen


def test_a_later_start_believes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(path: Path) -> Path:
        return row_graphs.mixed(path, "a running sum")

    first = load(mixed, tmp_path / "repo", cache=tmp_path / "cache")
    assert first.profile.proof.differs

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it is proven again")

    monkeypatch.setattr("carpool.engine.loading.loading.BatchTrial", never)
    monkeypatch.setattr("carpool.engine.loading.loading.prove", never)
    again = load(mixed, tmp_path / "repo", cache=tmp_path / "cache")
    assert again.config.unbatched == first.config.unbatched
    assert again.signature.max_batch == 1


# ---- noise


@dataclass
class Net:
    """A network in Python."""

    answers: Callable[[Array, int], Array]
    alive: bool = True
    signature: ModelSignature = field(default_factory=ModelSignature)
    runs: int = 0
    images: int = 0

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        self.runs += 1
        self.images += len(inputs["x"])
        return {"y": self.answers(inputs["x"], self.runs)}

    def abort(self) -> None: ...

    def close(self) -> None: ...


def signature(datatype: Datatype = Datatype.FP32) -> Signature:
    return Signature("m", (TensorSpec("x", Datatype.FP32, (8,)),), (TensorSpec("y", datatype, (8,)),), 4)


def found(answers: Callable[[Array, int], Array], datatype: Datatype = Datatype.FP32) -> Any:
    return prove(Net(answers), signature(datatype))


def test_noise_of_an_engine_is_no_difference() -> None:
    random = np.random.default_rng(3)

    def kernels(x: Array, _run: int) -> Array:  # another one for batches
        return (x * (1 + 2e-5 * (len(x) > 1))).astype(np.float32)

    def halves(x: Array, _run: int) -> Array:  # an engine that computes in 8 bits of precision
        return (x * np.float32(1 + 0.01 * (len(x) > 1))).astype(np.float32)

    def dice(x: Array, _run: int) -> Array:
        return random.random(x.shape, np.float32)

    def chaos(x: Array, _run: int) -> Array:  # the order of what is nearly equal
        shaken = (x * np.float32(1 + 1e-6 * len(x)) * 1e4) % 1
        return shaken.astype(np.float32)

    for answers in (kernels, halves, dice, chaos):
        assert not found(answers).differs, answers


def test_little_of_another_row_is_a_difference() -> None:
    def leaks(x: Array, _run: int) -> Array:
        return (x + 1e-2 * x.mean(0)).astype(np.float32)

    def bytes_of(x: Array, _run: int) -> Array:
        return (x.mean(0) + x > 1).astype(np.int64)

    assert found(leaks).differs
    assert found(bytes_of, Datatype.INT64).differs


def test_a_model_that_shows_nothing_of_small_noise_is_asked_loudly() -> None:
    def deaf(x: Array, _run: int) -> Array:  # answers to nothing below 1
        return np.where(x.sum(0) > 1.5 * len(x), x.sum(0), np.zeros_like(x)).astype(np.float32)

    assert found(deaf).differs


def test_what_does_not_run_on_noise_is_not_proven() -> None:
    def refuses(_x: Array, _run: int) -> Array:
        raise ModelError("not this")

    proof = found(refuses)
    assert (proof.differs, proof.untried) == ("", "not this")


def test_what_a_model_raises_is_kept_as_a_short_line() -> None:
    def refuses(_x: Array, _run: int) -> Array:
        raise ModelError("not\nthis \x1b[31m" + "x" * 50_000)

    proof = found(refuses)
    assert proof.untried.startswith("not this ?[31mx")
    assert len(proof.untried) <= 1000
    profile = Profile(Layout(1, 1), "tried", Measured((Point(1, 0.01, 0.1, 5),)), proof=proof)
    assert read_profile(as_json(profile)) == profile


def test_it_costs_few_images() -> None:
    net = Net(lambda x, _run: x)
    assert not prove(net, signature()).differs
    assert (net.runs, net.images) == (4, 7)  # two rows alone, then two and three of them


def test_who_is_asked() -> None:
    net, path = Net(lambda x, _run: x), Path("m")
    asked = {
        "files": (ModelConfig(name="m", path=path, backend="onnxruntime", max_batch=8), True, True),
        "single requests": (
            ModelConfig(name="m", path=path, backend="onnxruntime", max_batch=1),
            True,
            False,
        ),
        "Python that says it": (ModelConfig(name="m", path=path, backend="python", max_batch=8), True, False),
        "Python that does not": (
            ModelConfig(name="m", path=path, backend="python", max_batch=32),
            False,
            True,
        ),
        "streams": (
            ModelConfig(name="m", path=path, backend="python", max_batch=32, decoupled=True),
            False,
            False,
        ),
    }
    for what, (config, declared, expected) in asked.items():
        assert must_be_proven(net, config, declared=declared) == expected, what


def test_inspect_says_it(tmp_path: Path) -> None:
    from carpool.lab.model_report import inspect_model

    for make, said in (
        (row_graphs.two_towers, NAMES),
        (lambda path: row_graphs.mixed(path, "a running sum"), "depends on the other"),
        (lambda path: row_graphs.right(path, "a product"), ""),
    ):
        report = inspect_model(make(tmp_path / "model.onnx"))
        assert (said in report.unbatched) if said else not report.unbatched
        assert any(line.startswith("each request runs alone") for line in report.evidence) == bool(said)


SUMS = """
INPUTS = {"x": ("FP32", [4])}
OUTPUTS = {"y": ("FP32", [4])}
MAX_BATCH = LARGEST

class Model:
    def predict(self, x):
        if x.max() < 1000:
            raise ValueError("no such row")
        return {"y": x}
"""


@pytest.mark.parametrize("largest", [32, 16])
def test_a_python_file_asks_for_as_many_as_others_have_unasked(largest: int, tmp_path: Path) -> None:
    from carpool.lab.model_report import inspect_model

    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(SUMS.replace("LARGEST", str(largest)))
    (source,) = find_models([tmp_path], gpus=0)[0]
    ready = Loading(source.config, source.versions[-1]).prepare(lambda _: None)
    ready.close()
    assert (ready.signature.max_batch, ready.signature.unbatched) == (largest, "")
    assert inspect_model(tmp_path / "m").unbatched == ""
