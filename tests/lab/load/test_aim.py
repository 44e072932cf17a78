"""What is asked before anything is loaded, and the sentence when the answer is no."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carpool.errors import CarpoolError, InvalidInput, Unreachable
from carpool.lab.load import aim as aim_module
from carpool.lab.load.aim import Address, Aim, read_url, take_aim
from carpool.lab.load.generator import run
from carpool.lab.load.load_plan import Closed, Plan
from carpool.lab.load.load_report import LoadReport
from lab.load.stub import ANSWER, Exchange, Stub, fine, in_loop


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost", Address("http", "localhost", 8000, "")),
        ("http://h:81/", Address("http", "h", 81, "")),
        ("http://h/detect?model=m", Address("http", "h", 8000, "/detect?model=m")),
        ("grpc://h", Address("grpc", "h", 8001, "")),
        ("https://h:1", Address("https", "h", 1, "")),
        ("grpcs://h", Address("grpcs", "h", 8001, "")),
        ("http://[::1]:8000", Address("http", "::1", 8000, "")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert read_url(url) == address


@pytest.mark.parametrize(
    "url", ["ftp://h", "httpss://h", "http://", "h:port", "http://h:99999", "http://u:p@h", "http://h/a b"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(InvalidInput):
        read_url(url)


def test_grpc_needs_what_may_not_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aim_module, "find_spec", lambda _: None)
    assert read_url("http://localhost")
    with pytest.raises(InvalidInput, match=r"pip install 'carpool\[grpc-client\]'"):
        read_url("grpc://localhost")


def test_an_ipv6_address_keeps_its_brackets() -> None:
    assert read_url("http://[::1]:9").authority == "[::1]:9"


def loaded(aim: dict[str, Any], stub: Stub, requests: int = 3) -> LoadReport:
    async def work() -> LoadReport:
        async with stub.serve():
            url = stub.url + aim.pop("path", "")
            target = await asyncio.to_thread(take_aim, Aim(url, **aim))
            return await run(Plan(Closed(1, requests=requests)), target)

    return in_loop(work())


def test_the_only_model_is_asked_and_one_request_is_sent_first() -> None:
    stub = Stub(fine)
    report = loaded({}, stub)
    assert report.total.answered == 3
    assert len(stub.seen) == 4
    assert {exchange.path for exchange in stub.seen} == {"/v2/models/m/infer"}
    assert report.target.endswith("model m")


def test_a_version_is_asked_by_its_path() -> None:
    stub = Stub(fine)
    loaded({"model": "a/b", "version": "2"}, stub)
    assert stub.seen[0].path == "/v2/models/a%2Fb/versions/2/infer"


@pytest.mark.parametrize(
    ("stub", "aim", "says"),
    [
        (Stub(fine, ready=400), {}, "is not ready: GET /v2/health/ready answered 400. Nothing was sent"),
        (Stub(fine, models=[]), {}, "no model that is ready"),
        (Stub(fine, models=[{"name": "a"}, {"name": "b"}]), {}, "--model a or b"),
        (Stub(fine, models={"odd": 1}), {}, "no model that is ready"),
        (Stub(fine, metadata=None), {"model": "x"}, "no such model"),
        (Stub(fine, metadata={"inputs": []}), {}, "has no inputs"),
        (
            Stub(fine, metadata={"inputs": [{"name": "x", "datatype": "FP99", "shape": [1]}]}),
            {},
            "an invalid input",
        ),
        (Stub(fine), {"path": "/detect"}, "goes with --image"),
    ],
)
def test_nothing_is_sent_to_a_server_that_cannot_be_asked(stub: Stub, aim: dict[str, Any], says: str) -> None:
    with pytest.raises(CarpoolError, match=says):
        loaded(dict(aim), stub)
    assert not stub.seen


def test_a_request_that_cannot_be_right_is_not_repeated() -> None:
    async def no(exchange: Exchange) -> None:
        exchange.say(400, b'{"error":"input \'x\' has the wrong shape"}')

    stub = Stub(no)
    with pytest.raises(Unreachable, match=r"answered 400: input 'x' has the wrong shape"):
        loaded({}, stub)
    assert len(stub.seen) == 1


def test_a_refusal_of_the_first_request_is_no_reason_to_give_up() -> None:
    async def busy(exchange: Exchange) -> None:
        exchange.say(
            429 if exchange.number == 0 else 200, b'{"reason":"overload"}' if exchange.number == 0 else ANSWER
        )

    assert loaded({}, Stub(busy)).total.answered == 3


def test_an_answer_that_is_not_of_the_protocol() -> None:
    async def odd(exchange: Exchange) -> None:
        exchange.say(200, b"hello")

    with pytest.raises(InvalidInput, match="not valid JSON"):
        loaded({}, Stub(odd))


def test_nobody_there() -> None:
    with pytest.raises(Unreachable, match=r"there is no server at 127.0.0.1:1: .*Nothing was sent"):
        take_aim(Aim("http://127.0.0.1:1"))


def test_pictures_are_uploaded(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    stub = Stub(fine)
    pictures = (tmp_path / "a.jpg", tmp_path / "b.png")
    assert loaded({"path": "/detect?model=m", "pictures": pictures}, stub).total.answered == 3
    assert stub.seen[0].path == "/detect?model=m"
    assert [exchange.body for exchange in stub.seen] == [b"a.jpg", b"a.jpg", b"b.png", b"a.jpg"]
    assert b"image/png" in stub.seen[2].head
    stub = Stub(fine)
    loaded({"model": "m", "pictures": pictures}, stub)
    assert stub.seen[0].path == "/models/m/predict"


def test_pictures_need_a_place_and_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"a")
    with pytest.raises(InvalidInput, match="/detect, or --model NAME"):
        loaded({"pictures": (tmp_path / "a.jpg",)}, Stub(fine))
    with pytest.raises(InvalidInput, match="cannot read"):
        loaded({"path": "/detect", "pictures": (tmp_path / "b.jpg",)}, Stub(fine))
    with pytest.raises(InvalidInput, match="over gRPC"):
        take_aim(Aim("grpc://127.0.0.1:1", pictures=(tmp_path / "a.jpg",)))


@pytest.mark.parametrize("url", ["grpc://h", "http://h/detect"])
def test_shared_memory_is_for_tensors_over_http(url: str) -> None:
    pictures = (Path("a.jpg"),) if "detect" in url else ()
    with pytest.raises(InvalidInput, match="--shared-memory"):
        take_aim(Aim(url, pictures=pictures, shared_memory=True))
