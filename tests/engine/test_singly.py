"""Batches that are run request by request in one call: each is answered for itself, whatever others do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from carpool.backends.backend import Backend
from carpool.config.model import ModelSignature
from carpool.engine.run.batch import BatchResult, BatchRun, Outcome, Work, answer_each
from carpool.errors import CarpoolError, InvalidInput, ModelError
from carpool.link.templates import RequestForm
from carpool.types import Array, Datatype, Signature, TensorSpec

SHAPE = (2,)


class Doubles:
    """Refuses what is negative, stumbles over zero, answers 9 in another shape, and dies of 13."""

    signature = ModelSignature()

    def __init__(self) -> None:
        self.alive = True
        self.calls: list[list[float]] = []

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
        answers: list[Mapping[str, Array] | CarpoolError] = []
        self.run_singly([inputs], wanted, answers)
        return cast(Mapping[str, Array], answers[0])

    def run_singly(
        self,
        requests: Iterable[Mapping[str, Array]],
        wanted: Sequence[str],
        answers: list[Mapping[str, Array] | CarpoolError],
    ) -> None:
        call: list[float] = []
        self.calls.append(call)
        for inputs in requests:
            first = inputs["x"].flat[0]
            call.append(float(first))
            if first == 13:
                self.alive = False
            if not self.alive:
                raise ModelError("it is gone", reason="aborted")
            if first < 0:
                raise InvalidInput("it is negative")
            if first == 0:
                raise ZeroDivisionError("zero")
            made = {"y": 2 * inputs["x"], "z": -inputs["x"]}
            answers.append({name: made[name][:, :1] if first == 9 else made[name] for name in wanted})

    def abort(self) -> None:
        self.alive = False

    def close(self) -> None:
        """Nothing to free."""


def signature(*shape: int) -> Signature:
    outputs = TensorSpec("y", Datatype.FP32, shape), TensorSpec("z", Datatype.FP32, shape)
    return Signature("m", (TensorSpec("x", Datatype.FP32, SHAPE),), outputs, 8)


def ran(model: Doubles, *works: Work, shape: Sequence[int] = SHAPE) -> BatchResult:
    return BatchRun(cast(Backend, model), signature(*shape), 8, 1, answer_each).run(works)


def work(value: float, images: int = 1, wanted: Sequence[str] = ()) -> Work:
    array = np.full((images, *SHAPE), value, np.float32)
    return Work({"x": array}, lambda *_: None, images=images, form=RequestForm(wanted))


def first_of(outcome: Outcome) -> float:
    assert outcome.outputs is not None
    return float(outcome.outputs["y"].flat[0])


def test_all_run_in_one_call_and_each_is_answered() -> None:
    model = Doubles()
    result = ran(model, work(1), work(2, images=3), work(4))
    assert model.calls == [[1.0, 2.0, 4.0]]
    assert [first_of(outcome) for outcome in result.outcomes] == [2.0, 4.0, 8.0]
    assert result.outcomes[1].outputs is not None
    assert result.outcomes[1].outputs["z"].shape == (3, 2)
    assert result.clean
    assert result.timing.batch == 5
    assert result.timing.input == 0.0, "nothing is gathered"
    assert min(result.timing.infer, result.timing.output) > 0.0
    assert result.timing.infer + result.timing.output <= result.seconds


def test_what_breaks_one_breaks_no_other() -> None:
    model = Doubles()
    result = ran(model, work(1), work(-1), work(0), work(9), work(5), work(-2))
    kinds = [type(outcome.error) for outcome in result.outcomes]
    assert kinds == [type(None), InvalidInput, ModelError, ModelError, type(None), InvalidInput]
    assert "ZeroDivisionError" in str(result.outcomes[2].error)
    assert "shape" in str(result.outcomes[3].error)
    assert [first_of(result.outcomes[at]) for at in (0, 4)] == [2.0, 10.0]
    assert not result.clean
    assert model.calls == [[1.0, -1.0], [0.0], [9.0, 5.0, -2.0]], "each runs once"


def test_whoever_ran_before_the_model_died_is_answered() -> None:
    outcomes = ran(Doubles(), work(1), work(13), work(2)).outcomes
    assert first_of(outcomes[0]) == 2.0
    assert [outcome.error and outcome.error.reason for outcome in outcomes[1:]] == ["aborted", "aborted"]


def test_each_gets_only_what_it_asked_for() -> None:
    outcomes = ran(Doubles(), work(1, wanted=["z"]), work(2, wanted=["y"])).outcomes
    assert [list(outcome.outputs or ()) for outcome in outcomes] == [["z"], ["y"]]


def test_what_must_be_copied_is_copied_when_its_turn_comes() -> None:
    """All copies at once would have left the caches by then."""
    model = Doubles()
    raw = bytearray(b"\0" + np.full((1, *SHAPE), 3, np.float32).tobytes())
    apart = work(2)
    apart.inputs = {"x": np.frombuffer(raw, np.uint8)[1:].view(np.float32).reshape(1, *SHAPE)}

    class Changing(dict[str, Array]):
        def __getitem__(self, name: str) -> Array:
            raw[1:] = np.full((1, *SHAPE), 4, np.float32).tobytes()
            return super().__getitem__(name)

    first = work(1)
    first.inputs = Changing(first.inputs)
    result = ran(model, first, apart)
    assert model.calls == [[1.0, 4.0]]
    assert [first_of(outcome) for outcome in result.outcomes] == [2.0, 8.0]
    assert result.timing.input > 0.0


def test_large_answers_are_not_kept_until_all_have_run() -> None:
    model = Doubles()
    ran(model, work(1), work(2), shape=(1 << 16,))
    assert model.calls == [[1.0], [2.0]]
