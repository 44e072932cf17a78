"""The small parts of the link: streams cut into records, tables and messages that arrive whole."""

from __future__ import annotations

import asyncio
import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool import errors
from carpool.core.job import INFINITY, GivenUp, Job, Reason, Refusal, Terms
from carpool.core.refusal_words import dropped, given_up, refused, turned_away
from carpool.errors import CarpoolError, ModelError, Refused, Unavailable
from carpool.link.advice import GATE_BYTES, MAX_VALUES, GateTable
from carpool.link.child_process import Control, control_pair
from carpool.link.link_failures import read_failure, write_failure
from carpool.link.records import (
    AS_DECLARED,
    TO_ENGINE,
    ProtocolError,
    RecordReader,
    to_engine,
)
from carpool.link.request_place import RequestPlace
from carpool.link.templates import ServedTemplate
from carpool.memory.arena import create_memory, map_memory
from later import many
from link.echo import MODELS
from link.joined import run

FOUR = np.array([[1, 2, 3, 4]], np.float32)


@settings(max_examples=many(100), deadline=None)
@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 200), min_size=1, max_size=40))
def test_a_stream_means_the_same_however_it_is_cut(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(to_engine(1, number, payload) for number, payload in enumerate(payloads))
    reader = RecordReader(TO_ENGINE, 300)
    heard: list[tuple[int, bytes]] = []
    position, turn = 0, 0
    while position < len(stream):
        piece = stream[position : position + cuts[turn % len(cuts)]]
        heard += [(fields[2], payload) for fields, payload in reader.feed(piece)]
        position += len(piece)
        turn += 1
    assert heard == list(enumerate(payloads))


def test_a_payload_over_the_limit_is_refused_before_it_arrives() -> None:
    reader = RecordReader(TO_ENGINE, 100)
    with pytest.raises(ProtocolError):
        list(reader.feed(to_engine(1, 1, bytes(101))[: TO_ENGINE.size]))


def test_a_long_payload_is_gathered_without_looking_at_it_again_and_again() -> None:
    reader = RecordReader(TO_ENGINE, 1 << 20)
    stream = to_engine(1, 1, bytes(1 << 20))
    heard = []
    for start in range(0, len(stream), 1000):
        heard += list(reader.feed(stream[start : start + 1000]))
    assert len(heard) == 1
    assert len(heard[0][1]) == 1 << 20


ALL_ERRORS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, CarpoolError)
]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_class_of_error_survives_the_way(kind: type[CarpoolError]) -> None:
    back = read_failure(*write_failure(kind("why", reason="a-word")))
    assert type(back) is kind
    assert (back.message, back.reason) == ("why", "a-word")


def test_what_an_error_carries_survives_too() -> None:
    refused = Refused("full", predicted_ms=3.5, retry_after_s=1.0)
    back = read_failure(*write_failure(refused))
    assert isinstance(back, Refused)
    assert (back.predicted_ms, back.retry_after_s, back.reason) == (3.5, 1.0, "overload")
    assert read_failure(*write_failure(ModelError("bad", field="output 'y'"))).field == "output 'y'"


def test_an_error_of_one_side_only_arrives_as_the_nearest_both_know() -> None:
    class Flooded(Unavailable):
        reason = "flooded"

    back = read_failure(*write_failure(Flooded("wet")))
    assert type(back) is Unavailable
    assert back.reason == "flooded"
    assert type(read_failure(9999, b'{"error": "?"}')) is CarpoolError


_SECONDS = st.floats(0, 100)


@pytest.mark.parametrize(
    "reason", [Reason.OVERLOAD, Reason.CANNOT_FINISH, Reason.OVER_SHARE, Reason.QUEUE_FULL, Reason.GIVEN_UP]
)
@given(
    terms=st.builds(Terms, _SECONDS | st.just(INFINITY), *[_SECONDS] * (len(Terms._fields) - 1)),
    retry=st.floats(0, 10),
    counts=st.tuples(st.integers(0, 10**9), st.integers(0, 10**9)),
    rates=st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)),
    sizes=st.tuples(st.integers(0, 64), st.integers(0, 64)),
    rest=st.tuples(st.floats(0, 1e9), st.sampled_from([0.0, 0.5]), st.floats(0, 1)),
)
def test_a_refusal_is_put_into_words_where_it_arrives(
    reason: Reason,
    terms: Terms,
    retry: float,
    counts: tuple[int, int],
    rates: tuple[float, float],
    sizes: tuple[int, int],
    rest: tuple[float, float, float],
) -> None:
    """The very words, and numbers, that the engine would have used."""
    refusal = Refusal(reason, retry, *counts, *rates, *sizes, *rest, terms=terms)
    sent = turned_away("model", Job(1000.0), refusal, fixed=False)
    back = read_failure(*write_failure(sent), "model")
    said = refused("model", Job(1000.0), refusal, fixed=False)
    for error in (back, sent):
        assert isinstance(error, Refused)
        assert (error.message, error.reason, error.field) == (said.message, said.reason, None)
        assert error.numbers == said.numbers
        assert isinstance(said, Refused)
        assert (error.predicted_ms, error.retry_after_s) == (said.predicted_ms, said.retry_after_s)


@given(waited=st.floats(0, 100), budget=st.floats(0, 100), retry=st.floats(1e-3, 10))
def test_who_was_given_up_hears_the_same_words_too(waited: float, budget: float, retry: float) -> None:
    gone = GivenUp(Job(1000.0, 1000.0 + budget), Reason.GIVEN_UP, 2, 8)
    sent = dropped("model", gone, 1000.0 + waited, retry)
    back = read_failure(*write_failure(sent), "model")
    said = given_up("model", gone, 1000.0 + waited, retry)
    assert isinstance(back, Refused)
    assert str(sent) == back.message == said.message
    assert isinstance(said, Refused)
    assert (back.reason, back.numbers, back.retry_after_s) == ("given-up", said.numbers, said.retry_after_s)
    assert back.retry_after_s == pytest.approx(retry, abs=1e-6)


# ── the gate's table ──


def test_the_gate_says_what_was_written_last() -> None:
    memory = bytearray(GATE_BYTES)
    writer, reader = GateTable(memory), GateTable(memory)
    assert reader.read(0) is None
    assert reader.read(3) is None
    writer.write(3, 1.5, -2.0, float("inf"))
    assert reader.read(3) == (1.5, -2.0, float("inf"))
    writer.write(3, 7.0)
    assert reader.read(3) == (7.0,)
    writer.write(0, *range(MAX_VALUES))
    assert reader.read(0) == tuple(map(float, range(MAX_VALUES)))
    writer.clear()
    assert reader.read(3) is None


def test_models_that_share_a_row_are_not_mistaken_for_each_other() -> None:
    table = GateTable(bytearray(GATE_BYTES))
    table.write(5, 1.0)
    table.write(5 + 1024, 2.0)
    assert table.read(5) is None
    assert table.read(5 + 1024) == (2.0,)


@given(st.integers(0, 31), st.integers(1, 255))
def test_a_torn_row_is_not_believed(position: int, flip: int) -> None:
    memory = bytearray(GATE_BYTES)
    table = GateTable(memory)
    table.write(0, 1.0, 2.0)
    memory[position] ^= flip
    assert table.read(0) is None


# ── placing outputs ──


def _placement(memory_size: int = 8192) -> tuple[RequestPlace, memoryview]:
    fd = create_memory("test", memory_size)
    memory = map_memory(fd)
    os.close(fd)
    document = {
        "key": 1,
        "inputs": [("x", "FP32", (1, 4), 0, 16, True)],
        "wanted": ["y"],
        "priority": 0,
        "timeout": 0.0,
        "source": "",
        "latest": False,
        "encoded": False,
    }
    template = ServedTemplate(document, MODELS[0], b"")
    return RequestPlace(template, memory, 0, 4096, 4096, 1 << 20, call=1), memoryview(memory)


def test_outputs_go_where_the_front_end_looks() -> None:
    placement, memory = _placement()
    assert placement({"y": FOUR}) == {}
    assert placement.form == AS_DECLARED
    assert struct.unpack_from("<4f", memory, 4096) == (1, 2, 3, 4)


def test_nothing_is_written_once_it_was_answered() -> None:
    """A model's thread that comes back after its time must not write into what is another's by now."""
    placement, memory = _placement()
    assert placement.close()
    assert placement({"y": FOUR}) == {}
    assert bytes(memory[4096:4112]) == bytes(16)
    assert placement.form is None


def test_an_answer_waits_for_the_thread_that_is_writing_it() -> None:
    placement, _ = _placement()
    seen: list[bool] = []

    class Row(np.ndarray):  # type: ignore[type-arg]
        @property
        def dtype(self) -> np.dtype[np.float32]:  # read in the middle of placing
            seen.append(placement.close())
            return np.dtype(np.float32)

    placement({"y": FOUR.view(Row)})
    assert seen
    assert not any(seen)
    assert placement.close()


# ── control ──


def test_messages_arrive_apart_and_with_their_files() -> None:
    async def main() -> None:
        ours, theirs = control_pair()
        here, there = Control(ours), Control(theirs)
        fd = create_memory("test", 4096)
        assert here.send("one", [fd, fd], number=1)
        assert here.send("two")
        os.close(fd)
        first, second = await there.receive(), await there.receive()
        assert first is not None
        assert second is not None
        assert (first.word, first.body["number"], len(first.files)) == ("one", 1, 2)
        assert all(os.fstat(fd).st_size == 4096 and not os.get_inheritable(fd) for fd in first.files)
        assert (second.word, second.files) == ("two", [])
        for fd in first.files:
            os.close(fd)
        here.close()
        assert await there.receive() is None
        assert await there.receive() is None
        assert not here.send("three")
        assert not there.send("four")

    run(main())


def test_an_end_that_nobody_reads_does_not_block() -> None:
    async def main() -> None:
        ours, theirs = control_pair()
        with theirs:
            control = Control(ours)
            assert any(not control.send("flood", text="x" * 1000) for _ in range(10_000))
            control.close()
        await asyncio.sleep(0)

    run(main())
