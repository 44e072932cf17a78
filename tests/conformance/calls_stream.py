"""gRPC streams: many requests on one call, answers as they finish."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from conformance.calls_infer import numbers
from conformance.flavours import PATIENCE_S, Flavour, Session, header_of
from conformance.table import case, expect

_SYNC, _AIO = {Flavour.GRPC}, {Flavour.GRPC_AIO}

Answers = queue.Queue[tuple[Any, Any]]


@contextmanager
def _stream(session: Session, **given: Any) -> Iterator[Answers]:
    answers: Answers = queue.Queue()
    session.client.start_stream(
        lambda result, error: answers.put((result, error)), stream_timeout=PATIENCE_S, **given
    )
    try:
        yield answers
    finally:
        session.client.stop_stream()


def _send(session: Session, n: int, model: str = "numbers", **given: Any) -> None:
    tensors = [session.tensor("x", numbers(n, 0, 0)["x"])]
    session.client.async_stream_infer(model, tensors, request_id=str(n), **given)


def _totals(answers: Answers, count: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for _ in range(count):
        result, error = answers.get(timeout=PATIENCE_S)
        expect(error, None)
        found[header_of(result)["id"]] = result.as_numpy("total").item()
    return found


@case("start_stream", "plain, and with gzip", "a stream that answers", _SYNC)
def start(session: Session) -> str:
    for given in ({}, {"compression_algorithm": "gzip"}):
        with _stream(session, **given) as answers:
            _send(session, 5)
            expect(_totals(answers, 1), {"5": 5})
    return "answered"


@case("async_stream_infer", "sixteen on one stream", "sixteen answers, each with its id", _SYNC)
def many(session: Session) -> str:
    with _stream(session) as answers:
        for n in range(16):
            _send(session, n)
        expect(_totals(answers, 16), {str(n): n for n in range(16)})
    return "16 answers"


@case("async_stream_infer", "one of three names no model", "an error for it; the stream goes on", _SYNC)
def bad_neighbour(session: Session) -> str:
    said = ""
    with _stream(session) as answers:
        for n, model in enumerate(("numbers", "nothing", "numbers")):
            _send(session, n, model)
        found = [answers.get(timeout=PATIENCE_S) for _ in range(3)]
        errors = [str(error.message()) for _, error in found if error is not None]
        expect(len(errors), 1)
        said = errors[0]
        assert "unknown model" in said
        _send(session, 3)
        expect(_totals(answers, 1), {"3": 3})
    return f"2 answers, 1 error: {said}"


@case("async_stream_infer", "enable_empty_final_response", "the answer says that it is the last", _SYNC)
def final_response(session: Session) -> str:
    with _stream(session) as answers:
        _send(session, 1, enable_empty_final_response=True)
        result, error = answers.get(timeout=PATIENCE_S)
        expect(error, None)
    parameters = result.get_response().parameters
    expect(parameters["triton_final_response"].bool_param, True)
    return "triton_final_response true"


@case("async_stream_infer", "a decoupled model, three answers", "all, and which is the last", _SYNC)
def many_answers(session: Session) -> str:
    with _stream(session) as answers:
        _send(session, 3, "counts", enable_empty_final_response=True)
        found: list[float] = []
        while True:
            result, error = answers.get(timeout=PATIENCE_S)
            expect(error, None)
            total = result.as_numpy("total")
            found += [] if total is None else [total.item()]
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
    expect(found, [0, 1, 2])
    return "0, 1, 2 and the end"


@case("stop_stream", "with requests on their way", "it waits for their answers", _SYNC)
def stop(session: Session) -> str:
    with _stream(session) as answers:
        for n in range(4):
            _send(session, n)
    expect(_totals(answers, 4), {str(n): n for n in range(4)})
    return "4 answers"


@case("stop_stream", "cancel_requests, a model that takes 400 ms", "CANCELLED at once", _SYNC)
def stop_at_once(session: Session) -> str:
    answers: Answers = queue.Queue()
    session.client.start_stream(lambda result, error: answers.put((result, error)))
    _send(session, 1, "slow")
    session.client.stop_stream(cancel_requests=True)
    _, error = answers.get(timeout=PATIENCE_S)
    expect(error.status(), "StatusCode.CANCELLED")
    return "CANCELLED"


# ---- asyncio


def _ask(session: Session, models: Sequence[str], **given: Any) -> list[tuple[Any, Any]]:
    """One request to each model, on one stream."""

    async def requests() -> AsyncIterator[dict[str, Any]]:
        for n, model in enumerate(models):
            tensors = [session.tensor("x", numbers(n, 0, 0)["x"])]
            yield {"model_name": model, "inputs": tensors, "request_id": str(n)}

    async def ask() -> list[tuple[Any, Any]]:
        stream = session.client.stream_infer(requests(), stream_timeout=PATIENCE_S, **given)
        return [await anext(stream) for _ in models]

    answers: list[tuple[Any, Any]] = session.run(ask())
    return answers


@case("stream_infer", "sixteen on one stream, plain and with gzip", "sixteen answers, each with its id", _AIO)
def many_aio(session: Session) -> str:
    for given in ({}, {"compression_algorithm": "gzip"}):
        answers = _ask(session, ["numbers"] * 16, **given)
        expect([error for _, error in answers if error is not None], [])
        found = {header_of(result)["id"]: result.as_numpy("total").item() for result, _ in answers}
        expect(found, {str(n): n for n in range(16)})
    return "16 answers, twice"


@case("stream_infer", "one of three names no model", "an error for it; the stream goes on", _AIO)
def bad_neighbour_aio(session: Session) -> str:
    answers = _ask(session, ["numbers", "nothing", "numbers"])
    errors = [str(error.message()) for _, error in answers if error is not None]
    expect(len(errors), 1)
    assert "unknown model" in errors[0]
    return f"2 answers, 1 error: {errors[0]}"
