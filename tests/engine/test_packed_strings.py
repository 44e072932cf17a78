"""Strings are unpacked where their batch is made: in the model's thread, and not in the engine's loop."""

from __future__ import annotations

from mmap import mmap
from typing import Any

import numpy as np
import orjson
import pytest

from carpool.engine.run.batch import BatchRun, Work, answer_each
from carpool.errors import CarpoolError
from carpool.link.templates import read_template
from carpool.types import Array, Datatype, Signature, Tensor, TensorSpec
from carpool.wire import strings
from carpool.wire.codec import to_binary
from carpool.wire.head import MAX_STRINGS
from carpool.wire.strings import PackedStrings
from engine.test_region_inputs import InParts, Largest, OneByOne, Singly
from extensions.ensembles.test_ensemble_route import ScriptedRoute, ensemble
from link.echo import entry

WORDS = entry(3, "words", Datatype.BYTES, (-1,))


def memory_of(packed: bytes) -> mmap:
    memory = mmap(-1, max(1, len(packed)))
    memory[: len(packed)] = packed
    return memory


def work_of(packed: bytes, count: int) -> Work:
    """As the engine's end of a link makes it."""
    listed = [("x", "BYTES", (1, count), 0, len(packed), True)]
    document = {"key": 3, "inputs": listed, "wanted": [], "encoded": False}
    template = read_template(orjson.dumps(document), lambda _key: WORDS)
    return Work(
        template.bind(memory_of(packed), 0), lambda *_: None, shape=template.shape, form=template.form
    )


def framed(*elements: bytes) -> bytes:
    array = np.array(elements, object)
    return bytes(to_binary(Tensor("x", Datatype.BYTES, array.shape, array)))


class Echo:
    def run(self, inputs: Any, _wanted: Any) -> dict[str, Array]:
        self.runs.append(inputs["x"])  # type: ignore[attr-defined]
        return {"y": inputs["x"]}


class EchoTogether(Echo, Largest): ...


class EchoOneByOne(Echo, OneByOne): ...


class EchoInParts(Echo, InParts): ...


class EchoSingly(Echo, Singly): ...


def test_the_link_makes_no_element(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strings, "split_strings", lambda *_: pytest.fail("unpacked in the loop"))
    work = work_of(bytes(4 * 50_000), 50_000)
    assert isinstance(work.inputs["x"], PackedStrings)
    assert work.form.packed


@pytest.mark.parametrize("kind", [EchoTogether, EchoOneByOne, EchoInParts, EchoSingly])
def test_a_batch_unpacks_them_and_what_is_broken_costs_its_owner_alone(kind: type[Any]) -> None:
    """The memory is shared with the front end, which has checked it before."""
    works = [work_of(framed(b"a", b"bc"), 2), work_of(b"\xff" * 9, 2), work_of(framed(b"", b"d"), 2)]
    backend = kind()
    piece = 1 if isinstance(backend, Singly) else 8
    text = TensorSpec("y", Datatype.BYTES, (-1,))
    signature = Signature("words", (TensorSpec("x", Datatype.BYTES, (-1,)),), (text,), 8)
    outcomes = BatchRun(backend, signature, 8, piece, answer_each).run(works).outcomes
    found = [
        one.error.reason if isinstance(one.error, CarpoolError) else (one.outputs or {})["y"].tolist()
        for one in outcomes
    ]
    assert found == [[[b"a", b"bc"]], "invalid-input", [[b"", b"d"]]]
    assert all(type(array) is np.ndarray for array in backend.runs)
    alone = BatchRun(kind(), signature, 8, piece, answer_each).run(works[:1]).outcomes[0]
    assert (alone.outputs or {})["y"].tolist() == [[b"a", b"bc"]]


def test_an_engine_gets_so_many_strings_at_a_time() -> None:
    """It makes its own of them under the interpreter lock, for which the loop waits."""
    count = MAX_STRINGS // 2
    works = [work_of(bytes(4 * count), count) for _ in range(5)]
    backend: Any = EchoTogether()
    text = TensorSpec("y", Datatype.BYTES, (-1,))
    signature = Signature("words", (TensorSpec("x", Datatype.BYTES, (-1,)),), (text,), 8)
    result = BatchRun(backend, signature, 8, 8, answer_each).run(works)
    assert [len(rows) for rows in backend.runs] == [2, 2, 1]
    assert result.timing.batch == 5
    assert [(one.outputs or {})["y"].shape for one in result.outcomes] == [(1, count)] * 5


def test_steps_of_an_ensemble_are_passed_them_packed() -> None:
    route = ScriptedRoute([])
    work = work_of(framed(b"a", b"bc", b""), 3)
    work.inputs = {"in": work.inputs["x"]}
    ensemble([[]], route).submit([work])
    (child,) = route.waiting
    assert child.form.packed
    (given,) = child.inputs.values()
    assert isinstance(given, PackedStrings)
    assert given.unpacked().tolist() == [[b"a", b"bc", b""]]
