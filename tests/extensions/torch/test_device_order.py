"""Large batches compute in a row, on pretended streams that keep a virtual time of their own."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest

from carpool.extensions.torch.device_sharing import Order, order_of


class Mark:
    def __init__(self) -> None:
        self.at = 0.0

    def record(self, stream: Stream) -> None:
        self.at = stream.now


class Stream:
    """Does what it is given one after the other; `now` is when the last of it ends."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits = 0
        self.end = Mark()
        self.computed: list[tuple[float, float]] = []
        self.copied: list[tuple[float, float]] = []

    def wait_event(self, event: Mark) -> None:
        self.waits += 1
        self.now = max(self.now, event.at)

    def _take(self, kind: list[tuple[float, float]], seconds: float) -> None:
        kind.append((self.now, self.now + seconds))
        self.now += seconds

    def copy(self, seconds: float) -> None:
        self._take(self.copied, seconds)

    def compute(self, seconds: float) -> None:
        self._take(self.computed, seconds)

    def launch(self, order: Order, seconds: float) -> None:
        order.launch(self, self.end, lambda: self.compute(seconds))


def overlaps(spans: list[tuple[float, float]]) -> bool:
    return any(later[0] < earlier[1] for earlier, later in pairwise(sorted(spans)))


def test_computing_is_in_a_row_and_copies_beside_it() -> None:
    order, streams = Order(), [Stream(), Stream(), Stream()]
    for _ in range(4):
        for stream in streams:
            stream.copy(2.0)
            stream.launch(order, 3.0)
            stream.copy(1.0)  # the answers
    computed = [span for stream in streams for span in stream.computed]
    assert not overlaps(computed)
    assert max(end for _, end in computed) == 2.0 + 12 * 3.0  # the device computes without a pause
    assert overlaps(computed + [span for stream in streams for span in stream.copied])


def test_a_stream_does_not_wait_for_itself() -> None:
    order, one, other = Order(), Stream(), Stream()
    one.launch(order, 1.0)
    one.launch(order, 1.0)
    assert one.waits == 0
    other.launch(order, 1.0)
    one.launch(order, 1.0)
    assert (one.waits, other.waits) == (1, 1)
    assert one.computed[-1] == (3.0, 4.0)


def test_what_waits_is_not_moved_by_a_later_batch_of_whom_it_waits_for() -> None:
    order, one, other = Order(), Stream(), Stream()
    one.launch(order, 5.0)
    other.launch(order, 1.0)
    one.launch(order, 5.0)  # records the mark anew that the other waits for
    assert other.computed == [(5.0, 6.0)]
    assert one.computed[-1] == (6.0, 11.0)


def test_a_launch_that_fails_leaves_the_order_as_it_was() -> None:
    order, one, broken, other = Order(), Stream(), Stream(), Stream()
    one.launch(order, 4.0)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"):
        order.launch(broken, broken.end, fail)
    other.launch(order, 1.0)
    assert other.computed == [(4.0, 5.0)]  # behind the one that was launched, not behind the one that was not
    broken.launch(order, 1.0)
    assert broken.computed == [(5.0, 6.0)]


def test_whoever_leaves_is_waited_for_no_more() -> None:
    order, one, other = Order(), Stream(), Stream()
    one.launch(order, 4.0)
    order.leave(other.end)
    order.leave(one.end)
    other.launch(order, 1.0)
    assert other.waits == 0


def test_threads_do_not_come_between_a_wait_and_its_mark() -> None:
    order, streams = Order(), [Stream() for _ in range(4)]
    together = threading.Barrier(len(streams))

    def work(stream: Stream) -> None:
        together.wait(30)
        for _ in range(200):
            stream.launch(order, 1.0)

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    computed = sorted(span for stream in streams for span in stream.computed)
    assert computed == [(float(turn), turn + 1.0) for turn in range(800)]


def test_one_order_for_each_gpu() -> None:
    assert order_of(6) is order_of(6)
    assert order_of(6) is not order_of(7)
