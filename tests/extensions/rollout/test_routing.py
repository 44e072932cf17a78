"""Who gets which version: by source, by header, by request."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.extensions.rollout.front import read_side
from carpool.extensions.rollout.routing import Split
from carpool.extensions.rollout.split import RolloutSplit
from carpool.link.catalog import Batching, ModelEntry
from carpool.link.senders import Sender
from carpool.types import Signature


def entry(version: str) -> ModelEntry:
    return ModelEntry(int(version), "m", version, Signature("m", (), ()), Batching("promise", 0.05))


def split(share: float, sticky: str = "source", salt: str = "aa") -> Split:
    return Split(RolloutSplit("1", "2", share, salt, sticky), entry("1"), entry("2"))


def chosen(one: Split, source: str = "", at: float = 0.0, header: bytes | None = None) -> str:
    headers = {} if header is None else {b"x-tenant": header}
    return one.choose(Sender(source), at, headers).version


def test_a_tenth_is_about_a_tenth() -> None:
    count = sum(chosen(split(0.1), f"camera {number}") == "2" for number in range(2000))
    assert 150 <= count <= 250


@given(st.text(min_size=1, max_size=50), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_one_source_keeps_to_its_side_and_a_larger_share_moves_nobody_back(
    source: str, one: float, other: float
) -> None:
    small, large = sorted((one, other))
    first = chosen(split(small), source, 1.0)
    assert chosen(split(small), source, 2.0) == first
    if first == "2":
        assert chosen(split(large), source) == "2"


def test_replicas_agree_and_another_candidate_is_another_draw() -> None:
    sources = [f"camera {number}" for number in range(200)]
    mine = [chosen(split(0.5), source) for source in sources]
    assert [chosen(split(0.5), source, 99.0) for source in sources] == mine
    assert [chosen(split(0.5, salt="bb"), source) for source in sources] != mine


def test_without_a_source_each_request_is_drawn() -> None:
    found = {chosen(split(0.5), at=at / 7) for at in range(100)}
    assert found == {"1", "2"}


def test_the_holder_of_a_key_is_not_a_source() -> None:
    sender = Sender("acme", holder="acme")
    found = {split(0.5).choose(sender, at / 7, {}).version for at in range(100)}
    assert found == {"1", "2"}


def test_by_header_and_by_request() -> None:
    by_header = split(0.5, "header:X-Tenant")
    assert len({chosen(by_header, at=at / 7, header=b"acme") for at in range(50)}) == 1
    assert len({chosen(by_header, "camera", at=at / 7) for at in range(50)}) == 2
    assert len({chosen(split(0.5, "request"), "camera", at=at / 7) for at in range(50)}) == 2


@pytest.mark.parametrize(("share", "version"), [(0.0, "1"), (1.0, "2")])
def test_all_or_nothing(share: float, version: str) -> None:
    assert {chosen(split(share), f"{number}") for number in range(50)} == {version}


def test_a_side_can_be_asked_for() -> None:
    one = split(0.5)
    assert one.choose(Sender("x"), 0.0, {}, "stable").version == "1"
    assert one.choose(Sender("x"), 0.0, {}, "candidate").version == "2"
    assert read_side(None) == ""
    with pytest.raises(InvalidInput):
        read_side(b"both")


def test_a_name_of_ten_megabytes_costs_no_more_than_a_long_one() -> None:
    huge = cast("bytes", b"x" * 10_000_000)
    one = split(0.5, "header:X-Tenant")
    assert chosen(one, header=huge) == chosen(one, header=huge[:512])
