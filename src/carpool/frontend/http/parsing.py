"""Reads the head of a request: found, checked strictly, and turned into plain data.

Whatever two programs could read in two ways is refused, because a proxy in front may read it the other way.
A faulty line is reported as soon as it ends, and how the bytes were split into reads never changes the fault.
"""

from __future__ import annotations

import re
from typing import Final

from carpool.frontend.http.exchange import Fault, HttpHead, bad_request
from carpool.frontend.http.limits import Limits

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]"
_REQUEST_LINE: Final = _TOKEN + rb"++ [!-~]++ HTTP/[0-9]\.[0-9]"
_FIELD: Final = _TOKEN + rb"++:[\t -~\x80-\xff]*+"

_HEAD = re.compile(
    rb"(" + _TOKEN + rb"++) ([!-~]++) HTTP/1\.([0-9])\r\n((?:" + _FIELD + rb"\r\n)*+)\r\n",
)
_LINE_OF_REQUEST = re.compile(_REQUEST_LINE)
_LINE_OF_FIELD = re.compile(_FIELD)
_NOT_PRINTABLE = re.compile(rb"[^ -~]")
_LENGTH = re.compile(rb"[0-9]+")
_HOST = re.compile(rb"[0-9A-Za-z\-._~%!$&'()*+;=:\[\]]*")
_TARGET = re.compile(rb"(?:https?://([^/?#]+))?(/[^?#]*)?(?:\?([^#]*))?", re.IGNORECASE)

_TOO_MANY_DIGITS: Final = 19
_LONGEST_METHOD: Final = 32
_LENGTH_FIELD = re.compile(rb"\r\ncontent-length:[ \t]*([1-9][0-9]{0,17})[ \t]*\r\n", re.IGNORECASE)
_PARENT_FIELD = re.compile(rb"\r\ntraceparent:[ \t]*([0-9a-f-]{55})[ \t]*\r\n", re.IGNORECASE)
_MOST_HEADS: Final = 256
_LONGEST_HEAD: Final = 2048


class HeadFinder:
    """Looks for the end of a head that may arrive in pieces."""

    __slots__ = ("_checked", "_fields", "_limits")

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._checked = 0
        self._fields = -1

    def reset(self) -> None:
        self._checked = 0
        self._fields = -1

    def end_of_head(self, data: bytes | bytearray, start: int, end: int) -> int:
        """Where the head that begins at `start` ends, or -1: the rest has not come yet.

        Until the head is complete, `start` has to stay its first byte from call to call.
        """
        window = min(end, start + self._limits.max_header_bytes)
        found = data.find(b"\r\n\r\n", start, window)
        if found >= 0:
            return found + 4
        self.check_lines(data, start, window)
        if end > window:
            raise Fault(431, f"the head is over {self._limits.max_header_bytes} bytes", "headers-too-large")
        return -1

    def check_lines(self, data: bytes | bytearray, start: int, end: int) -> None:
        """Raises for the first faulty line among those that are complete and were not checked before."""
        begin = start + self._checked
        while (feed := data.find(b"\n", begin, end)) >= 0:
            if self._fields < 0:
                self._check_request_line(bytes(data[begin : feed + 1]))
            else:
                _check_field_line(bytes(data[begin : feed + 1]))
            self._fields += 1
            if self._fields > self._limits.max_header_fields:
                raise self.too_many_fields()
            begin = feed + 1
        self._checked = begin - start
        if self._fields < 0:
            self._check_request_line(bytes(data[begin:end]))

    def too_many_fields(self) -> Fault:
        return Fault(431, f"more than {self._limits.max_header_fields} header fields", "headers-too-large")

    def _check_request_line(self, line: bytes) -> None:
        limit = self._limits.max_request_line_bytes
        complete = line.endswith(b"\n")
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        if _NOT_PRINTABLE.search(text[:limit]):
            raise bad_request(_what_else(text))
        if len(text) > limit:
            raise Fault(414, f"the request line is over {limit} bytes", "uri-too-long")
        if not complete:
            return
        if not line.endswith(b"\r\n"):
            raise bad_request("the request line must end with CR LF")
        if not _LINE_OF_REQUEST.fullmatch(text):
            raise bad_request("the request line is not 'METHOD target HTTP/1.1'")
        if text.startswith(b"PRI * HTTP/2"):
            raise bad_request("HTTP/2 is not spoken on this port: use HTTP/1.1")
        if not text[:-1].endswith(b"HTTP/1."):
            raise Fault(505, "only HTTP/1.0 and HTTP/1.1 are spoken here", "http-version")


def parse_head(raw: bytes, limits: Limits, finder: HeadFinder) -> HttpHead:
    """The head in `raw`, which `finder` has found complete; raises `Fault`."""
    match = _HEAD.fullmatch(raw)
    if match is None or match.end(3) > limits.max_request_line_bytes:
        finder.check_lines(raw, 0, len(raw) - 2)
        raise bad_request("the head is malformed")
    method, target, minor, fields = match.groups()
    if fields.count(b"\n") > limits.max_header_fields:
        raise finder.too_many_fields()
    if len(method) > _LONGEST_METHOD or method == b"CONNECT":
        raise Fault(501, "the method is not supported", "unsupported")
    headers = _fields_of(fields)
    _check_host(headers, minor)
    named, http_minor = method.decode(), min(int(minor), 1)
    parts = _split_target(named, target, headers)
    framing = _framing(headers, http_minor, limits.max_body_bytes)
    return HttpHead(named, target, parts, http_minor, headers, framing)


def _fields_of(lines: bytes) -> dict[bytes, bytes]:
    headers: dict[bytes, bytes] = {}
    for line in lines[:-2].split(b"\r\n") if lines else ():
        name, _, value = line.partition(b":")
        name = name.lower()
        value = value.strip(b" \t")
        if name in headers:
            if name in (b"host", b"content-length"):
                raise bad_request(f"more than one {name.decode()} field")
            separator = b"; " if name == b"cookie" else b", "
            value = headers[name] + separator + value
        headers[name] = value
    return headers


def _check_host(headers: dict[bytes, bytes], minor: bytes) -> None:
    host = headers.get(b"host")
    if host is None:
        if minor != b"0":
            raise bad_request("the Host field is missing")
    elif not _HOST.fullmatch(host):
        raise bad_request("the Host field is malformed")


def _framing(headers: dict[bytes, bytes], minor: int, max_body: int) -> tuple[int | None, bool]:
    coding = headers.get(b"transfer-encoding")
    length = headers.get(b"content-length")
    if coding is not None:
        if length is not None:
            raise bad_request("Content-Length and Transfer-Encoding exclude each other")
        if minor == 0:
            raise bad_request("HTTP/1.0 has no Transfer-Encoding")
        codings = [part.strip(b" \t").lower() for part in coding.split(b",")]
        if codings == [b"chunked"]:
            return None, True
        if codings.count(b"chunked") > 1 or b"chunked" in codings[:-1]:
            raise bad_request("chunked has to be the last and only chunked transfer coding")
        raise Fault(501, "the only transfer coding supported is chunked", "unsupported")
    if length is None:
        return None, False
    if not _LENGTH.fullmatch(length):
        raise bad_request("Content-Length is not a number")
    if len(length) > _TOO_MANY_DIGITS:
        raise Fault(413, f"the body is over {max_body} bytes", "too-large")
    return int(length), False


def _split_target(method: str, target: bytes, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Returns path and query. The name of the server in a whole URL takes the place of the Host field (RFC
    9112, 3.2.2): that is what is compared with the names that are allowed."""
    if target == b"*" and method == "OPTIONS":
        return "*", ""
    match = _TARGET.fullmatch(target)
    if match is None or (match[2] is None and target.startswith(b"?")):
        raise bad_request("the request target is neither a path nor an http URL")
    if match[1] is not None:
        if not _HOST.fullmatch(match[1]):
            raise bad_request("the name of the server in the request target is malformed")
        headers[b"host"] = match[1]
    return (match[2] or b"/").decode(), (match[3] or b"").decode()


def _check_field_line(line: bytes) -> None:
    if not line.endswith(b"\r\n"):
        raise bad_request("a header line must end with CR LF")
    text = line[:-2]
    if text.startswith((b" ", b"\t")):
        raise bad_request("folded header lines are not allowed")
    if not _LINE_OF_FIELD.fullmatch(text):
        raise bad_request("a header line is not 'name: value' in printable characters")


def _what_else(text: bytes) -> str:
    if text.startswith(b"\x16"):
        return "this looks like TLS, but this port speaks plain HTTP/1.1"
    return "the request line holds bytes that are not printable ASCII"


class KnownHeads:
    """Remembers the heads of all connections. Every picture has a length of its own, and every request of a
    client that traces a parent: without them, the heads of a camera, and of many alike, are one."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._known: dict[bytes, HttpHead] = {}

    def read(self, raw: bytes, finder: HeadFinder) -> HttpHead:
        """The head in `raw`, which `finder` has found complete; raises `Fault`."""
        found = _LENGTH_FIELD.search(raw) if len(raw) <= _LONGEST_HEAD else None
        if found is None:
            return parse_head(raw, self._limits, finder)
        start, end = found.span(1)
        others = raw[:start] + raw[end:]
        known = self._known.get(others)
        if known is not None:
            return known.with_length(found[1])
        traced = _PARENT_FIELD.search(others)
        if traced is None:
            return self._learn(others, parse_head(raw, self._limits, finder))
        start, end = traced.span(1)
        # Nothing follows the end of a head, so this is the key of no head whose field is empty.
        untraced = others[:start] + others[end:] + b"traceparent"
        known = self._known.get(untraced)
        if known is None:
            head = parse_head(raw, self._limits, finder)
            alone = head.headers[b"traceparent"] == traced[1]  # and not one of several
            return self._learn(untraced if alone else others, head)
        head = known.with_length(found[1])
        head.headers[b"traceparent"] = traced[1]
        return head

    def _learn(self, others: bytes, head: HttpHead) -> HttpHead:
        if len(self._known) >= _MOST_HEADS:
            self._known.clear()
        self._known[others] = head
        return head

    def __len__(self) -> int:
        return len(self._known)
