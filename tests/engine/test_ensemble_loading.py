"""Ensembles come and go with their models: loaded after them, unloaded before them, checked against them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from carpool.engine.engine import Engine
from carpool.engine.models.served import VersionState
from carpool.errors import CarpoolError, ConfigError, NotFound, Unavailable
from engine import ensembles
from engine.repositories import python
from engine.scripted import run
from engine.test_ensembles import rows
from extensions.text.test_text_driver import write_model
from waiting import until_in_loop as until


def states(engine: Engine) -> dict[str, str]:
    return {line.name: line.state for line in engine.index()}


def reason(engine: Engine, name: str) -> str:
    return next(line.reason for line in engine.index() if line.name == name)


def fails(folder: Path, said: str, name: str = "wrong") -> None:
    async def story() -> None:
        with pytest.raises(CarpoolError, match=said):
            await Engine(folder).start(only=[name])

    run(story())


def one_step(folder: Path, model: str, name: str = "wrong", version: int = -1) -> None:
    steps = ensembles.step(model, [("x", "in")], [("y", "out")], version=version)
    ensembles.write(folder, name, ensembles.text(steps))


def test_non_existing_model(tmp_path: Path) -> None:
    ensembles.adds(tmp_path, "one", 1)
    one_step(tmp_path, "on")
    fails(tmp_path, r'step\[0\].model_name: there is no model "on"; .*one')


def test_circular_dependency(tmp_path: Path) -> None:
    first = ensembles.step("second", [("in", "in")], [("out", "out")])
    second = ensembles.step("wrong", [("in", "in")], [("out", "out")])
    ensembles.write(tmp_path, "wrong", ensembles.text(first))
    ensembles.write(tmp_path, "second", ensembles.text(second))
    fails(tmp_path, "step.model_name: ensembles cannot need each other: wrong → second → wrong")


def test_self_circular_dependency(tmp_path: Path) -> None:
    ensembles.write(
        tmp_path, "wrong", ensembles.text(ensembles.step("wrong", [("in", "in")], [("out", "out")]))
    )
    fails(tmp_path, "step.model_name: ensembles cannot need each other: wrong → wrong")


def test_circles_do_not_stop_a_whole_start(tmp_path: Path) -> None:
    test_circular_dependency(tmp_path)
    ensembles.adds(tmp_path, "one", 1)

    async def story() -> None:
        engine = Engine(tmp_path)
        failed = await engine.start(patient=True)
        assert failed.keys() == {"wrong", "second"}
        assert states(engine)["one"] == VersionState.READY
        await engine.stop(1.0)

    run(story())


@pytest.mark.parametrize("versions", [(2,), (-1, 2), (2, -1)])
def test_no_required_version(tmp_path: Path, versions: tuple[int, ...]) -> None:
    ensembles.adds(tmp_path, "one", 1)
    tensors = ["in", *(f"t{n}" for n in range(1, len(versions))), "out"]
    steps = [
        ensembles.step("one", [("x", tensors[n])], [("y", tensors[n + 1])], version=version)
        for n, version in enumerate(versions)
    ]
    ensembles.write(tmp_path, "wrong", ensembles.text(*steps))
    fails(tmp_path, rf"step\[{versions.index(2)}\].model_version: version 2 of one is not loaded")


@pytest.mark.parametrize("name", ["invalid_decoupled_branching", "invalid_decoupled_branching_2"])
def test_decoupled_models_are_refused_before_any_ensemble_could_join_them(tmp_path: Path, name: str) -> None:
    model = ensembles.adds(tmp_path, "one", 1)
    config = model / "config.pbtxt"
    config.write_text(config.read_text() + "model_transaction_policy { decoupled: true }\n")
    one_step(tmp_path, "one", name)
    fails(tmp_path, "one: decoupled: it is for Python models|one is decoupled", name)


KINDS = {
    "sequences": ("sums", "sums takes sequences"),
    "decoupled": ("counts", "counts is decoupled, and a step needs exactly one response"),
    "generate": ("writer", "writer writes token by token"),
}


def model_of_a_kind(folder: Path, kind: str) -> str:
    name = KINDS[kind][0]
    if kind == "sequences":
        python(folder, "def predict(x): return x", name=name, head="[sequences]")
    elif kind == "decoupled":
        python(folder, "def predict(x): yield x", name=name, head="decoupled = true")
    else:
        write_model(folder)
    return name


@pytest.mark.parametrize("kind", KINDS)
def test_models_without_one_answer_of_their_own_are_no_steps(tmp_path: Path, kind: str) -> None:
    one_step(tmp_path, model_of_a_kind(tmp_path, kind))
    fails(tmp_path, rf"step\[0\].model_name: {KINDS[kind][1]}")


@pytest.mark.parametrize("kind", KINDS)
def test_nor_are_they_of_pipelines(tmp_path: Path, kind: str) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "pipeline.toml").write_text(
        f'[[step]]\nname = "first"\nmodel = "{model_of_a_kind(tmp_path, kind)}"\n'
    )
    fails(tmp_path, f"first.*{KINDS[kind][1]}")


def test_loading_an_ensemble_loads_what_it_needs(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)
    ensembles.adds(tmp_path, "other", 5)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start(only=[])
        await engine.load("chain")
        assert states(engine) == {
            "chain": VersionState.READY,
            "one": VersionState.READY,
            "ten": VersionState.READY,
            "other": "",
        }
        await engine.stop(1.0)

    run(story())


def test_unloading_a_step_takes_its_ensembles_along(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)
    steps = ensembles.step("chain", [("in", "in")], [("out", "out")])
    ensembles.write(tmp_path, "outer", ensembles.text(steps))

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.unload("one")
            await until(lambda: not engine.fleet.leaving)
            with pytest.raises(Unavailable, match=r"outer.*one, which it needs, was unloaded"):
                await engine.infer("outer", {"in": rows(1)})
            assert states(engine)["ten"] == VersionState.READY
            await engine.load("outer")  # and back, with all that it needs
            answer = await engine.infer("outer", {"in": rows(1)})
            np.testing.assert_array_equal(answer["out"], rows(12))

    run(story())


@pytest.mark.parametrize("dependents", [False, True])
def test_unloading_an_ensemble_leaves_its_steps_unless_asked(tmp_path: Path, dependents: bool) -> None:
    ensembles.chain(tmp_path)
    one_step(tmp_path, "ten", "also")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.unload("chain", dependents=dependents)
            with pytest.raises(NotFound):
                await engine.infer("chain", {"in": rows(1)})
            assert states(engine)["ten"] == VersionState.READY  # another ensemble needs it
            assert (states(engine)["one"] == VersionState.READY) is not dependents
            assert (await engine.infer("also", {"in": rows(1)}))["out"][0, 0] == 11

    run(story())


def test_a_step_that_is_loaded_again_is_used_at_once(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            assert (await engine.infer("chain", {"in": rows(1)}))["out"][0, 0] == 12
            ensembles.adds(tmp_path, "ten", 20, version=2)
            await engine.load("ten")
            assert (await engine.infer("chain", {"in": rows(1)}))["out"][0, 0] == 22

    run(story())


def test_a_step_that_does_not_fit_any_more_is_told(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            config = tmp_path / "ten" / "config.pbtxt"
            config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 2"))
            await engine.load("ten")
            assert not engine.find("chain").able
            with pytest.raises(ConfigError, match="max_batch_size 8 of the ensemble is more than the 2"):
                await engine.infer("chain", {"in": rows(1)})

    run(story())


def test_labels_are_those_of_the_model_that_writes_the_output(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)
    config = tmp_path / "ten" / "config.pbtxt"
    said = 'output [ { name: "y" label_filename: "labels.txt" '
    config.write_text(config.read_text().replace('output [ { name: "y" ', said))
    (tmp_path / "ten" / "labels.txt").write_text("cat\ndog\nowl\n")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            assert list(engine.find("chain").labels["out"]) == ["cat", "dog", "owl"]

    run(story())


_NAMER = """backend = "fake"
task = "classify"
max_batch = 8
[fake]
curve = "90+0"
[[input]]
name = "images"
datatype = "FP32"
shape = [3, 8, 8]
[[output]]
name = "logits"
datatype = "FP32"
shape = [3]
"""


_STEP = '\n[[step]]\nname = "kind"\nmodel = "namer"\n'


def pipelines(folder: Path, **promises: str) -> None:
    """Of one model that takes a tenth of a second."""
    for name, text in [("namer/model", _NAMER), *((f"{n}/pipeline", t + _STEP) for n, t in promises.items())]:
        (folder / name).parent.mkdir()
        (folder / f"{name}.toml").write_text(text)


@pytest.mark.parametrize("others", ["", "slo_ms = 60\nslo_may_grow = true"])
def test_a_pipelines_promise_may_grow_with_those_of_its_models(tmp_path: Path, others: str) -> None:
    pipelines(tmp_path, street="slo_ms = 50\nslo_may_grow = true", others=others)

    async def story() -> None:
        engine = Engine(tmp_path)
        await engine.start()
        for name in ("street", "namer"):
            found = engine.fleet.find(name)
            assert found is not None
            assert found[1].slo == pytest.approx(0.2)
        await engine.stop(1.0)

    run(story())


def test_no_promise_grows_that_somebody_counts_on(tmp_path: Path) -> None:
    pipelines(tmp_path, street="slo_ms = 50\nslo_may_grow = true", strict="slo_ms = 60")

    async def story() -> None:
        engine = Engine(tmp_path)
        failed = await engine.start(patient=True)
        assert failed.keys() == {"namer", "street", "strict"}
        assert "one image takes 90 ms here, so slo_ms = 60 cannot be met" in reason(engine, "namer")
        await engine.stop(1.0)

    run(story())
