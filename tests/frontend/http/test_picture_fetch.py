"""Pictures by their address: from hosts that are allowed, at public addresses, within bounds."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from carpool.errors import Refused
from carpool.frontend.http import picture_fetch
from carpool.frontend.http.picture_fetch import (
    _MOST_FETCHES,
    PictureFetcher,
    _InTurns,
    is_public,
    longest_s,
)
from client.scripted_server import Said, Scripted, scripted_server
from frontend.http.front_end import FrontEnd, error_of, front_end
from frontend.http.harness import Response
from frontend.picture_models import GREEN, classifier, picture
from waiting import until

NAME = "pictures.example"


@pytest.fixture
def pictures() -> Iterator[Scripted]:
    with scripted_server() as found:
        yield found


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What names lead to: this machine, which counts as public here unless it is called 127.0.0.2."""
    known: dict[str, list[str]] = {NAME: ["127.0.0.1"]}

    def resolve(host: str, _port: int) -> list[str]:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return known[host]

    monkeypatch.setattr(picture_fetch, "resolve", resolve)
    monkeypatch.setattr(picture_fetch, "is_public", lambda address: address == "127.0.0.1")
    return known


@pytest.fixture
def served(pictures: Scripted, addresses: dict[str, list[str]]) -> Iterator[FrontEnd]:
    with front_end(classifier(), picture_hosts=(f"{NAME}:{port_of(pictures)}", "other.example")) as found:
        yield found


def port_of(server: Scripted) -> str:
    return server.url.rpartition(":")[2]


def ask(served: FrontEnd, url: object, extra: bytes = b"") -> Response:
    with served.connect() as client:
        fields = b"Content-Type: application/json\r\n" + extra
        return client.post("/classify", json.dumps({"url": url}).encode(), fields)


def address(server: Scripted, path: str = "/a.jpg") -> str:
    return f"http://{NAME}:{port_of(server)}{path}"


def test_a_picture_is_fetched_and_answered(served: FrontEnd, pictures: Scripted) -> None:
    pictures.replies.append(Said(body=picture(GREEN, size=(64, 48))))
    answer = ask(served, address(pictures, "/deep/a.jpg?size=1"))
    assert answer.status == 200, answer.body
    document = json.loads(answer.body)
    assert document["classes"][0]["label"] == "green"
    assert document["image"] == {"width": 64, "height": 48}
    [asked] = pictures.asked
    assert asked.path == "/deep/a.jpg?size=1"
    assert asked.fields["host"] == f"{NAME}:{port_of(pictures)}"
    assert "authorization" not in asked.fields


def test_it_is_off_unless_a_host_is_allowed() -> None:
    with front_end(classifier()) as served:
        answer = ask(served, "https://pictures.example/a.jpg")
    assert answer.status == 403
    assert error_of(answer)["reason"] == "url-off"


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example/a.jpg",  # another port than the one allowed
        "http://evil.example/a.jpg",
        "http://127.0.0.1/a.jpg",
        "http://[::1]/a.jpg",
        "http://sub.other.example/",
        "http://other.example.evil.example/",
        "http://other.example:8080/",
    ],
)
def test_other_hosts_are_not_asked(served: FrontEnd, url: str) -> None:
    answer = ask(served, url)
    assert answer.status == 403
    assert error_of(answer)["reason"] == "host-not-allowed"


@pytest.mark.parametrize(
    "url",
    [
        *("", "a.jpg", "file:///etc/passwd", "ftp://other.example/a", "http://", "http://other.example:x/"),
        *(
            "http://a@other.example/",
            "http://other.example/\r\nX: y",
            "http://other.example/a b",
            "http://ö/",
        ),
        *("http://other.example/" + "a" * 2048, 7, None, ["http://other.example/"]),
    ],
)
def test_what_is_no_address_is_refused(served: FrontEnd, url: object) -> None:
    answer = ask(served, url)
    assert answer.status == 400
    assert error_of(answer)["field"] == "url"


def test_every_address_of_a_name_must_be_public(
    served: FrontEnd, pictures: Scripted, addresses: dict[str, list[str]]
) -> None:
    for found in (["127.0.0.2"], ["127.0.0.1", "127.0.0.2"], []):
        addresses[NAME] = found
        answer = ask(served, address(pictures))
        assert answer.status == 403
        assert error_of(answer)["reason"] == "address-not-public"
    assert pictures.asked == []


def test_a_host_with_its_address_need_not_be_public(
    pictures: Scripted, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is not looked up: whoever answers for it cannot lead the server elsewhere."""
    monkeypatch.setattr(picture_fetch, "is_public", is_public)
    addresses[NAME] = ["127.0.0.2"]
    port = port_of(pictures)
    with front_end(classifier(), picture_hosts=(f"{NAME}:{port}=127.0.0.1", "other.example")) as served:
        pictures.replies.append(Said(body=picture(GREEN)))
        assert ask(served, address(pictures)).status == 200
        assert pictures.asked[0].fields["host"] == f"{NAME}:{port}"
        addresses["other.example"] = ["127.0.0.1"]
        others = ("http://other.example/a", "address-not-public"), (f"http://{NAME}/a", "host-not-allowed")
        for url, reason in (*others, (f"http://127.0.0.1:{port}/a", "host-not-allowed")):
            answer = ask(served, url)
            assert (answer.status, error_of(answer)["reason"]) == (403, reason), url
        pictures.replies.append(Said(302, fields={"location": f"http://127.0.0.1:{port}/inside"}))
        assert error_of(ask(served, address(pictures)))["reason"] == "host-not-allowed"
    assert len(pictures.asked) == 2


def test_redirects_are_checked_like_the_first_address(
    served: FrontEnd, pictures: Scripted, addresses: dict[str, list[str]]
) -> None:
    pictures.say({}, 302, Location="/b.jpg")
    pictures.replies.append(Said(body=picture(GREEN)))
    assert ask(served, address(pictures)).status == 200
    assert [asked.path for asked in pictures.asked] == ["/a.jpg", "/b.jpg"]

    addresses["other.example"] = ["127.0.0.2"]
    for target, reason in (
        ("http://169.254.169.254/latest", "host-not-allowed"),
        ("http://other.example/", "address-not-public"),
        ("file:///etc/passwd", "invalid-input"),
    ):
        pictures.say({}, 301, Location=target)
        assert error_of(ask(served, address(pictures)))["reason"] == reason
    for _ in range(5):
        pictures.say({}, 307, Location="/again")
    assert error_of(ask(served, address(pictures)))["reason"] == "picture-not-fetched"


def test_what_cannot_be_had_is_said_in_the_same_words(served: FrontEnd, pictures: Scripted) -> None:
    pictures.say({"secret": 1}, 404)
    pictures.replies.append(Said(body=b"x", fields={"Content-Encoding": "gzip"}))
    for _ in range(2):
        answer = ask(served, address(pictures))
        assert answer.status == 400
        assert error_of(answer)["reason"] == "picture-not-fetched"
        assert b"secret" not in answer.body
    nobody = ask(served, "http://other.example/a.jpg")
    assert error_of(nobody)["reason"] == "picture-not-fetched"
    pictures.replies.append(Said(body=b"no picture"))
    assert "known format" in error_of(ask(served, address(pictures)))["error"]


def test_bytes_are_bounded(pictures: Scripted, addresses: dict[str, list[str]]) -> None:
    pictures.replies.append(Said(body=bytes(4097)))
    with front_end(
        classifier(), picture_hosts=(f"{NAME}:{port_of(pictures)}",), max_body_bytes=4096
    ) as served:
        answer = ask(served, address(pictures))
    assert answer.status == 413


def test_time_is_bounded(served: FrontEnd, pictures: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(picture_fetch, "begin_reply", never)
    answer = ask(served, address(pictures), b"X-Carpool-Deadline-Ms: 20\r\n")
    assert error_of(answer)["reason"] == "picture-not-fetched"


def test_a_client_that_leaves_ends_the_fetch(
    served: FrontEnd, pictures: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    async def never(*_: object) -> None:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    monkeypatch.setattr(picture_fetch, "begin_reply", never)
    fetcher = served.app._service.fetcher
    body = json.dumps({"url": address(pictures)}).encode()
    with served.connect() as client:
        client.send(
            b"POST /classify HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(lambda: steps == ["begun"])
    until(lambda: steps == ["begun", "ended"] and not fetcher._under_way)


def test_a_picture_in_short_chunks_is_refused(served: FrontEnd, pictures: Scripted) -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in picture(GREEN, size=(64, 48))) + b"0\r\n\r\n"
    pictures.replies.append(Said(body=body, fields={"Transfer-Encoding": "chunked"}))
    assert error_of(ask(served, address(pictures)))["reason"] == "picture-not-fetched"


def test_a_host_and_a_client_have_a_share_of_the_fetches(
    pictures: Scripted, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead host holds as many fetches as it can; so does the greedy client, with both hosts."""
    dead = asyncio.Event()

    async def connect(address: str, port: int, **tls: object) -> object:
        if address == "dead":
            await dead.wait()
        return await connected(address, port, **tls)  # type: ignore[arg-type]

    connected = asyncio.open_connection
    monkeypatch.setattr(asyncio, "open_connection", connect)
    monkeypatch.setattr(picture_fetch, "is_public", lambda _address: True)
    addresses["dead.example"] = ["dead"]

    async def attacked() -> None:
        fetcher = PictureFetcher((f"{NAME}:{port_of(pictures)}", "dead.example"), 1 << 20)
        greedy = as_many_as_it_may(fetcher, "http://dead.example/", "greedy")
        assert 0 < len(greedy) < _MOST_FETCHES
        more = as_many_as_it_may(fetcher, "http://dead.example/", "other")
        for number in range(3):
            pictures.replies.append(Said(body=b"%d" % number))
            assert await fetcher.start(address(pictures), 10.0, "other") == b"%d" % number
        with pytest.raises(Refused):
            fetcher.start(address(pictures), 10.0, "greedy")
        fetcher.close()
        await asyncio.gather(*greedy, *more, return_exceptions=True)
        assert not fetcher._by_client.total
        assert not fetcher._by_host.total

    asyncio.run(attacked())


def as_many_as_it_may(fetcher: PictureFetcher, url: str, client: str) -> list[asyncio.Task[bytearray]]:
    found = []
    with suppress(Refused):
        while True:
            found.append(fetcher.start(url, 10.0, client))
    return found


def test_a_client_has_a_share_of_the_bytes(
    pictures: Scripted, addresses: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_fetch, "_MOST_HELD_BYTES", 4096)

    async def fetched() -> None:
        fetcher = PictureFetcher((f"{NAME}:{port_of(pictures)}",), 1 << 20)
        fetcher._held.take("other", 1000)
        pictures.replies.append(Said(body=bytes(4000)))
        with pytest.raises(Refused):
            await fetcher.start(address(pictures), 10.0, "greedy")
        assert fetcher._held.total == 1000

    asyncio.run(fetched())


def test_a_host_must_send_at_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time for the next byte grows with what it has sent; here it has no time to begin with."""
    assert longest_s(0) < longest_s(1 << 12) < longest_s(1 << 20)
    monkeypatch.setattr(picture_fetch, "_FIRST_BYTES_S", 0.0)

    async def read() -> None:
        stream = asyncio.StreamReader()
        stream.feed_data(bytes(100_000))
        begun = asyncio.get_running_loop().time()
        reader = _InTurns(stream, begun)
        assert len(await reader.read(1 << 20)) == 1 << 16
        assert len(await reader.read(1 << 20)) == 100_000 - (1 << 16)
        with pytest.raises(TimeoutError):
            await _InTurns(stream, begun).read(1)

    asyncio.run(read())


@pytest.mark.parametrize(
    "found",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1"),
        *("224.0.0.1", "255.255.255.255", "198.18.0.1", "192.0.2.1", "::", "::1", "fe80::1%2", "fc00::1"),
        *("::ffff:10.0.0.1", "::ffff:8.8.8.8", "64:ff9b::a00:1", "2002:a00:1::", "ff02::1", "2001::1"),
        *("fec0::1", "::8.8.8.8", "192.88.99.1", "192.0.0.8", "192.0.0.9", "5f00::1", "3fff::1", "4000::1"),
        *("198.51.100.1", "203.0.113.1", "240.0.0.1", "100::1", "2001:db8::1", "64:ff9b:1::1"),
    ],
)
def test_addresses_that_are_not_public(found: str) -> None:
    assert not is_public(found)


@pytest.mark.parametrize(
    "found",
    ["8.8.8.8", "2606:4700:4700::1111", "192.0.1.1", "192.88.98.1", "100.63.255.255", "223.255.255.255"],
)
def test_addresses_that_are_public(found: str) -> None:
    assert is_public(found)


@pytest.mark.usefixtures("addresses")
def test_an_authorization_is_for_the_host_of_the_address_alone(
    pictures: Scripted, addresses: dict[str, list[str]]
) -> None:
    other = "other.example"
    addresses[other] = ["127.0.0.1"]
    port = port_of(pictures)

    async def fetched() -> None:
        fetcher = PictureFetcher((f"{NAME}:{port}", f"{other}:{port}"), 1 << 20)
        for place in (f"http://{NAME}:{port}/b", f"http://{other}:{port}/b"):
            pictures.replies += [Said(302, fields={"Location": place}), Said(body=b"image")]
            assert await fetcher.start(address(pictures, "/a"), 10.0, "", "Token secret") == b"image"
        fetcher.close()

    asyncio.run(fetched())
    sent = [(one.path, one.fields.get("authorization")) for one in pictures.asked]
    assert sent == [("/a", "Token secret"), ("/b", "Token secret"), ("/a", "Token secret"), ("/b", None)]
