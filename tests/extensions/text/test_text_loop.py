"""The loop of a model that writes, turn by turn in a time of its own: right texts, whatever comes between."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from carpool.core.curve import BatchCurve
from carpool.errors import CarpoolError, InvalidInput, ModelError, Refused, Unavailable
from carpool.extensions.text.stepper import AHEAD, TextInstance
from carpool.extensions.text.text_job import TextPromise
from carpool.extensions.text.text_loop import TextLoop
from carpool.extensions.text.text_records import Event, Failed, Piece, TextEventReader, Worked, write_events
from carpool.extensions.text.text_scheduler import TextScheduler

ENCODE, STEP = BatchCurve.parse("2+0.5", 8), BatchCurve.parse("1+0.1", 4)


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


class Scripted:
    """Reads bytes and writes them again; some poison it."""

    slots, longest, end, device, broken, overlaps = 4, 64, 0, "", False, True
    widths: Sequence[int] = (1, 2, 3, 4)
    notes: Sequence[str] = ()

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.left: list[bytes] = [b""] * self.slots
        self.fails: list[Exception] = []  # of the next steps
        self.launched: deque[tuple[float, Any]] = deque()
        self.busy = 0.0  # until then
        self.closed = False

    def read(self, inputs: Any) -> bytes:
        return bytes(inputs)

    def encode(self, pictures: Sequence[bytes]) -> Sequence[bytes]:
        self._queued(ENCODE.times[len(pictures)])
        if not self.overlaps:
            self._clock.at = self.busy
        if any(b"poison" in picture for picture in pictures):
            raise RuntimeError("a kernel failed")
        return pictures

    def admit(self, slots: Sequence[int], encoded: Sequence[bytes]) -> None:
        for slot, text in zip(slots, encoded, strict=True):
            self.left[slot] = text

    def launch(self, width: int) -> None:
        assert len(self.launched) < (AHEAD if self.overlaps else 1)
        tokens = np.array([text[0] if text else self.end for text in self.left[:width]], np.int64)
        self.left[:width] = [text[1:] for text in self.left[:width]]
        self.launched.append((self._queued(STEP.times[width]), tokens))

    def tokens(self) -> Any:
        due, tokens = self.launched.popleft()
        self._clock.at = max(self._clock.at, due)
        if self.fails:
            raise self.fails.pop(0)
        return tokens

    def forget(self) -> None:
        self.launched.clear()

    def _queued(self, seconds: float) -> float:
        self.busy = max(self._clock.at, self.busy) + seconds
        return self.busy

    def piece(self, token: int) -> bytes:
        return bytes((token,))

    def sample(self) -> bytes:
        return b"x"

    def abort(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True, params=[False, True], ids=["in turn", "ahead"])
def _overlapping(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices that can be asked for the next step before the last one's tokens were looked at, and others."""
    monkeypatch.setattr(Scripted, "overlaps", request.param)


class Stage:
    def __init__(self, **promise: Any) -> None:
        self.clock = Clock()
        self.stepper = Scripted(self.clock)
        self.events: list[Event] = []
        self.scheduler = TextScheduler(ENCODE, STEP, TextPromise(4, 64, **promise))
        self.loop = TextLoop(
            "m", TextInstance.whole(self.stepper), self.scheduler, self.events.extend, now=self.clock
        )

    def submit(self, number: int, text: bytes, **more: Any) -> CarpoolError | None:
        return self.loop.submit(number, text, self.clock.at, **more)

    def play(self, turns: int = 500) -> None:
        for _ in range(turns):
            if not self.loop.turn():
                return

    def texts(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for event in self.events:
            if isinstance(event, Piece):
                found[event.number] = found.get(event.number, "") + event.text
        return found

    def finishes(self) -> dict[int, str]:
        return {e.number: e.finish for e in self.events if isinstance(e, Piece) and e.finish}

    def failed(self) -> dict[int, CarpoolError]:
        return {event.number: event.error for event in self.events if isinstance(event, Failed)}


def test_texts_come_piece_by_piece_and_whole() -> None:
    stage = Stage()
    wanted = {n: f"text {n} " + "x" * (n % 5) for n in range(12)}
    for number, text in wanted.items():
        assert stage.submit(number, text.encode()) is None
    stage.play()
    assert stage.texts() == wanted
    assert set(stage.finishes().values()) == {"stop"}
    assert stage.scheduler.used == stage.scheduler.waiting == 0
    firsts = {e.number: e for e in reversed(stage.events) if isinstance(e, Piece)}
    assert all(event.encoded > 0 for event in firsts.values())
    assert all(firsts[n].waited > firsts[0].waited for n in range(4, 12))


def test_an_answer_ends_where_it_may_have_no_more_tokens() -> None:
    stage = Stage()
    stage.submit(1, b"abcdef", limit=3)
    stage.submit(2, b"abc", limit=64)
    stage.play()
    assert stage.texts() == {1: "abc", 2: "abc"}
    assert stage.finishes() == {1: "length", 2: "stop"}


def test_characters_are_never_cut_between_tokens() -> None:
    stage = Stage()
    stage.submit(1, "a€ü".encode())
    stage.submit(2, "€€".encode(), limit=4)  # ends in the middle of one
    stage.play()
    pieces = [e.text for e in stage.events if isinstance(e, Piece) and e.number == 1]
    assert [text for text in pieces if text] == ["a", "€", "ü"]
    assert stage.texts()[2] == "€\ufffd"


def test_an_empty_text_is_an_answer() -> None:
    stage = Stage()
    stage.submit(1, b"")
    stage.play()
    assert stage.texts() == {1: ""}
    assert stage.finishes() == {1: "stop"}


def test_who_leaves_is_not_heard_of_and_his_slot_is_free() -> None:
    """At any moment: while it waits, in its slot, and when it is nearly over."""
    random, wanted = Random(4), {n: f"{n} " * (1 + n % 7) for n in range(300)}
    stage, left = Stage(), set[int]()
    for number, text in wanted.items():
        assert stage.submit(number, text.encode()) is None
        for _ in range(random.randrange(4)):
            stage.loop.turn()
        if random.random() < 0.5:
            gone = random.randrange(max(0, number - 8), number + 1)
            if gone not in stage.finishes():
                left.add(gone)
            stage.loop.cancel(gone)
            told = len([e for e in stage.events if isinstance(e, Piece) and e.number == gone])
            stage.loop.turn()
            again = len([e for e in stage.events if isinstance(e, Piece) and e.number == gone])
            assert told == again
    stage.play(5000)
    texts = stage.texts()
    for number, text in wanted.items():
        if number not in left:
            assert texts[number] == text
            assert stage.finishes()[number] == "stop"
    assert stage.scheduler.used == stage.scheduler.waiting == 0
    assert not stage.loop._open


def test_that_the_last_one_left_is_told_although_no_work_follows() -> None:
    stage = Stage()
    assert stage.submit(1, b"text") is None
    stage.play(2)
    stage.loop.cancel(1)
    assert stage.loop.turn(wait=True)
    assert stage.scheduler.used == 0
    told = stage.events[-1]
    assert isinstance(told, Worked)
    assert (told.used, told.waiting) == (0, 0)


def test_a_poisoned_picture_costs_only_its_own_request() -> None:
    stage = Stage()
    for number in range(8):
        stage.submit(number, b"poison" if number in (2, 5) else b"fine")
    stage.play()
    assert stage.texts() == {n: "fine" for n in range(8) if n not in (2, 5)}
    assert set(stage.failed()) == {2, 5}
    assert all(isinstance(error, ModelError) for error in stage.failed().values())
    assert stage.scheduler.used == 0


def test_a_step_that_fails_costs_those_in_slots_one_error_each() -> None:
    stage = Stage()
    for number in range(6):
        stage.submit(number, b"words")
    stage.loop.turn()
    stage.loop.turn()
    stage.stepper.fails = [RuntimeError("no kernel image")]
    stage.play()
    assert set(stage.failed()) == {0, 1, 2, 3}
    assert stage.texts()[4] == stage.texts()[5] == "words"
    assert stage.loop.alive


@pytest.mark.parametrize("broken", [False, True])
def test_an_instance_that_cannot_step_ends_and_everybody_hears_so(broken: bool) -> None:
    stage = Stage()
    for number in range(30):
        stage.submit(number, b"words")
    stage.stepper.fails = [RuntimeError("CUDA error")] * (1 if broken else 9)
    stage.stepper.broken = broken
    stage.loop._work()
    assert stage.stepper.closed
    assert set(stage.failed()) == set(range(30))
    assert not stage.loop.alive
    assert isinstance(stage.submit(99, b"x"), ModelError)


def test_the_gate_says_no_at_arrival_and_why() -> None:
    stage = Stage(ttft=0.02, per_token=0.005)
    errors = [stage.submit(number, b"a long text of many words") for number in range(40)]
    refused = [error for error in errors if error is not None]
    assert refused
    assert errors[0] is None
    assert {error.reason for error in refused} == {"cannot-finish"}
    for error in refused:
        assert isinstance(error, Refused)
        assert "later than the deadline of 20 ms. 4 images are queued." in str(error)
        assert str(error).startswith("m rejected the request: the response would be ready in ")
        assert error.predicted_ms is not None
        assert error.predicted_ms > 20
    stage.play()
    firsts = {e.number for e in stage.events if isinstance(e, Piece)}
    assert firsts | set(stage.failed()) == {n for n, error in enumerate(errors) if error is None}
    late = stage.submit(77, b"x", deadline=stage.clock.at + 0.001)
    assert late is not None
    assert late.reason == "cannot-finish"
    assert "later than the deadline of 1 ms. 0 images are queued." in str(late)


def test_a_deadline_in_the_middle_ends_the_answer() -> None:
    stage = Stage()
    assert stage.submit(1, b"x" * 60, deadline=stage.clock.at + 0.5) is None
    assert stage.submit(2, b"short") is None
    for _ in range(4):
        stage.loop.turn()
    stage.clock.at += 1.0
    stage.play()
    assert stage.failed()[1].reason == "deadline"
    assert stage.texts()[2] == "short"
    assert stage.scheduler.used == 0


def test_closing_tells_who_is_left() -> None:
    stage = Stage()
    stage.submit(1, b"abc")
    stage.loop.turn()
    stage.loop.close()
    stage.loop._work()
    assert isinstance(stage.failed()[1], Unavailable)
    assert isinstance(stage.submit(2, b"x"), Unavailable)


def test_events_travel_as_they_are() -> None:
    events: list[Event] = [
        Piece(7, "grüß", 3, "", 0.25, 0.5),
        Piece(2**40, "", 4, "length"),
        Failed(8, InvalidInput("no picture", field="image")),
        Worked(0, 4, 0.001, 3, 12),
    ]
    written, reader = write_events(events), TextEventReader("m")
    heard = [event for byte in written for event in reader.feed(bytes((byte,)))]
    assert heard[:2] == events[:2]
    assert heard[3] == events[3]
    assert isinstance(heard[2], Failed)
    assert heard[2].error.field == "image"
    for wrong in (b"\xff" * 200, written.replace(b"gr", b"\xff\xff")):
        with pytest.raises(Exception, match=r"event|payload"):
            TextEventReader("m").feed(wrong)


def test_what_encoding_took_is_told_with_the_first_token_and_learned() -> None:
    stage = Stage()
    for number in range(30):
        stage.submit(number, b"text")
        stage.play(40)
        first = next(one for one in stage.events if isinstance(one, Piece) and one.number == number)
        assert first.encoded == pytest.approx(ENCODE.times[1])
    assert stage.scheduler.encoder.speeds[0].mean == pytest.approx(1.0)
    assert stage.scheduler.step.speeds[0].mean == pytest.approx(1.0)


def test_a_step_is_launched_before_the_tokens_of_the_last_are_told() -> None:
    stage = Stage()
    stage.submit(1, b"long text")
    stage.submit(2, b"no")
    flown = []
    tell = stage.events.extend

    def told(events: Sequence[Event]) -> None:
        flown.append((bool(stage.stepper.launched), any(isinstance(event, Piece) for event in events)))
        tell(events)

    stage.loop._tell = told
    stage.play()
    assert stage.texts() == {1: "long text", 2: "no"}
    ahead = [launched for launched, pieces in flown if pieces]
    assert any(ahead[:-1]) is Scripted.overlaps
    assert not stage.stepper.launched
