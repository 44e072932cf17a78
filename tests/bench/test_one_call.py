"""The attacker's gRPC call hears that it is rejected, as every client of gRPC does."""

from __future__ import annotations

import socket
import struct
import threading

from attacks.elements import send_unless_answered
from attacks.isolation import frame
from attacks.one_call import OneCall
from carpool.frontend.grpc.rpc_heads import HEAD, Status, trailers

HEADERS, SETTINGS, WINDOW = 1, 4, 8
END_OF_CALL = 5
FIRST_WINDOW = 65_535
WIDE = struct.pack(">I", 1 << 30)


def reject_after_the_first_window(server: socket.socket, received: list[int]) -> None:
    """Opens wide windows in the same moment: the client could send all of its message."""
    server.sendall(frame(SETTINGS, 0, 0))
    got = 0
    while got < FIRST_WINDOW:
        got += len(server.recv(1 << 16))
    block = HEAD + trailers(Status.UNAVAILABLE, "no room", (("retry-after", "3"),))
    wide = frame(WINDOW, 0, 0, WIDE) + frame(WINDOW, 0, 1, WIDE)
    server.sendall(wide + frame(HEADERS, END_OF_CALL, 1, block))
    while data := server.recv(1 << 16):
        got += len(data)
    received.append(got)


def test_a_rejected_call_sends_no_more_and_comes_back_when_the_server_says() -> None:
    client, server = socket.socketpair()
    received: list[int] = []
    with server:
        thread = threading.Thread(target=reject_after_the_first_window, args=(server, received), daemon=True)
        thread.start()
        with client:
            client.settimeout(30.0)
            call = OneCall(client)
            assert not call.run("/any/Call", bytes(4 << 20), compressed=False)
        thread.join(30.0)
    assert call.retry_after_s == 3.0
    assert received[0] < 4 * FIRST_WINDOW


def test_a_rejected_body_is_sent_no_further() -> None:
    client, server = socket.socketpair()
    with client, server:
        server.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        send_unless_answered(client, bytes(4 << 20))
        client.shutdown(socket.SHUT_WR)
        assert server.recv(1) == b""
    client, server = socket.socketpair()
    with client:
        server.close()
        send_unless_answered(client, bytes(4 << 20))
