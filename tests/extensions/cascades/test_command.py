"""`carpool cascade tune`: thresholds from samples and from models, and when it is not worth it."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from PIL import Image

from carpool.demo import bundled_models
from carpool.errors import InvalidInput
from carpool.extensions.cascades.command import write_threshold
from cli_run import CliResult, run_cli
from later import later

PIPELINE = """# keep this line
slo_ms = 500
[[step]]
name = "quick"
model = "small"
[[step]]
name = "sure"
model = "large"
escalate = { from = "quick", by = "margin", below = 0.5 }  # tuned
[answer]
from = "sure or quick"
under_load = "quick"
"""


def tune(*arguments: object) -> CliResult:
    return run_cli(["cascade", "tune", *map(str, arguments)])


def sample_file(folder: Path, pictures: int = 600, *, head: str = '{"labelled": true}') -> Path:
    """The cheap model is right where it is sure, and the big one nearly always."""
    random = Random(1)
    lines = [head]
    for _ in range(pictures):
        sure = random.random()
        one = {
            "certainty": {"margin": sure, "confidence": sure},
            "cheap": sure > 0.3 or random.random() < 0.5,
            "big": random.random() < 0.99,
        }
        lines.append(json.dumps(one))
    file = folder / "sample.jsonl"
    file.write_text("\n".join(line for line in lines if line))
    return file


def test_a_sample_is_tuned(tmp_path: Path) -> None:
    done = tune("--recorded", sample_file(tmp_path), "--costs", "1,15", "--loss", "0.5%", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["worth_it"]
    assert found["by"] == "margin"
    assert 0.6 < found["kept"] < 0.8
    assert found["loss"] <= 0.005 <= found["loss_at_most"]
    assert found["ratio"] == pytest.approx(15)
    assert found["times_cheaper"] == pytest.approx(15 / (1 + 15 * (1 - found["kept"])))
    assert found["curve"][0]["kept"] == 0.0
    assert found["curve"][-1]["kept"] == 1.0
    assert not found["written"]
    shown = tune("--recorded", sample_file(tmp_path), "--costs", "1,15")
    assert "By margin, below" in shown.stdout
    assert "→" in shown.stdout


def test_what_does_not_pay_is_said_to_be_not_worth_it(tmp_path: Path) -> None:
    done = tune("--recorded", sample_file(tmp_path), "--costs", "1,1.2")
    assert done.exit_code == 1
    assert "Not worth it" in done.stdout
    assert "large model alone" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("head", "arguments", "said"),
    [
        ('{"labelled": true}', (), "--costs is needed"),
        ('{"labelled": true}', ("--costs", "1"), "--costs must be two"),
        ('{"labelled": true}', ("--costs", "1,9", "--loss", "200%"), "--loss must be like"),
        ('{"labelled": true}', ("--costs", "1,9", "--by", "entropy"), "not entropy"),
        ("[1]", ("--costs", "1,9"), "must be an object"),
        ("nonsense", ("--costs", "1,9"), "no JSON"),
        ('{"certainty": {"margin": 2}}', ("--costs", "1,9"), "from 0 to 1"),
        ('{"certainty": {"margin": 1}, "cheap": 1}', ("--costs", "1,9"), "true or false"),
    ],
)
def test_what_cannot_be_used_is_named(
    tmp_path: Path, head: str, arguments: tuple[str, ...], said: str
) -> None:
    done = tune("--recorded", sample_file(tmp_path, head=head), *arguments)
    assert done.exit_code == 2
    assert said in done.stderr


def test_too_few_are_refused(tmp_path: Path) -> None:
    done = tune("--recorded", sample_file(tmp_path, 299), "--costs", "1,9")
    assert done.exit_code == 2
    assert "299 images are too few" in done.stderr


def test_costs_of_the_sample_are_used_and_the_curve_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    head = '{"labelled": false, "cheap_ms": 2, "big_ms": 20}'
    plot = tmp_path / "kept.svg"
    done = tune("--recorded", sample_file(tmp_path, head=head), "--loss", "2%", "--plot", plot, "--json")
    assert json.loads(done.stdout)["ratio"] == pytest.approx(10)
    assert plot.read_text().startswith("<?xml")


def test_only_the_threshold_is_written(tmp_path: Path) -> None:
    file = tmp_path / "pipeline.toml"
    file.write_text(PIPELINE)
    write_threshold(file, "confidence", 0.8123456789)
    changed = PIPELINE.replace('by = "margin", below = 0.5', 'by = "confidence", below = 0.812345')
    assert file.read_text() == changed
    file.write_text("slo_ms = 1\n")
    with pytest.raises(InvalidInput, match="into it yourself"):
        write_threshold(file, "margin", 0.5)


# ---- both models, loaded here


def colour_model(folder: Path, columns: int) -> None:
    """Names the strongest channel, from so many of the eight columns."""
    (folder / "1").mkdir(parents=True)
    cuts = [helper.make_tensor(name, TensorProto.INT64, [1], [value]) for name, value in CUTS.items()]
    cuts[1] = helper.make_tensor("end", TensorProto.INT64, [1], [columns])
    nodes = [
        helper.make_node("Slice", ["images", "start", "end", "axis"], ["part"]),
        helper.make_node("ReduceMean", ["part"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("Mul", ["mean", "gain"], ["logits"]),
    ]
    gain = helper.make_tensor("gain", TensorProto.FLOAT, [1], [20.0])
    images = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, 8, 8])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph(nodes, "colours", [images], [logits], [*cuts, gain])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, str(folder / "1" / "model.onnx"))
    settings = 'task = "classify"\nlabels = "labels.txt"\nmax_batch = 4\n'
    (folder / "model.toml").write_text(settings)
    (folder / "labels.txt").write_text("red\ngreen\nblue\n")


CUTS = {"start": 0, "end": 8, "axis": 3}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    colour_model(folder / "small", 2)
    colour_model(folder / "large", 8)
    (folder / "animals").mkdir()
    (folder / "animals" / "pipeline.toml").write_text(PIPELINE)
    pictures = folder.parent / "val"
    pictures.mkdir(exist_ok=True)
    random = np.random.default_rng(1)
    lines = ["file,label"]
    for number in range(320):
        pixels = random.integers(0, 256, (8, 8, 3)).astype(np.float64)
        pixels[:, :, number % 3] += random.choice([5, 80])
        pixels = pixels.clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number}.png")
        lines.append(f"{number}.png,{['red', 'green', 'blue'][int(pixels.mean((0, 1)).argmax())]}")
    (folder.parent / "val.csv").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("labelled", [True, later(False)])
def test_pictures_are_shown_to_both_models(
    repository: Path, labelled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARPOOL_CACHE_DIR", str(tmp_path / "cache"))
    labels = ("--labels", repository.parent / "val.csv") if labelled else ()
    kept = tmp_path / "sample.jsonl"
    given = (repository / "animals", "--pictures", repository.parent / "val", *labels, "--record", kept)
    done = tune(*given, "--costs", "1,20", "--loss", "1%", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["pictures"] == 320
    assert found["labelled"] is labelled
    assert found["big_accuracy"] == 1.0
    assert 0.3 < found["cheap_accuracy"] < 0.95
    assert 0.1 < found["kept"] < 0.95
    assert set(found["kept_by_measure"]) == {"margin", "confidence", "entropy"}
    assert found["written"]
    text = (repository / "animals" / "pipeline.toml").read_text()
    assert f'by = "{found["by"]}", below = {found["below"]:.2f}'[:-1] in text
    again = json.loads(tune("--recorded", kept, "--costs", "1,20", "--loss", "1%", "--json").stdout)
    assert again["below"] == pytest.approx(found["below"])


def test_what_is_no_cascade_or_has_too_few_pictures_is_refused(repository: Path, tmp_path: Path) -> None:
    assert "there is no" in tune(tmp_path, "--pictures", tmp_path).stderr
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.png").write_bytes((repository.parent / "val" / "0.png").read_bytes())
    done = tune(repository / "animals", "--pictures", tmp_path / "few")
    assert done.exit_code == 2
    assert "1 are too few" in done.stderr
    plain = '[[step]]\nname = "quick"\nmodel = "small"\n'
    (tmp_path / "pipeline.toml").write_text(plain)
    assert "no cascade" in tune(tmp_path, "--pictures", tmp_path).stderr
    assert "give PIPELINE" in tune("--pictures", tmp_path).stderr


def test_a_cascade_is_drawn(tmp_path: Path) -> None:
    folder = tmp_path / "animals"
    folder.mkdir()
    (folder / "pipeline.toml").write_text(
        '[[step]]\nname = "quick"\nmodel = "efficientnet_lite0"\n'
        '[[step]]\nname = "sure"\nmodel = "efficientnet_lite0"\n'
        'escalate = { from = "quick", by = "margin", below = 0.62 }\n'
        '[answer]\nunder_load = "quick"\n'
    )
    done = run_cli(["pipeline", "check", str(folder), "--models", str(bundled_models())])
    assert done.exit_code == 0, done.stderr
    for words in (
        "└─ quick: efficientnet_lite0, classify",
        "└─ where its margin is below 0.62:",
        "└─ sure: efficientnet_lite0, classify",
        "answer: that of sure if it runs, else of quick",
        "no time for sure: the response of quick, marked as degraded",
    ):
        assert words in done.stdout
    assert "keeps" not in done.stdout
