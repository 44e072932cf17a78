"""Rates, counts and times in sentences: as a person would write them, never with an exponent."""

from __future__ import annotations


def numeral(value: float, digits: int = 3) -> str:
    """So many digits that mean something; what has more before its point is whole: 0.25, 93.1, 12,346."""
    # Half below the power of ten: rounding takes it there, and `g` would write 1e+03.
    return f"{value:,.0f}" if value >= 10**digits - 0.5 else f"{value:.{digits}g}"


_DIGITS = (4, 6, 9, 12)


def apart(one: float, other: float) -> tuple[str, str]:
    """Returns two numbers, with as many digits as it takes to see which is larger."""
    for digits in _DIGITS:
        said = numeral(one, digits), numeral(other, digits)
        if said[0] != said[1]:
            break
    return said
