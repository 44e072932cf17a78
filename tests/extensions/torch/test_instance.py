"""Batches in the runner: each answer goes to its own slot, whatever becomes of its neighbours."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from carpool.errors import ModelError
from carpool.extensions.torch import runner_instance as instance_module
from carpool.link.records import AS_DECLARED, AS_EXPECTED, INLINE, LISTED, OK
from extensions.torch.placed import ARENA, SLOT, WIDTH, Doubling, Stand, error_of, signature
from waiting import until


def test_each_answer_lies_in_its_own_slot() -> None:
    with Stand(Doubling()) as stand:
        for slot in range(8):
            stand.put(slot, slot)
        slots = [5, 0, 7, 2]
        assert stand.run(slots) == [AS_EXPECTED] * 4
        assert [stand.answer(slot) for slot in slots] == [[2.0 * slot] * WIDTH for slot in slots]
        assert stand.answer(1) == [0.0] * WIDTH
        assert stand.backend.batches == [4]


def test_a_slot_that_comes_again_is_looked_at_anew_but_not_made_anew() -> None:
    with Stand(Doubling()) as stand:
        for number in range(1, 4):
            stand.put(0, number)
            stand.put(1, -3 * number)
            assert stand.run([0, 1]) == [AS_EXPECTED] * 2
            assert stand.answer(0) == [2.0 * number] * WIDTH
            assert stand.answer(1) == [-6.0 * number] * WIDTH
        assert stand.backend.views == 2


@pytest.mark.parametrize("spins_s", [0.0, 30.0])
def test_lone_images_on_a_device_are_answered_whether_its_thread_sleeps_or_looks(
    monkeypatch: pytest.MonkeyPatch, spins_s: float
) -> None:
    monkeypatch.setattr(instance_module, "_SPIN_S", spins_s)
    with Stand(Doubling(device="cuda:0")) as stand:
        for number in range(1, 4):
            stand.put(0, number)
            assert stand.run([0]) == [AS_EXPECTED]
            assert stand.answer(0) == [2.0 * number] * WIDTH
        stand.put(1, 9.0)
        assert stand.run([0, 1]) == [AS_EXPECTED] * 2


def test_what_has_to_be_copied_is_copied_each_time() -> None:
    with Stand(Doubling()) as stand:
        for number in (4.0, 5.0):
            stand.put(0, number, shift=1)
            assert stand.run([0], shift=1) == [AS_EXPECTED]
            assert stand.answer(0) == [2 * number] * WIDTH
        assert stand.backend.views == 2


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instance_module, "_MOST_KEPT", 2)
    with Stand(Doubling()) as stand:
        for slot in (0, 1, 2, 0, 1, 2):
            stand.put(slot, slot + 1)
            assert stand.run([slot]) == [AS_EXPECTED]
            assert stand.answer(slot) == [2.0 * (slot + 1)] * WIDTH
        assert len(stand.arenas.find(ARENA)._kept) <= 2


def test_memory_that_is_forgotten_goes() -> None:
    with Stand(Doubling()) as stand:
        assert stand.run([0, 1, 2]) == [AS_EXPECTED] * 3
        memory = weakref.ref(stand.memory)
        stand.arenas.forget(ARENA)
        del stand.memory
        until(lambda: memory() is None, work=gc.collect)  # the thread tells first, then lets go


@pytest.mark.parametrize("piece", [8, 3, 1])
def test_a_poisoned_request_costs_one_error_and_moves_no_answer(piece: int) -> None:
    with Stand(Doubling(), piece=piece) as stand:
        for slot in range(8):
            stand.put(slot, -1 if slot == 5 else slot)
        endings = stand.run(range(8))
        assert isinstance(error_of(endings[5]), ModelError)
        assert endings[:5] + endings[6:] == [AS_EXPECTED] * 7
        assert [stand.answer(slot) for slot in range(8) if slot != 5] == [
            [2.0 * slot] * WIDTH for slot in range(8) if slot != 5
        ]
        assert stand.answer(5) == [0.0] * WIDTH


def test_a_bad_picture_is_its_owners_alone() -> None:
    with Stand(Doubling(), encoded=True) as stand:
        for slot, length in enumerate((10, 0, 300)):
            stand.put_file(slot, b"x" * length)
        endings = stand.run([0, 1, 2])
        assert "no picture" in error_of(endings[1]).message
        assert [endings[0], endings[2]] == [AS_EXPECTED] * 2
        assert [stand.answer(slot) for slot in range(3)] == [[10.0] * WIDTH, [0.0] * WIDTH, [300.0] * WIDTH]


def test_a_file_longer_than_the_memory_is_its_owners_alone() -> None:
    with Stand(Doubling(), encoded=True) as stand:
        for slot in range(3):
            stand.put_file(slot, b"xyz")
        stand.memory[SLOT : SLOT + 8] = b"\xff" * 8
        endings = stand.run([0, 1, 2])
        assert "reaches beyond its memory" in error_of(endings[1]).message
        assert [endings[0], endings[2]] == [AS_EXPECTED] * 2
        assert stand.answer(2) == [3.0] * WIDTH


def test_outputs_of_sizes_that_only_the_model_knows_say_where_they_lie() -> None:
    with Stand(Doubling(-1), signature(-1)) as stand:
        for slot in range(2):
            stand.put(slot, slot + 1)
        endings = stand.run([1, 0])
        assert [(ending.status, ending.form) for ending in endings] == [(OK, LISTED)] * 2
        assert [stand.answer(slot) for slot in (0, 1)] == [[2.0] * WIDTH, [4.0] * WIDTH]


def test_outputs_that_do_not_fit_their_slot_come_along() -> None:
    with Stand(Doubling()) as stand:
        stand.put(0, 1)
        stand.put(1, 2)
        endings = stand.run([0, 1], capacity=8)
        assert [(ending.status, ending.form) for ending in endings] == [(OK, INLINE)] * 2
        assert stand.answer(0) == [0.0] * WIDTH


def test_large_outputs_lie_where_small_ones_would() -> None:
    width = 5 * SLOT  # 80 KiB
    with Stand(Doubling(width), signature(width)) as stand:
        for slot in (0, 40):
            stand.put(slot, slot + 1)
        endings = stand.run([40, 0], capacity=4 * width)
        assert [(ending.status, ending.form) for ending in endings] == [(OK, AS_DECLARED)] * 2
        assert [stand.answer(slot, width) for slot in (0, 40)] == [[2.0] * width, [82.0] * width]


def test_nothing_is_written_beyond_the_memory_and_neighbours_are_answered() -> None:
    with Stand(Doubling()) as stand:
        for slot in (0, 1):
            stand.put(slot, 3)
        last = len(stand.memory) // SLOT - 100  # its outputs would lie right behind the end
        endings = stand.run([0, last, 1])
        assert [endings[0], endings[2]] == [AS_EXPECTED] * 2
        assert isinstance(error_of(endings[1]), ModelError)
        assert [stand.answer(slot) for slot in (0, 1)] == [[6.0] * WIDTH] * 2


def test_nothing_is_written_after_an_abort_however_long_the_model_takes() -> None:
    backend = Doubling()
    backend.go.clear()
    with Stand(backend) as stand:
        stand.put(0, 3)
        stand.put(1, 3)
        stand.start([0, 1])
        assert backend.began.wait(30)
        stand.instance.abort()  # returns while the model still runs
        backend.go.set()
        endings = stand.end(2)
        assert [error_of(ending).reason for ending in endings] == ["aborted"] * 2
        assert [stand.answer(slot) for slot in (0, 1)] == [[0.0] * WIDTH] * 2
        assert [error_of(ending).reason for ending in stand.run([0])] == ["aborted"]


def test_an_abort_waits_for_what_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory may be another's as soon as it returns."""
    backend = Doubling()
    with Stand(backend) as stand:
        writing, write_on, aborted = threading.Event(), threading.Event(), threading.Event()
        delivery = stand.instance._delivery
        write = delivery._write

        def slowly(*arguments: object) -> object:
            writing.set()
            assert write_on.wait(30)
            return write(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(delivery, "_write", slowly)
        stand.put(0, 3)
        stand.start([0])
        assert writing.wait(30)
        aborter = threading.Thread(target=lambda: (stand.instance.abort(), aborted.set()))
        aborter.start()
        assert not aborted.wait(0.05)
        write_on.set()
        assert aborted.wait(30)
        assert stand.answer(0) == [6.0] * WIDTH
        aborter.join(30)
        assert stand.end(1) == [AS_EXPECTED]


def test_a_whole_backend_takes_the_place_of_a_hurried_one_between_two_batches() -> None:
    hurried, whole, late = Doubling(), Doubling(), Doubling()
    with Stand(hurried) as stand:
        stand.put(0, 3.0)
        assert stand.run([0]) == [AS_EXPECTED]
        stand.instance.swap(whole)
        assert stand.run([0]) == [AS_EXPECTED]
        assert stand.answer(0) == [6.0] * WIDTH
        assert (hurried.batches, whole.batches) == ([1], [1])
        assert not hurried.alive, "it holds memory of the device"
        unused, better = Doubling(), Doubling()
        stand.instance.swap(unused)
        stand.instance.swap(better)  # before anybody came for the first
        assert stand.run([0]) == [AS_EXPECTED]
        assert (unused.batches, better.batches) == ([], [1])
        assert not unused.alive
    assert not better.alive
    stand.instance.swap(late)  # the instance has ended meanwhile
    assert not late.alive


def test_a_model_that_cannot_be_freed_still_ends() -> None:
    class Stuck(Doubling):
        def close(self) -> None:
            raise RuntimeError("it cannot be freed")

    with Stand(Stuck()) as stand:
        assert stand.run([0]) == [AS_EXPECTED]
