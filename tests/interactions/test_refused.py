"""Pairs of features that are refused: when the model is loaded, or with the request that asks for both."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from carpool.engine.engine import Engine
from carpool.errors import CarpoolError
from engine import ensembles
from engine.scripted import run
from extensions.sequences.test_sequences import STATE, stateful
from interactions import stage

SEQUENCES = '[sequences]\n[[sequences.control]]\nname = "start"\nkind = "start"\ndatatype = "FP32"\n'
TENSORS = (
    '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [2]\n'
    '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [2]\n'
)
ROLLOUT = "[rollout]\ncanary = [0.5]\n"
CACHE = "[cache]\nttl_s = 10.0\n"
SIMILAR = "[cache]\nsimilar = true\n"
WRITES = '[generate]\n[fake]\ncurve = "1+0.1"\n'
SEQUENCE_MODEL = f'backend = "python"\n{SEQUENCES}{TENSORS}'


def settings(*texts: str) -> Callable[[Path], None]:
    """A model of these settings, the lines without a table first."""

    def write(models: Path) -> None:
        (models / "bad" / "1").mkdir(parents=True)
        (models / "bad" / "1" / "model.py").write_text("def predict(x):\n    return x\n")
        (models / "bad" / "model.toml").write_text("\n".join(texts))

    return write


def pipeline(more: str = "", model: str = "namer") -> Callable[[Path], None]:
    def write(models: Path) -> None:
        stage.colours(models, "namer")
        (models / "bad").mkdir()
        step = f'[[step]]\nname = "one"\nmodel = "{model}"\n'
        (models / "bad" / "pipeline.toml").write_text(more + step if "[" not in more else step + more)

    return write


def ensemble(model: str = "one", more: str = "") -> Callable[[Path], None]:
    """With two steps, of which this model is the second."""

    def write(models: Path) -> None:
        ensembles.adds(models, "one", 1)
        steps = [
            ensembles.step(name, [("x", a)], [("y", b)])
            for name, a, b in (("one", "in", "mid"), (model, "mid", "out"))
        ]
        ensembles.write(models, "bad", ensembles.text(*steps, more=more))

    return write


def both(*writes: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(models: Path) -> None:
        for one in writes:
            one(models)

    return write


def writer(models: Path) -> None:
    (models / "writer").mkdir(parents=True)
    (models / "writer" / "model.toml").write_text(WRITES)


def counter(models: Path) -> None:
    (models / "count" / "1").mkdir(parents=True)
    (models / "count" / "1" / "model.py").write_text(stage.COUNT)
    (models / "count" / "model.toml").write_text(stage.COUNT_SETTINGS)


def tracker(models: Path) -> None:
    stateful(models, STATE % "").rename(models / "tracker")


def rolled_ensemble(models: Path) -> None:
    ensemble()(models)
    (models / "bad" / "rollout.toml").write_text("canary = [0.5]\n")


def ensemble_of_a_pipeline(models: Path) -> None:
    pipeline()(models)
    (models / "bad").rename(models / "street")
    ensemble("street")(models)


DEVICE = '[image]\ndecode = "device"\n'
PIXELS = TENSORS.replace('"FP32"\nshape = [2]', '"UINT8"\nshape = [3, 16, 16]', 1)
REFUSED: dict[tuple[str, str], tuple[Callable[[Path], None], str]] = {
    ("exact", "pipeline"): (pipeline(CACHE), "cache does not go with a pipeline: neither its responses"),
    ("exact", "sequence"): (
        settings('backend = "python"', SEQUENCES, CACHE, TENSORS),
        "sequences do not go with a cache",
    ),
    ("exact", "decoupled"): (
        settings('decoupled = true\nbackend = "python"', CACHE, TENSORS),
        "decoupled: a cache stores the one response",
    ),
    ("exact", "text"): (settings(WRITES, CACHE), r"cache does not go with \[generate\]"),
    ("similar", "pipeline"): (
        pipeline(SIMILAR),
        "cache does not go with a pipeline: neither its responses",
    ),
    ("similar", "ensemble"): (
        ensemble(
            more='parameters { key: "cache" value { string_value: "similar" } } cache { similar: true }'
        ),
        "unknown field .cache.; did you mean .response_cache.",
    ),
    ("similar", "sequence"): (
        settings('backend = "python"', SEQUENCES, SIMILAR, TENSORS),
        "sequences do not go with a cache",
    ),
    ("similar", "decoupled"): (
        settings('decoupled = true\nbackend = "python"', SIMILAR, TENSORS),
        "decoupled: a cache stores the one response",
    ),
    ("similar", "text"): (settings(WRITES, SIMILAR), r"cache does not go with \[generate\]"),
    ("rollout", "pipeline"): (pipeline(ROLLOUT), "rollout does not go with a pipeline: roll out the models"),
    ("rollout", "ensemble"): (
        rolled_ensemble,
        "rollout.toml: does not go with ensemble_scheduling.*roll out the models",
    ),
    ("rollout", "sequence"): (
        settings('backend = "python"', SEQUENCES, ROLLOUT, TENSORS),
        "sequences do not go with a rollout",
    ),
    ("rollout", "decoupled"): (
        settings('decoupled = true\nbackend = "python"', ROLLOUT, TENSORS),
        "decoupled: a rollout compares the one response",
    ),
    ("rollout", "text"): (settings(WRITES, ROLLOUT), r"rollout does not go with \[generate\]"),
    ("pipeline", "ensemble"): (ensemble_of_a_pipeline, "street is a pipeline, which only front ends run"),
    ("pipeline", "sequence"): (both(tracker, pipeline(model="tracker")), "tracker takes sequences"),
    ("pipeline", "decoupled"): (
        both(counter, pipeline(model="count")),
        "count is decoupled, and a step needs exactly one response",
    ),
    ("pipeline", "text"): (both(writer, pipeline(model="writer")), "writer writes token by token"),
    ("ensemble", "sequence"): (both(tracker, ensemble("tracker")), "tracker takes sequences"),
    ("ensemble", "decoupled"): (
        both(counter, ensemble("count")),
        "count is decoupled, and a step needs exactly one response",
    ),
    ("ensemble", "text"): (both(writer, ensemble("writer")), "writer writes token by token"),
    ("sequence", "decoupled"): (
        settings('decoupled = true\nbackend = "python"', SEQUENCES, TENSORS),
        "decoupled: the next request of a sequence waits",
    ),
    ("sequence", "text"): (settings(WRITES, SEQUENCES), r"sequences does not go with \[generate\]"),
    ("sequence", "device"): (
        settings('backend = "python"', SEQUENCES, DEVICE, PIXELS),
        r"sequences do not go with a task for images, or \[image\]",
    ),
    ("decoupled", "text"): (settings("decoupled = true", WRITES), r"decoupled does not go with \[generate\]"),
    ("decoupled", "device"): (
        settings('decoupled = true\nbackend = "python"', DEVICE, PIXELS),
        "decoupled: image.decode",
    ),
    ("text", "device"): (settings(WRITES, DEVICE), r"image.decode cannot be .device. with \[generate\]"),
}


def why_not(models: Path) -> str:
    """What the model `bad` is refused with."""

    async def story() -> str:
        try:
            async with Engine(models) as engine:
                return next(
                    (line.reason for line in engine.index() if line.name == "bad" and line.reason), ""
                )
        except CarpoolError as error:
            return error.message

    return run(story())


@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_refused(pair: tuple[str, str], tmp_path: Path) -> None:
    write, says = REFUSED[pair]
    write(tmp_path)
    assert re.search(says, why_not(tmp_path)), why_not(tmp_path)
