"""From what was typed to what the lab needs. Every refusal names the option and what would be valid."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.sim.arrivals import Bursty

MOST_IN_A_BATCH = 4096
MOST_REQUESTS = 5_000_000  # in one run: a minute or two, and some GB


def number(
    option: str, value: float, *, above: float | None = None, least: float = 0.0, most: float = 1e9
) -> float:
    """The value, if it lies strictly `above`, or else from `least`, up to `most`."""
    low_enough = value > above if above is not None else value >= least
    if isfinite(value) and low_enough and value <= most:
        return value
    valid = f"above {above:g} and at most" if above is not None else f"from {least:g} to"
    raise InvalidInput(f"{option} must be {valid} {most:,.9g}, not {value:g}")


def whole(option: str, value: int, *, least: int, most: int) -> int:
    if least <= value <= most:
        return value
    raise InvalidInput(f"{option} must be a whole number from {least} to {most:,}, not {value}")


def sizes(option: str, text: str | None, most: int = MOST_IN_A_BATCH) -> tuple[int, ...]:
    """Batch sizes like `4,8`, rising."""
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} must be batch sizes like 4,8, not {text!r}") from None
    if any(not 1 <= size <= most for size in found) or list(found) != sorted(set(found)):
        raise InvalidInput(f"{option} must be rising batch sizes from 1 to {most}, not {text!r}")
    return found


def numbers(
    option: str, text: str, *, example: str, at_most: str, above: float | None = None, most: float
) -> list[float]:
    """As in the `example`; `at_most` is how many, and perhaps of what."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{option} must be {example}, not {text!r}") from None
    if len(found) > int(at_most.split()[0]):
        raise InvalidInput(f"{option}: {at_most} at most, not {len(found)}")
    return [number(option, value, above=above, most=most) for value in found]


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, lengths = text.rpartition(":")
    try:
        shape = tuple(int(length) for length in lengths.split(","))
    except ValueError:
        shape = ()
    if not name or not shape or any(not 1 <= length <= 1 << 31 for length in shape):
        raise InvalidInput(f"--shape must be like image:1,3,224,224, not {text!r}")
    return name, shape


def batch_curve(text: str, max_batch: int | None, buckets: str | None) -> BatchCurve:
    if max_batch is not None:
        whole("--max-batch", max_batch, least=1, most=MOST_IN_A_BATCH)
    try:
        last = BatchCurve.parse(text, max_batch=1).points[-1][0]
        if last > MOST_IN_A_BATCH:
            raise CurveError(f"batch sizes go up to {MOST_IN_A_BATCH}, not {last}")
        return BatchCurve.parse(text, max_batch, sizes("--buckets", buckets))
    except CurveError as error:
        raise InvalidInput(f"--curve: {error}") from None


def slo(slo_ms: float, curve: BatchCurve) -> float:
    """In seconds; below the time of a single image there is nothing to promise."""
    number("--slo-ms", slo_ms, above=0, most=1e7)
    alone = curve.times[1] * 1e3
    if slo_ms < alone:
        raise InvalidInput(
            f"--slo-ms {slo_ms:g} is below the {alone:g} ms that one image takes: "
            f"give at least {2 * alone:g}, for a request may have to wait for the one before it"
        )
    return slo_ms / 1e3


def affordable(rate: float, seconds: float) -> None:
    if not rate * seconds <= MOST_REQUESTS:
        raise InvalidInput(
            f"--seconds {seconds:g} at {rate:,.9g} images/s is more than the {MOST_REQUESTS:,} requests "
            f"that one run may hold: give at most {MOST_REQUESTS / rate:.3g}"
        )


def bursty(factor: float, length: float, period: float) -> Bursty:
    from carpool.sim.arrivals import Bursty

    number("--burst-period", period, least=0.01, most=1e6)
    return Bursty(
        number("--burst-factor", factor, least=1, most=1000),
        number("--burst-seconds", length, above=0, most=period),
        period,
    )


def drawing(path: Path | None) -> None:
    """Say so before the work, not after it."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"--plot must name a .png, .svg or .pdf file, not {path}")
    if not path.parent.is_dir():
        raise InvalidInput(f"--plot: there is no folder {path.parent}")
