"""Models with sequences in a whole engine, without sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import carpool
from absent import rows
from carpool.engine.engine import Engine
from carpool.engine.run.batch import Work
from carpool.errors import CarpoolError, ConfigError, InvalidInput, ModelError, Unavailable
from carpool.observe import columns
from engine.repositories import python
from waiting import until_in_loop as until

EXAMPLES = Path(__file__).parents[3] / "examples"
SEQUENCES = """
[sequences]
{more}
[[sequences.control]]
name = "start"
kind = "start"
datatype = "FP32"
[[sequences.control]]
name = "end"
kind = "end"
datatype = "BOOL"
[[sequences.control]]
name = "ready"
kind = "ready"
values = [-1, 2]
[[sequences.control]]
name = "id"
kind = "corrid"
"""
SUMS = """
    import os
    import numpy as np
    sums = {}
    def predict(x, start, end, ready, id):
        assert start.dtype == np.float32 and end.dtype == np.bool_ and ready.dtype == np.int32
        assert id.dtype == np.uint64 and start.shape == (len(x), 1) and set(ready.ravel()) == {2}
        y = np.zeros_like(x)
        for row in range(len(x)):
            name = int(id[row, 0])
            if x[row, 0] == 666:
                os._exit(1)
            if x[row, 0] == 1313:
                raise ValueError("no luck")
            sums[name] = x[row] + (0 if start[row, 0] else sums.get(name, 1000))
            y[row] = sums[name]
            if end[row, 0]:
                del sums[name]
        return {"y": y + len(sums) * 0}
"""


def sums(folder: Path, *, head: str = "", more: str = "", text: bool = False, **options: Any) -> Path:
    if text:
        model = SUMS.replace("int(id[row, 0])", "id[row, 0]").replace("id.dtype == np.uint64", "True")
        says = SEQUENCES.format(more=more) + 'datatype = "BYTES"\n'
        return python(folder, model, name="sums", head=f"{head}\n{says}", **options)
    return python(folder, SUMS, name="sums", head=f"{head}\n{SEQUENCES.format(more=more)}", **options)


async def ask(engine: Engine, name: int | str, value: float, flags: str = "", **more: Any) -> float:
    given = np.full((1, 2), value, np.float32)
    start, end = "s" in flags, "e" in flags
    answer = await engine.infer(
        "sums", {"x": given}, sequence_id=name, sequence_start=start, sequence_end=end, **more
    )
    return float(answer["y"][0, 0])


def run(path: Path, story: Any) -> None:
    async def play() -> None:
        async with Engine(path) as engine:
            await story(engine)

    asyncio.run(asyncio.wait_for(play(), 60))


def test_interleaved_sequences_keep_their_own_sums(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        async def one(name: int) -> list[float]:
            flags = {0: "s", 5: "e"}
            return await asyncio.gather(*(ask(engine, name, name + n, flags.get(n, "")) for n in range(6)))

        answers = await asyncio.gather(*map(one, range(1, 20)))
        for name, found in enumerate(answers, start=1):
            assert found == list(np.cumsum([name + n for n in range(6)]))

    run(sums(tmp_path, head="instances = 2", more="max_candidates = 3"), story)


def test_what_is_refused_and_with_which_words(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        with pytest.raises(InvalidInput, match="'sums' must specify a non-zero or non-empty correlation ID"):
            await ask(engine, 0, 1, "s")
        with pytest.raises(
            InvalidInput,
            match="inference request for sequence 7 to model 'sums' must specify the START flag on the first",
        ):
            await ask(engine, 7, 1)
        with pytest.raises(InvalidInput, match="must specify batch-size 1 due to requirements of sequence"):
            await engine.infer("sums", np.zeros((2, 2), np.float32), sequence_id=7, sequence_start=True)
        with pytest.raises(InvalidInput, match="takes sequence_id as a number"):
            await ask(engine, "seven", 1, "s")
        for wrong in (2**64, -1, True, np.int64(7), 7.0):
            with pytest.raises(InvalidInput, match="2\\^64 - 1"):
                await ask(engine, wrong, 1, "s")  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="latest"):
            await ask(engine, 7, 1, "s", latest=True, source="cam")
        assert await ask(engine, 2**64 - 1, 5, "se") == 5
        with pytest.raises(InvalidInput, match="START"):
            await ask(engine, 2**64 - 1, 5)

    run(sums(tmp_path), story)


def test_a_restart_and_a_failed_request_leave_the_sequence_in_place(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        with pytest.raises(ModelError, match="no luck"):
            await ask(engine, 7, 1313)
        assert await ask(engine, 7, 2) == 3
        assert await ask(engine, 7, 10, "s") == 10
        assert await ask(engine, 7, 1, "e") == 11

    run(sums(tmp_path), story)


def test_idle_sequences_end_and_the_backlog_gets_their_place(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        assert await ask(engine, 8, 2, "se") == 2  # when the first has idled for long enough
        with pytest.raises(InvalidInput, match=r"START flag.*ended after 0\.2 s without a request"):
            await ask(engine, 7, 1)

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 200"), story)


def test_a_sequence_that_finds_no_place_in_time_is_told(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        late = [ask(engine, 8, 2, "s", deadline_ms=50), ask(engine, 8, 3, "e")]
        errors = await asyncio.gather(*late, return_exceptions=True)
        for error in errors:
            assert isinstance(error, Unavailable)
            assert error.message == "timeout of the corresponding sequence has been expired"
        assert await ask(engine, 7, 1, "e") == 2

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 60000"), story)


def test_a_client_that_leaves_frees_its_place(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        waiting = asyncio.ensure_future(ask(engine, 8, 2, "s"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        route = engine.fleet.routes[1]
        assert (route.law.live, route.law.backlog, route.law.waiting) == (1, 0, 0)  # type: ignore[attr-defined]
        assert await ask(engine, 7, 1, "e") == 2

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 60000"), story)


def test_a_dead_instance_ends_its_sequences_with_a_clear_error(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        asked = [ask(engine, 7, 666), ask(engine, 7, 2), ask(engine, 7, 3)]
        for error in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(error, ModelError)
            assert error.reason == "sequence-lost"
            assert "sequence 7 has ended with the instance" in error.message
        with pytest.raises(CarpoolError) as found:
            await ask(engine, 7, 4)
        assert "its instance died" in found.value.message or "restart" in found.value.message
        assert await ask(engine, 7, 4, "s") == 4

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 60000"), story)


def test_gauges_say_what_is_left_when_nothing_follows(tmp_path: Path) -> None:
    """After an end, and after a sequence was silent for too long."""

    async def story(engine: Engine) -> None:
        row = engine.find("sums").counters.row

        async def until_there(live: int, backlog: int) -> None:
            cells = [columns.by_word("sequences", "states")[name] for name in ("live", "backlog")]
            await until(lambda: [row._cells[cell] for cell in cells] == [live, backlog])

        await ask(engine, 1, 1, "s")
        await until_there(1, 0)
        await ask(engine, 1, 1, "e")
        await until_there(0, 0)
        await ask(engine, 2, 1, "s")
        waits = asyncio.ensure_future(ask(engine, 3, 1, "s"))
        await until_there(1, 1)
        await waits
        await until_there(0, 0)

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 200"), story)


def test_no_place_in_time_is_said_with_when_to_come_back(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        await ask(engine, 1, 1, "s")
        waits = asyncio.ensure_future(ask(engine, 2, 1, "s"))
        follows = asyncio.ensure_future(ask(engine, 2, 1, "e"))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="1 sequences wait already for one of sums's 1 slots") as full:
            await ask(engine, 3, 1, "s")
        assert full.value.reason == "queue-full"
        assert full.value.retry_after_s is not None
        assert 0 < full.value.retry_after_s <= 60
        for late in (waits, follows):
            with pytest.raises(Unavailable, match=r"none of sums's 1 slots was free within 0\.2 s") as told:
                await late
            assert told.value.reason == "timeout"
        assert told.value.retry_after_s is not None
        assert 0 < told.value.retry_after_s < 60
        assert await ask(engine, 1, 2, "e") == 3
        assert await ask(engine, 3, 1, "se") == 1

    settings = "max_candidates = 1\nidle_ms = 60000\nmax_wait_ms = 200\nmax_backlog = 1"
    run(sums(tmp_path, more=settings), story)


def test_a_model_that_is_loaded_again_knows_nothing_of_sequences(tmp_path: Path) -> None:
    """What was accepted is answered by what was there; what comes then has to start."""

    async def story(engine: Engine) -> None:
        assert await ask(engine, "7", 1, "s") == 1
        under_way = [asyncio.ensure_future(ask(engine, "7", 1)) for _ in range(20)]
        await asyncio.sleep(0)
        with (tmp_path / "sums/1/model.py").open("a") as file:
            file.write("# changed\n")
        await engine.load("sums")
        assert await asyncio.gather(*under_way) == list(range(2, 22))
        with pytest.raises(InvalidInput, match="START"):
            await ask(engine, "7", 1)
        assert await ask(engine, "7", 5, "s") == 5

    run(sums(tmp_path, text=True), story)


def test_a_request_that_was_answered_is_freed_at_once(tmp_path: Path) -> None:
    """With its inputs, not when the collector comes."""

    async def story(engine: Engine) -> None:
        gc.collect()
        gc.disable()
        try:
            for n in range(300):
                await ask(engine, 1, 1, "s" if n == 0 else "")
            held = sum(isinstance(one, Work) for one in gc.get_objects())
        finally:
            gc.enable()
        assert held < 150  # the places of those that left the queue are given back in passing

    run(sums(tmp_path), story)


def test_a_promise_holds_for_each_request(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        assert await ask(engine, 7, 1) == 2
        with pytest.raises(CarpoolError):
            await ask(engine, 8, 1, "s")  # no place within the SLO
        assert await ask(engine, 7, 1, "e") == 3

    run(sums(tmp_path, head="slo_ms = 2000", more="max_candidates = 1\nidle_ms = 60000"), story)


def test_when_it_is_unloaded_all_are_told(tmp_path: Path) -> None:
    async def story(engine: Engine) -> None:
        assert await ask(engine, 7, 1, "s") == 1
        waiting = asyncio.ensure_future(ask(engine, 8, 2, "s"))
        await asyncio.sleep(0)
        await engine.stop(0.1)
        with pytest.raises(Unavailable):
            await waiting

    run(sums(tmp_path, more="max_candidates = 1\nidle_ms = 60000"), story)


# ---- Triton's Python models, and its settings --------------------------------------------------------------

TRITONS = """
    import numpy as np
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def initialize(self, args):
            self.sums = {}
        def execute(self, requests):
            answers = []
            for request in requests:
                def value(name):
                    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                name = value("CORRID").ravel()[0].decode()
                assert name == str(request.correlation_id()) or not request.correlation_id()
                assert value("START").ravel()[0] == int(request.flags() & 1) or not name
                before = 0 if value("START").ravel()[0] else self.sums[name]
                self.sums[name] = before + value("x")
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", self.sums[name])]))
            return answers
"""
PBTXT = """
    backend: "python" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }
    sequence_batching {
      max_sequence_idle_microseconds: 5000000
      control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
      control_input { name: "CORRID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
      %s
    }
"""


@pytest.mark.parametrize("strategy", ["oldest { max_candidate_sequences: 8 }", "direct { }"])
def test_tritons_python_models_are_told(tmp_path: Path, strategy: str) -> None:
    model = tmp_path / "sums"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(dedent(TRITONS))
    (model / "config.pbtxt").write_text(dedent(PBTXT % strategy))

    async def story(engine: Engine) -> None:
        for name in ("cam-1", 12):
            assert await ask(engine, name, 1, "s") == 1
        for name in ("cam-1", 12):
            assert await ask(engine, name, 2, "e") == 3

    run(model, story)


def test_what_is_said_of_a_sequence_becomes_json_when_it_is_asked_for() -> None:
    work = Work({}, lambda _work, _outcome: None)
    assert work.extras.details == b""
    said = {"sequence_id": "cam-1", "sequence_start": True, "sequence_end": False}
    work.own_extras().parameters = said
    assert json.loads(work.extras.details) == {"parameters": said}
    work.extras.details = b'{"id": "7"}'
    assert work.extras.details == b'{"id": "7"}'


# ---- states that the server keeps --------------------------------------------------------------------------


def stateful(folder: Path, sequences: str, *, max_batch: int = 4) -> Path:
    """y = x + state, and so is the next state; READY, where it is asked for, is multiplied in."""
    model = folder / "sums"
    (model / "1").mkdir(parents=True)
    lead = ["n"] if max_batch else []
    float32 = TensorProto.FLOAT

    def tensor(name: str, *dims: Any) -> Any:
        return helper.make_tensor_value_info(name, float32, [*lead, *dims])

    nodes = [helper.make_node("Add", ["x", "h"], ["sum"]), helper.make_node("Identity", ["sum"], ["h_next"])]
    inputs = [tensor("x", 2), tensor("h", 2)]
    if "READY" in sequences:
        inputs.append(tensor("ready", 1))
        nodes.append(helper.make_node("Mul", ["sum", "ready"], ["y"]))
    else:
        nodes.append(helper.make_node("Identity", ["sum"], ["y"]))
    graph = helper.make_graph(nodes, "g", inputs, [tensor("y", 2), tensor("h_next", 2)])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(made, str(model / "1" / "model.onnx"))
    (model / "initial_state").mkdir()
    (model / "initial_state" / "ten").write_bytes(np.array([10, 20], np.float32).tobytes())
    (model / "config.pbtxt").write_text(
        f"max_batch_size: {max_batch}\n"
        'input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }\n'
        f"sequence_batching {{ {sequences} }}"
    )
    return model


STATE = 'state { input_name: "h" output_name: "h_next" data_type: TYPE_FP32 dims: 2 %s }'
TEN = 'initial_state { name: "i" data_type: TYPE_FP32 dims: 2 data_file: "ten" }'
READY_INPUT = (
    'control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY fp32_false_true: [0, 1] } }'
)


@pytest.mark.parametrize("max_batch", [0, 4])
@pytest.mark.parametrize(("initial", "first"), [("", 0), (TEN, 10)])
@pytest.mark.parametrize(
    "strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }", f"{READY_INPUT}"]
)
def test_states_are_kept_from_one_request_to_the_next(
    tmp_path: Path, max_batch: int, initial: str, first: int, strategy: str
) -> None:
    async def story(engine: Engine) -> None:
        async def one(name: int) -> list[float]:
            def value(n: int) -> np.ndarray[Any, Any]:
                return np.full((1, 2) if max_batch else (2,), name + n, np.float32)

            answers = await asyncio.gather(
                *(
                    engine.infer(
                        "sums",
                        {"x": value(n)},
                        sequence_id=name,
                        sequence_start=n == 0,
                        sequence_end=n == 3,
                    )
                    for n in range(4)
                )
            )
            assert all(set(answer) == {"y"} for answer in answers)
            return [float(answer["y"].ravel()[0]) for answer in answers]

        found = await asyncio.gather(*map(one, range(1, 10)))
        for name, sums_of in enumerate(found, start=1):
            assert sums_of == [first + total for total in np.cumsum([name + n for n in range(4)])]

    run(stateful(tmp_path, f"{strategy} {STATE % initial}", max_batch=max_batch), story)


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 3 }"])
def test_a_state_that_is_declared_as_an_output_is_one(tmp_path: Path, strategy: str) -> None:
    model = stateful(tmp_path, f"{strategy} {STATE % TEN}")
    settings = model / "config.pbtxt"
    one = np.ones((1, 2), np.float32)

    async def hidden(engine: Engine) -> None:
        with pytest.raises(InvalidInput, match="sums has no output 'h_next'"):
            await engine.infer("sums", {"x": one}, outputs=["h_next"], sequence_id=1, sequence_start=True)

    async def shown(engine: Engine) -> None:
        for number, (outputs, names) in enumerate(
            ((["h_next"], {"h_next"}), (["y"], {"y"}), ((), {"y", "h_next"}))
        ):
            answer = await engine.infer(
                "sums", {"x": one}, outputs=outputs, sequence_id=1, sequence_start=not number
            )
            assert set(answer) == names
            assert all(array.tolist() == [[11 + number, 21 + number]] for array in answer.values())

    run(model, hidden)
    declared = 'output { name: "h_next" data_type: TYPE_FP32 dims: 2 }\nsequence_batching'
    settings.write_text(settings.read_text().replace("sequence_batching", declared))
    run(model, shown)


def test_nothing_is_left_of_a_sequence_whose_client_went(tmp_path: Path) -> None:
    """Its place is another's when it has idled, and that one starts with the initial state."""

    async def story(engine: Engine) -> None:
        assert await ask(engine, 1, 5, "s") == 15
        going = [asyncio.ensure_future(ask(engine, 1, 7)) for _ in range(10)]
        await asyncio.sleep(0)
        for one in going:
            one.cancel()
        await asyncio.gather(*going, return_exceptions=True)
        assert await asyncio.gather(*(ask(engine, name, 1, "se") for name in (2, 3))) == [11, 11]

    idle = "max_sequence_idle_microseconds: 200000"
    run(stateful(tmp_path, f"{idle} {STATE % TEN}", max_batch=1), story)


@pytest.mark.parametrize(
    ("sequences", "words"),
    [
        ("iterative_sequence: true", "iterative_sequence is not supported"),
        (STATE % "use_growable_memory: true", "use_growable_memory is not supported"),
        (STATE.replace("dims: 2", "dims: -1") % "", "needs an initial state"),
        (STATE.replace('"h"', '"g"') % "", '"g", for its sequences, is not in the model file'),
        (STATE.replace("FP32", "FP64") % "", "should be FP64 .* and is FP32"),
        (STATE % TEN.replace("dims: 2", "dims: 3"), "and its initial state"),
        (STATE % "" + READY_INPUT.replace("[0, 1]", "[0]"), "needs the two values"),
        (STATE % "" + READY_INPUT.replace("[0, 1]", "[1, 1]"), "the same value for no and for yes"),
        (STATE % "" + READY_INPUT + READY_INPUT, "more than one control input is of kind ready"),
        (STATE % "" + READY_INPUT.replace('"ready"', '"x"'), "clients do not send"),
        (STATE % "" + 'control_input { name: "ready" }', "needs a name and a control"),
        (STATE % "" + "direct { minimum_slot_utilization: 2 }", "must be 0 to 1"),
        (STATE % "" + "oldest { max_candidate_sequences: -1 }", "must be 0 to"),
    ],
)
def test_what_is_wrong_with_settings_is_said(tmp_path: Path, sequences: str, words: str) -> None:
    async def story(_: Engine) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=words):
        run(stateful(tmp_path, sequences), story)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        *rows("cache", ("response_cache = true", "a cache")),
        *rows("rollout", ("[rollout]\ncanary = 0.1", "a rollout")),
        ('task = "detect"', "a task for images"),
    ],
)
def test_what_does_not_go_with_sequences_is_said(tmp_path: Path, head: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(sums(tmp_path, head=head), None)


# ---- the example -------------------------------------------------------------------------------------------


def test_the_tracker_follows_what_moves(tmp_path: Path) -> None:
    """Two cameras; two objects cross the picture, one is hidden for some frames."""

    def frame(time: int, shift: float) -> np.ndarray[Any, Any]:
        boxes = np.zeros((1, 32, 5), np.float32)
        boxes[0, 3] = (10 + 4 * time + shift, 10, 40 + 4 * time + shift, 40, 0.9)
        if time not in (4, 5):
            boxes[0, 7] = (200 - 4 * time, 100, 240 - 4 * time, 140, 0.8)
        return boxes

    async def play() -> None:
        async with Engine(EXAMPLES / "tracking") as engine:
            for time in range(10):
                for camera, shift in (("north", 0.0), ("south", 3.0)):
                    answer = await engine.infer(
                        "tracker",
                        {"boxes": frame(time, shift)},
                        sequence_id=camera,
                        sequence_start=time == 0,
                        sequence_end=time == 9,
                    )
                    tracks = answer["tracks"][0]
                    assert tracks[3] == 1
                    assert tracks[7] == (0 if time in (4, 5) else 2)
                    assert not tracks[[0, 1, 2, 31]].any()

    asyncio.run(asyncio.wait_for(play(), 60))
    assert carpool.__version__
