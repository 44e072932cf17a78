from __future__ import annotations

from typing import Any

import pytest

from carpool.core.curve import BatchCurve
from carpool.errors import InvalidInput, Unreachable
from carpool.lab.load.tally import PLAIN_ANSWER, Answer, Kind, Ticket, Timing
from carpool.lab.sweep.sweep_prediction import (
    SERVER,
    CurveEstimate,
    SweepBasis,
    from_answers,
    predict,
    rates_of,
    read_basis,
    read_profile,
)
from carpool.lab.sweep.sweep_runs import AS_IS, FIXED, PROMISE, Setting, Watcher

BELIEF = CurveEstimate(BatchCurve.parse("40+10", 16), 1, SERVER)


def test_the_servers_profile_is_believed() -> None:
    document = {"curve": [[1, 5.0], [8, 12.0]], "instances": 2, "max_batch": 16, "promise": {"slo_ms": 50.0}}
    found = read_profile(document)
    assert found is not None
    assert (found.text, found.instances, found.slo_ms, found.curve.max_batch) == ("1:5,8:12", 2, 50.0, 16)
    assert found.max_delay_ms is None
    fixed = read_profile(document | {"promise": None, "knobs": {"max_delay_ms": 3.0}})
    assert fixed is not None
    assert (fixed.slo_ms, fixed.max_delay_ms) == (None, 3.0)


@pytest.mark.parametrize(
    "document",
    [
        *(None, [], {}, "x", {"curve": [], "instances": 1}, {"curve": [[1]], "instances": 1}),
        *({"curve": [[0, 1.0]], "instances": 1}, {"curve": [[1, -1.0]], "instances": 1}),
        {"curve": [[1, 5.0]], "instances": None},
    ],
)
def test_what_is_no_profile_is_not_believed(document: Any) -> None:
    assert read_profile(document) is None


def test_answers_tell_how_long_batches_took() -> None:
    seen = Watcher(1)
    for size, seconds in ((1, 0.005), (4, 0.008), (9, 0.5)):
        for number in range(4):
            answer = Answer(Kind.ANSWERED, "", Timing(0.0, seconds, size))
            seen(Ticket(number, 0.0, phase=1), 0.02, answer)
            seen(Ticket(number, 0.0, phase=0), 0.02, Answer(Kind.ANSWERED, "", Timing(0.0, 9.0, 1)))
    belief = from_answers(seen, 16)
    assert [size for size, _ in belief.curve.points] == [1, 4], "a batch of 9 was not even seen once in full"
    assert belief.curve.times[4] == pytest.approx(0.008, rel=0.01)
    assert belief.curve.max_batch == 16
    silent = Watcher(0)
    silent(Ticket(0, 0.0), 0.02, PLAIN_ANSWER)
    assert silent.response.count == 1
    with pytest.raises(Unreachable, match="--curve"):
        from_answers(silent, None)


def test_loads_are_multiples_of_what_can_be_promised() -> None:
    capacity = BELIEF.capacity(200.0)
    assert capacity == pytest.approx(60), "batches of 6 take 100 ms"
    assert rates_of((), (0.5, 1.5), BELIEF, 200.0) == [(30.0, 0.5), (90.0, 1.5)]
    assert rates_of((15.0,), (), BELIEF, 200.0) == [(15.0, 0.25)]
    assert rates_of((15.0,), (), BELIEF, 60.0) == [(15.0, None)]
    with pytest.raises(InvalidInput, match="one image takes 50 ms: give --slo-ms 100 or more, or --rates"):
        rates_of((), (0.5,), BELIEF, 60.0)


def test_the_prediction_is_the_simulators() -> None:
    settings = [Setting(PROMISE, 500.0), Setting(FIXED, None, 0.0, 16)]
    found = predict(settings, [10.0, 200.0], BELIEF, 500.0, seconds=8.0)
    at = {(point.setting, point.rate): point for point in found}
    assert at["promise 500 ms", 10.0].attainment == pytest.approx(1, abs=0.01)
    assert at["promise 500 ms", 200.0].goodput_rps > 50
    assert at["knobs 0 ms, batch 16", 200.0].goodput_rps < 20, "everybody is late"
    rates = [point.rate for point in found if point.setting == "promise 500 ms"]
    assert rates == sorted(set(rates))
    assert len(rates) >= 9


def test_a_server_as_it_is_is_predicted_by_what_it_tells() -> None:
    told = CurveEstimate(BELIEF.curve, 1, SERVER, max_delay_ms=0.0)
    late = predict([Setting(AS_IS)], [200.0], told, 500.0, seconds=8.0)[-1]
    kept = predict([Setting(AS_IS)], [200.0], BELIEF, 500.0, seconds=8.0)[-1]
    assert late.goodput_rps < 20 < kept.goodput_rps


def test_what_was_found_out_reads_back() -> None:
    found = SweepBasis(
        "m", 50.0, [(10.0, 0.5), (20.0, None)], CurveEstimate(BELIEF.curve, 2, SERVER, None, 3.0), "tensors"
    )
    again = read_basis(found.as_json())
    assert again.as_json() == found.as_json()
    for damaged in ({}, {"belief": 3}, found.as_json() | {"rates": [1]}):
        with pytest.raises(InvalidInput, match="damaged"):
            read_basis(damaged)


@pytest.mark.conformance
def test_the_steps_of_a_pipeline_are_predicted_together() -> None:
    told = CurveEstimate(BatchCurve.parse("16+4"), 1, "given with --step", steps=("16+4", "12+3"))
    assert told.capacity(500.0) < CurveEstimate(told.curve, 1, SERVER).capacity(500.0)
    assert told.text == "16+4 → 12+3"
    (found,) = predict([Setting(AS_IS)], [told.capacity(500.0) * 3], told, 500.0, seconds=4.0)[-1:]
    assert 0.2 < found.attainment < 0.5
