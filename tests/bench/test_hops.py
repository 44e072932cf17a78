"""The count of calls per request: that it counts the whole path, and how it is told."""

import json
from collections import Counter

import pytest

import hops


@pytest.fixture(scope="module")
def printed() -> list[dict[str, object]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hops, "QUICK_REQUESTS", 5)
        lines: list[str] = []
        patch.setattr("builtins.print", lines.append)
        patch.setattr("sys.argv", ["hops.py", "--quick", "--json"])
        assert hops.main() == 0
    found: list[dict[str, object]] = json.loads(lines[0])
    return found


def test_both_requests_are_counted_through_front_end_link_and_engine(
    printed: list[dict[str, object]],
) -> None:
    assert [row["request"] for row in printed] == ["v2", "jpeg"]
    for row in printed:
        by_file = row["by_file"]
        assert isinstance(by_file, dict)
        assert row["files"] == len(by_file)
        assert row["calls"] == sum(by_file.values())
        assert by_file["core/scheduler.py"] > 0
        assert any("http/" in file for file in by_file)
        assert any("link/" in file for file in by_file)
        assert not any(file.startswith("/") for file in by_file)


def test_what_happens_now_and_then_is_left_out() -> None:
    always = hops.Hops(Counter({"a.py": 3}), 2, 1)
    disturbed = hops.Hops(Counter({"a.py": 3, "timer.py": 9}), 4, 2)
    found = hops.usual([disturbed, always, disturbed, always, disturbed])
    assert (found.by_file, found.moves, found.threads) == ({"a.py": 3}, 2, 1)


def test_the_table_shows_what_is_asked() -> None:
    text = hops.as_text([(hops.V2, hops.Hops(Counter({"a.py": 3}), 2, 1))])
    assert "≤ 40" in text
    assert "≤ 250" in text
    assert (hops.JPEG.most_files, hops.JPEG.most_calls) == (50, 350)
