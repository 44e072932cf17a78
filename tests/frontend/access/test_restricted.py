"""Triton's restricted APIs, at both doors."""

from __future__ import annotations

import grpc
import pytest

from carpool.errors import ConfigError
from carpool.frontend.access.guard import APIS, Guard, Wanted, read_restrictions
from carpool.frontend.access.route_rules import RULES, Kind
from frontend.grpc.front_end import front_end as grpc_front_end
from frontend.http.front_end import error_of, front_end


@pytest.mark.parametrize(
    "given",
    [
        ["model-repository,logging:Admin=S:=1", "health:h=2"],
        ["model-repository", "logging:Admin=S:=1", "health:h=2"],
    ],
)
def test_options_and_variables_are_read_alike(given: list[str]) -> None:
    assert read_restrictions(given, "x") == {
        "model-repository": Wanted("admin", b"S:=1"),
        "logging": Wanted("admin", b"S:=1"),
        "health": Wanted("h", b"2"),
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("modelrepository:a=SECRET", "unknown API"),
        ("logging", "must be followed"),
        ("logging:SECRET", "must be like"),
        ("logging:a b=SECRET", "must be like"),
        ("logging:a=SECRET,logging:b=SECRET", "twice"),
    ],
)
def test_mistakes_are_told_without_the_secret(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_restrictions([given], "x")
    assert "SECRET" not in raised.value.message


def test_every_route_that_triton_knows_has_its_group() -> None:
    without = {name for name, rule in RULES.items() if not rule.api}
    assert {rule.api for rule in RULES.values()} == {"", *APIS}
    assert all(RULES[name].kind in (Kind.PAGE, Kind.METRICS) for name in without)


def test_over_http() -> None:
    guard = Guard(restricted=read_restrictions(["model-repository,logging:admin-key=SECRET"], "x"))
    with front_end(guard=guard) as front, front.connect() as client:
        assert client.ask("GET", "/v2/models/image").status == 200
        for field in (b"", b"Admin-Key: other\r\n"):
            refused = client.ask("POST", "/v2/repository/index", field)
            assert refused.status == 403
            assert error_of(refused)["error"] == "This API is restricted, expecting header 'admin-key'"
        assert client.ask("POST", "/v2/repository/index", b"Admin-Key: SECRET\r\n").status == 200


def test_over_grpc() -> None:
    with (
        grpc_front_end(grpc_restricted_protocol=("logging:admin-key=SECRET",)) as front,
        grpc.insecure_channel(front.url) as channel,
    ):
        ask = channel.unary_unary("/inference.GRPCInferenceService/LogSettings")
        with pytest.raises(grpc.RpcError) as raised:
            ask(b"", timeout=30)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "'triton-grpc-protocol-admin-key'" in raised.value.details()
        with pytest.raises(grpc.RpcError) as raised:
            ask(b"", timeout=30, metadata=(("triton-grpc-protocol-admin-key", "SECRET"),))
        assert (
            raised.value.code() is not grpc.StatusCode.PERMISSION_DENIED
        )  # the fake engine has no such question
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=30)
