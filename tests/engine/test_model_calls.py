"""Models that ask other models of their server, written as for Triton's Python backend."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest

from carpool.core.job import INFINITY, Job
from carpool.engine.engine import Engine
from carpool.engine.fleet.model_calls import MOST_CALLS, ModelCalls
from carpool.engine.run.batch import Outcome, Work
from carpool.errors import InvalidInput, ModelError, Unavailable
from engine import repositories

T = TypeVar("T")

DOUBLE = "def predict(x): return x * 2"
PLAIN = 'instances = [{ count = 1, kind = "cpu" }]'
TWO = 'instances = [{ count = 2, kind = "cpu" }]'


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


def row(*values: float) -> np.ndarray[Any, Any]:
    return np.array([values], np.float32)


def asking(folder: Path, target: str, *, name: str = "asks", head: str = PLAIN, request: str = "") -> Path:
    """Asks the target with what it was asked, adds one, and passes errors on. A first value of 99 stays home:
    trials and what ends a chain."""
    code = f"""
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                return [self.answer(request) for request in requests]

            def answer(self, request):
                x = pb_utils.get_input_tensor_by_name(request, "x")
                if x.as_numpy()[0, 0] in (0, 99):
                    return pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy())])
                asked = pb_utils.InferenceRequest(
                    model_name={target!r}, requested_output_names=["y"], inputs=[x], {request}
                )
                found = asked.exec()
                if found.has_error():
                    return pb_utils.InferenceResponse(error=found.error())
                y = pb_utils.get_output_tensor_by_name(found, "y").as_numpy()
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", y + 1)])
    """
    return repositories.python(folder, code, name=name, head=head)


def test_a_model_asks_another(tmp_path: Path) -> None:
    repositories.python(tmp_path, DOUBLE, name="doubles", head=PLAIN)
    asking(tmp_path, "doubles")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            found = await asyncio.gather(*(engine.infer("asks", row(n, 2)) for n in range(1, 9)))
        assert [answer["y"].tolist() for answer in found] == [[[2 * n + 1, 5]] for n in range(1, 9)]

    run(story())


PROMISING = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.answer(request) for request in requests]

        def answer(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "x")
            asked = pb_utils.InferenceRequest(model_name="doubles", requested_output_names=["y"], inputs=[x])
            found = asked.exec()
            if found.has_error():
                raise ValueError(found.error().message())
            return pb_utils.InferenceResponse(found.output_tensors())
"""
SLOWLY = "import time\ndef setup(config): time.sleep(0.3)\ndef predict(x): return x * 2"


@pytest.mark.parametrize("on_demand", [False, True])
def test_who_is_asked_is_loaded_first(tmp_path: Path, on_demand: bool) -> None:
    """A promise is measured, and measuring asks."""
    repositories.python(tmp_path, PROMISING, name="asks", head=PLAIN + "\nslo_ms = 2000")
    repositories.python(tmp_path, SLOWLY, name="doubles", head=PLAIN)

    async def story() -> None:
        async with Engine(tmp_path, on_demand=on_demand) as engine:
            found = await engine.infer("asks", row(1, 2))
            assert found["y"].tolist() == [[2, 4]]
            assert {served.name for served in engine.served.values()} == {"asks", "doubles"}

    run(story())


def test_who_is_asked_may_be_loaded_for_it(tmp_path: Path) -> None:
    """The name is told by nobody before the call."""
    asking(tmp_path, "", name="asks")
    file = tmp_path / "asks" / "1" / "model.py"
    file.write_text(file.read_text().replace("model_name=''", "model_name='doub' + 'les'"))
    repositories.python(tmp_path, DOUBLE, name="doubles", head=PLAIN)

    async def story() -> None:
        async with Engine(tmp_path, on_demand=True) as engine:
            assert (await engine.infer("asks", row(1, 2)))["y"].tolist() == [[3, 5]]

    run(story())


def test_a_coroutine_asks_several_at_once(tmp_path: Path) -> None:
    repositories.python(tmp_path, DOUBLE, name="doubles", head=PLAIN)
    repositories.python(tmp_path, "def predict(x): return x * 3", name="triples", head=PLAIN)
    code = """
        import asyncio
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            async def execute(self, requests):
                responses = []
                for request in requests:
                    asked = [
                        pb_utils.InferenceRequest(
                            model_name=name, requested_output_names=["y"], inputs=request.inputs()
                        ).async_exec()
                        for name in ("doubles", "triples")
                    ]
                    found = [answer.output_tensors()[0].as_numpy() for answer in await asyncio.gather(*asked)]
                    responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", sum(found))]))
                return responses
    """
    repositories.python(tmp_path, code, name="gathers", head=PLAIN)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            found = await asyncio.gather(*(engine.infer("gathers", row(n, 1)) for n in range(4)))
        assert [answer["y"].tolist() for answer in found] == [[[5 * n, 5]] for n in range(4)]

    run(story())


@pytest.mark.parametrize(
    ("request_", "cause"),
    [
        ("model_version=7,", "there is no model doubles version 7"),
        ("", "doubles needs the input 'x'"),
    ],
)
def test_what_is_wrong_with_a_call_reaches_the_client_and_no_other(
    tmp_path: Path, request_: str, cause: str
) -> None:
    repositories.python(tmp_path, DOUBLE, name="doubles", head=PLAIN)
    model = asking(tmp_path, "doubles", request=request_)
    if not request_:
        file = model / "1" / "model.py"
        file.write_text(file.read_text().replace("inputs=[x]", "inputs=[]"))

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            good, bad = await asyncio.gather(
                engine.infer("asks", row(99, 1)), engine.infer("asks", row(1, 1)), return_exceptions=True
            )
        assert isinstance(good, dict)
        assert good["y"].tolist() == [[99, 1]]
        assert cause in str(bad)

    run(story())


def test_a_model_that_calls_itself_is_told_at_once(tmp_path: Path) -> None:
    asking(tmp_path, "asks")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(Unavailable, match="every instance of asks waits"):
                await engine.infer("asks", row(1, 2))
            assert (await engine.infer("asks", row(99, 2)))["y"].tolist() == [[99, 2]]

    run(story())


def test_two_models_that_wait_for_each_other_are_told(tmp_path: Path) -> None:
    asking(tmp_path, "right", name="left")
    asking(tmp_path, "left", name="right")

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            found = await asyncio.gather(
                *(engine.infer(name, row(1, 2)) for name in ("left", "right") * 4), return_exceptions=True
            )
            assert all("waits for its own" in str(error) for error in found)
            assert (await engine.infer("left", row(99, 2)))["y"].tolist() == [[99, 2]]

    run(story())


def test_a_model_may_call_itself_where_an_instance_is_left(tmp_path: Path) -> None:
    """The second instance answers the call of the first, which it knows by a value that ends the chain."""
    model = asking(tmp_path, "asks", head=TWO)
    file = model / "1" / "model.py"
    file.write_text(
        file.read_text().replace("inputs=[x]", 'inputs=[pb_utils.Tensor("x", x.as_numpy() * 0 + 99)]')
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            found = await asyncio.gather(
                *(engine.infer("asks", row(n, 2)) for n in range(1, 13)), return_exceptions=True
            )
        answers = [one["y"].tolist() for one in found if isinstance(one, dict)]
        assert answers
        assert all(answer == [[100, 100]] for answer in answers)
        assert all("waits for its own calls" in str(one) for one in found if isinstance(one, Exception))

    run(story())


@pytest.mark.parametrize(
    ("riders", "timeout", "expected"),
    [
        ([7.0], 0.0, 7.0),
        ([7.0, 9.0], 0.0, 9.0),  # somebody still reads it
        ([7.0, INFINITY], 0.0, INFINITY),
        ([7.0], 2.0, 3.0),
        ([], 0.0, INFINITY),  # a trial
    ],
)
def test_the_deadline_of_a_request_holds_for_what_it_asks(
    riders: list[float], timeout: float, expected: float
) -> None:
    submitted: list[Work] = []

    def prepare(*arguments: Any) -> tuple[int, Work, bool]:
        return 5, Work({}, arguments[-1], arrived=1.0), False

    counted: list[object] = []

    def served(jobs: list[Job]) -> Any:
        instance = SimpleNamespace(
            index=0, available=True, batch=SimpleNamespace(jobs=jobs) if jobs else None
        )
        return SimpleNamespace(
            runtime=SimpleNamespace(
                loop=asyncio.get_running_loop(), riding=lambda _number: jobs, asked_for=lambda _work: None
            ),
            scheduler=SimpleNamespace(instances=[instance]),
            name="model",
            counters=SimpleNamespace(asked=lambda error, _seconds: counted.append(error)),
        )

    async def story() -> None:
        target = served([])
        engine = SimpleNamespace(
            prepare=prepare,
            submit_own=lambda _key, work: submitted.append(work),
            served={5: target},
            bring_for=lambda *_: None,
        )
        calls = ModelCalls(engine)  # type: ignore[arg-type]
        caller = calls.caller(served([Job(0.0, deadline) for deadline in riders]), 0)
        answers: list[object] = []
        caller.ask("other", "", {}, (), timeout, answers.append)
        await asyncio.sleep(0)
        (work,) = submitted
        assert (work.deadline, work.due) == (expected, expected)
        work.done(work, Outcome(outputs={"y": row(1)}))
        assert list(answers[0]) == ["y"]  # type: ignore[call-overload]
        assert not calls.busy
        assert counted == [None]

    run(story())


@pytest.mark.conformance
def test_calls_end_with_the_instance_that_made_them(tmp_path: Path) -> None:
    repositories.fake(tmp_path, name="slow", curve="300+1", head="")
    code = """
        import os, threading
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            def execute(self, requests):
                x = requests[0].inputs()[0].as_numpy()
                if x[0, 0] == 1:
                    inputs = [pb_utils.Tensor("x", x.repeat(2, axis=1))]
                    for _ in range(3):
                        request = pb_utils.InferenceRequest(
                            model_name="slow", requested_output_names=["y"], inputs=inputs
                        )
                        threading.Thread(target=request.exec, daemon=True).start()
                    request.exec()
                    os._exit(1)
                return [
                    pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
                    for request in requests
                ]
    """
    repositories.python(tmp_path, code, name="asks", head=PLAIN)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(ModelError, match="process died"):
                await engine.infer("asks", row(1, 2))
            assert (await engine.infer("asks", row(2, 2)))["y"].tolist() == [[2, 2]]
            slow = engine.find("slow")
            assert await slow.runtime.driver.drained(20)

    run(story())


def test_an_instance_has_so_many_calls_and_no_more(tmp_path: Path) -> None:
    """The model that is asked answers nothing as long as a file is there, and the one that asks removes it at
    its second refusal: without them, all its calls would wait for ever."""
    shut = tmp_path / "shut"
    waits = f"""
        import pathlib, time

        def predict(x):
            while pathlib.Path({str(shut)!r}).exists():
                time.sleep(0.01)
            return x
    """
    code = f"""
        import asyncio, pathlib
        import numpy as np
        import triton_python_backend_utils as pb_utils

        class TritonPythonModel:
            async def execute(self, requests):
                x = requests[0].inputs()[0].as_numpy()
                calls = [
                    asyncio.ensure_future(pb_utils.InferenceRequest(
                        model_name="slow", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)],
                    ).async_exec())
                    for _ in range(int(x[0, 0]))
                ]
                done, waiting = set(), set(calls)
                while calls and len(done) < 2:
                    ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                    done |= ended
                if calls:
                    pathlib.Path({str(shut)!r}).unlink(missing_ok=True)
                refused = [found for found in await asyncio.gather(*calls) if found.has_error()]
                assert all("are open" in found.error().message() for found in refused)
                y = np.full((1, 2), len(refused), np.float32)
                return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
    """
    repositories.python(tmp_path, waits, name="slow", head=PLAIN)
    repositories.python(tmp_path, code, name="asks", head=PLAIN, max_batch=1)

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            few = await engine.infer("asks", row(MOST_CALLS, 0))
            shut.touch()
            many = await engine.infer("asks", row(MOST_CALLS + 2, 0))
        assert few["y"][0, 0] == 0
        assert many["y"][0, 0] == 2

    run(story())


def test_who_asks_for_nothing_sensible_hears_why(tmp_path: Path) -> None:
    repositories.python(tmp_path, DOUBLE, name="doubles", head=PLAIN)
    model = asking(tmp_path, "doubles")
    file = model / "1" / "model.py"
    file.write_text(
        file.read_text().replace("inputs=[x]", 'inputs=[pb_utils.Tensor("x", x.as_numpy().astype("f8"))]')
    )

    async def story() -> None:
        async with Engine(tmp_path) as engine:
            with pytest.raises(InvalidInput, match="must be FP32, not float64"):
                await engine.infer("asks", row(1, 2))

    run(story())
