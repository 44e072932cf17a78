"""Inputs that a batch fetches from clients' memory itself: what is gone costs its owner an error, and nobody
else anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from carpool.engine.run.batch import NO_EXTRAS, BatchRun, Outcome, Work, answer_each
from carpool.errors import CarpoolError, InvalidInput
from carpool.memory.client_files import PLACE, OpenRegion, RegionRead, RegionReads, find_regions
from carpool.types import Array, Datatype, Signature, TensorSpec
from frontend.client_files import ClientFile, client_file

SIZE = 64
OUTPUTS = (TensorSpec("y", Datatype.UINT8, (1,)),)
FIXED = Signature("m", (TensorSpec("x", Datatype.UINT8, (SIZE,)),), OUTPUTS, 8)
LOOSE = Signature("m", (TensorSpec("x", Datatype.UINT8, (-1,)),), OUTPUTS, 8)


class Largest:
    """Answers each row's largest value, and remembers what it was asked."""

    alive = True

    def __init__(self) -> None:
        self.runs: list[Array] = []

    def run(self, inputs: Mapping[str, Array], _wanted: Sequence[str]) -> Mapping[str, Array]:
        self.runs.append(inputs["x"].copy())
        return {"y": inputs["x"].max(axis=1, keepdims=True)}

    def abort(self) -> None: ...

    def close(self) -> None: ...


class OneByOne(Largest):
    def run_each(
        self, requests: Sequence[tuple[Mapping[str, Array], Sequence[str]]], details: Sequence[bytes] = ()
    ) -> list[Mapping[str, Array] | CarpoolError]:
        return [self.run(inputs, wanted) for inputs, wanted in requests]


class InParts(Largest):
    def run_parts(
        self, parts: Sequence[Mapping[str, Array]], images: Sequence[int], wanted: Sequence[str]
    ) -> Mapping[str, Array]:
        return self.run({"x": np.concatenate([part["x"] for part in parts])}, wanted)

    def view(self, inputs: Mapping[str, Array]) -> None: ...


class Singly(Largest):
    def run_singly(
        self,
        requests: Iterable[Mapping[str, Array]],
        wanted: Sequence[str],
        answers: list[Mapping[str, Array] | CarpoolError],
    ) -> None:
        for inputs in requests:
            answers.append(self.run(inputs, wanted))


def request(file: ClientFile | None, value: int = 0) -> tuple[Work, Array]:
    """In the client's memory, or with bytes of its own; and the slot that was put aside for it."""
    slot = np.full((1, SIZE), value, np.uint8)
    work = Work({"x": slot}, lambda *_: None, 0.0)
    if file is not None:
        work.own_extras().reads = RegionReads({"x": RegionRead(OpenRegion(file.region()), 0)})
    return work, slot


def run(backend: Any, works: Sequence[Work], signature: Signature = FIXED) -> list[Outcome]:
    piece = 1 if isinstance(backend, Singly) else 8
    return BatchRun(backend, signature, 8, piece, answer_each).run(works).outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    return [one.error.reason if one.error else int((one.outputs or {})["y"][0, 0]) for one in outcomes]


@pytest.mark.parametrize("signature", [FIXED, LOOSE], ids=["fixed", "loose"])
@pytest.mark.parametrize("kind", [Largest, OneByOne, InParts, Singly])
def test_memory_that_shrinks_costs_its_owner_an_error_and_nobody_else(
    kind: type[Largest], signature: Signature
) -> None:
    with ExitStack() as stack:
        first, gone, last = (
            stack.enter_context(client_file(bytes([value]) * SIZE)) for value in (11, 12, 13)
        )
        slots = [request(first), request(gone), request(None, 7), request(last)]
        gone.shrink(SIZE // 2)
        backend = kind()
        outcomes = run(backend, [work for work, _ in slots], signature)
    assert values(outcomes) == [11, "invalid-input", 7, 13]
    assert isinstance(outcomes[1].error, InvalidInput)
    assert "has shrunk: 32 of 64 bytes are there" in outcomes[1].error.message
    assert [int(slot.max()) for _, slot in slots] == [0, 0, 7, 0], "slots may be another's by now"
    if kind is Largest:
        assert [len(rows) for rows in backend.runs] == [4], "its batch is not run again for it"
        assert not backend.runs[0][1].any(), "nobody's bytes"
    if kind in (OneByOne, Singly):
        assert len(backend.runs) == 3


def test_a_picture_is_read_when_its_turn_comes() -> None:
    """All read before the first runs would have left the caches by then; and each has memory of its own."""

    class Changing(Singly):
        def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
            file.write(bytes([20 + len(self.runs)]) * SIZE)
            seen.append(inputs["x"])
            return super().run(inputs, wanted)

    seen: list[Array] = []
    with client_file(bytes([5]) * SIZE) as file:
        works = [request(file)[0], request(None, 7)[0], request(file)[0]]
        backend: Any = Changing()
        result = BatchRun(backend, FIXED, 8, 1, answer_each).run(works)
    assert values(result.outcomes) == [5, 7, 21]
    assert [int(array[0, 0]) for array in seen] == [5, 7, 21], "no copy is another's"
    assert 0.0 < result.timing.input < result.seconds


def test_what_a_model_stumbles_over_leaves_the_others_their_answers_and_errors() -> None:
    class Stumbling(Singly):
        def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
            if inputs["x"][0, 0] == 99:
                raise ZeroDivisionError
            return super().run(inputs, wanted)

    with ExitStack() as stack:
        gone, bad, good = (stack.enter_context(client_file(bytes([v]) * SIZE)) for v in (1, 99, 3))
        order = [gone, bad, gone, good, bad, bad, gone, good]
        works = [request(file)[0] for file in order]
        gone.shrink(0)
        outcomes = run(Stumbling(), works)
    expected = {id(gone): "invalid-input", id(bad): "model-error", id(good): 3}
    assert values(outcomes) == [expected[id(file)] for file in order]


def test_a_batch_that_is_given_up_while_it_runs_ends_all_the_same() -> None:
    """Its works are answered, and lose their inputs, while the model's thread is still at the first."""

    class GivenUp(Singly):
        def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Mapping[str, Array]:
            for work in works:
                work.inputs, work.extras = {}, NO_EXTRAS
            return super().run(inputs, wanted)

    with client_file(bytes([5]) * SIZE) as file:
        works = [request(file)[0], request(file)[0], request(None, 7)[0]]
        assert values(run(GivenUp(), works)) == [5, "model-error", "model-error"]


@pytest.mark.parametrize("kind", [Largest, OneByOne, InParts, Singly])
def test_a_model_is_not_asked_for_what_nobody_is_left_to_hear(kind: type[Largest]) -> None:
    with client_file(bytes(SIZE)) as file:
        works = [request(file)[0], request(file)[0]]
        file.shrink(0)
        backend = kind()
        outcomes = run(backend, works) + run(backend, works[:1])
    assert [type(outcome.error) for outcome in outcomes] == [InvalidInput] * 3
    assert not backend.runs


@pytest.mark.parametrize("signature", [FIXED, LOOSE], ids=["fixed", "loose"])
def test_one_alone_is_copied_too(signature: Signature) -> None:
    """What a model reads must not change under it."""
    with client_file(bytes([5]) * SIZE) as file:
        work, slot = request(file)
        backend = Largest()
        assert values(run(backend, [work], signature)) == [5]
        file.write(bytes([9]) * SIZE)
    assert backend.runs[0].max() == 5
    assert not slot.any()


def test_a_model_without_batches() -> None:
    signature = Signature("m", (TensorSpec("x", Datatype.UINT8, (1, SIZE)),), OUTPUTS, 0)
    with client_file(bytes([5]) * SIZE) as file:
        backend = Largest()
        (outcome,) = run(backend, [request(file)[0]], signature)
    assert backend.runs[0].tolist() == [[5] * SIZE]
    assert outcome.error is not None, "it answers two dimensions where one was declared"


def test_places_that_cannot_be() -> None:
    with client_file(bytes(SIZE)) as file:
        region = OpenRegion(file.region())
        regions = {region.region.number: region}
        there = PLACE.pack(region.region.number, 8)
        find_regions(there, [("x", SIZE - 8)], regions)
        with pytest.raises(ValueError, match="beyond"):
            find_regions(there, [("x", SIZE - 7)], regions)
        for wrong in (b"", there + there):
            with pytest.raises(ValueError, match="argument"):
                find_regions(wrong, [("x", 1)], regions)
        with pytest.raises(InvalidInput, match="not registered any more"):
            find_regions(there, [("x", 1)], {})
