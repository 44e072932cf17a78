"""The count of calls per request: that it counts the whole path, and how it is told."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

import hops

ROUNDS = 8


@dataclass
class Counted:
    """Each kind of request is sent until it is within its budget, or it is sure that it costs more: where the
    machine is busy, all of a round may take so long that the server's own work falls into them."""

    server: hops.CountedServer
    found: dict[str, list[hops.Hops]] = field(default_factory=dict)

    def of(self, asked: hops.Asked) -> list[hops.Hops]:
        counts = self.found.setdefault(asked.name, [])
        while len(counts) < ROUNDS * hops.QUICK_REQUESTS and not (counts and _within(asked, counts)):
            counts += self.server.each(asked, hops.QUICK_REQUESTS)
        return counts


def _within(asked: hops.Asked, counts: list[hops.Hops]) -> bool:
    least = hops.least(counts)
    return len(least.by_file) <= asked.most_files and least.calls <= asked.most_calls


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Counted]:
    with hops.counted_server(tmp_path_factory.mktemp("hops")) as server:
        yield Counted(server)


@pytest.mark.interpreted  # what is compiled calls nothing that Python's profiler could count
@pytest.mark.parametrize("asked", hops.ALL, ids=lambda asked: asked.name)
def test_a_request_is_within_its_budget(counted: Counted, asked: hops.Asked) -> None:
    """Of the least, so that a busy machine makes no difference. Who adds a call takes another away, or says
    in the budget what the request costs now."""
    found = hops.least(counted.of(asked))
    by_file = dict(found.by_file.most_common())
    assert len(by_file) <= asked.most_files, by_file
    assert found.calls <= asked.most_calls, by_file


@pytest.mark.interpreted
def test_all_requests_are_counted_through_front_end_link_and_engine(counted: Counted) -> None:
    for asked in hops.ALL:
        row = hops.as_row(asked, hops.usual(counted.of(asked)))
        by_file = row["by_file"]
        assert isinstance(by_file, dict)
        assert row["files"] == len(by_file)
        assert row["calls"] == sum(by_file.values())
        assert (
            by_file["extensions/text/text_scheduler.py" if asked is hops.STREAM else "core/scheduler.py"] > 0
        )
        protocol = "grpc/" if asked is hops.GRPC else "http/"
        assert any(protocol in file for file in by_file)
        assert any("link/" in file for file in by_file)
        assert not any(file.startswith("/") for file in by_file)


def test_what_happens_now_and_then_is_left_out() -> None:
    always = hops.Hops(Counter({("a.py", "f"): 2, ("a.py", "g"): 1}), 2, 1)
    disturbed = hops.Hops(always.by_function + Counter({("timer.py", "ring"): 9}), 4, 2)
    found = hops.usual([disturbed, always, disturbed, always, disturbed])
    assert (found.by_file, found.moves, found.threads) == ({"a.py": 3}, 2, 1)
    assert found.by_function == always.by_function


def test_the_functions_are_shown_in_the_order_of_their_calls() -> None:
    called = Counter({("b.py", "begin"): 1, ("a.py", "f"): 2, ("b.py", "end"): 1})
    lines = hops.as_walk(hops.V2, hops.Hops(called, 2, 1)).split()
    assert lines == ["v2:", "b.py", "begin", "a.py", "f", "×2", "b.py", "end"]


def test_the_table_shows_what_is_asked() -> None:
    text = hops.as_text([(hops.V2, hops.Hops(Counter({("a.py", "f"): 3}), 2, 1))])
    assert f"≤ {hops.V2.most_files}" in text
    assert f"≤ {hops.V2.most_calls}" in text
