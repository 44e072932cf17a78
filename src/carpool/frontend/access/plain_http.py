"""Answers clients that send plain HTTP to a port that speaks TLS, where the connection would be closed
without a word."""

from __future__ import annotations

import ssl
from typing import Any

_PLAIN = ("HTTP_REQUEST", "HTTPS_PROXY_REQUEST")  # as OpenSSL calls what it was sent in place of a handshake
_BODY = b'{"error":"this port speaks HTTPS, and the request came without TLS: write https:// in its address",'
_BODY += b'"reason":"bad-request"}'
_ANSWER = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
_ANSWER += b"x-content-type-options: nosniff\r\ncontent-length: %d\r\n"
_ANSWER = _ANSWER % len(_BODY) + b"connection: close\r\n\r\n" + _BODY


class AnswersPlainHttp(ssl.SSLObject):
    """Represents the side of a server, for `SSLContext.sslobject_class`. The event loop writes what lies in
    `outgoing` when a handshake wants more, so that is where the answer goes; what comes then ends the
    connection."""

    _outgoing: ssl.MemoryBIO
    _told = False

    @classmethod
    def _create(cls, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **named: Any) -> Any:
        made = super()._create(incoming, outgoing, *args, **named)  # type: ignore[misc]
        made._outgoing = outgoing
        return made

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLError as error:
            if self._told or error.reason not in _PLAIN:
                raise
            self._told = True
            self._outgoing.read()  # an alert that no client of plain HTTP understands
            self._outgoing.write(_ANSWER)
            raise ssl.SSLWantReadError from error
