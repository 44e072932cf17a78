"""The head's parser beside h11, which was written by others from the same standard.

What h11 refuses is refused here, too. What both take is the same to both: method, target, fields, where the
body ends, and whether the connection goes on. That more is refused here is meant: see test_bad_heads.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import h11
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.frontend.http.exchange import Fault
from carpool.frontend.http.limits import Limits
from carpool.frontend.http.parsing import HeadFinder, parse_head
from later import many

LIMITS = Limits(max_body_bytes=1 << 20)
LONGEST_BODY = 5_000  # is sent to h11 to see where it ends


@dataclass(frozen=True)
class Read:
    """What a parser made of a head."""

    method: bytes
    target: bytes
    fields: dict[bytes, bytes]
    length: int | None  # none: chunked
    goes_on: bool | None  # none: nothing is said of HTTP/1.0, which h11 always closes
    waits_for_100: bool


def ours(raw: bytes) -> Read | None:
    finder = HeadFinder(LIMITS)
    try:
        if finder.end_of_head(raw, 0, len(raw)) != len(raw):
            return None  # more than one head, or less
        head = parse_head(raw, LIMITS, finder)
    except Fault:
        return None
    fields = dict(head.headers)
    if head.chunked:  # h11 writes it so
        fields[b"transfer-encoding"] = fields[b"transfer-encoding"].lower()
    return Read(
        head.method.encode(),
        head.target,
        fields,
        None if head.chunked else head.content_length or 0,
        head.keep_alive if head.http_minor else None,
        head.expects_continue,
    )


def by_h11(raw: bytes) -> Read | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(raw)
    try:
        request = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    if not isinstance(request, h11.Request):
        return None
    fields: dict[bytes, bytes] = {}
    for name, value in request.headers:
        separator = b"; " if name == b"cookie" else b", "
        fields[name] = fields[name] + separator + value if name in fields else value
    waits = connection.they_are_waiting_for_100_continue
    length = body_length(connection, fields)
    goes_on = connection.their_state is h11.DONE if request.http_version != b"1.0" else None
    return Read(request.method, request.target, fields, length, goes_on, waits)


def body_length(connection: h11.Connection, fields: dict[bytes, bytes]) -> int | None:
    """Found by sending a body until h11 says that it is over."""
    chunked = b"transfer-encoding" in fields
    length = 0 if chunked else int(fields.get(b"content-length", b"0").split(b",")[0])
    if length > LONGEST_BODY:
        return length
    sent = b"0\r\n\r\n" if chunked else bytes(length)
    assert not sent or connection.next_event() is h11.NEED_DATA, "it is over before it began"
    if sent:
        connection.receive_data(sent)
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
    assert connection.trailing_data == (b"", False)
    return None if chunked else length


def compare(raw: bytes) -> None:
    here = ours(raw)
    if here is None:
        return
    there = by_h11(raw)
    assert there is not None, "h11 refuses it"
    if here.length is not None and here.length > LONGEST_BODY:
        assert here.length == there.length
        return
    assert here == there


def mostly(*right: str) -> Callable[..., st.SearchStrategy[str]]:
    """Nearly always one of these, so that most heads have one mistake or none."""

    def or_else(*others: str) -> st.SearchStrategy[str]:
        often = 12 * len(others) // len(right)
        return st.sampled_from([*right * often, *others])

    return or_else


METHOD = mostly("GET", "POST")("OPTIONS", "get", "M-SEARCH", "A!", "", "G T", "PRI", "CONNECT", "é")
TARGET = mostly("/", "/a?b=c", "/%2f")("*", "http://h/x", "/a b", "", "/é", "a", "/#", "/\t", "//")
VERSION = mostly("HTTP/1.1")("HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1", "HTTP/1.10", "")
LENGTHS = ["0", "3", "3, 3", "+3", "-1", "0x3", "00012", "1_0", "٣", "9" * 19, "9" * 21, "3 3", ""]
CODINGS = ["chunked", "Chunked", "gzip, chunked", "chunked, chunked", "identity", "xchunked", "chunked;a=b"]
OPTIONS = ["close", "Close, b", "keep-alive", "upgrade", "clos", "a,close", ""]
HOSTS = ["x", "[::1]:80", "u@h", "h/x", "a b", "", "é"]
TEXTS = ["x", "a, b", "a\tb", "", "a\x0bb", "\x7f", "é", "  a  "]
FIELDS = {
    "Content-Length": LENGTHS,
    "Transfer-Encoding": CODINGS,
    "Connection": OPTIONS,
    "Expect": ["100-continue", "100-Continue", "200-ok"],
    "Host": HOSTS,
    "Cookie": TEXTS,
    "A": TEXTS,
    "B": TEXTS,
}
COLON = mostly(": ", ":")(" : ", ":\t", "", ":: ", ":  ")
END = mostly("\r\n")("\n", "\r", "\r\n ", "\r\r\n")


@st.composite
def fields(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from([*FIELDS, "A", "B"]))
    value = draw(st.sampled_from(FIELDS[name])) if draw(st.integers(0, 9)) else draw(st.text(max_size=8))
    return f"{name}{draw(COLON)}{value}{draw(END)}"


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads that are nearly right: from words that matter, with a byte changed here and there."""
    text = f"{draw(METHOD)} {draw(TARGET)} {draw(VERSION)}{draw(END)}"
    if draw(st.integers(0, 19)):
        text += "Host: h\r\n"
    for _ in range(draw(st.integers(0, 3))):
        text += draw(fields())
    raw = bytearray((text + "\r\n").encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1]))):
        at = draw(st.integers(0, len(raw) - 1))
        change = draw(st.sampled_from(["replace", "insert", "remove"]))
        byte = draw(st.one_of(st.sampled_from(b"\r\n\t :,\0\x7f\x80"), st.integers(0, 255)))
        raw[at : at + (change != "insert")] = b"" if change == "remove" else bytes([byte])
    return bytes(raw)


PLAIN = b"POST /a HTTP/1.1\r\nHost: h\r\n"


@settings(max_examples=many(400))
@given(heads())
@example(PLAIN + b"Content-Length: 3\r\n\r\n")
@example(PLAIN + b"Transfer-Encoding: Chunked\r\n\r\n")
@example(PLAIN + b"Expect: 100-continue\r\nContent-Length: 3\r\nConnection: Close\r\n\r\n")
@example(b"GET / HTTP/1.0\r\n\r\n")
def test_what_h11_refuses_is_refused_and_what_both_take_is_the_same(raw: bytes) -> None:
    compare(raw)


def test_the_comparison_sees_differences() -> None:
    assert ours(PLAIN + b"\r\n") == by_h11(PLAIN + b"\r\n") != by_h11(PLAIN + b"Content-Length: 3\r\n\r\n")
