"""Which layers stay in full precision: the worst come first, and only as many as are needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from carpool.extensions.optimize.layer_search import LayerSearch, error
from carpool.extensions.optimize.lower_precision import NotQuantized, OnnxQuantizer
from carpool.types import Array

ERRORS = {"stem": 0.01, "middle": 0.02, "odd": 0.5, "head": 4.0}


class Scripted:
    """Each layer adds an error of its own; `run` answers by what was written last."""

    def __init__(self, errors: Mapping[str, float], fails: str = "") -> None:
        self.errors, self.fails = errors, fails
        self.layers = list(errors)
        self.now: list[str] = []

    def write(self, file: Path, *, kept: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        if self.fails in only:
            raise NotQuantized("no")
        self.now = list(only) or [name for name in self.layers if name not in kept]

    def run(self, _: Path) -> list[Mapping[str, Array]]:
        off = sum(self.errors[name] for name in self.now)
        return [{"y": np.array([[1.0 + off]], np.float32)}]


def search(scripted: Scripted, **given: Any) -> LayerSearch:
    right: list[Mapping[str, Array]] = [{"y": np.ones((1, 1), np.float32)}]
    quantizer = cast("OnnxQuantizer", scripted)
    return LayerSearch(quantizer, right, scripted.run, Path("x"), **{"seconds": 60.0, **given})


def test_the_worst_layers_come_first() -> None:
    found = search(Scripted(ERRORS)).sensitive()
    assert [layer for layer, _ in found] == ["head", "odd", "middle", "stem"]


def test_a_layer_that_cannot_be_quantized_is_the_worst() -> None:
    assert search(Scripted(ERRORS, fails="stem")).sensitive()[0][0] == "stem"


def test_the_search_ends_in_time_and_begins_at_the_end() -> None:
    times = iter(range(100))
    one = search(Scripted(ERRORS), seconds=1.5, now=lambda: float(next(times)))
    assert {layer for layer, _ in one.sensitive()} == {"head"}
    assert one.searched == 1


def test_levels_keep_as_few_as_bring_the_error_down() -> None:
    one = search(Scripted(ERRORS))
    assert one.levels(["head", "odd", "middle", "stem"]) == [("head",)]
    alike = Scripted({f"layer{number}": 0.1 for number in range(16)})
    levels = search(alike).levels(alike.layers)
    assert [len(level) for level in levels] == [8]  # half of them, where none stands out
    assert search(Scripted({})).levels([]) == []


def test_the_error_is_that_of_the_output_that_is_furthest_off() -> None:
    right = [{"a": np.ones(4, np.float32), "b": np.ones(4, np.float32), "n": np.ones(4, np.int64)}]
    found = [{"a": np.ones(4, np.float32), "b": np.full(4, 1.5, np.float32), "n": np.zeros(4, np.int64)}]
    assert error(right, right) == 0.0
    assert error(right, found) == 0.5
