"""Python models that give any number of answers to a request, in their process."""

from __future__ import annotations

import os
import signal
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from backends.cases import python_file, settings
from backends.test_triton_python import HEAD, Opened, X, Y, rows
from carpool import backends
from carpool.backends.backend import Backend, Placement
from carpool.backends.python.python_backend import PythonBackend
from carpool.backends.python.python_worker import Rounds
from carpool.config.repository import ModelVersion
from carpool.errors import CarpoolError, DeadlineExceeded, InvalidInput, ModelError
from carpool.types import Array

Loaded = Callable[..., PythonBackend]

COUNT = """
    class Model:
        def predict(self, x):
            for number in range(int(x[0, 0])):
                yield x + number
"""


@dataclass(eq=False)
class Heard:
    """A rider that has enough after so many."""

    most: int = 10**9
    inputs: dict[str, Array] = field(default_factory=dict)
    outputs: Sequence[str] = ("y",)
    details: bytes = b""
    ends: list[CarpoolError | None] = field(default_factory=list)
    each: Callable[[int], None] = lambda _: None
    values: list[Any] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        return len(self.values) < self.most

    def send(self, outputs: Any, *, last: bool = False) -> None:
        assert self.wanted, "an answer after the client left"
        self.values.append(outputs["y"][0, 0] if "y" in outputs else None)
        self.last.append(last)
        self.each(len(self.values))

    def end(self, error: CarpoolError | None) -> None:
        self.ends.append(error)


@pytest.fixture
def loaded(opened: Opened, tmp_path: Path) -> Loaded:
    def start(source: str, *, timeout: float | None = None, decoupled: bool = True) -> Backend:
        file = python_file(tmp_path, textwrap.dedent(source))
        config = replace(
            settings("python", file, X, Y), decoupled=decoupled, execution_timeout=timeout, max_batch=8
        )
        version = ModelVersion(1, file)
        return opened(backends.load(backends.describe(config, version), version, Placement(threads=1)))

    return start  # type: ignore[return-value]


def run(backend: PythonBackend, *given: Array, heard: Sequence[Heard] = ()) -> tuple[Any, list[Any]]:
    riders = list(heard) or [Heard() for _ in given]
    for rider, one in zip(riders, given, strict=True):
        rider.inputs = {"x": one}
    backend.run_many(riders, tuple)
    assert all(len(rider.ends) == 1 for rider in riders)
    return [rider.values for rider in riders], [rider.ends[0] for rider in riders]


def test_each_request_has_as_many_answers_as_it_has(loaded: Loaded) -> None:
    backend = loaded(COUNT)
    assert run(backend, rows(3), rows(0), rows(2)) == ([[3, 4, 5], [], [2, 3]], [None] * 3)
    assert run(backend, rows(1)) == ([[1]], [None])
    assert backend.run({"x": rows(5)}, ())["y"].tolist() == rows(5).tolist()  # to warm it up
    assert backend.run({"x": rows(0)}, ()) == {}


@pytest.mark.conformance
def test_ten_thousand_answers(loaded: Loaded) -> None:
    (values,), errors = run(loaded(COUNT), rows(10_000))
    assert errors == [None]
    assert values == [10_000 + number for number in range(10_000)]


def test_requests_of_a_batch_take_turns(loaded: Loaded) -> None:
    order: list[str] = []
    heard = [Heard(each=lambda _: order.append("a")), Heard(each=lambda _: order.append("b"))]
    run(loaded(COUNT), rows(3), rows(3), heard=heard)
    assert "".join(order) == "ababab"


def test_who_comes_while_others_ride_rides_along(loaded: Loaded) -> None:
    """Also behind one that never ends: it has its turns at once, and its own end."""
    late = Heard(inputs={"x": rows(2)})
    endless = Heard(most=50, inputs={"x": rows(1_000_000)})
    coming = [late]

    def more() -> list[Heard]:
        return [coming.pop()] if coming and len(endless.values) == 3 else []

    def see(_: int) -> None:
        if late.ends:
            seen.append(len(endless.values))

    seen: list[int] = []
    endless.each = see
    loaded(COUNT).run_many([endless], more)
    assert late.values == [2, 3]
    assert (late.ends, endless.ends) == ([None], [None])
    assert seen[0] <= 8


def test_inputs_stay_what_they_are_when_others_come(loaded: Loaded) -> None:
    """All come through the same memory."""
    riders = [Heard(inputs={"x": rows(20)}), *(Heard(inputs={"x": rows(number)}) for number in range(1, 9))]
    coming = riders[1:]
    loaded(COUNT).run_many(riders[:1], lambda: [coming.pop()] if coming else [])
    assert [one.values for one in riders] == [
        [number + n for n in range(number)] for number in (20, *range(1, 9))
    ]


def test_newcomers_keep_nobody_from_a_turn() -> None:
    rounds = Rounds()
    rounds.come([1, 2, 3])
    order = []
    for number in range(10, 30):
        rounds.come([number])  # one more at each turn, and none of them ends
        order.append(rounds.next())
        rounds.stays(order[-1])
    assert {1, 2, 3} <= set(order[:7])
    assert order[1] != order[0]


def test_what_it_returns_is_the_one_answer(loaded: Loaded) -> None:
    backend = loaded("def predict(x):\n    return x * 2 if x[0, 0] else None")
    assert run(backend, rows(3), rows(0)) == ([[6], []], [None, None])


def test_an_error_after_some_answers_is_only_its_own(loaded: Loaded) -> None:
    source = """
        def predict(x):
            for number in range(3):
                if x[0, 0] == 7 and number == 2:
                    raise ValueError("enough of this")
                yield x
    """
    backend = loaded(source)
    values, (first, second) = run(backend, rows(7), rows(1))
    assert values == [[7, 7], [1, 1, 1]]
    assert isinstance(first, ModelError)
    assert "enough of this" in first.message
    assert second is None
    assert run(backend, rows(1))[1] == [None]


def test_a_model_hears_that_the_client_left_before_its_next_answer(loaded: Loaded) -> None:
    source = """
        left = 0
        def predict(x):
            global left
            if x[0, 0] == 0:
                yield x + left
                return
            try:
                while True:
                    yield x
            finally:
                left += 1
    """
    backend = loaded(source)
    values, errors = run(backend, rows(1), rows(2), heard=[Heard(most=3), Heard(most=5)])
    assert (values, errors) == ([[1] * 3, [2] * 5], [None, None])
    assert run(backend, rows(0)) == ([[2]], [None])


def test_a_process_that_dies_between_two_answers(loaded: Loaded) -> None:
    backend = loaded(COUNT)

    def kill(count: int) -> None:
        if count == 2:
            os.kill(backend._process.pid, signal.SIGKILL)

    heard = Heard(each=kill)
    with pytest.raises(ModelError, match="died"):
        run(backend, rows(100), heard=[heard])
    assert len(heard.values) == 2
    assert not backend.alive


def test_a_model_that_gives_no_answer_for_too_long_is_ended(loaded: Loaded) -> None:
    backend = loaded(
        "import time\ndef predict(x):\n    yield x\n    time.sleep(600)\n    yield x", timeout=500.0
    )

    def only_now(count: int) -> None:  # so that the first has as long as it needs
        backend._timeout = 0.1

    heard = Heard(each=only_now)
    with pytest.raises(DeadlineExceeded, match="no response within 100 ms"):
        run(backend, rows(1), heard=[heard])
    assert len(heard.values) == 1
    assert not backend.alive


def test_an_answer_that_cannot_be_sent_ends_its_request(loaded: Loaded) -> None:
    backend = loaded("def predict(x):\n    yield {'y': x}\n    yield {'y': object()}\n    yield {'y': x}")
    values, (error,) = run(backend, rows(1))
    assert values == [[1]]
    assert isinstance(error, CarpoolError)

    def refuse(count: int) -> None:
        if count == 2:
            raise InvalidInput("too long")

    backend = loaded(COUNT)
    values, (error,) = run(backend, rows(9), heard=[Heard(each=refuse)])
    assert values == [[9, 10]]
    assert isinstance(error, InvalidInput)


def test_a_model_that_yields_without_saying_so_in_its_settings(loaded: Loaded) -> None:
    with pytest.raises(ModelError, match="decoupled = true"):
        loaded(COUNT, decoupled=False).run({"x": rows(1)}, ())


def test_a_generator_that_will_not_be_closed(loaded: Loaded) -> None:
    source = """
        def predict(x):
            while True:
                try:
                    yield x
                except GeneratorExit:
                    if x[0, 0] == 2:
                        raise KeyError("in the end") from None
    """
    backend = loaded(source)
    values, errors = run(
        backend, rows(1), rows(2), rows(3), heard=[Heard(most=2), Heard(most=3), Heard(most=5)]
    )
    assert values == [[1] * 2, [2] * 3, [3] * 5]
    assert len(errors) == 3  # nobody hears them
    assert run(backend, rows(1), heard=[Heard(most=1)])[0] == [[1]]


def test_odd_answers_end_their_request_and_no_other(loaded: Loaded) -> None:
    source = """
        import numpy as np

        def predict(x):
            odd = [{"y": np.array([object()])}, {"y": [[1, 2], [3]]}]
            yield x
            if x[0, 0] >= 10:
                yield odd[int(x[0, 0]) - 10]
            yield x
    """
    backend = loaded(source)
    for kind in (10, 11):
        values, (odd, fine) = run(backend, rows(kind), rows(1))
        assert (values, fine) == ([[kind], [1, 1]], None)
        assert isinstance(odd, CarpoolError)
    assert backend.alive


# ── Triton's way: a sender for each request ──

SENDING = """
    FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

    def answer(value):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full((1, 3), value, np.float32))])

    def value(request):
        return int(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0, 0])
"""


def triton(body: str) -> str:
    execute = textwrap.indent(textwrap.dedent(body), "        ")
    return (
        HEAD
        + textwrap.dedent(SENDING)
        + f"class TritonPythonModel:\n    def execute(self, requests):\n{execute}"
    )


REPEAT = """
    def work(sender, count):
        for number in range(count):
            sender.send(answer(number))
        sender.send(flags=FINAL)

    for request in requests:
        threading.Thread(target=work, args=(request.get_response_sender(), value(request))).start()
"""


def test_threads_of_the_model_send_as_many_as_they_like(loaded: Loaded) -> None:
    backend = loaded(triton(REPEAT))
    assert run(backend, rows(3), rows(0), rows(2)) == ([[0, 1, 2], [], [0, 1]], [None] * 3)
    assert run(backend, rows(300)) == ([list(range(300))], [None])


def test_the_last_answer_may_say_that_it_is(loaded: Loaded) -> None:
    heard = Heard()
    backend = loaded(
        triton("way = requests[0].get_response_sender()\nway.send(answer(1))\nway.send(answer(2), FINAL)")
    )
    run(backend, rows(1), heard=[heard])
    assert (heard.values, heard.last) == ([1, 2], [False, True])


def test_an_error_that_is_sent_is_the_end_for_the_client(loaded: Loaded) -> None:
    backend = loaded(
        triton("""
            sender = requests[0].get_response_sender()
            sender.send(answer(1))
            wrong = pb_utils.TritonError("no", pb_utils.TritonError.INVALID_ARG)
            sender.send(pb_utils.InferenceResponse(error=wrong))
            sender.send(answer(2))
            sender.send(flags=FINAL)
        """)
    )
    values, (error,) = run(backend, rows(1))
    assert values == [[1]]
    assert isinstance(error, InvalidInput)
    assert error.message == "no"


def test_a_request_that_the_model_forgets_is_ended(loaded: Loaded) -> None:
    forgetful = loaded(triton("requests[0].get_response_sender().send(answer(1))"))
    values, (error,) = run(forgetful, rows(1))
    assert values == [[1]]
    assert isinstance(error, ModelError)
    assert "dropped a request" in error.message
    (error,) = run(loaded(triton("pass")), rows(1))[1]
    assert "no response sender" in error.message
    (error,) = run(loaded(triton("return [answer(1)]")), rows(1))[1]
    assert "must return None" in error.message


def test_an_execute_that_raises_ends_what_is_open(loaded: Loaded) -> None:
    backend = loaded(
        triton("requests[0].get_response_sender().send(answer(1), FINAL)\nraise ValueError('enough')")
    )
    values, (first, second) = run(backend, rows(1), rows(2))
    assert values == [[1], []]
    assert first is None
    assert "enough" in second.message


def test_after_the_last_nothing_is_sent(loaded: Loaded) -> None:
    backend = loaded(
        triton("""
            sender = requests[0].get_response_sender()
            sender.send(flags=FINAL)
            try:
                sender.send(answer(1))
            except pb_utils.TritonModelException as error:
                other = requests[1].get_response_sender()
                other.send(answer(len(str(error)) > 10), FINAL)
            try:
                other.send()
            except pb_utils.TritonModelException:
                pass
        """)
    )
    assert run(backend, rows(1), rows(1)) == ([[], [1]], [None, None])


def test_a_sender_knows_that_its_client_has_gone(loaded: Loaded) -> None:
    backend = loaded(
        triton("""
            sender = requests[0].get_response_sender()
            while not sender.is_cancelled():
                assert not requests[0].is_cancelled()
                sender.send(answer(1))
            sender.send(flags=FINAL)
        """)
    )
    assert run(backend, rows(1), heard=[Heard(most=4)]) == ([[1] * 4], [None])


POLLS = """
    sender = requests[0].get_response_sender()
    while not (requests[0].is_cancelled() and sender.is_cancelled()):
        pass
    sender.send(answer(1))
    sender.send(flags=FINAL)
"""


def test_a_model_that_only_asks_hears_that_its_client_has_gone(loaded: Loaded) -> None:
    assert run(loaded(triton(POLLS)), rows(1), heard=[Heard(most=0)]) == ([[]], [None])


def test_to_ask_is_no_answer(loaded: Loaded) -> None:
    with pytest.raises(DeadlineExceeded, match="no response within 500 ms"):
        run(loaded(triton(POLLS), timeout=0.5), rows(1))


def test_a_thread_that_asks_after_the_end_disturbs_nobody(loaded: Loaded) -> None:
    backend = loaded(
        triton("""
            sender = requests[0].get_response_sender()
            def ask():
                for _ in range(20_000):
                    sender.is_cancelled()
            threading.Thread(target=ask).start()
            sender.send(answer(value(requests[0])), FINAL)
        """)
    )
    for number in range(50):
        assert run(backend, rows(number)) == ([[number]], [None])


def test_answers_come_in_the_order_in_which_they_are_sent(loaded: Loaded) -> None:
    """Of several requests, whichever threads send them."""
    orders = ("01010101", "11110000", "01111000", "00001111")
    backend = loaded(
        triton(f"""
            senders = [request.get_response_sender() for request in requests]
            order = {orders}[value(requests[0])]
            def work():
                for number in order:
                    senders[int(number)].send(answer(int(number)))
                for sender in senders:
                    sender.send(flags=FINAL)
            threading.Thread(target=work).start()
        """)
    )
    for number, order in enumerate(orders):
        said: list[str] = []
        heard = [Heard(each=lambda _, to=said: to.append("0")), Heard(each=lambda _, to=said: to.append("1"))]  # type: ignore[misc]
        assert run(backend, rows(number), rows(0), heard=heard)[1] == [None, None]
        assert "".join(said) == order


def test_an_execute_that_raises_each_time_keeps_its_process(loaded: Loaded) -> None:
    backend = loaded(triton("raise ValueError('on purpose')"))
    for _ in range(10):
        (error,) = run(backend, rows(1))[1]
        assert "on purpose" in error.message
    assert backend.alive


BEHIND = """
    import threading
    import triton_python_backend_utils as pb_utils
    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                threading.Thread(target=self.answer, args=(request,)).start()
        def answer(self, request):
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            for number in range(int(x[0, 0])):
                if sender.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_execute_is_called_again_while_answers_are_open(loaded: Loaded) -> None:
    """As Triton does once it has returned."""
    late = Heard(inputs={"x": rows(2)})
    endless = Heard(inputs={"x": rows(1_000_000)})
    coming = [late]

    def see(_: int) -> None:
        if late.ends:
            endless.most = len(endless.values)  # its client has had enough when the other has its end

    endless.each = see
    loaded(BEHIND).run_many([endless], lambda: [coming.pop()] if coming and endless.values else [])
    assert late.values == [2, 3]
    assert (late.ends, endless.ends) == ([None], [None])


def test_execute_is_called_again_while_nothing_is_sent(loaded: Loaded) -> None:
    source = BEHIND.replace(
        "            for number in range",
        """
            while x[0, 0] == 9 and not sender.is_cancelled():
                threading.Event().wait(0.1)
            for number in range""",
    )
    late, silent = Heard(inputs={"x": rows(2)}), Heard(inputs={"x": rows(9)})
    coming = [late]

    def more() -> list[Heard]:
        if late.ends:
            silent.most = 0
        return [coming.pop()] if coming else []

    loaded(source).run_many([silent], more)
    assert (late.values, silent.values) == ([2, 3], [])
