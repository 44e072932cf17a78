"""Calls across a link: what goes in comes out, once, and every slot comes back."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from carpool.core.job import INFINITY, NO_OPTIONS, JobOptions, JobOrigin
from carpool.engine.run.batch import Work
from carpool.errors import (
    CarpoolError,
    DeadlineExceeded,
    InvalidInput,
    ModelError,
    NotFound,
    Refused,
    Unavailable,
)
from carpool.frontend.front_link import RemoteCall, expiry
from carpool.link import records
from carpool.link.catalog import Batching, ModelEntry, Traits
from carpool.link.engine_client import Answer, Ask, Handling
from carpool.link.records import MAX_SOURCES, MAX_TEMPLATES, to_frontend
from carpool.link.senders import Sender
from carpool.link.templates import DeclaredOutputs
from carpool.memory.arena import ArenaSlot
from carpool.memory.layout import ENCODED, FILE_AT, write_file
from carpool.memory.pulse import HOPELESS_S, STALE_S
from carpool.types import Datatype, RequestOptions, Timing
from carpool.wire.v2 import RequestHead, TensorHead
from heard import Heard
from later import later
from link.echo import MODELS, TIMING, entry
from link.joined import Client, Joined, joined, packed, run
from waiting import until_in_loop as until

FOUR = np.array([[1, 2, 3, 4]], np.float32)


def strings(*texts: bytes) -> np.ndarray:
    return np.array([texts], dtype=object)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        ("fixed", FOUR),
        ("fixed", np.arange(12, dtype=np.float32).reshape(3, 4)),
        ("loose", np.arange(200, dtype=np.uint8).reshape(2, 100)),
        ("loose", np.zeros((1, 0), np.uint8)),
        ("words", strings(b"", b"two", b"\0\xff")),
        ("flags", np.array([[True, False, True]])),
        ("single", np.array([[1, -2], [3, -4]], np.int64)),
    ],
)
def test_every_kind_of_tensor_goes_there_and_back(model: str, x: np.ndarray) -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            for _ in range(3):  # the first answer of unknown size may take another way than the next
                asked = client.infer(model, x)
                answer = await asked.answer()
                assert answer.error is None
                (tensor,) = answer.outputs
                assert (tensor.name, tensor.shape, tensor.data.shape) == ("y", x.shape, x.shape)
                assert tensor.datatype is client.model(model).signature.outputs[0].datatype
                assert tensor.data.tolist() == x.tolist()
                asked.call.release()
            assert client.door.arena.slots_used == 0

    run(main())


def test_outputs_that_lie_as_declared_are_bytes_until_somebody_looks_at_one() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR)
            answer = await asked.answer()
            outputs = answer.outputs
            assert isinstance(outputs, DeclaredOutputs)
            assert b"".join(outputs.pieces()) == FOUR.tobytes()
            assert len(outputs) == 1
            assert outputs[0] is outputs[:][0] is next(iter(outputs))
            assert outputs[0].data.tolist() == FOUR.tolist()
            _, head, _ = packed(client.model("fixed"), FOUR)
            outputs.template.said = head, [b"y"]
            assert outputs.known(head) == [b"y"]
            assert outputs.known(replace(head)) is None
            asked.call.release()

    run(main())


def test_files_of_any_length_are_one_kind_of_request() -> None:
    """They share one template, although each is as long as it is, and ride among tensors."""

    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            entry = client.model("pictures")
            tensor = TensorHead("x", Datatype.UINT8, (FILE_AT,), 0, FILE_AT)
            head = RequestHead("", (tensor,), (), RequestOptions(), True, FILE_AT, 1, encoded=True)
            for data in (b"", b"one", bytes(range(256)) * 40, b"one"):
                slot = client.door.slot(FILE_AT + len(data))
                assert slot is not None
                write_file(slot.view, data)
                heard = Heard()
                answers = heard.answers
                call = client.door.infer(Ask(entry, head, slot, 0, time.monotonic()), heard)
                await until(lambda found=answers: found)
                assert answers[0].error is None
                assert bytes(answers[0].outputs[0].data.reshape(-1)) == data
                assert call.template.number == 1
                call.release()
            assert client.door.arena.slots_used == 0
            pixels = np.arange(12, dtype=np.uint8).reshape(1, 3, 2, 2)
            (work,) = await held(link, client, "pictures", pixels)
            assert not work.form.encoded
            assert work.shape != ENCODED

    run(main())


async def held(link: Joined, client: Client, model: str, x: np.ndarray) -> list[Work]:
    client.infer(model, x, "hold")
    await until(lambda: link.engine.waiting)
    return link.engine.waiting


def test_a_second_attempt_that_says_something_of_itself_is_part_of_no_group() -> None:
    """Each flag of a request is a bit of its own: any client can set this one, with a header."""

    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            body, head, tail = packed(client.model("told"), FOUR)
            head = replace(head, id="seven")
            slot = client.door.slot(len(body))
            slot.view[:] = body
            sender = Sender("hold", again=True)
            ask = Ask(client.model("told"), head, slot, tail, time.monotonic(), sender=sender)
            client.door.infer(ask, Heard())
            await until(lambda: link.engine.waiting or link.dropped)
            (work,) = link.engine.waiting
            assert work.options.again
            assert b"seven" in work.extras.details
            assert not link.dropped

    run(main())


def test_the_answer_says_where_the_time_went() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            answer = await client.infer("fixed", FOUR).answer()
            assert answer.timing == TIMING

    run(main())


def left(answer: Answer, unread: float = 0.0) -> None:
    """As a call does when its answer is away."""
    if answer.outside is not None:
        now = time.monotonic()
        answer.outside.seen(unread + now - answer.sent, now)


def test_what_an_answers_way_takes_is_learned_and_told_to_the_engine() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            before = time.monotonic()
            asked = client.infer("fixed", FOUR)
            answer = await asked.answer()
            assert before <= answer.sent <= time.monotonic()
            assert asked.call.template.outside.seconds == 0.0
            left(answer, unread=1.0)
            learned = asked.call.template.outside.seconds
            assert learned > 0.19  # a fifth of what was seen
            asked.call.release()
            client.infer("loose", np.zeros((2, 9), np.uint8), "hold")
            client.infer("fixed", FOUR, "hold")  # another template of the same model
            await until(lambda: len(link.engine.waiting) == 2)
            assert [work.outside for work in link.engine.waiting] == [0.0, learned]

    run(main())


def test_a_refusal_says_when_it_was_sent_as_well() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR, "refuse")
            answer = await asked.answer()
            assert answer.error is not None
            left(answer)
            assert asked.call.template.outside.seconds > 0.0

    run(main())


def test_what_was_lost_with_its_engine_teaches_nothing() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR, "hold")
            await until(lambda: link.engine.waiting)
            link.side.close()
            answer = await asked.answer()
            assert answer.error is not None
            left(answer, unread=1.0)
            assert asked.call.template.outside.seconds == 0.0

    run(main())


def test_the_engine_gets_what_the_request_said() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            before = time.monotonic()
            options = RequestOptions(priority=3, timeout=0.25)
            client.infer("loose", np.zeros((2, 9), np.uint8), "hold", options=options)
            client.infer("fixed", FOUR, "hold")
            await until(lambda: len(link.engine.waiting) == 2)
            loose, fixed = link.engine.waiting
            assert (loose.images, loose.options.priority, loose.options.timeout) == (2, 3, 0.25)
            assert loose.shape is not None
            assert (fixed.images, fixed.shape) == (1, None)
            assert before <= fixed.arrived <= time.monotonic()
            assert fixed.deadline == float("inf")

    run(main())


def test_errors_arrive_as_they_were_raised() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            error = (await client.infer("fixed", FOUR, "refuse").answer()).error
            assert isinstance(error, Refused)
            assert (error.message, error.reason) == ("too much", "overload")
            assert (error.predicted_ms, error.retry_after_s) == (12.5, 0.5)
            for source, words in [
                ("missing", "gave no output 'y'"),
                ("wrong", "output 'y' is float64, but FP32 was declared"),
                ("nothing", "without outputs"),
                ("explode", "exploded"),
            ]:
                asked = client.infer("fixed", FOUR, source)
                error = (await asked.answer()).error
                asked.call.release()
                assert isinstance(error, ModelError)
                assert words in error.message
            assert not any(one.calls for one in link.side.links)

    run(main())


def test_bytes_that_are_no_tensor_cost_one_error() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            good = client.infer("flags", np.array([[True, False, True]]), "hold")
            await until(lambda: link.engine.waiting)
            bad = client.infer("flags", np.array([[2, 0, 1]], np.uint8).view(bool))
            error = (await bad.answer()).error
            assert isinstance(error, InvalidInput)
            assert error.field == "input 'x'.data"
            link.engine.release()
            assert await good.output() == [[True, False, True]]

    run(main())


def test_an_engine_that_answers_twice_is_heard_once() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            twice = client.infer("fixed", FOUR, "twice")
            await twice.answer()
            assert await client.infer("fixed", FOUR).output() == FOUR.tolist()
            assert len(twice.answers) == 1

    run(main())


def test_done_is_never_called_before_infer_returns() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            loose = client.model("loose")
            link.side.engine.publish(*(m for m in MODELS if m.name != "loose"))  # type: ignore[attr-defined]
            await until(lambda: "loose" not in client.door.catalog.newest)
            gone = client.infer(loose, np.zeros((1, 3), np.uint8))
            assert not gone.answers
            assert isinstance((await gone.answer()).error, NotFound)
            assert client.door.arena.slots_used == 0

    run(main())


# ── cancelling ──


def test_cancelled_in_the_turn_it_was_asked() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR)
            asked.call.cancel()
            assert client.door.arena.slots_used == 2  # the engine will read them
            await until(lambda: client.door.arena.slots_used == 0)
            assert not asked.answers

    run(main())


def test_cancelled_while_it_waits() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR, "hold")
            await until(lambda: link.engine.waiting)
            asked.call.cancel()
            asked.call.cancel()
            await until(lambda: client.door.arena.slots_used == 0)
            assert not link.engine.waiting
            assert not asked.answers
            assert not any(one.calls for one in link.side.links)

    run(main())


def test_cancelled_while_it_runs_keeps_its_slots_until_the_batch_is_over() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR, "run")
            await until(lambda: link.engine.running)
            asked.call.cancel()
            await client.door.ask("ping", {})  # the cancellation has arrived: it was sent before
            assert client.door.arena.slots_used == 2
            link.engine.release()
            await until(lambda: client.door.arena.slots_used == 0)
            assert not asked.answers

    run(main())


def test_cancelled_while_the_answer_is_on_its_way() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR, "run")
            await until(lambda: link.engine.running)
            link.engine.release()
            asked.call.cancel()
            await until(lambda: client.door.arena.slots_used == 0)
            await client.door.ask("ping", {})
            assert not asked.answers
            assert len(link.side.links) == 1

    run(main())


def test_cancelled_or_released_after_the_answer() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            asked = client.infer("fixed", FOUR)
            await asked.answer()
            assert client.door.arena.slots_used == 1  # the outputs
            asked.call.cancel()
            asked.call.release()
            asked.call.cancel()
            assert client.door.arena.slots_used == 0
            assert len(asked.answers) == 1

    run(main())


def test_cancelled_before_a_refusal_was_told() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            client.door._link.writable = False  # type: ignore[union-attr]
            asked = client.infer("fixed", FOUR)
            asked.call.cancel()
            await asyncio.sleep(0)
            assert not asked.answers
            assert client.door.arena.slots_used == 0

    run(main())


# ── memory ──


def test_an_answer_that_does_not_fit_comes_over_the_socket_and_fits_the_next_time() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            x = np.arange(6000, dtype=np.uint16).view(np.uint8).reshape(1, -1)
            for _ in range(2):
                assert await client.infer("loose", x).output() == x.tolist()
            asked = client.infer("loose", x)
            answer = await asked.answer()
            memory = client.door.arena.memory
            base = np.frombuffer(memory, np.uint8).ctypes.data
            assert base <= answer.outputs[0].data.ctypes.data < base + len(memory)

    run(main())


def test_without_room_for_outputs_there_still_is_an_answer() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door(size=8192)
            hog = client.door.slot(4096)
            assert hog is not None
            asked = client.infer("fixed", FOUR)
            assert asked.call.output is None
            assert await asked.output() == FOUR.tolist()

    run(main())


def test_an_answer_over_the_limit_is_an_error() -> None:
    async def main() -> None:
        async with joined() as link:
            link.side.max_answer_bytes = 1 << 16
            client = await link.door()
            error = (await client.infer("loose", np.zeros((1, 4), np.uint8), "large").answer()).error
            assert isinstance(error, ModelError)
            assert "1048576 bytes" in error.message

    run(main())


@pytest.mark.parametrize("rounds", [63, later(625)])
def test_many_calls_leave_nothing_behind(rounds: int) -> None:
    """Up to 20,000 calls, 32 at a time, over three models; some are cancelled."""

    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            door = client.door
            words = strings(b"a", b"bc")
            sample = [("fixed", FOUR), ("loose", np.ones((1, 50), np.uint8)), ("words", words)]
            for round_ in range(rounds):
                model, x = sample[round_ % 3]
                asked = [client.infer(model, x) for _ in range(32)]
                asked[round_ % 32].call.cancel()
                await until(lambda: door.arena.slots_used <= 31)
                for index, one in enumerate(asked):
                    if index != round_ % 32:
                        assert (await one.answer()).error is None
                        one.call.release()
                assert door.arena.slots_used == 0
            assert not any(one.calls for one in link.side.links)
            assert door.arena.bytes_used == 0
            assert link.engine.submitted == 32 * rounds

    run(main())


def test_many_different_heads_do_not_pile_up() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            for number in range(3 * MAX_TEMPLATES):
                x = np.zeros((1, number), np.uint8)
                asked = client.infer("loose", x)
                if number % 100 == 0:
                    assert await asked.output() == x.tolist()
                else:
                    asked.call.cancel()
            await until(lambda: client.door.arena.slots_used == 0)
            (engine_link,) = link.side.links
            assert len(engine_link._templates) <= MAX_TEMPLATES

    run(main())


def test_equal_heads_share_a_template_whatever_objects_they_are() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            for _ in range(5):
                x = strings(b"a" * 2000)  # their heads are cached; a longer one would be parsed anew
                assert await client.infer("words", x).output() == x.tolist()
            (engine_link,) = link.side.links
            assert len(engine_link._templates) == 1

    run(main())


# ── inputs that are still to come ──


@dataclass
class Coming:
    """A call that was made before its tensors, as a test sees it."""

    slot: ArenaSlot
    call: RemoteCall
    admitted: list[bool]
    answers: list[Answer]


def offer(client: Client, source: str = "") -> Coming:
    entry = client.model("fixed")
    _, head, _ = packed(entry, FOUR)
    slot = client.door.slot(FOUR.nbytes)
    assert slot is not None
    admitted: list[bool] = []
    heard = Heard(on_admitted=lambda: admitted.append(True))
    ask = Ask(entry, head, slot, 0, time.monotonic(), sender=Sender(source), handling=Handling(0.01))
    return Coming(slot, client.door.infer(ask, heard), admitted, heard.answers)


def test_a_call_is_let_in_before_its_tensors_and_runs_with_them() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            coming = offer(client)
            await until(lambda: coming.admitted)
            (work,) = link.engine.coming
            assert work.course.ready_at <= time.monotonic() + 0.01
            assert not coming.answers
            coming.slot.view[: FOUR.nbytes] = FOUR.tobytes()
            coming.call.ready(coming.slot)
            await until(lambda: coming.answers)
            assert coming.answers[0].error is None
            assert np.array(coming.answers[0].outputs[0].data).tolist() == FOUR.tolist()
            coming.call.release()
            assert client.door.arena.slots_used == 0
            assert coming.admitted == [True]

    run(main())


def test_a_call_that_is_refused_before_its_tensors_leaves_their_slot_to_its_owner() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            coming = offer(client, "refuse")
            await until(lambda: coming.answers)
            assert coming.answers[0].error is not None
            assert coming.answers[0].error.reason == "overload"
            assert not coming.admitted
            coming.call.release()
            assert client.door.arena.slots_used == 1  # somebody may be writing to it
            coming.call.ready(coming.slot)  # too late: it is given back at once
            assert client.door.arena.slots_used == 0
            assert len(coming.answers) == 1

    run(main())


def test_one_that_is_given_up_while_the_word_is_on_its_way_is_answered_once() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            coming = offer(client)
            await until(lambda: coming.admitted)
            (work,) = link.engine.coming
            work.origin = JobOrigin("refuse")
            link.engine.ready(work)  # the engine ends it, and does not hear of its tensors before
            coming.call.ready(coming.slot)
            await until(lambda: coming.answers)
            coming.call.release()
            assert await client.infer("fixed", FOUR).output() == FOUR.tolist()  # the link has not minded
            assert len(coming.answers) == 1
            assert client.door.arena.slots_used == 0
            assert not any(one.calls for one in link.side.links)

    run(main())


def test_who_leaves_before_its_tensors_are_there_is_forgotten() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            coming = offer(client)
            await until(lambda: link.engine.coming)
            coming.call.cancel()
            await until(lambda: not any(one.calls for one in link.side.links))
            coming.slot.release()
            await until(lambda: client.door.arena.slots_used == 0)
            assert not coming.answers

    run(main())


# ── options that differ from request to request ──


def test_deadlines_priorities_and_sources_make_no_templates() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            for number in range(50):
                options = RequestOptions(priority=number % 3, timeout=1.0 + number)
                assert await client.infer("fixed", FOUR, options=options).output() == FOUR.tolist()
                asked = client.infer("fixed", FOUR, f"hold-{number}")
                assert await asked.output() == FOUR.tolist()
            (engine_link,) = link.side.links
            assert len(engine_link._templates) == 1

    run(main())


def test_options_arrive_as_they_were_given() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            options = RequestOptions(priority=2, timeout=0.25, source="hold", latest=True)
            asked = [client.infer("fixed", FOUR, options=options), client.infer("fixed", FOUR, "hold")]
            await until(lambda: len(link.engine.waiting) == 2)
            first, second = link.engine.waiting
            assert (first.options, first.origin.source) == (JobOptions(2, 0.25, latest=True), "hold")
            assert (second.options, second.origin.source) == (NO_OPTIONS, "hold")
            huge = RequestOptions(priority=2**63, timeout=1e10, source="hold")
            asked.append(client.infer("fixed", FOUR, options=huge))
            await until(lambda: len(link.engine.waiting) == 3)
            assert link.engine.waiting[-1].options.priority == 2**32 - 1
            link.engine.release()
            for one in asked:
                await one.output()

    run(main())


def test_more_sources_than_have_numbers_are_still_told_apart() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            names = [f"camera-{number}" for number in range(2 * MAX_SOURCES + 7)]
            seen: list[str] = []
            submit = link.engine._submit

            def note(key: int, work: Work) -> None:
                seen.append(work.origin.source)
                submit(key, work)

            link.engine._submit = note  # type: ignore[method-assign]
            for name in [*names, *names[-3:], names[0]]:
                asked = client.infer("fixed", FOUR, name)
                await asked.output()
            assert seen == [*names, *names[-3:], names[0]]

    run(main())


def test_who_pays_is_the_holder_of_a_key_or_else_an_address() -> None:
    heard = records.HeardSources()
    said = records.SaidSources(lambda record: heard.hear(*_of_source(record)))

    def number(name: str, holder: str = "", weight: float = 1.0, payer: str = "") -> int:
        return said.number(JobOrigin(name, holder, weight, payer))

    unnamed = Sender().paid_by("192.0.2.1")
    assert heard.source(number("", payer=unnamed.payer)) == ("", "", 1.0, unnamed.lane)
    assert heard.source(number("gate", payer="2001:db8::/64")) == ("gate", "", 1.0, "2001:db8::/64")
    assert heard.source(number("alice/gate", "alice", 2.0)) == ("alice/gate", "alice", 2.0, "alice")
    assert heard.source(number("gate")) == ("gate", "", 1.0, "")
    assert number("", payer=unnamed.payer) == 1, "it is said once"
    assert heard.source(number("")) == ("", "", 1.0, "")
    for address in range(records.MAX_SOURCES + 10):
        assert number("", payer=f"\0{address}") != 0, "however many there are"
    assert len(said.known) == len(heard.known) - 1 == records.MAX_SOURCES


def _of_source(record: bytes) -> tuple[int, bytes]:
    ((fields, payload),) = records.RecordReader(records.TO_ENGINE, 1 << 10).feed(record)
    return fields[2], payload


# ── losing the engine ──


def test_when_the_engine_dies_every_call_gets_one_clear_error() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            door = client.door
            waiting = [client.infer("fixed", FOUR, "hold") for _ in range(20)]
            cancelled = client.infer("fixed", FOUR, "hold")
            question = asyncio.ensure_future(door.ask("wait", {}))
            await until(lambda: len(link.engine.waiting) == 21)
            cancelled.call.cancel()
            (engine_link,) = link.side.links
            engine_link.close()
            for one in waiting:
                error = (await one.answer()).error
                assert isinstance(error, Unavailable)
                assert error.reason == "engine-restarted"
                one.call.release()
            with pytest.raises(Unavailable):
                await question
            assert not cancelled.answers
            assert door.arena.slots_used == 0
            assert not door.serving
            assert not door.catalog.ready
            late = client.infer("fixed", FOUR)
            error = (await late.answer()).error
            assert isinstance(error, Unavailable)
            assert error.reason == "engine-restarted"
            with pytest.raises(Unavailable):
                await door.ask("ping", {})

    run(main())


def test_the_engine_forgets_a_front_end_that_died() -> None:
    async def main() -> None:
        async with joined() as link:
            client, other = await link.door(), await link.door()
            client.infer("fixed", FOUR, "hold")
            client.infer("fixed", FOUR, "run")
            await until(lambda: link.engine.waiting and link.engine.running)
            client.door.close()
            await until(lambda: len(link.side.links) == 1)
            assert not link.engine.waiting  # cancelled
            assert link.engine.running  # finishes into memory that nobody reads
            link.engine.release()
            assert await other.infer("fixed", FOUR).output() == FOUR.tolist()
            assert not link.dropped

    run(main())


def test_the_memory_of_a_front_end_that_died_is_unmapped() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            sock, _ = await link.raw(5 << 20)
            assert _mapped_bytes() == {64 << 20, 5 << 20}
            sock.close()
            del sock, _
            await until(lambda: len(link.side.links) == 1)
            await until(lambda: _mapped_bytes() == {64 << 20})
            assert await client.infer("fixed", FOUR).output() == FOUR.tolist()

    gc.collect()
    run(main())


def _mapped_bytes() -> set[int]:
    sizes = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "test-arena" in line:
            start, _, end = line.split()[0].partition("-")
            sizes.add(int(end, 16) - int(start, 16))
    return sizes


def test_a_request_for_the_old_engine_goes_to_the_same_model_of_the_new_one() -> None:
    async def main() -> None:
        async with joined() as old, joined() as new:
            client = await old.door()
            fixed, loose = client.model("fixed"), client.model("loose")
            changed = entry(2, "loose", Datatype.UINT8, (-1, 3))
            new.engine.catalog = new.engine.catalog.__class__(
                1, True, {("fixed", "1"): entry(9, "fixed", Datatype.FP32, (4,)), ("loose", "1"): changed}
            )
            new.side._publish(new.engine.catalog)
            (engine_link,) = old.side.links
            engine_link.close()
            await until(lambda: not client.door.serving)
            ours, theirs = socket.socketpair()
            await client.door.attach(theirs)
            early = await client.infer(fixed, FOUR).answer()  # connected, but it has said nothing yet
            assert isinstance(early.error, Unavailable)
            await new.side.attach(7, ours, os.dup(client.arena))
            await until(lambda: client.door.serving)
            asked = client.infer(fixed, FOUR, "hold")
            await until(lambda: new.engine.waiting)
            assert new.engine.together == [(9, 1)]
            new.engine.release()
            assert await asked.output() == FOUR.tolist()
            error = (await client.infer(loose, np.zeros((1, 3), np.uint8)).answer()).error
            assert isinstance(error, Unavailable)
            assert error.reason == "model-replaced"
            error = (await client.infer(MODELS[2], strings(b"x")).answer()).error
            assert isinstance(error, NotFound)

    run(main())


@pytest.mark.parametrize(
    "nonsense", [to_frontend(99, 1, 0), to_frontend(7, 12345, 0), to_frontend(9, 1, 0), b"\xff" * 400]
)
def test_an_engine_that_cannot_be_understood_is_reported(nonsense: bytes) -> None:
    async def main() -> None:
        broken: list[None] = []
        async with joined() as link:
            client = await link.door(broken=lambda: broken.append(None))
            asked = client.infer("fixed", FOUR, "hold")
            await until(lambda: link.engine.waiting)
            (engine_link,) = link.side.links
            engine_link._outbox.put(nonsense)
            assert isinstance((await asked.answer()).error, Unavailable)
            assert broken == [None]

    run(main())


def test_a_callback_that_raises_harms_nobody_else() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()

            def fail(_: Answer) -> None:
                raise RuntimeError("the front end exploded")

            first = client.infer("fixed", FOUR, "hold")
            first.call.hears = Heard(fail)
            second = client.infer("fixed", FOUR, "hold")
            await until(lambda: len(link.engine.waiting) == 2)
            link.engine.release()
            assert await second.output() == FOUR.tolist()
            assert client.door.arena.slots_used == 0

    run(main())


def test_a_slot_of_another_kind_is_refused() -> None:
    class Plain:
        view = memoryview(bytearray(100))

        def release(self) -> None: ...

    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            heard = Heard()
            answers = heard.answers
            _, head, tail = packed(client.model("fixed"), FOUR)
            client.door.infer(Ask(client.model("fixed"), head, Plain(), tail, 0.0), heard)
            await until(lambda: answers)
            assert isinstance(answers[0].error, CarpoolError)
            assert answers[0].timing == Timing()

    run(main())


# ---- an engine that hangs, which its link does not show


def test_an_engine_that_stands_still_is_not_served_from_and_who_waits_is_answered() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            door = client.door
            running = client.infer("fixed", FOUR, "run")
            question = asyncio.ensure_future(door.ask("wait", {}))
            await until(lambda: link.engine.running)
            assert door.serving
            door.engine_stood_still(STALE_S)
            assert not door.serving
            refused = await client.infer("fixed", FOUR).answer()
            assert refused.error is not None
            assert refused.error.reason == "engine-stalled"
            assert not running.answers, "it may still come back"
            door.engine_stood_still(HOPELESS_S)
            told = await running.answer()
            assert told.error is not None
            assert told.error.reason == "engine-stalled"
            with pytest.raises(Unavailable, match="does not respond"):
                await question
            running.call.release()
            assert door.arena.slots_used == 2, "the engine may still write there"
            door.engine_stood_still(0.0)
            assert door.serving
            link.engine.release()
            await until(lambda: door.arena.slots_used == 0)
            assert len(running.answers) == 1, "answered twice"
            assert await client.infer("fixed", FOUR).output() == FOUR.tolist()

    run(main())


def test_a_request_is_answered_at_its_own_deadline_however_long_its_batch_hangs() -> None:
    async def main() -> None:
        async with joined() as link:
            client = await link.door()
            running = client.infer("fixed", FOUR, "run")
            await until(lambda: link.engine.running)
            client.door.engine_stood_still(0.0)
            assert not running.answers, "nothing was promised, and the engine lives"
            running.call.expires = time.monotonic()
            client.door.engine_stood_still(0.0)
            told = await running.answer()
            assert isinstance(told.error, DeadlineExceeded)
            running.call.release()
            assert client.door.arena.slots_used == 2
            link.engine.release()
            await until(lambda: client.door.arena.slots_used == 0)
            assert len(running.answers) == 1

    run(main())


def test_when_a_front_end_answers_by_itself() -> None:
    def promising(slo: float | None, *, decoupled: bool = False) -> ModelEntry:
        return replace(MODELS[0], batching=Batching("promise", slo), traits=Traits(decoupled=decoupled))

    assert expiry(promising(None), 5.0, INFINITY) == INFINITY
    assert expiry(promising(None), 5.0, 6.0) == pytest.approx(6.25)
    assert expiry(promising(0.05), 5.0, INFINITY) == pytest.approx(6.05)
    assert expiry(promising(30.0), 5.0, INFINITY) == pytest.approx(65.0)
    assert expiry(promising(30.0), 5.0, 6.0) == pytest.approx(6.25)
    assert expiry(promising(0.05, decoupled=True), 5.0, INFINITY) == INFINITY
    assert expiry(promising(0.05, decoupled=True), 5.0, 6.0) == pytest.approx(6.25)
