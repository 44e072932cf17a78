"""What one server of a fleet says of itself: what is asked of it, what it can answer, why it refuses, and
that it is about to go."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from carpool.client.questions import error_of
from carpool.core.job import Reason
from carpool.errors import DeadlineExceeded, Refused, Unavailable
from carpool.frontend.http.exchange import Fault, status_of
from carpool.link.senders import NOBODY, Sender, read_attempt
from carpool.types import RequestOptions
from engine import repositories
from frontend.http.harness import Client, Response
from frontend.whole_server import WholeServer, whole_server
from waiting import until

PATH = "/v2/models/fake/infer"
HOPELESS = b"X-Carpool-Deadline-Ms: 150\r\n"  # of 210; on its way it may stand still for as long
AGAIN = b"X-Envoy-Attempt-Count: 2\r\n"


def infer(client: Client, images: int = 1, extra: bytes = b"") -> Response:
    tensor = {"name": "x", "datatype": "FP32", "shape": [images, 4], "data": [0.0] * 4 * images}
    return client.post(PATH, orjson.dumps({"inputs": [tensor]}), extra)


def metric(client: Client, name: str) -> float | None:
    start = f'{name}{{model="fake",version="1"}} '
    for line in client.get("/metrics").body.decode().splitlines():
        if line.startswith(start):
            return float(line.removeprefix(start))
    return None


@contextmanager
def serving(folder: Path) -> Iterator[WholeServer]:
    """210 ms for one image; 8 in 280 ms, twice that within the SLO: 28.6/s."""
    model = repositories.fake(folder, curve="200+10", head="slo_ms = 30000")
    with whole_server(model, gate_status="503", load_report="asked") as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with serving(tmp_path_factory.mktemp("models")) as running:
        yield running


def test_what_is_offered_is_counted_once_in_a_fleet(tmp_path: Path) -> None:
    """By a server of its own: images are counted some time after they came."""
    with serving(tmp_path) as server, server.connect() as client:
        assert infer(client, 3).status == 200
        assert infer(client, 2, HOPELESS).status == 503, "refused, and asked for all the same"
        until(lambda: metric(client, "carpool_offered_images_total") == 5)
        assert metric(client, "carpool_capacity_images_per_second") == pytest.approx(8 / 0.28, rel=0.2)
        until(lambda: (metric(client, "carpool_load") or 0.0) > 0.0)
        assert infer(client, 3, AGAIN).status == 200
        assert infer(client, 2, AGAIN + HOPELESS).status == 503
        assert infer(client, 1).status == 200
        until(lambda: metric(client, "carpool_offered_images_total") == 6)


@pytest.mark.parametrize(
    ("field", "again"),
    [(None, False), (b"1", False), (b"2", True), (b"17", True), (b"", False), (b"-2", False), (b"x", False)],
)
def test_which_try_it_is(field: bytes | None, again: bool) -> None:
    assert read_attempt(field) is again
    assert read_attempt(b"9" * 5000) is True


@pytest.mark.parametrize(("metadata", "again"), [((), False), ("1", False), ("2", True), (b"3", True)])
def test_over_grpc_the_same_is_said_in_the_metadata(metadata: object, again: bool) -> None:
    from carpool.frontend.grpc.grpc_infer import read_metadata

    said = (("x-envoy-attempt-count", metadata),) if metadata else ()
    assert read_metadata(said).sender.again is again  # type: ignore[arg-type]


def test_the_word_travels_with_the_sender() -> None:
    sender = Sender("cam", latest=True, again=True)
    assert sender.with_options(RequestOptions(latest=True)).again
    assert not NOBODY.again


def test_a_refusal_at_the_gate_says_why_and_may_be_sent_elsewhere(server: WholeServer) -> None:
    with server.connect() as client:
        answer = infer(client, 1, HOPELESS)
        assert (answer.status, answer.fields["x-carpool-reason"]) == (503, "cannot-finish")
        told = error_of(answer.status, answer.fields, answer.body)
        assert isinstance(told, Refused), "clients see a refusal, whatever its status"
        missing = client.post("/v2/models/none/infer", b"{}")
        assert (missing.status, missing.fields["x-carpool-reason"]) == (404, "unknown-model")
        bad = client.post(PATH, b"{")
        assert (bad.status, bad.fields["x-carpool-reason"]) == (400, json.loads(bad.body)["reason"])


def test_only_the_gate_has_another_status() -> None:
    for reason in (Reason.CANNOT_FINISH, Reason.OVERLOAD, Reason.OVER_SHARE, Reason.QUEUE_FULL):
        refusal = Refused("no", reason=reason.value)
        assert (status_of(refusal), status_of(refusal, 503)) == (429, 503)
    assert status_of(Refused("late", reason=Reason.GIVEN_UP.value), 503) == 429
    assert status_of(DeadlineExceeded("late"), 503) == 504
    assert status_of(Unavailable("down"), 429) == 503


def test_what_the_server_answers_itself_has_a_reason_too() -> None:
    assert b"X-Carpool-Reason: too-many-connections\r\n" in Fault(503, "no", "too-many-connections").fields()


def test_the_load_is_told_to_those_who_ask(server: WholeServer) -> None:
    with server.connect() as client:
        until(
            lambda: b"endpoint-load" in _fields(infer(client, 1, b"Endpoint-Load-Metrics-Format: text\r\n"))
        )
        text = infer(client, 1, b"endpoint-load-metrics-format: text\r\n").fields["endpoint-load-metrics"]
        kind, _, numbers = text.partition(" ")
        told = dict(part.split("=") for part in numbers.split(","))
        assert kind == "TEXT"
        assert told.keys() == {"application_utilization", "rps_fractional"}
        as_json = infer(client, 1, b"endpoint-load-metrics-format: JSON\r\n").fields["endpoint-load-metrics"]
        assert json.loads(as_json.removeprefix("JSON ")).keys() == told.keys()
        refused = infer(client, 1, b"endpoint-load-metrics-format: text\r\n" + HOPELESS)
        assert "endpoint-load-metrics" in refused.fields, "with every answer"
        assert "endpoint-load-metrics" not in infer(client, 1).fields


def _fields(answer: Response) -> bytes:
    return " ".join(answer.fields).encode()


def test_a_lame_duck_is_not_ready_and_serves(tmp_path: Path) -> None:
    """Until its time is over, which the test decides: it takes the sleep's place."""
    model = repositories.fake(tmp_path, head="slo_ms = 60000")
    leaving, gone = threading.Event(), threading.Event()

    async def sleep(_seconds: float) -> None:
        leaving.set()
        await asyncio.to_thread(gone.wait, 60.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "carpool.process.lone_server.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": sleep})
        )
        with (
            whole_server(model, load_report="always", lame_duck_s=3600.0) as server,
            server.connect() as client,
        ):
            assert client.get("/v2/health/ready").status == 200
            server.loop.call_soon_threadsafe(server.stop.set)
            assert leaving.wait(60.0)
            until(lambda: client.get("/v2/health/ready").status == 400)
            assert client.get("/health").status == 503
            assert client.get("/v2/health/live").status == 200
            assert infer(client).status == 200
            with server.connect() as another:
                assert infer(another).status == 200, "new connections as well"
            gone.set()
