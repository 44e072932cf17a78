"""Heads that differ only in length or `traceparent` are parsed once, and never taken for one another."""

import pytest

from carpool.frontend.http.exchange import (
    Fault,
    HttpHead,
)
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import HeadFinder, KnownHeads

LIMITS = Limits()


def head(lines: bytes, path: bytes = b"/detect") -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\nHost: a\r\n" + lines + b"\r\n"


def read(known: KnownHeads, raw: bytes) -> HttpHead:
    return known.read(raw, HeadFinder(LIMITS))


def everything(found: HttpHead) -> dict[str, object]:
    """Not by `__slots__`, which the compiled form does not have."""
    values = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    return {name: value for name, value in values.items() if not callable(value)}


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: %b\r\nAccept: */*\r\n",
        b"Accept: */*\r\ncontent-length:%b\r\n",
        b"CONTENT-LENGTH: \t%b \r\nExpect: 100-continue\r\nConnection: close\r\n",
    ],
)
def test_another_length_is_all_that_differs(lines: bytes) -> None:
    known = KnownHeads(LIMITS)
    first = read(known, head(lines % b"100"))
    first.start = "the app's"
    second = read(known, head(lines % b"7"))
    anew = read(KnownHeads(LIMITS), head(lines % b"7"))
    anew.start = "the app's"
    assert everything(second) == everything(anew)
    assert second.content_length == 7
    assert first.content_length == 100
    assert first.headers[b"content-length"] == b"100"


def test_what_differs_in_more_shares_nothing() -> None:
    known = KnownHeads(LIMITS)
    first = read(known, head(b"Content-Length: 5\r\n"))
    first.start = "the app's"
    assert read(known, head(b"Content-Length: 5\r\n", b"/classify")).start is None
    assert read(known, head(b"Content-Length: 5\r\nAccept: */*\r\n")).start is None
    assert read(known, head(b"")).start is None
    empty = read(known, head(b"Content-Length: 0\r\n"))
    assert empty.start is None  # no body is not another length
    assert not empty.has_body


@pytest.mark.parametrize(
    "lines",
    [
        b"Content-Length: %b\r\nTraceParent: %b\r\n",
        b"traceparent:\t%b \r\ncontent-length: %b\r\nAccept: */*\r\n",
    ],
)
def test_every_request_has_another_parent(lines: bytes) -> None:
    known = KnownHeads(LIMITS)
    parents = [b"00-%032x-%016x-01" % (number, number) for number in range(1, 1000)]
    for length, parent in enumerate(parents, 1):
        two = (b"%d" % length, parent) if lines.startswith(b"C") else (parent, b"%d" % length)
        found = read(known, head(lines % two))
        if length > 1:
            assert found.start == "the app's"
        found.start = "the app's"
        anew = read(KnownHeads(LIMITS), head(lines % two))
        anew.start = "the app's"
        assert everything(found) == everything(anew)
    assert len(known) == 1


def test_what_is_no_parent_is_no_others() -> None:
    known = KnownHeads(LIMITS)
    good = b"00-%032x-%016x-01" % (1, 1)
    other = b"00-%032x-%016x-01" % (2, 2)
    length, field = b"Content-Length: 5\r\n", b"traceparent: %b\r\n"
    for first in (good, other):
        read(known, head(length + field % first)).start = "the app's"
        for rest in (b"", field % b"", field % b"x" * 55, field % first[:-1], field % first + field % good):
            found = read(known, head(length + rest))
            assert found.start is None
            assert found.headers == read(KnownHeads(LIMITS), head(length + rest)).headers


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (b"Content-Length: \r\n", 400),
        (b"Content-Length: 5x\r\n", 400),
        (b"Content-Length: +5\r\n", 400),
        (b"Content-Length : 5\r\n", 400),
        (b"Content-Length: 5\r\nContent-Length: 5\r\n", 400),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        (b"Content-Length: " + b"9" * 20 + b"\r\n", 413),
    ],
)
def test_a_good_head_before_does_not_excuse_a_bad_one(lines: bytes, status: int) -> None:
    known = KnownHeads(LIMITS)
    read(known, head(b"Content-Length: 5\r\n"))
    for _ in range(2):
        with pytest.raises(Fault) as fault:
            read(known, head(lines))
        assert fault.value.status == status


def test_no_more_are_kept_than_some() -> None:
    known = KnownHeads(LIMITS)
    for number in range(1000):
        read(known, head(b"Content-Length: 5\r\nX-Number: %d\r\n" % number))
    long = b"X-Long: " + b"x" * 3000 + b"\r\n"
    read(known, head(b"Content-Length: 5\r\n" + long)).start = "the app's"
    assert read(known, head(b"Content-Length: 6\r\n" + long)).start is None
    assert len(known) <= 256
