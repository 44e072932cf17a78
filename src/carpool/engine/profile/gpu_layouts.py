"""Chooses how many instances run on each GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from carpool.backends.backend import Backend
from carpool.config.model import ModelConfig
from carpool.core.numerals import numeral
from carpool.engine.profile.layouts import MOST_STREAMS, Chosen, Layout, close_all, closed_if_it_fails
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.errors import ModelError

_USUAL_STREAMS, _USUAL_DECODING_STREAMS = 2, 3
_WORTH_ANOTHER = 1.1  # times the rate without it: each takes memory, and makes single images slower
_GPU_TRIAL = Effort(seconds=0.3, warm_up=0.1)
OpenOne = Callable[[int], Backend]


def choose_on_gpus(
    config: ModelConfig,
    gpus: Sequence[int],
    slo: float,
    open_one: OpenOne,
    measuring: Callable[[Sequence[Backend], Effort], Measuring],
) -> Chosen:
    """Chooses as many as the settings say; else one more on every GPU for as long as that clearly brings
    more. The first ones are kept: an instance is slow to prepare."""
    if any(group.given for group in config.instances):
        return Chosen(Layout(len(gpus), 1))
    devices = len(gpus)
    opened: list[Backend] = []
    tried: list[tuple[int, float]] = []
    ended = ""
    with closed_if_it_fails(opened):
        for per_device in range(1, MOST_STREAMS + 1):
            before = len(opened)
            try:
                opened.extend(open_one(number) for number in range(before, per_device * devices))
            except ModelError as error:
                if not tried:
                    raise
                close_all(opened[before:])
                del opened[before:]
                ended = f"; no more, since {error.message}"
                break
            rate = _capacity(measuring(opened, _GPU_TRIAL), len(opened), slo, config.max_batch or 1)
            tried.append((per_device * devices, rate))
            if len(tried) > 1 and rate < _WORTH_ANOTHER * tried[-2][1]:
                close_all(opened[before:])
                del opened[before:]
                break
    against = ", ".join(f"{numeral(rate)} images/s with {count}" for count, rate in tried)
    return Chosen(Layout(len(opened), 1), f"{against}{ended}", opened)


def usual_on_gpus(gpus: Sequence[int], open_one: OpenOne, *, decodes: bool) -> Chosen:
    """Returns two on every GPU, untried: the first answers matter more, and what sustains more may change
    when it is compiled. Three, where the GPU also `decodes` images; fewer, where there is no room."""
    opened: list[Backend] = []
    streams = _USUAL_DECODING_STREAMS if decodes else _USUAL_STREAMS
    what = "three streams on each GPU overlap decoding and" if decodes else "two streams on each GPU overlap"
    why = f"{what} copies with computing; others are tried where nothing is compiled"
    with closed_if_it_fails(opened):
        for number in range(streams * len(gpus)):
            try:
                opened.append(open_one(number))
            except ModelError as error:
                if number < len(gpus):
                    raise
                why = f"no more, since {error.message}"
                alike = number // len(gpus) * len(gpus)  # each GPU has as many
                close_all(opened[alike:])
                del opened[alike:]
                break
    return Chosen(Layout(len(opened), 1), why, opened)


def _capacity(measuring: Measuring, instances: int, slo: float, largest: int) -> float:
    """Returns images per second that all of them can promise together, or do at all: with the largest batch
    that takes no more than half of the promise while all of them run."""
    size = largest
    while True:
        rate = measuring.rate(size)
        if size == 1 or instances * size / rate <= slo / 2:
            return rate
        size //= 2
