"""Spans and exemplars of real processes: both protocols, a batch of many, and a collector that dies or hangs.

One server tells all of it, so this is one test in several acts.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as plain_families
from tritonclient.grpc import InferInput

from engine import repositories
from frontend.http.harness import Client
from frontend.span_collector import Collector, collecting, told
from live.server import PATIENCE_S, Live, infer_path, json_request
from live.test_grpc import client, serving
from waiting import until

OVER_HTTP, OVER_GRPC = "POST /v2/models/{model}/infer", "inference.GRPCInferenceService/ModelInfer"
# Holds what is not 0 until the file `go` is there, and says so.
HELD = """
import os, time
from pathlib import Path

GO = Path({go!r})

def predict(x):
    if x.any():
        GO.with_name("runs").touch()
    while x.any() and not GO.exists():
        time.sleep(0.002)
    return 2 * x
"""
OPENMETRICS = b"Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n"


def ask(server: Live, door: str, parent: str, value: float = 0.0) -> None:
    """One request on a connection of its own; `value` above 0: the model holds it."""
    if door == OVER_HTTP:
        with server.connect() as connected:
            extra = f"traceparent: {parent}\r\ntracestate: other=1\r\n".encode() if parent else b""
            response = connected.post(infer_path("model"), json_request([value, 0.0], [1, 2]), extra)
            assert response.status == 200, response
    else:
        tensor = InferInput("x", [1, 2], "FP32").set_data_from_numpy(np.array([[value, 0.0]], np.float32))
        headers = {"traceparent": parent, "tracestate": "other=1"} if parent else None
        with client(server) as connected:
            connected.infer("model", [tensor], headers=headers, client_timeout=PATIENCE_S)


def new_parent(flags: str = "01") -> tuple[str, str, str]:
    """The trace, the caller's span, and the two as they are sent."""
    trace, span = token_hex(16), token_hex(8)
    return trace, span, f"00-{trace}-{span}-{flags}"


def root_of(collector: Collector, trace: str) -> Any:
    """The span of the one request in this trace."""

    def roots() -> list[Any]:
        return [
            one for one in collector.spans if one.trace_id.hex() == trace and one.kind == one.SPAN_KIND_SERVER
        ]

    until(roots, f"the spans of {trace}")
    (root,) = roots()
    return root


def below(collector: Collector, parent: Any) -> dict[str, Any]:
    return {
        one.name: one
        for one in collector.spans
        if (one.trace_id, one.parent_span_id) == (parent.trace_id, parent.span_id)
    }


def check_parents_and_parts(server: Live, collector: Collector) -> None:
    for door in (OVER_HTTP, OVER_GRPC):
        trace, span, parent = new_parent()
        ask(server, door, parent)
        root = root_of(collector, trace)
        assert (root.name, root.parent_span_id.hex(), root.trace_state) == (door, span, "other=1")
        assert told(root)["carpool.model"] == "model"
        parts = below(collector, root)
        assert set(parts) == {"decode", "queue", "batch", "post"}, door
        assert set(below(collector, parts["batch"])) == {"infer"}
        for part in parts.values():
            assert root.start_time_unix_nano <= part.start_time_unix_nano <= part.end_time_unix_nano
            assert part.end_time_unix_nano <= root.end_time_unix_nano


def check_who_decides(server: Live, collector: Collector) -> None:
    """Nobody by chance, here. Spans go out in the order of the requests of one front end: a later one of each
    shows that an earlier one has none."""
    undecided, _, refused = new_parent("00")
    before = len(collector.spans)
    with server.connect() as connected:
        for parent in ("", refused, last := new_parent()[2]):
            extra = f"traceparent: {parent}\r\n".encode() if parent else b""
            body = json_request([0.0, 0.0], [1, 2])
            assert connected.post(infer_path("model"), body, extra).status == 200
    root_of(collector, last.split("-")[1])
    traces = {one.trace_id.hex() for one in collector.spans[before:]}
    assert undecided not in traces
    assert traces == {last.split("-")[1]}


@contextmanager
def held(server: Live, go: Path, parents: list[str]) -> Iterator[list[Future[None]]]:
    """One that the model holds, and the others waiting behind it."""
    with ThreadPoolExecutor(len(parents) + 1) as pool:
        try:
            asked = [pool.submit(ask, server, OVER_HTTP, "", 1.0)]
            until(go.with_name("runs").exists, "it runs")
            for number, parent in enumerate(parents):
                asked.append(pool.submit(ask, server, (OVER_HTTP, OVER_GRPC)[number % 2], parent, 1.0))
            server.until_metric(len(parents), "nv_inference_pending_request_count", model="model")
            yield asked
        finally:
            go.touch()


def check_a_batch(server: Live, collector: Collector, go: Path) -> None:
    parents = [new_parent() for _ in range(6)]
    with held(server, go, [sent for _, _, sent in parents]) as asked:
        go.touch()
        for future in asked:
            future.result(PATIENCE_S)
    riders = {root.span_id: root for root in (root_of(collector, trace) for trace, _, _ in parents)}
    linked: dict[tuple[bytes, bytes], set[bytes]] = {}  # by the batch's span, as its riders tell
    for root in riders.values():
        (link,) = below(collector, root)["batch"].links
        linked.setdefault((link.trace_id, link.span_id), set()).add(root.span_id)
    batches = [one for one in collector.named("batch model") if (one.trace_id, one.span_id) in linked]
    for batch in batches:
        told_here = linked[batch.trace_id, batch.span_id]
        assert {link.span_id for link in batch.links} == told_here
        assert {link.trace_id for link in batch.links} == {riders[span].trace_id for span in told_here}
    assert len(batches) == len(linked), "each has an id of its own"
    assert len(linked) >= 2, "one of each front end"
    assert len({batch.trace_id for batch in batches}) == 1, "which all tell of one batch"
    assert {told(batch)["carpool.batch.images"] for batch in batches} == {6}


def check_metrics(server: Live, collector: Collector) -> None:
    with Client("127.0.0.1", server.metrics_port) as connected:
        usual, asked = connected.get("/metrics"), connected.get("/metrics", OPENMETRICS)
    assert usual.fields["content-type"].startswith("text/plain")
    assert b" # {" not in usual.body
    assert list(plain_families(usual.body.decode()))
    assert asked.fields["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(asked.body.decode())}
    traces = {one.trace_id.hex() for one in collector.spans}
    for name in (
        "request_duration_seconds",
        "queue_duration_seconds",
        "infer_duration_seconds",
        "batch_size",
    ):
        samples = families[f"carpool_{name}"].samples
        shown = {one.exemplar.labels["trace_id"] for one in samples if one.exemplar is not None}
        assert shown, name
        assert shown <= traces, name


def check_a_hung_one(server: Live, collector: Collector) -> None:
    collector.may_answer.clear()
    before = len(collector.requests)
    for door in (OVER_HTTP, OVER_GRPC):
        ask(server, door, new_parent()[2])
    until(lambda: len(collector.requests) >= before + 2, "both wait for the collector")
    for door in (OVER_HTTP, OVER_GRPC) * 10:
        ask(server, door, new_parent()[2])
    collector.may_answer.set()


def check_a_dead_one(server: Live) -> None:
    for door in (OVER_HTTP, OVER_GRPC) * 10:
        ask(server, door, new_parent()[2])
    until(lambda: server.events("spans-not-exported"), "somebody is told")
    for door in (OVER_HTTP, OVER_GRPC) * 10:
        ask(server, door, new_parent()[2])
    assert server.metric("carpool_spans_total", result="exported") > 0


def test_spans_of_a_live_server(tmp_path: Path) -> None:
    go = tmp_path / "go"
    model = repositories.python(tmp_path / "models", HELD.format(go=str(go)))
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        settings = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url.removesuffix("/v1/traces"),
            "OTEL_EXPORTER_OTLP_TIMEOUT": "600000",  # whoever waits for it is found out
            "OTEL_BSP_SCHEDULE_DELAY": "20",
            "CARPOOL_TRACE_SAMPLE": "0",
        }
        server = serving(model, folder=tmp_path, frontends=2, grpc=1, environment=settings)
        with server as running:
            check_parents_and_parts(running, collector)
            check_who_decides(running, collector)
            check_a_batch(running, collector, go)
            check_metrics(running, collector)
            check_a_hung_one(running, collector)
            stack.close()
            check_a_dead_one(running)
            running.signal(signal.SIGTERM)
            assert running.wait() == 0
