"""The count of calls per request: that it counts the whole path, and how it is told."""

from collections import Counter

import pytest

import hops


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[hops.Hops]]:
    with hops.counted_server(tmp_path_factory.mktemp("hops")) as server:
        return {asked.name: server.each(asked, hops.QUICK_REQUESTS) for asked in hops.ALL}


@pytest.mark.interpreted  # what is compiled calls nothing that Python's profiler could count
@pytest.mark.parametrize("asked", hops.ALL, ids=lambda asked: asked.name)
def test_a_request_is_within_its_budget(counted: dict[str, list[hops.Hops]], asked: hops.Asked) -> None:
    """Of the least, so that a busy machine makes no difference. Who adds a call takes another away, or says
    in the budget what the request costs now."""
    found = hops.least(counted[asked.name])
    by_file = dict(found.by_file.most_common())
    assert len(by_file) <= asked.most_files, by_file
    assert found.calls <= asked.most_calls, by_file


@pytest.mark.interpreted
def test_all_requests_are_counted_through_front_end_link_and_engine(
    counted: dict[str, list[hops.Hops]],
) -> None:
    for asked in hops.ALL:
        row = hops.as_row(asked, hops.usual(counted[asked.name]))
        by_file = row["by_file"]
        assert isinstance(by_file, dict)
        assert row["files"] == len(by_file)
        assert row["calls"] == sum(by_file.values())
        assert by_file["core/text_scheduler.py" if asked is hops.STREAM else "core/scheduler.py"] > 0
        assert any("http/" in file for file in by_file)
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
