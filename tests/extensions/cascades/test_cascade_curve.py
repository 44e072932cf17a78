"""Cascades told from samples: counts, their intervals, thresholds, and when it is not worth it."""

from __future__ import annotations

from math import comb
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.extensions.cascades.cascade_curve import Judged, at_least, at_most, beta_below, curve_of
from carpool.extensions.cascades.cascade_tuning import Costs, Sampled, tune
from carpool.vision.certainty import CLASSES_NEEDED, MEASURES, certainty, of_boxes, of_classes

judged = st.builds(Judged, st.integers(0, 20).map(lambda n: n / 20), st.booleans(), st.booleans())


# ---- how sure a count is


def binomial_at_most(happened: int, trials: int, rate: float) -> float:
    return sum(comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(happened + 1))


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n - 1), st.just(n))))
def test_a_bound_is_where_so_few_become_unlikely(case: tuple[int, int]) -> None:
    happened, trials = case
    high = at_most(happened, trials)
    assert binomial_at_most(happened, trials, high) == pytest.approx(0.05, abs=1e-6)
    assert happened / trials < high <= 1.0


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_bounds_lie_around_the_share_and_mirror_each_other(case: tuple[int, int]) -> None:
    happened, trials = case
    low, high = at_least(happened, trials), at_most(happened, trials)
    assert 0.0 <= low <= happened / trials <= high <= 1.0
    assert low == pytest.approx(1.0 - at_most(trials - happened, trials))


def test_bounds_that_are_known() -> None:
    assert at_most(0, 300) == pytest.approx(1 - 0.05 ** (1 / 300), rel=1e-6)  # the rule of three
    assert at_most(5, 5) == 1.0
    assert at_most(0, 0) == 1.0
    assert at_least(0, 40) == 0.0


@given(st.floats(0, 1), st.integers(1, 40), st.integers(1, 40))
def test_the_beta_distribution_is_the_binomials_other_face(x: float, a: int, b: int) -> None:
    tail = 1.0 - binomial_at_most(a - 1, a + b - 1, x)
    assert beta_below(x, a, b) == pytest.approx(tail, abs=1e-9)


# ---- the curve


@given(st.lists(judged, min_size=1, max_size=60))
def test_every_point_says_what_serving_by_it_would_give(sample: list[Judged]) -> None:
    curve = curve_of(sample)
    assert (curve.points[0].kept, curve.points[-1].kept) == (0, len(sample))
    assert curve.points[0].accuracy == curve.big
    assert curve.points[-1].accuracy == pytest.approx(curve.cheap)
    for point in curve.points:
        right = [one.cheap if one.certainty >= point.below else one.big for one in sample]
        assert point.kept == sum(one.certainty >= point.below for one in sample)
        assert point.accuracy == pytest.approx(sum(right) / len(sample))
        assert point.loss == pytest.approx(curve.big - point.accuracy)
        assert point.loss <= point.loss_at_most
        assert curve.gain_at_least(point) <= point.accuracy - curve.cheap + 1e-9


@given(st.lists(judged, min_size=2, max_size=60), st.randoms())
def test_the_order_of_the_sample_says_nothing(sample: list[Judged], random: Random) -> None:
    mixed = random.sample(sample, len(sample))
    assert curve_of(mixed).points == curve_of(sample).points


# ---- which threshold, and whether


def made(pictures: int, seed: int = 1, *, hard: float = 0.3, big: float = 0.97) -> list[Sampled]:
    """The cheap model is right where it is sure, and a coin's throw where it is not."""
    random = Random(seed)
    found = []
    for _ in range(pictures):
        easy = random.random() >= hard
        sure = random.betavariate(12, 1.5) if easy else random.betavariate(3, 4)
        noisy = min(1.0, max(0.0, sure + random.gauss(0, 0.02)))
        cheap = random.random() < (0.985 if easy else 0.55)
        found.append(
            Sampled({"margin": sure, "confidence": noisy, "entropy": sure}, cheap, random.random() < big)
        )
    return found


def test_what_is_kept_loses_no_more_than_is_allowed_and_holds_elsewhere() -> None:
    """On other pictures of the kind, within the interval: in nine of ten samples at least."""
    kept_it = 0
    for seed in range(10):
        found = tune(made(1500, seed), Costs(1.0, 15.0), labelled=True, loss=0.005)
        assert found.point.loss <= 0.005
        assert not found.why_not
        elsewhere = made(10_000, 1000 + seed)
        wrong = [
            one.big - (one.cheap if one.certainty[found.by] >= found.point.below else one.big)
            for one in elsewhere
        ]
        kept_it += sum(wrong) / len(wrong) <= found.point.loss_at_most
    assert kept_it >= 9


@pytest.mark.conformance
def test_to_be_sure_less_is_kept() -> None:
    sample = made(3000)
    easy = tune(sample, Costs(1.0, 15.0), labelled=True, loss=0.01)
    sure = tune(sample, Costs(1.0, 15.0), labelled=True, loss=0.01, sure=True)
    assert sure.point.loss_at_most <= 0.01
    assert 0 < sure.point.kept < easy.point.kept


@pytest.mark.parametrize("ratio", [1.05, 1.3])
def test_a_big_model_that_is_hardly_dearer_is_not_worth_it(ratio: float) -> None:
    found = tune(made(1000), Costs(1.0, ratio), labelled=True, loss=0.005)
    assert found.point.share < found.costs.break_even
    assert "more than the large model alone" in found.why_not
    assert found.saving < 1.0


@given(st.floats(0.01, 100), st.floats(0, 1))
def test_break_even_is_where_it_costs_as_much(ratio: float, kept: float) -> None:
    costs = Costs(1.0, ratio)
    assert (costs.of(kept) < costs.big - 1e-9) <= (kept > costs.break_even)
    if ratio > 1:
        assert costs.of(costs.break_even) == pytest.approx(costs.big)


def test_agreement_that_does_not_rise_with_certainty_is_useless() -> None:
    random = Random(3)
    sample = [Sampled({"margin": random.random()}, random.random() < 0.85, True) for _ in range(1000)]
    found = tune(sample, Costs(1.0, 15.0), labelled=False, loss=0.2)
    assert "labels are needed" in found.why_not
    assert not found.curve.rises


def test_a_cheap_model_that_is_as_good_is_said_to_be() -> None:
    random = Random(4)
    sample = [
        Sampled({"margin": random.random()}, right := random.random() < 0.95, right) for _ in range(500)
    ]
    found = tune(sample, Costs(1.0, 15.0), labelled=True, loss=0.005)
    assert "cheap model alone is as good" in found.why_not


def test_a_cascade_may_be_better_than_either() -> None:
    """Each knows what the other does not."""
    random = Random(5)
    sample = []
    for _ in range(3000):
        sure = random.random()
        sample.append(
            Sampled(
                {"confidence": sure}, random.random() < (0.99 if sure > 0.2 else 0.6), random.random() < 0.88
            )
        )
    found = tune(sample, Costs(5.7, 86.7), labelled=True, loss=0.005)
    assert not found.why_not
    assert found.point.accuracy > max(found.curve.cheap, found.curve.big) + 0.02
    assert found.saving > 3
    assert any("alone is as good" in warning for warning in found.warnings)


def test_the_simplest_measure_is_taken_unless_another_keeps_more() -> None:
    assert tune(made(2000), Costs(1.0, 9.0), labelled=True, loss=0.005).by == "margin"
    random = Random(6)
    blind = [Sampled({**one.certainty, "margin": random.random()}, one.cheap, one.big) for one in made(2000)]
    assert tune(blind, Costs(1.0, 9.0), labelled=True, loss=0.005).by == "confidence"
    assert tune(blind, Costs(1.0, 9.0), labelled=True, loss=0.005, by="entropy").by == "entropy"


def test_too_few_pictures_are_refused() -> None:
    with pytest.raises(InvalidInput, match="too few"):
        tune(made(299), Costs(1.0, 9.0), labelled=True, loss=0.005)
    sample = [Sampled({"confidence": 0.5}, True, True)] * 300
    with pytest.raises(InvalidInput, match="not entropy"):
        tune(sample, Costs(1.0, 9.0), labelled=True, loss=0.005, by="entropy")


# ---- how sure an answer is

scores = st.lists(st.floats(0, 1), min_size=1, max_size=20).map(lambda found: sorted(found, reverse=True))


@given(scores, st.sampled_from(MEASURES))
def test_certainty_is_a_number_from_0_to_1(found: list[float], by: str) -> None:
    assert 0.0 <= of_classes(found, by) <= 1.0


@pytest.mark.parametrize("by", MEASURES)
def test_all_in_one_class_is_certain_and_all_alike_is_not(by: str) -> None:
    assert of_classes([1.0, 0.0, 0.0], by) == 1.0
    assert of_classes([0.25] * 4, by) <= 0.25
    assert of_classes([0.8, 0.1, 0.1], by) > of_classes([0.5, 0.4, 0.1], by)
    assert of_classes([float("nan"), 0.1], by) == of_classes([], by) == 0.0


def test_scores_at_the_ends_of_what_numbers_can_be() -> None:
    assert of_classes([1.0, 1.0, 5e-324], "entropy") == of_classes([1.0, 1.0, 0.0], "entropy")
    assert of_classes([1e308, 1e308, 1.0], "entropy") == 0.0


@given(st.lists(st.floats(0.01, 1), max_size=5), st.floats(0.05, 0.95))
def test_a_detector_is_sure_far_from_the_score_that_counts(found: list[float], counts: float) -> None:
    sure = of_boxes(found, counts)
    assert 0.0 <= sure <= 1.0
    if not found:
        assert sure == 1.0  # nothing is there
    assert of_boxes([counts], counts) == 0.0
    assert of_boxes([1.0, *found], counts) == 1.0


def test_certainty_of_answers() -> None:
    classes = {"classes": [{"score": 0.7}, {"score": 0.2}]}
    assert certainty(classes, "margin") == pytest.approx(0.5)
    assert certainty({"detections": []}, "confidence") == 1.0
    assert certainty({"text": "EXIT", "score": 0.93}, "confidence") == pytest.approx(0.93)
    assert certainty({"text": "EXIT", "score": 0.93}, "margin") is None
    assert certainty({"embedding": [1.0]}, "confidence") is None
    assert CLASSES_NEEDED.keys() == set(MEASURES)
