"""Ensembles through the engine's public face: the answers that calling the models by hand gives."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.engine.engine import Engine
from carpool.errors import ModelError, Refused
from carpool.extensions.ensembles.ensemble_route import EnsembleRoute
from engine import ensembles, repositories
from engine.scripted import run
from waiting import until_in_loop as until

Array = np.ndarray[Any, Any]


def rows(*values: float) -> Array:
    return np.array([[value] * 3 for value in values], np.float32)


def read(folder: Path, name: str, **inputs: Array) -> dict[str, Array]:
    async def story() -> dict[str, Array]:
        async with Engine(folder) as engine:
            return await engine.infer(name, inputs)

    return run(story())


def test_a_chain_answers_as_its_models_do_one_after_the_other(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            x = rows(1, 2, 5)
            mid = await engine.infer("one", {"x": x})
            by_hand = await engine.infer("ten", {"x": mid["y"]})
            answer = await engine.infer("chain", {"in": x})
            assert answer.keys() == {"out"}
            np.testing.assert_array_equal(answer["out"], by_hand["y"])
            alone = await engine.infer("chain", {"in": x[0]})  # without a batch dimension
            np.testing.assert_array_equal(alone["out"], by_hand["y"][0])

    run(story())


def diamond(folder: Path) -> Path:
    ensembles.adds(folder, "one", 1)
    ensembles.adds(folder, "ten", 10)
    ensembles.adds(folder, "extra", 100)
    ensembles.joins(folder, "join")
    steps = (
        ensembles.step("one", [("x", "in")], [("y", "left")]),
        ensembles.step("ten", [("x", "in")], [("y", "right")]),
        ensembles.step("join", [("a", "left"), ("b", "right")], [("total", "sum"), ("product", "product")]),
        ensembles.step("extra", [("x", "left")], [("y", "side")]),
    )
    return ensembles.write(folder, "street", ensembles.text(*steps, outputs=("sum", "product", "side")))


def test_steps_fan_out_and_in(tmp_path: Path) -> None:
    diamond(tmp_path)
    found = read(tmp_path, "street", **{"in": rows(1, 2)})
    np.testing.assert_array_equal(found["sum"], rows(13, 15))
    np.testing.assert_array_equal(found["product"], rows(22, 36))
    np.testing.assert_array_equal(found["side"], rows(102, 103))


def test_steps_that_no_wanted_output_needs_do_not_run(tmp_path: Path) -> None:
    diamond(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            found = await engine.infer("street", {"in": rows(1)}, outputs=["side"])
            assert found.keys() == {"side"}
            ran = {
                name: engine.find(name).counters.batches.document()
                for name in ("one", "ten", "join", "extra")
            }
            assert [bool(ran[name]) for name in ran] == [True, False, False, True]

    run(story())


def test_ensembles_may_be_steps(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)
    ensembles.adds(tmp_path, "hundred", 100)
    steps = (
        ensembles.step("chain", [("in", "in")], [("out", "mid")]),
        ensembles.step("hundred", [("x", "mid")], [("y", "late")]),
        ensembles.step("chain", [("in", "late")], [("out", "out")]),
    )
    ensembles.write(tmp_path, "outer", ensembles.text(*steps, more=ensembles.promise(5000)))
    np.testing.assert_array_equal(read(tmp_path, "outer", **{"in": rows(1, 2)})["out"], rows(123, 124))


@pytest.mark.parametrize("max_batch", [0, 1])
@pytest.mark.parametrize("batched", [(True, False), (False, True), (False, False), (True, True)])
def test_models_with_and_without_batches_go_together(
    tmp_path: Path, max_batch: int, batched: tuple[bool, bool]
) -> None:
    ensembles.adds(tmp_path, "one", 1, batched=batched[0])
    ensembles.adds(tmp_path, "ten", 10, batched=batched[1])
    steps = (
        ensembles.step("one", [("x", "in")], [("y", "mid")]),
        ensembles.step("ten", [("x", "mid")], [("y", "out")]),
    )
    ensembles.write(tmp_path, "chain", ensembles.text(*steps, max_batch=max_batch))
    x = rows(1) if max_batch else rows(1)[0]
    np.testing.assert_array_equal(read(tmp_path, "chain", **{"in": x})["out"], x + 11)


def test_a_step_may_name_its_version(tmp_path: Path) -> None:
    ensembles.adds(tmp_path, "one", 1)
    ensembles.adds(tmp_path, "one", 1000, version=2)
    steps = (
        ensembles.step("one", [("x", "in")], [("y", "mid")], version=1),
        ensembles.step("one", [("x", "mid")], [("y", "out")]),
    )
    ensembles.write(tmp_path, "both", ensembles.text(*steps))
    np.testing.assert_array_equal(read(tmp_path, "both", **{"in": rows(5)})["out"], rows(1006))


def test_requests_share_the_batches_of_its_steps(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            asked = [engine.infer("chain", {"in": rows(n)}) for n in range(8)]
            answers = await asyncio.gather(*asked)
            for number, answer in enumerate(answers):
                np.testing.assert_array_equal(answer["out"], rows(number + 11))
            sizes = engine.find("one").counters.batches.document()
            assert max(int(entry["batch_size"]) for entry in sizes) > 1

    run(story())


def test_its_statistics_are_the_sums_of_its_steps(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            await engine.infer("chain", {"in": rows(1, 2)})
            (entry,) = engine.find("chain").counters.batches.document()
            assert int(entry["batch_size"]) == 2
            parts = [engine.find(name).counters.batches.document()[0] for name in ("one", "ten")]
            total = sum(int(part["compute_infer"]["ns"]) for part in parts)
            assert int(entry["compute_infer"]["ns"]) == pytest.approx(total, abs=2)

    run(story())


def test_the_first_step_that_fails_ends_it(tmp_path: Path) -> None:
    ensembles.adds(tmp_path, "one", 1)
    repositories.python(tmp_path, "def predict(x): raise ValueError('it broke')", name="broken", shape="[3]")
    steps = (
        ensembles.step("broken", [("x", "in")], [("y", "mid")]),
        ensembles.step("one", [("x", "mid")], [("y", "out")]),
    )
    ensembles.write(tmp_path, "chain", ensembles.text(*steps))
    with pytest.raises(ModelError, match=r"in ensemble 'chain', .*it broke"):
        read(tmp_path, "chain", **{"in": rows(1)})


OMITS = """
import triton_python_backend_utils as u

class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            x = u.get_input_tensor_by_name(request, "x").as_numpy()
            outputs = [u.Tensor("sure", x)] if x[0, 0] != 9 else []
            if x[0, 0] > 0 and x[0, 0] != 9:
                outputs.append(u.Tensor("unsure", x))
            found.append(u.InferenceResponse(outputs))
        return found
"""


def omitting(folder: Path) -> None:
    """It leaves `unsure` out below zero, and everything for a nine."""
    (folder / "omits" / "1").mkdir(parents=True)
    (folder / "omits" / "1" / "model.py").write_text(OMITS)
    tensor = "data_type: TYPE_FP32 dims: [ 3 ]"
    (folder / "omits" / "config.pbtxt").write_text(
        f'backend: "python" max_batch_size: 8 input {{ name: "x" {tensor} }} '
        f'output {{ name: "sure" {tensor} }} output {{ name: "unsure" {tensor} }}'
    )
    ensembles.adds(folder, "ten", 10)
    steps = (
        ensembles.step("omits", [("x", "in")], [("sure", "out"), ("unsure", "mid")]),
        ensembles.step("ten", [("x", "mid")], [("y", "more")]),
    )
    ensembles.write(folder, "some", ensembles.text(*steps, outputs=("out", "more")))


def test_outputs_that_a_step_leaves_out_are_left_out_of_the_answer(tmp_path: Path) -> None:
    omitting(tmp_path)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            assert (await engine.infer("some", {"in": rows(1)})).keys() == {"out", "more"}
            assert (await engine.infer("some", {"in": rows(-1)})).keys() == {"out"}
            assert not engine.find("ten").counters.batches.document()[1:]  # it ran once, for the first
            for wanted in ([], ["more"]):
                with pytest.raises(ModelError, match="in ensemble 'some', unexpected deadlock"):
                    await engine.infer("some", {"in": rows(9)}, outputs=wanted)

    run(story())


def slow_chain(folder: Path, slo_ms: float, curve: str = "60+1") -> None:
    for name in ("first", "second"):
        model = folder / name
        model.mkdir()
        (model / "model.toml").write_text(
            f'backend = "fake"\nmax_batch = 8\n[fake]\ncurve = "{curve}"\n'
            '[[input]]\nname = "x"\ndatatype = "FP32"\nshape = [3]\n'
            '[[output]]\nname = "y"\ndatatype = "FP32"\nshape = [3]\n'
        )
    steps = (
        ensembles.step("first", [("x", "in")], [("y", "mid")]),
        ensembles.step("second", [("x", "mid")], [("y", "out")]),
    )
    ensembles.write(folder, "slow", ensembles.text(*steps, more=ensembles.promise(slo_ms)))


def test_its_promise_holds_for_steps_that_promise_nothing(tmp_path: Path) -> None:
    slow_chain(tmp_path, 2000)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            assert engine.find("slow").slo == engine.find("first").slo == engine.find("second").slo == 2.0
            answer = await engine.infer("slow", {"in": rows(1)})
            assert answer["out"].shape == (1, 3)

    run(story())


def test_what_a_later_step_could_not_finish_is_refused_at_arrival(tmp_path: Path) -> None:
    """100 ms are enough for one step of 60 ms, and not for two."""
    slow_chain(tmp_path, 100)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            for step in ("first", "second"):  # which have just run: else it would be a probe
                engine.find(step).scheduler.instances[0].idle_since = float("inf")
            with pytest.raises(Refused) as caught:
                await engine.infer("slow", {"in": rows(1)})
            assert caught.value.reason == "cannot-finish"
            assert caught.value.predicted_ms is not None
            assert caught.value.predicted_ms > 120
            assert not engine.find("first").counters.batches.document()

    run(story())


def test_a_client_that_leaves_ends_it(tmp_path: Path) -> None:
    slow_chain(tmp_path, 5000, curve="200+1")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            task = asyncio.ensure_future(engine.infer("slow", {"in": rows(1)}))
            route = engine.find("slow").runtime.route()
            assert isinstance(route, EnsembleRoute)
            await until(lambda: len(route.open) == 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: not route.open)
            assert not engine.find("second").counters.batches.document()

    run(story())


def test_python_models_may_call_an_ensemble(tmp_path: Path) -> None:
    ensembles.chain(tmp_path)
    (tmp_path / "caller" / "1").mkdir(parents=True)
    (tmp_path / "caller" / "1" / "model.py").write_text(
        "import triton_python_backend_utils as u\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        found = []\n"
        "        for request in requests:\n"
        "            x = u.get_input_tensor_by_name(request, 'x').as_numpy()\n"
        "            asked = u.InferenceRequest(model_name='chain', requested_output_names=['out'],\n"
        "                                       inputs=[u.Tensor('in', x)])\n"
        "            answer = asked.exec()\n"
        "            assert not answer.has_error(), answer.error().message()\n"
        "            out = u.get_output_tensor_by_name(answer, 'out').as_numpy()\n"
        "            found.append(u.InferenceResponse([u.Tensor('y', out)]))\n"
        "        return found\n"
    )
    (tmp_path / "caller" / "config.pbtxt").write_text(
        'backend: "python" max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [ 3 ] }'
    )
    np.testing.assert_array_equal(read(tmp_path, "caller", x=rows(1))["y"], rows(12))
