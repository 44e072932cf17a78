"""Numbers in sentences: a person reads them."""

from __future__ import annotations

import pytest

from carpool.core.numerals import numeral


@pytest.mark.parametrize(
    ("value", "digits", "written"),
    [
        (0.0, 3, "0"),
        (0.25, 3, "0.25"),
        (93.14, 3, "93.1"),
        (99.96, 3, "100"),
        (999.4, 3, "999"),
        (999.5, 3, "1,000"),
        (1_234.5, 3, "1,234"),
        (1_234.5, 4, "1234"),
        (9_999.4, 4, "9999"),
        (9_999.5, 4, "10,000"),
        (12_345.6, 4, "12,346"),
        (1.5e6, 3, "1,500,000"),
    ],
)
def test_as_a_person_would_write_it(value: float, digits: int, written: str) -> None:
    assert numeral(value, digits) == written


def test_never_an_exponent() -> None:
    for digits in (3, 4):
        for step in range(1, 2_000_000, 37):
            assert "e" not in numeral(step / 50, digits)
