"""Spans as a collector gets them, over both doors; and what becomes of them where it is dead, slow or mad."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2_grpc

from carpool.config.server import ServerSettings
from carpool.errors import ConfigError, Refused
from carpool.extensions.tracing.front import Tracer
from carpool.extensions.tracing.request_spans import RequestSpans, SpanMessages, _Context, _Ended
from carpool.extensions.tracing.settings import OtelSettings, read_otel
from carpool.extensions.tracing.span_export import SpanExporter
from carpool.frontend.calls.front_part import StartedWith
from carpool.frontend.calls.trace_context import Parent, RequestOrigin, read_parent, read_state
from carpool.frontend.front_parts import ServerOfParts
from carpool.link.catalog import PublishedModel
from carpool.observe.columns import REQUEST_SECONDS, by_word
from carpool.observe.counters import Table, table_bytes
from carpool.observe.prometheus import Exposition
from carpool.types import PartTiming, StepTiming, Timing
from frontend.grpc.front_end import front_end as grpc_front_end
from frontend.grpc.front_end import image_request
from frontend.http.front_end import IMAGE, front_end
from frontend.span_collector import collecting, told
from waiting import until

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_for(table: Table, url: str, **more: Any) -> RequestSpans:
    settings = OtelSettings(url, **{"sample": 1.0, "delay_s": 0.01, **more})
    return RequestSpans(settings, "test", table.block(0).server, table.block_exemplars(0))


def export(service: Any, spans: RequestSpans) -> None:
    server = ServerOfParts(service, service.server_row, StartedWith())
    service.parts.add("tracing", Tracer(server, spans).part)
    service._follow(service.engine.catalog)


@contextlib.contextmanager
def traced(url: str, *models: Any, **more: Any) -> Iterator[Any]:
    with front_end(*models) as front:
        table = front.app._service.table
        spans = spans_for(table, url, **more)
        front.run(lambda: export(front.app._service, spans))
        yield front


def ask(front: Any, model: str = "image", **fields: str) -> int:
    with front.connect() as client:
        listed = {"Inference-Header-Content-Length": "0", **fields}.items()
        extra = "".join(f"{name}: {value}\r\n" for name, value in listed).encode()
        return int(client.post(f"/v2/models/{model}/infer", IMAGE.tobytes(), extra).status)


def test_a_request_over_http_and_its_parts() -> None:
    parent = f"00-{TRACE}-{SPAN}-01"
    with collecting() as collector, traced(collector.url, sample=0.0) as front:
        assert ask(front, traceparent=parent, tracestate="a=1") == 200
        until(lambda: bool(collector.named("POST /v2/models/{model}/infer")))
    (root,) = collector.named("POST /v2/models/{model}/infer")
    assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, SPAN, "a=1")
    about = told(root)
    assert (about["carpool.model"], about["http.response.status_code"]) == ("image", 200)
    assert about["url.path"] == "/v2/models/image/infer"
    parts = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert parts
    assert all((span.trace_id.hex(), span.trace_state) == (TRACE, "a=1") for span in parts)
    assert all(root.start_time_unix_nano <= span.start_time_unix_nano for span in parts)
    assert all(span.end_time_unix_nano <= root.end_time_unix_nano for span in parts)
    resource = {one.key for one in collector.requests[0].resource_spans[0].resource.attributes}
    assert {"service.name", "service.version", "service.instance.id"} <= resource


@pytest.mark.parametrize(
    ("field", "sample", "kept"),
    [
        (f"00-{TRACE}-{SPAN}-00", 1.0, False),
        (f"00-{TRACE}-{SPAN}-01", 0.0, True),
        (f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01", 0.0, False),
        ("", 0.0, False),
        ("", 1.0, True),
    ],
)
def test_callers_decide_and_else_chance(field: str, sample: float, kept: bool) -> None:
    with collecting() as collector, traced(collector.url, sample=sample) as front:
        assert ask(front, **({"traceparent": field} if field else {})) == 200
        front.run(front.app._service.parts.close)
    assert bool(collector.spans) is kept


def test_a_request_over_grpc() -> None:
    with collecting() as collector, grpc_front_end() as front:
        spans = spans_for(front.table, collector.url, sample=0.0)
        front.run(lambda: export(front.server.service, spans))
        with grpc.insecure_channel(front.url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            metadata = (("traceparent", f"00-{TRACE}-{SPAN}-01"),)
            stub.ModelInfer(image_request(), metadata=metadata)
            with pytest.raises(grpc.RpcError):
                stub.ModelInfer(image_request("no-such"), metadata=metadata)
        until(lambda: len(collector.named("inference.GRPCInferenceService/ModelInfer")) == 2)
    good, bad = collector.named("inference.GRPCInferenceService/ModelInfer")
    assert good.trace_id.hex() == bad.trace_id.hex() == TRACE
    assert told(good)["rpc.grpc.status_code"] == 0
    assert told(bad)["error.type"] == "unknown-model"
    assert not bad.status.code, "a mistake of the client's"


def test_refusals_and_faults_are_the_status() -> None:
    with collecting() as collector, traced(collector.url) as front:
        front.run(lambda: setattr(front.door, "refuses", lambda *_, **__: Refused("too much")))
        ask(front)
        ask(front, "no-such")
        until(lambda: len(collector.named("POST /v2/models/{model}/infer")) == 2)
    by_reason = {told(span).get("error.type"): span for span in collector.spans}
    assert set(by_reason) == {"overload", "unknown-model"}
    refused, unknown = by_reason["overload"], by_reason["unknown-model"]
    assert (refused.status.code, refused.status.message) == (2, "overload: too much")
    assert told(refused)["http.response.status_code"] == 429
    assert not unknown.status.code, "a mistake of the client's"


def record(number: int, trace: bytes, **more: Any) -> _Ended:
    context = _Context(trace, os.urandom(8), b"", "")
    entry: Any = type("Entry", (), {"name": "m", "version": "1", "published": PublishedModel()})()
    timing = more.pop("timing", Timing(0.002, 0.001, 0.004, 0.001, 3, number=number))
    return _Ended(
        context, RequestOrigin("POST /x", {}), entry, 10.0, 10.02, 10.001, 10.015, 1, timing=timing, **more
    )


def encoded(records: list[_Ended]) -> list[Any]:
    body, count = SpanMessages(OtelSettings("http://x"), "1").encode(records)
    spans = list(ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans)
    assert len(spans) == count
    return spans


def test_a_batch_links_to_its_riders_and_they_to_it() -> None:
    riders = [record(7, bytes([n]) * 16) for n in (1, 2)]
    spans = encoded([*riders, record(8, b"\x03" * 16)])
    seven, eight = [span for span in spans if span.name == "batch m"]
    links = {(link.trace_id, link.span_id) for link in seven.links}
    assert links == {(one.context.trace, one.context.span) for one in riders}
    assert len(eight.links) == 1
    back = [span for span in spans if span.name == "batch" and span.trace_id in (b"\x01" * 16, b"\x02" * 16)]
    assert [(one.links[0].trace_id, one.links[0].span_id) for one in back] == [
        (seven.trace_id, seven.span_id)
    ] * 2
    names = [span.name for span in spans if span.trace_id == b"\x01" * 16]
    assert names == ["POST /x", "decode", "queue", "batch", "infer", "post"]


def test_two_messages_tell_of_one_batch_in_one_trace() -> None:
    (one,) = [span for span in encoded([record(7, b"\x01" * 16)]) if span.name == "batch m"]
    (other,) = [span for span in encoded([record(7, b"\x02" * 16)]) if span.name == "batch m"]
    assert one.trace_id == other.trace_id
    assert one.span_id != other.span_id


def test_who_had_a_batch_alone_needs_no_other_span() -> None:
    alone = record(7, b"\x01" * 16, timing=Timing(0.0, 0.0, 0.004, 0.0, 1, number=7))
    assert not [span for span in encoded([alone]) if span.name == "batch m"]


def test_steps_are_laid_end_to_end_within_the_request() -> None:
    steps = (
        ("detect", PartTiming(0.001, 0.0, 0.004, 0.0, 2, 1, 0.0, number=5)),
        ("classify", Timing(0.001, 0.0, 0.003, 0.0, 4, number=6)),
    )
    timing = StepTiming(0.002, 0.0, 0.007, 0.0, 4, steps)
    spans = encoded([record(0, b"\x01" * 16, timing=timing)])
    first, second = [span for span in spans if span.name.startswith("step ")]
    assert first.end_time_unix_nano <= second.start_time_unix_nano + 1
    assert {span.name for span in spans} >= {"batch detect", "batch classify"}


@given(st.binary(max_size=80))
def test_whatever_is_no_parent_is_ignored(field: bytes) -> None:
    assert read_parent(field) is None
    assert isinstance(read_state(field), str)


@pytest.mark.parametrize(
    ("field", "known"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-more", True),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE}-{SPAN}-1", False),
        (f"00-{TRACE}-{SPAN}-01\n", False),
    ],
)
def test_parents_as_the_standard_has_them(field: str, known: bool) -> None:
    found = read_parent(field.encode())
    assert found == (Parent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), True) if known else None)


def exporter(url: str, table: Table, encode: Callable[[Any], tuple[bytes, int]], **more: Any) -> Any:
    settings = OtelSettings(url, **{"delay_s": 0.01, "most_waiting": 4, "most_at_once": 2, **more})
    return SpanExporter(settings, table.block(0).server, encode, 1)


def test_a_dead_collector_costs_spans_only() -> None:
    table = Table(bytearray(table_bytes(1)))
    exporting = exporter("http://127.0.0.1:9/v1/traces", table, lambda records: (b"", len(records)))
    for number in range(100):
        exporting.put(number)
    until(lambda: exporting._fails)
    exporting.close()  # which waits for nobody
    exporting._thread.join(30)
    cells = table.server()
    assert cells[by_word("tracing", "spans")["dropped"]] >= 90
    assert cells[by_word("tracing", "spans")["exported"]] == 0


@pytest.mark.parametrize("answer", [b"", b"\xff" * 100_000])
@pytest.mark.parametrize("status", [200, 400, 503])
def test_a_collector_that_talks_nonsense(status: int, answer: bytes) -> None:
    table = Table(bytearray(table_bytes(1)))
    with collecting(status, answer) as collector:
        exporting = exporter(collector.url, table, lambda records: (b"", len(records)))
        exporting.put(1)
        until(lambda: bool(collector.requests))
        exporting.close()
        exporting._thread.join(30)
    counted = table.server()[by_word("tracing", "spans")["exported" if status == 200 else "failed"]]
    assert counted == 1


class Clock:
    """In the place of the event that a stopping exporter waits for, too: waiting takes no time."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(("takes", "most"), [(0.0, 5.0), (10.0, 10.0)])
def test_lost_spans_are_counted_within_seconds(
    monkeypatch: pytest.MonkeyPatch, takes: float, most: float
) -> None:
    """Whether the collector refuses at once or never answers, and with those that came meanwhile."""
    table, clock = Table(bytearray(table_bytes(1))), Clock()
    exporting = exporter("http://x/", table, lambda records: (b"", len(records)), delay_s=3600.0)
    counted: list[tuple[float, float]] = []

    def send(_body: bytes) -> int:
        clock.now += takes
        exporting.put(2)
        raise TimeoutError("nobody there")

    def count(_column: object, spans: int) -> None:
        counted.append((clock.now, spans))

    exporting._row = type("Row", (), {"add": staticmethod(count)})()
    exporting._send, exporting._most_at_once, exporting._most_waiting = send, 1000, 1000
    alive, exporting._closing = exporting._closing, clock
    monkeypatch.setattr("carpool.extensions.tracing.span_export.monotonic", clock)
    exporting._export([1])
    tries = 3 if most < 10.0 else 1
    assert counted == [(most, 1), (most, tries)]
    before = clock.now
    exporting._export([1])  # it is known not to answer: once is enough
    assert counted[2:] == [(before + takes, 1), (before + takes, 1)]
    exporting._closing = alive
    exporting.close()


def test_a_slow_collector_holds_up_nobody() -> None:
    table = Table(bytearray(table_bytes(1)))
    asked, held = threading.Event(), threading.Event()

    def encode(records: Any) -> tuple[bytes, int]:
        asked.set()
        held.wait(30)
        return b"", len(records)

    exporting = exporter("http://127.0.0.1:9/", table, encode)
    exporting.put(0)
    assert asked.wait(30)
    for number in range(50):
        exporting.put(number)
    exporting.close()
    assert exporting._thread.is_alive(), "it still waits, and nobody for it"
    held.set()
    exporting._thread.join(30)
    assert table.server()[by_word("tracing", "spans")["dropped"]] == 46


def test_exemplars_are_read_by_the_official_parser() -> None:
    with collecting() as collector, traced(collector.url) as front:
        assert ask(front) == 200
        table = front.app._service.table
        until(lambda: bool(table.exemplars()))
        page = Exposition(table, "test").page(openmetrics=True).decode()
        plain = Exposition(table, "test").page().decode()
    families = {family.name: family for family in text_string_to_metric_families(page)}
    samples = families["carpool_request_duration_seconds"].samples
    (shown,) = [one.exemplar for one in samples if one.exemplar is not None]
    assert len(shown.labels["trace_id"]) == 32
    assert families["nv_inference_count"].type == "unknown"
    assert families["carpool_shed"].type == "counter"
    assert " # {" not in plain
    names = {line.partition("{")[0].partition(" ")[0] for line in plain.splitlines() if line[0] != "#"}
    again = {line.partition("{")[0].partition(" ")[0] for line in page.splitlines() if line[0] != "#"}
    assert names == again, "dashboards know them by these"


def test_an_exemplar_that_is_being_written_is_left_out() -> None:
    buffer = bytearray(table_bytes(2))
    table = Table(buffer)
    table.block_exemplars(1).note((3, 1), b"t" * 16, b"s" * 8, time.time(), REQUEST_SECONDS, 0.01)
    ((row, _, _), found) = next(iter(table.exemplars().items()))
    assert (row, found.trace) == (3, b"t" * 16)
    at = buffer.index(b"t" * 16)
    buffer[at] = 0
    assert not table.exemplars()


def server(**given: Any) -> ServerSettings:
    return ServerSettings(**given)


def test_settings_come_from_the_standard_variables() -> None:
    assert read_otel(server(), {}) is None
    environ = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:4318/",
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=a%20b",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "10",
        "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "250",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.5",
        "OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=c",
    }
    found = read_otel(server(), environ)
    assert found is not None
    assert (found.url, found.timeout_s) == ("https://c:4318/v1/traces", 0.25)
    assert (found.headers, found.service) == ({"api-key": "a b"}, "c")
    assert (found.sample, found.follows) == (0.5, False)
    found = read_otel(server(otlp_endpoint="http://d", trace_sample=0.25), environ)
    assert found is not None
    assert (found.url, found.sample) == ("http://d/v1/traces", 0.25)
    assert read_otel(server(), {**environ, "OTEL_SDK_DISABLED": "true"}) is None
    assert read_otel(server(), {**environ, "OTEL_TRACES_EXPORTER": "none"}) is None


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://x"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://u:p@x"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x:99999"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a=b%0d%0ac"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "-1"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
        ("OTEL_SDK_DISABLED", "perhaps"),
    ],
)
def test_what_is_wrong_names_its_variable(variable: str, value: str) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", variable: value}
    with pytest.raises(ConfigError, match=variable):
        read_otel(server(), environ)


def test_off_loads_nothing_of_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys; import carpool.process.front_ends, carpool.frontend.http.app;"
        "assert not [one for one in sys.modules if one.startswith('opentelemetry')];"
        "assert 'carpool.extensions.tracing.span_export' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
