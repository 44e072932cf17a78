"""TLS at both doors, and certificates that change while the server runs."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from carpool.errors import ConfigError
from carpool.frontend.access.access import FileWatch
from carpool.frontend.access.tls import Tls
from frontend.grpc.front_end import front_end as grpc_front_end
from frontend.grpc.front_end import wait_for
from frontend.http.front_end import front_end, image_body, infer
from frontend.http.harness import PATIENCE, QUICK, Client, PathApp, Serving, post, serving
from waiting import until

MADE = Path(__file__).parent / "certificates"


class Files:
    """A pair where an operator would put it."""

    def __init__(self, folder: Path) -> None:
        self.cert = folder / "cert.pem"
        self.key = folder / "key.pem"
        self.use("server", "server-key")

    def use(self, cert: str, key: str) -> None:
        shutil.copy(MADE / f"{cert}.pem", self.cert)
        shutil.copy(MADE / f"{key}.pem", self.key)
        self.key.chmod(0o600)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
def tls(files: Files) -> Tls:
    return Tls(str(files.cert), str(files.key))


@pytest.fixture
def server(tls: Tls) -> Iterator[Serving]:
    with serving(tls=tls.context) as running:
        yield running


def trusting(cert: str = "server") -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(MADE / f"{cert}.pem"))


def connect(server: Serving, context: ssl.SSLContext | None = None) -> Client:
    client = server.connect()
    client.socket = (context or trusting()).wrap_socket(client.socket, server_hostname="localhost")
    return client


def test_requests_of_every_kind(server: Serving) -> None:
    body = bytes(range(256)) * 3000
    with connect(server) as client:
        assert client.get().body == b"hello"
        assert client.post("/place", body).body == body
        assert client.post("/echo", body).body == body
        assert len(client.get("/big").body) == (8 << 20) + 2
        assert client.post("/place", b"x").body == b"x"


@pytest.mark.parametrize("body", [b"", bytes(200_000)])
def test_plain_http_is_told_that_this_is_not_the_way(server: Serving, body: bytes) -> None:
    with server.connect() as client:
        client.send(post("/place", body) if body else b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = client.response()
        assert answer.status == 400
        assert b"https://" in answer.body
    with connect(server) as client:  # others are served as before
        assert client.get().body == b"hello"


def test_a_large_answer_is_what_it_was_when_it_was_given(server: Serving) -> None:
    with connect(server) as client:
        assert set(client.get("/big").body[1:-1]) == {ord("a")}


def test_requests_in_one_piece_are_answered_in_turn(server: Serving) -> None:
    with connect(server) as client:
        client.send(post("/place", b"abc") * 20)
        assert [client.response().body for _ in range(20)] == [b"abc"] * 20


def test_a_refused_body_is_read_past(server: Serving) -> None:
    with connect(server) as client:
        for _ in range(3):
            assert client.post("/refuse", bytes(600_000)).status == 429
        assert client.get().status == 200


def test_a_body_in_small_pieces(server: Serving) -> None:
    with connect(server) as client:
        message = post("/place", b"0123456789" * 10)
        for start in range(0, len(message), 7):
            client.send(message[start : start + 7])
        assert client.response().body == b"0123456789" * 10


def test_a_bad_request_is_told_and_ends_the_connection(tls: Tls) -> None:
    with serving(tls=tls.context, **(QUICK | {"header_timeout_s": PATIENCE})) as server:
        with connect(server) as client:
            client.send(b"GET / HTTP/9.9\r\n\r\n")
            assert client.response().status == 505
            assert client.is_closed()
        server.until_connections(0)


def test_a_client_that_leaves_is_noticed(tls: Tls) -> None:
    app = PathApp()
    with serving(app, tls=tls.context) as server:
        client = connect(server)
        client.send(post("/hold", b"abc"))
        app.held.get(timeout=PATIENCE)
        client.socket.close()
        assert app.left.get(timeout=PATIENCE) == "hold"
        server.until_connections(0)


def test_whoever_does_not_speak_tls_is_cut_off(tls: Tls) -> None:
    with serving(tls=tls.context, **QUICK) as server:
        with server.connect() as plain:
            assert plain.get().status == 400
            assert plain.is_closed()
        with server.connect() as other:
            other.send(b"\x00\x01\x02\x03 neither HTTP nor TLS")
            with pytest.raises((AssertionError, OSError)):
                other.response()
        with server.connect() as silent:
            assert silent.is_closed()


def test_inference_through_a_slot(tls: Tls) -> None:
    with front_end(tls=tls.context) as front, connect(front.server) as client:
        for _ in range(3):
            assert infer(client, "image", image_body()).status == 200


def common_name(server: Serving, trusted: str) -> str:
    with connect(server, trusting(trusted)) as client:
        found = client.socket.getpeercert()  # type: ignore[attr-defined]
        return str(dict(pair for group in found["subject"] for pair in group)["commonName"])


def test_a_new_pair_is_for_new_connections(server: Serving, tls: Tls, files: Files) -> None:
    watch = FileWatch([str(files.cert), str(files.key)], tls.reload)
    with connect(server) as old:
        assert common_name(server, "server") == "localhost"
        files.use("other", "other-key")
        server.call(watch.look)
        assert common_name(server, "other") == "other"
        assert old.get().status == 200


@pytest.mark.parametrize(
    ("cert", "key", "why"),
    [
        ("other", "server-key", "mismatch"),
        ("expired", "server-key", "expired"),
        ("server-key", "server-key", "not pem"),
    ],
)
def test_a_pair_that_will_not_do_leaves_the_old_one(
    server: Serving, tls: Tls, files: Files, cert: str, key: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    files.use(cert, key)
    server.call(tls.reload)
    assert common_name(server, "server") == "localhost"
    assert "certificate-not-read" in caplog.text
    assert why in caplog.text
    with pytest.raises(ConfigError, match=why):
        Tls(str(files.cert), str(files.key))


def test_half_a_file_leaves_the_old_one(server: Serving, tls: Tls, files: Files) -> None:
    whole = files.cert.read_bytes()
    for half in (whole[: len(whole) // 2], b""):
        files.cert.write_bytes(half)
        server.call(tls.reload)
        assert common_name(server, "server") == "localhost"
    files.cert.unlink()
    server.call(tls.reload)
    assert common_name(server, "server") == "localhost"


def test_only_clients_of_an_authority(files: Files) -> None:
    tls = Tls(str(files.cert), str(files.key), str(MADE / "ca.pem"))
    known = trusting()
    known.load_cert_chain(MADE / "client.pem", MADE / "client-key.pem")
    with serving(tls=tls.context) as server:
        with connect(server, known) as client:
            assert client.get().status == 200
        refused = pytest.raises((OSError, AssertionError), match=r"(?i)certificate|closed|reset")
        with refused, connect(server) as stranger:
            stranger.get()


def live(url: str, cert: str, options: tuple[tuple[str, str], ...] = ()) -> bool:
    trusted = grpc.ssl_channel_credentials((MADE / f"{cert}.pem").read_bytes())
    with grpc.secure_channel(url, trusted, options) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        try:
            return bool(ask(b"", timeout=10))
        except grpc.RpcError:
            return False


def test_grpc_and_a_new_pair(files: Files) -> None:
    settings = {"tls_cert": str(files.cert), "tls_key": str(files.key)}
    with grpc_front_end(**settings) as front:
        url = f"localhost:{front.port}"
        assert live(url, "server")
        with grpc.insecure_channel(url) as plain, pytest.raises(grpc.RpcError):
            plain.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=5)
        files.use("other", "server-key")
        front.run(front.access.tls.reload)
        assert live(url, "server")
        files.use("other", "other-key")
        front.run(front.access.tls.reload)
        assert live(url, "other")
        assert not live(url, "server")


def test_a_watch_sees_a_link_that_points_elsewhere(tmp_path: Path) -> None:
    """As secrets of Kubernetes change."""
    seen = []
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    link = tmp_path / "link"
    link.symlink_to("a")
    watch = FileWatch([str(link)], lambda: seen.append(1))
    watch.look()
    assert not seen
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").rename(link)
    watch.look()
    assert seen == [1]
    link.unlink()
    watch.look()
    watch.look()
    assert seen == [1, 1]


def test_a_watch_looks_by_itself(tmp_path: Path) -> None:
    seen = []
    file = tmp_path / "file"
    file.write_text("a")

    async def start() -> FileWatch:
        watch = FileWatch([str(file)], lambda: seen.append(1))
        watch.start()
        return watch

    watch = wait_for(start())
    file.write_text("ab")
    until(lambda: bool(seen))
    watch.close()
