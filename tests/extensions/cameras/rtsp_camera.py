"""A network camera of a few lines: RTSP with a password, MJPEG in RTP over the same connection."""

from __future__ import annotations

import base64
import io
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

import av

from extensions.cameras.made_videos import picture

_SDP = "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nc=IN IP4 0.0.0.0\r\nt=0 0\r\nm=video 0 RTP/AVP 26\r\n"
_SIZE = (64, 48)


def packets(frames: int) -> list[bytes]:
    """RTP as libav makes it, caught on a socket of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as caught:
        caught.bind(("127.0.0.1", 0))
        caught.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        caught.setblocking(False)
        found = []
        url = f"rtp://127.0.0.1:{caught.getsockname()[1]}"
        with av.open(url, "w", format="rtp") as container:
            stream = container.add_stream("mjpeg", rate=Fraction(25), options={"huffman": "default"})
            stream.width, stream.height = _SIZE
            stream.pix_fmt = "yuvj420p"
            for number in range(frames):
                image = av.VideoFrame.from_ndarray(picture(number, _SIZE), format="rgb24")
                container.mux(stream.encode(image))
                while True:
                    try:
                        found.append(caught.recv(1 << 16))
                    except BlockingIOError:
                        break
        return found


class Camera(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, allowed: str, frames: int) -> None:
        self.allowed = "Basic " + base64.b64encode(allowed.encode()).decode()
        self.sent = packets(frames)
        self.came: list[str] = []  # who had the password
        super().__init__(("127.0.0.1", 0), Conversation)

    def handle_error(self, *_: object) -> None:
        pass


class Conversation(socketserver.StreamRequestHandler):
    server: Camera

    def handle(self) -> None:
        while line := self.rfile.readline().decode().strip():
            fields = {}
            while field := self.rfile.readline().decode().strip():
                name, _, value = field.partition(":")
                fields[name.lower()] = value.strip()
            getattr(self, f"on_{line.split()[0].lower()}", self.on_other)(fields)

    def on_other(self, asked: dict[str, str]) -> None:
        self._say(asked, "Public: DESCRIBE, SETUP, PLAY")

    def on_describe(self, asked: dict[str, str]) -> None:
        if asked.get("authorization") != self.server.allowed:
            self._say(asked, 'WWW-Authenticate: Basic realm="camera"', status="401 Unauthorized")
            return
        self.server.came.append(asked["authorization"])
        described = f"{_SDP}a=control:track1\r\n"
        self._say(asked, "Content-Type: application/sdp", f"Content-Length: {len(described)}", body=described)

    def on_setup(self, asked: dict[str, str]) -> None:
        self._say(asked, "Transport: RTP/AVP/TCP;unicast;interleaved=0-1", "Session: 1")

    def on_play(self, asked: dict[str, str]) -> None:
        self._say(asked, "Session: 1")
        for packet in self.server.sent:
            self.wfile.write(b"$\0" + len(packet).to_bytes(2, "big") + packet)
        self.rfile = io.BytesIO()  # nothing more is heard: it hangs up

    def _say(self, asked: dict[str, str], *lines: str, status: str = "200 OK", body: str = "") -> None:
        head = "\r\n".join((f"RTSP/1.0 {status}", f"CSeq: {asked['cseq']}", *lines, "", ""))
        self.wfile.write((head + body).encode())


@contextmanager
def rtsp_camera(user: str, password: str, frames: int = 20) -> Iterator[tuple[str, list[str]]]:
    """Its address, and who came in with the password; it hangs up after so many frames."""
    camera = Camera(f"{user}:{password}", frames)
    thread = threading.Thread(target=camera.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"rtsp://{user}:{password}@127.0.0.1:{camera.server_address[1]}/live", camera.came
    finally:
        camera.shutdown()
        thread.join()
        camera.server_close()
