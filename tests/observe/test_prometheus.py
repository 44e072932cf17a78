"""The metrics page, read back with Prometheus' own parser."""

from __future__ import annotations

import math
import re

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from absent import needs
from carpool.observe import columns
from carpool.observe.counters import Row, Table, table_bytes
from carpool.observe.prometheus import FAMILIES, Exposition, Scope, chosen

MODEL = {"model": "detector", "version": "1"}


def parsed(table: Table, **cameras: dict[str, str]) -> dict[str, Metric]:
    index = [(row.model, row.version, "ready") for row in table.models()]
    page = Exposition(table, "1.2.3", states=lambda *_: cameras, index=lambda: index).page().decode()
    assert page.endswith("\n")
    return {metric.name: metric for metric in text_string_to_metric_families(page)}


def value(metrics: dict[str, Metric], series: str, **labels: str) -> float:
    plain = series.removesuffix("_total")  # the parser adds the ending to every counter
    found = [
        sample.value
        for metric in metrics.values()
        for sample in metric.samples
        if sample.name.removesuffix("_total") == plain and sample.labels == labels
    ]
    assert len(found) == 1, (series, labels, found)
    return float(found[0])


@pytest.fixture
def table() -> Table:
    return Table(bytearray(table_bytes(2)))


@pytest.fixture
def row(table: Table) -> Row:
    return table.block(0).row(table.directory.assign("detector", "1"))


@needs("drift", "registry")
def test_every_family_is_there_with_its_kind(table: Table, row: Row) -> None:
    for what in columns.by_word("drift", "psi"):
        row.set(columns.by_word("drift", "psi")[what], 1.25)
        row.set(columns.by_word("drift", "alarm")[what], 2.0)
    row.set(columns.CAPACITY, 200.0)
    row.set(columns.LOAD, 2.5)
    step = table.block(1).row(table.directory.assign("street", "1\0find"))
    step.observe(columns.FAN_OUT, 0.0)
    server = table.block(1).server
    server.set(columns.single("registry", "up"), 2.0)
    server.set(columns.single("registry", "heard"), 1.0)
    metrics = parsed(table, detector={"door": "black"})
    # Versions that are rolled out, and GPUs, are not here: test_gpus.py has those.
    families = [
        family for family in FAMILIES if family.scope is not Scope.GPU and family.scope is not Scope.SOME
    ]
    for family in families:
        metric = metrics[family.name.removesuffix("_total")]
        assert metric.type == family.kind
        assert metric.documentation == family.help
        assert metric.samples
    assert len(metrics) == len(families)


def test_load_is_there_where_the_capacity_is_known(table: Table, row: Row) -> None:
    known = {"carpool_load", "carpool_capacity_images_per_second"}
    row.add(columns.OFFERED, 12)
    metrics = parsed(table)
    assert not known & metrics.keys()
    assert metrics["carpool_offered_images"].samples[0].value == 12.0
    row.set(columns.CAPACITY, 200.0)
    row.set(columns.LOAD, 1.0)
    assert parsed(table)["carpool_load"].samples[0].value == 0.0, "idle"
    row.set(columns.LOAD, 4.0)
    assert parsed(table)["carpool_load"].samples[0].value == 3.0, "and not capped"


@needs("drift")
def test_drift_is_there_where_it_is_known(table: Table, row: Row) -> None:
    assert not any(name.startswith("carpool_drift") for name in parsed(table))
    row.set(columns.by_word("drift", "psi")["size"], 1.0)
    row.set(columns.by_word("drift", "psi")["score"], 1.25)
    metrics = parsed(table, detector={'a "door"': "frozen"})
    assert value(metrics, "carpool_drift_psi", **MODEL, what="size") == 0.0
    assert value(metrics, "carpool_drift_psi", **MODEL, what="score") == 0.25
    assert len(metrics["carpool_drift_psi"].samples) == 2
    camera = {"model": "detector", "source": 'a "door"'}
    states = {
        state: value(metrics, "carpool_camera_state", **camera, state=state)
        for state in columns.by_word("drift", "cameras")
    }
    assert states == {"black": 0, "frozen": 1, "blurred": 0, "changed": 0}


def test_the_state_of_every_model_is_told(table: Table) -> None:
    index = [("detector", "1", "ready"), ("broken", "", "failed")]
    page = Exposition(table, version="1", index=lambda: index).page().decode()
    told = set(re.findall(r'carpool_model_state{model="(.*)",version="(.*)",state="(.*)"} 1', page))
    assert told == {("detector", "1", "ready"), ("broken", "", "failed")}
    assert len(re.findall(r"^carpool_model_state{", page, re.MULTILINE)) == 2 * len(columns.MODEL_STATES)


def test_the_page_without_models_has_no_empty_families(table: Table) -> None:
    assert parsed(table).keys() == {
        family.name.removesuffix("_total")
        for family in FAMILIES
        if family.scope not in (Scope.MODEL, Scope.SOME, Scope.STEP, Scope.GPU, Scope.SOURCE, Scope.INDEX)
        and not family.name.startswith("carpool_registry")
    }


def test_triton_s_counters_follow_from_one_observation_and_one_batch(table: Table, row: Row) -> None:
    row.observe(columns.REQUEST_SECONDS, 0.030)
    row.observe(columns.REQUEST_SECONDS, 0.040)
    row.add_batch(5, [0.001, 0.002], input_s=0.0001, infer_s=0.02, output_s=0.0002, ended_ms=1.0)
    metrics = parsed(table)
    expected = {
        "nv_inference_request_success": 2,
        "nv_inference_count": 5,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 70000,
        "nv_inference_queue_duration_us": 3000,
        "nv_inference_compute_input_duration_us": 200,
        "nv_inference_compute_infer_duration_us": 40000,
        "nv_inference_compute_output_duration_us": 400,
        "carpool_batch_size_sum": 5,
        "carpool_batch_size_count": 1,
        "carpool_infer_duration_seconds_count": 2,
    }
    assert {name: value(metrics, name, **MODEL) for name in expected} == expected


def test_histograms_are_cumulative_over_all_processes(table: Table, row: Row) -> None:
    slot = table.directory.assign("detector", "1")
    row.observe(columns.REQUEST_SECONDS, 0.0004)
    table.block(1).row(slot).observe(columns.REQUEST_SECONDS, 0.04)
    table.block(1).row(slot).observe(columns.REQUEST_SECONDS, 60.0)
    metrics = parsed(table)
    name = "carpool_request_duration_seconds"
    buckets = {
        sample.labels["le"]: sample.value
        for sample in metrics[name].samples
        if sample.name == f"{name}_bucket"
    }
    assert [buckets[le] for le in ("0.0005", "0.03", "0.05", "10.0", "+Inf")] == [1, 1, 2, 2, 3]
    assert list(buckets.values()) == sorted(buckets.values())
    assert value(metrics, f"{name}_count", **MODEL) == 3
    assert math.isclose(value(metrics, f"{name}_sum", **MODEL), 60.0404)


def test_every_reason_is_there_from_the_start(table: Table, row: Row) -> None:
    row.add(columns.SHED["given-up"], 3)
    metrics = parsed(table)
    for word in columns.FAILURE_WORDS:
        assert value(metrics, "nv_inference_request_failure", **MODEL, reason=word) == 0
    for word in columns.SHED_WORDS:
        expected = 3 if word == "given-up" else 0
        assert value(metrics, "carpool_shed_total", **MODEL, reason=word) == expected


def test_the_server_s_own(table: Table) -> None:
    engine, supervisor = table.block(0).server, table.block(1).server
    engine.set(columns.UP, 1)
    engine.set(columns.CONNECTIONS, 12)
    engine.add(columns.BYTES_RECEIVED, 2.0**52 + 1)
    supervisor.add(columns.RESTARTS["http"])
    metrics = parsed(table)
    assert value(metrics, "carpool_up") == 1
    assert value(metrics, "carpool_connections") == 12
    assert value(metrics, "carpool_bytes_received_total") == 2**52 + 1
    assert value(metrics, "carpool_process_restarts_total", process="http") == 1
    assert value(metrics, "carpool_process_restarts_total", process="engine") == 0
    [build] = metrics["carpool_build_info"].samples
    assert build.labels["version"] == "1.2.3"


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\\nb", "детектор", "{}", ""])
def test_any_name_survives_the_page(table: Table, name: str) -> None:
    table.directory.assign(name, "1")
    assert value(parsed(table), "nv_inference_count", model=name, version="1") == 0


def test_an_unloaded_model_leaves_the_page(table: Table, row: Row) -> None:
    table.directory.retire("detector", "1")
    assert "nv_inference_count" not in parsed(table)


SWITCHES = {"counter_latencies": True, "histogram_latencies": False}


def test_tritons_histogram_is_read_from_ours(table: Table) -> None:
    slot = table.directory.assign("m", "1")
    row = table.block(0).row(slot)
    for seconds in (0.1, 0.4, 2.0, 3.0, 60.0):
        row.observe(columns.REQUEST_SECONDS, seconds)
    families = chosen({**SWITCHES, "histogram_latencies": True})
    lines = Exposition(table, "1.2.3", families=families).page().decode().splitlines()
    name = "nv_inference_first_response_histogram_ms"
    assert [line for line in lines if line.startswith(name)] == [
        f'{name}_bucket{{model="m",version="1",le="100"}} 1',
        f'{name}_bucket{{model="m",version="1",le="500"}} 2',
        f'{name}_bucket{{model="m",version="1",le="2000"}} 3',
        f'{name}_bucket{{model="m",version="1",le="5000"}} 4',
        f'{name}_bucket{{model="m",version="1",le="+Inf"}} 5',
        f'{name}_sum{{model="m",version="1"}} 65500',
        f'{name}_count{{model="m",version="1"}} 5',
    ]
    assert name not in Exposition(table, "1.2.3").page().decode()


def test_the_sums_of_times_can_be_switched_off() -> None:
    kept = {family.name for family in chosen({**SWITCHES, "counter_latencies": False})}
    gone = {family.name for family in FAMILIES} - kept
    assert gone == {
        f"nv_inference_{phase}_duration_us"
        for phase in ("request", "queue", "compute_input", "compute_infer", "compute_output")
    }
    assert chosen(SWITCHES) == FAMILIES
