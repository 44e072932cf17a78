from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from carpool.lab.sweep.conduct import NoServer, OwnServer, last_words


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "it said nothing"),
        ("Loading\ncarpool: no such file\n\n", "no such file"),
        ('t error engine[1] model-not-loaded model=m error="m: bad"\nt info stopped code=1', "m: bad"),
        ("one\ntwo", "two"),
    ],
)
def test_the_last_words_are_those_that_say_why(log: str, words: str) -> None:
    assert last_words(log) == words


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = OwnServer(tmp_path / "nothing", tmp_path / "server.log")
    with pytest.raises(NoServer, match=r"the server ended: .*nothing: no such file or folder \(its log is"):
        asyncio.run(server.address())
    server.ask_to_end()
    server.end()
