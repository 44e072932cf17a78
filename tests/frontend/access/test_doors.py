"""Every route of both doors, from their own tables: what is open without a key, with one, and from a page."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import orjson
import pytest
from tritonclient.grpc import service_pb2 as pb

from carpool.frontend.access.guard import Guard, Names
from carpool.frontend.access.route_rules import RULES, Kind, rule_of
from carpool.frontend.grpc.grpc_handlers import CALLS, HEALTH, SERVICE
from carpool.frontend.http.app import MetricsApp, all_routes
from carpool.frontend.http.dialects import routes_of_extensions
from carpool.frontend.http.fairness import Fairness
from carpool.frontend.http.http_service import SharedPage
from frontend.access.key_files import ALICE, BOB, ROOT, admin_keys, api_keys, write
from frontend.grpc.front_end import front_end as grpc_front_end
from frontend.http.front_end import error_of, front_end, image_body, infer
from frontend.http.harness import serving
from frontend.picture_models import detector, picture

RULE_OF = {(route.method, route.pattern): route.handler.rule for route in all_routes()}
OF_EXTENSIONS = {route[:2] for route in routes_of_extensions() if not route.handler.for_events}
HTTP = list(RULE_OF)
GRPC = [
    *(f"{SERVICE}/{name}" for name in (*(call.name for call in CALLS), "ModelInfer", "ModelStreamInfer")),
    f"{HEALTH}/Check",
    f"{HEALTH}/Watch",
]
OPEN = (Kind.HEALTH, Kind.PAGE)


def path_of(pattern: str) -> str:
    path = re.sub(r"\[[^\]]*\]", "", pattern)
    return path.replace("{file}", "app.js").replace("{model}", "image").replace("{region}", "r")


def bearer(key: str) -> bytes:
    return b"Authorization: Bearer %b\r\n" % key.encode()


def test_every_route_of_both_doors_is_in_the_table() -> None:
    there = {f"{method} {pattern}" for method, pattern in RULE_OF.keys() - OF_EXTENSIONS} | {
        name.rpartition("/")[2] for name in GRPC
    }
    assert there == RULES.keys()


def test_a_route_that_is_not_listed_takes_the_most() -> None:
    assert rule_of("DELETE /v2/everything")[:2] == (Kind.CONTROL, True)


def test_what_changes_something_is_never_a_get() -> None:
    rules = RULES | {f"{method} {pattern}": rule for (method, pattern), rule in RULE_OF.items()}
    for name, rule in rules.items():
        assert not (rule.changes and name.startswith("GET "))
        if rule.kind is Kind.CONTROL and name.startswith("POST "):
            assert rule.changes


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    return Guard(
        Names(loopback=True),
        api_key_file=api_keys(tmp_path),
        admin_key_file=admin_keys(tmp_path),
        metrics_key=True,
    )


def test_without_a_key_nothing_but_health_and_the_consoles_files(guard: Guard) -> None:
    with front_end(guard=guard) as front, front.connect() as client:
        for method, pattern in HTTP:
            kind = RULE_OF[method, pattern].kind
            for field in (b"", bearer("unknown-key")):
                response = client.ask(method, path_of(pattern), field)
                if kind in OPEN:
                    assert response.status == 200, pattern
                else:
                    assert response.status == 401, pattern
                    assert error_of(response)["reason"] == "unauthenticated"
                    assert response.fields["www-authenticate"] == "Bearer"
            if kind is Kind.CONTROL:
                response = client.ask(method, path_of(pattern), bearer(ALICE))
                assert (response.status, error_of(response)["reason"]) == (403, "forbidden")
            elif kind not in OPEN:
                assert client.ask(method, path_of(pattern), bearer(ALICE)).status not in (401, 403), pattern
                field = b"X-API-Key: %b\r\n" % ROOT.encode()
                assert client.ask(method, path_of(pattern), field).status not in (401, 403), pattern


def test_health_names_the_models_to_those_who_may_use_them(guard: Guard) -> None:
    with front_end(guard=guard) as front, front.connect() as client:
        assert orjson.loads(client.get("/health").body) == {"ready": True}
        assert "image" in orjson.loads(client.get("/health", bearer(ALICE)).body)["models"]


def test_metrics_need_a_key_only_when_told_so(guard: Guard, tmp_path: Path) -> None:
    without = Guard(api_key_file=api_keys(tmp_path))
    for chosen, status in ((guard, 401), (without, 200)):
        app = MetricsApp(SharedPage(lambda: iter([b"numbers"])), Fairness(), chosen)
        with serving(app) as server, server.connect() as client:
            assert client.get("/metrics").status == status
            assert client.get("/metrics", bearer(ALICE)).status == 200


def test_over_grpc_without_a_key_nothing_but_health(tmp_path: Path) -> None:
    keys = {"api_key_file": api_keys(tmp_path), "admin_key_file": admin_keys(tmp_path)}
    with grpc_front_end(**keys) as front, grpc.insecure_channel(front.url) as channel:
        for name in GRPC:
            kind = rule_of(name.rpartition("/")[2]).kind
            for metadata in ((), (("authorization", "Bearer unknown-key"),), (("x-api-key", "unknown"),)):
                code = _code(channel, name, metadata)
                if kind is Kind.HEALTH:
                    assert code is None, name
                else:
                    assert code is grpc.StatusCode.UNAUTHENTICATED, name
            code = _code(channel, name, (("authorization", f"Bearer {ALICE}"),))
            assert (code is grpc.StatusCode.PERMISSION_DENIED) == (kind is Kind.CONTROL), name
            refused = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
            assert _code(channel, name, (("x-api-key", ROOT),)) not in refused


def _code(channel: grpc.Channel, name: str, metadata: object) -> grpc.StatusCode | None:
    """None when it worked; the first answer is enough of a stream."""
    if name.endswith(("Watch",)):
        call = channel.unary_stream(f"/{name}")(b"", timeout=30, metadata=metadata)
    elif name.endswith("StreamInfer"):
        call = channel.stream_stream(f"/{name}")(iter([]), timeout=30, metadata=metadata)
    else:
        try:
            channel.unary_unary(f"/{name}")(b"", timeout=30, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return None
    try:
        next(call, None)
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()
    return None


def test_a_call_without_a_key_is_refused_before_its_message_is_taken(tmp_path: Path) -> None:
    with (
        grpc_front_end(api_key_file=api_keys(tmp_path)) as front,
        grpc.insecure_channel(front.url) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        channel.unary_unary(f"/{SERVICE}/ModelInfer")(bytes(64 << 20), timeout=30)  # more than is ever taken
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_two_keys_are_none_whichever_comes_first(guard: Guard, tmp_path: Path) -> None:
    """A proxy in front may have looked at the other one."""
    with (
        grpc_front_end(api_key_file=api_keys(tmp_path)) as front,
        grpc.insecure_channel(front.url) as channel,
    ):
        for keys in ((ALICE, "unknown"), ("unknown", ALICE), (ALICE, BOB), ("", ALICE), (ALICE, ALICE)):
            metadata = [("x-api-key", key) for key in keys]
            code = _code(channel, f"{SERVICE}/ServerMetadata", metadata)
            assert code is grpc.StatusCode.UNAUTHENTICATED, keys
    with front_end(guard=guard) as front, front.connect() as client:
        for first, second in ((ALICE, "unknown"), ("unknown", ALICE), (ALICE, ALICE)):
            fields = f"X-Api-Key: {first}\r\nX-Api-Key: {second}\r\n".encode()
            assert client.get("/v2", fields).status == 401


def test_a_key_for_some_models(guard: Guard, tmp_path: Path) -> None:
    with front_end(guard=guard) as front, front.connect() as client:
        assert infer(client, "image", image_body(), bearer(BOB)).status == 200
        assert front.door.calls[-1].sender.priority == 3
        assert infer(client, "pair", image_body(), bearer(BOB)).status == 403
        assert client.get("/v2/models/pair", bearer(BOB)).status == 403
        assert client.get("/v2/models/image", bearer(BOB)).status == 200
    with (
        grpc_front_end(api_key_file=api_keys(tmp_path)) as front,
        grpc.insecure_channel(front.url) as channel,
    ):
        ask = channel.unary_unary(f"/{SERVICE}/ModelMetadata")
        metadata = (("x-api-key", BOB),)
        ask(pb.ModelMetadataRequest(name="image").SerializeToString(), metadata=metadata, timeout=30)
        message = pb.ModelMetadataRequest(name="pair").SerializeToString()
        with pytest.raises(grpc.RpcError) as raised:
            ask(message, metadata=metadata, timeout=30)
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        message = pb.ModelInferRequest(model_name="pair").SerializeToString()
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(f"/{SERVICE}/ModelInfer")(message, metadata=metadata, timeout=30)
        assert raised.value.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)


def test_a_task_is_done_by_a_model_that_the_key_is_for(tmp_path: Path) -> None:
    keys = f"alice {ALICE}\nbob {BOB} models=second\ncarol {ROOT} models=other\n"
    guard = Guard(api_key_file=write(tmp_path / "keys", keys))
    with front_end(detector("first"), detector("second"), guard=guard) as front, front.connect() as client:
        for key, model in ((ALICE, "first"), (BOB, "second")):
            answer = client.post("/detect", picture(), bearer(key))
            assert (answer.status, orjson.loads(answer.body)["model"]) == (200, model)
        assert client.post("/detect", picture(), bearer(ROOT)).status == 403
        assert client.post("/models/first/predict", picture(), bearer(BOB)).status == 403


def test_a_key_that_was_withdrawn_is_refused_on_the_same_connection(guard: Guard, tmp_path: Path) -> None:
    with front_end(guard=guard) as front, front.connect() as client:
        for _ in range(2):
            assert infer(client, "image", image_body(), bearer(ALICE)).status == 200
        write(tmp_path / "api", f"carol {BOB}\n")
        front.run(guard.reload)
        assert infer(client, "image", image_body(), bearer(ALICE)).status == 401
        assert infer(client, "image", image_body(), bearer(BOB)).status == 200


def test_a_head_that_is_known_is_not_checked_again(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []
    check = Guard.check

    def counted(self: Guard, *given: object, **named: object) -> object:
        checks.append(given)
        return check(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Guard, "check", counted)
    for chosen, field in ((guard, bearer(ALICE)), (Guard(), b"")):
        checks.clear()
        with front_end(guard=chosen) as front, front.connect() as client:
            for _ in range(5):
                assert infer(client, "image", image_body(), field).status == 200
        assert len(checks) == 1


@pytest.mark.parametrize(
    "field", [b"Sec-Fetch-Site: cross-site\r\n", b"Origin: http://evil.example\r\n", b"Origin: null\r\n"]
)
def test_a_page_of_another_site_changes_nothing(field: bytes) -> None:
    changing = [line for line in HTTP if RULE_OF[line].changes]
    assert len(changing) >= 8
    with front_end(guard=Guard()) as front, front.connect() as client:
        for method, pattern in changing:
            response = client.ask(method, path_of(pattern), field)
            assert (response.status, error_of(response)["reason"]) == (403, "forbidden"), pattern
            own = b"Origin: http://localhost\r\nSec-Fetch-Site: same-origin\r\n"
            assert client.ask(method, path_of(pattern), own).status != 403, pattern
            assert client.ask(method, path_of(pattern), b"").status != 403, pattern


def test_a_foreign_name_gets_no_answer_from_any_route() -> None:
    with front_end(guard=Guard(Names(loopback=True))) as front, front.connect() as client:
        for method, pattern in (*HTTP, ("GET", "/nothing/there")):
            client.send(
                b"%b %b HTTP/1.1\r\nHost: evil.example\r\nContent-Length: 0\r\n\r\n"
                % (method.encode(), path_of(pattern).encode())
            )
            response = client.response()
            assert (response.status, error_of(response)["reason"]) == (403, "forbidden"), pattern


def test_who_changed_what_is_in_the_log(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "carpool")
    with front_end(guard=guard) as front, front.connect() as client:
        client.ask("POST", "/v2/repository/models/image/load", bearer(ROOT))
        client.ask("POST", "/v2/repository/models/image/load", bearer(ALICE))
    assert "control what=" in caplog.text
    assert "model=image by=root" in caplog.text
    assert "refused what=" in caplog.text
    assert not any(key in caplog.text for key in (ALICE, BOB, ROOT))
