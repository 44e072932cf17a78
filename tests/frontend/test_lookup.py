"""What is said about a model that is not there, and what that may cost."""

from __future__ import annotations

import difflib
from typing import Any

import pytest

from carpool.errors import NotFound
from carpool.frontend import front_service as lookup
from carpool.frontend.front_service import FrontService
from carpool.link.catalog import Batching, Catalog, ModelEntry
from carpool.types import Signature
from frontend.fake_door import FakeDoor


def look_up(door: FakeDoor, name: str) -> ModelEntry:
    return FrontService("test", door, door.table.block(0), 1 << 20, 1).look_up(name)


def door_with(names: list[str]) -> FakeDoor:
    door = FakeDoor()
    newest = {
        name: ModelEntry(key, name, "1", Signature(name, (), ()), Batching("eager"))
        for key, name in enumerate(names)
    }
    door.catalog = Catalog(1, True, {(name, "1"): entry for name, entry in newest.items()}, newest)
    return door


@pytest.mark.parametrize("count", [3, 150])
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(count: int) -> None:
    names = [f"{'abcdefghij'[number % 10] * 4}-{number}" for number in range(count)]
    with pytest.raises(NotFound, match=r"did you mean 'resnet50'\?"):
        look_up(door_with([*names, "resnet50"]), "resnet-50")


def test_of_many_names_only_a_few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = difflib.get_close_matches

    def counted(word: str, known: Any, **options: Any) -> list[str]:
        compared.append(len(list(known)))
        return real(word, known, **options)

    monkeypatch.setattr(lookup.difflib, "get_close_matches", counted)
    with pytest.raises(NotFound, match="unknown model"):
        look_up(door_with([f"model-{number}" for number in range(5000)]), "modell-17")
    assert compared == [5]
