"""Estimates how often something happens, from counts that may be looked at after every trial.

An ordinary interval holds for one look. An observer who looks again and again, and stops at the first bad
one, is wrong far more often than it says. These hold for all looks together: Robbins' mixture of likelihoods
over a beta prior is a martingale, so it passes 1 / (1 - confidence) at the true rate only that rarely, ever.
The price is a wider interval: about twice as many trials for the same end.

Trials must be independent. Frames of one still camera are not: thin them before they are counted.
"""

from __future__ import annotations

from math import exp, expm1, inf, lgamma, log
from typing import NamedTuple

_PRIOR = (
    0.5  # of the beta distribution, on both sides: quick at rates near 0 and 1, which is where it matters
)
_STEPS, _CLOSE = 60, 1e-12  # a dozen steps are the rule


class Interval(NamedTuple):
    low: float
    high: float


def interval(bad: int, trials: int, confidence: float = 0.99) -> Interval:
    """Returns where the true rate is when so many trials were bad: both ends hold after every trial."""
    if not 0 <= bad <= trials:
        raise ValueError(f"{bad} of {trials} trials cannot be bad")
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    if trials == 0:
        return Interval(0.0, 1.0)
    good = trials - bad
    mixed = _log_beta(bad + _PRIOR, good + _PRIOR) - _log_beta(_PRIOR, _PRIOR)
    least = mixed + log(1.0 - confidence)  # a rate under which the counts are less likely than this is out
    return Interval(_lowest(bad, good, least), 1.0 - _lowest(good, bad, least))


def times_as_often(mine: int, others: int, my_share: float, confidence: float = 0.99) -> Interval:
    """Returns how many times as often a rare event happens to one party as to others.

    Of the events, `mine` happened to it and `others` to the others, and `my_share` of the traffic was its
    own. The rate of the event itself need not be known. The share must have been the same for all that is
    counted: with another one, count anew.
    """
    if not 0.0 <= my_share <= 1.0:
        raise ValueError(f"a share lies between 0 and 1, not at {my_share}")
    mine_of_all = interval(mine, mine + others, confidence)
    if my_share in (0.0, 1.0):
        return Interval(0.0, inf)
    odds = (1.0 - my_share) / my_share
    low, high = (rate / (1.0 - rate) * odds if rate < 1.0 else inf for rate in mine_of_all)
    return Interval(low, high)


def good_until_below(bad: int, trials: int, limit: float, confidence: float = 0.99, most: int = 10**7) -> int:
    """Returns how many more trials, all of them good, until the rate is proven to be at most `limit`; `most`
    where it takes more than that."""
    low, high = -1, 1
    while high < most and interval(bad, trials + high, confidence).high > limit:
        low, high = high, 2 * high
    while high - low > 1 and high < most:
        middle = (low + high) // 2
        if interval(bad, trials + middle, confidence).high > limit:
            low = middle
        else:
            high = middle
    return min(high, most)


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def _lowest(bad: int, good: int, least: float) -> float:
    """Returns the lowest rate under which so many bad and good trials are as likely as `least`, a logarithm.

    Newton's way, on the logarithm of the rate: the likelihood bends down everywhere, so that from below every
    step ends below, and the interval is never too narrow.
    """
    if not bad:
        return 0.0
    at = least / bad  # if the good ones said nothing
    for _ in range(_STEPS):
        otherwise = -expm1(at)  # 1 - rate
        short = least - bad * at - good * log(otherwise)
        step = short / (bad - good * (1.0 - otherwise) / otherwise)
        at += step
        if step < _CLOSE:
            break
    return exp(at)
