"""The metrics page: Prometheus' text format 0.0.4, written by hand.

prometheus-client shares numbers between processes through files of its own; ours already lie in one table,
and only the text is missing.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeAlias

from carpool.observe import columns
from carpool.observe.columns import Column, Histogram
from carpool.observe.counters import Cells, Table

# Fields of the first line of /proc/stat; those after steal are counted twice.
_IDLE, _IOWAIT, _STEAL = 3, 4, 7


class HostReading(NamedTuple):
    cpu_utilization: float  # 0 to 1
    memory_total_bytes: float
    memory_used_bytes: float


class Host:
    """The machine's processors and memory, read from /proc at the scrape.

    Utilization is a mean since the reading before, so one object belongs to one scraper.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._utilization = 0.0
        self._before = self._ticks()

    def read(self) -> HostReading:
        return HostReading(self._utilized(), *self._memory())

    def _utilized(self) -> float:
        busy, total = self._ticks()
        elapsed = total - self._before[1]
        if elapsed > 0:  # else the clock has not ticked since, and the last answer still holds
            share = (busy - self._before[0]) / elapsed
            self._utilization = min(max(share, 0.0), 1.0)  # the kernel's idle time can run backwards
            self._before = busy, total
        return self._utilization

    def _ticks(self) -> tuple[int, int]:
        with (self._proc / "stat").open(encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1 : 2 + _STEAL]]
        total = sum(fields)
        return total - fields[_IDLE] - fields[_IOWAIT], total

    def _memory(self) -> tuple[float, float]:
        sizes: dict[str, float] = {}
        for line in (self._proc / "meminfo").read_text("ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(rest.split()[0]) * 1024.0
        return sizes["MemTotal"], sizes["MemTotal"] - sizes["MemAvailable"]


# Every metric on the page: its name, its meaning and which cells it is read from.
#
# The `nv_` names mean what they mean in Triton, so that its dashboards and autoscaling recipes keep working.
# Most of them are the counts and sums of our own histograms: one observation in the hot path feeds both.


Value: TypeAlias = Callable[[Cells], float]


class Scope(enum.Enum):
    """Whose cells a family is read from, which also says what labels it has."""

    MODEL = "model"  # model, version
    SERVER = "server"
    HOST = "host"
    BUILD = "build"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric. `values` maps the labels beyond those of the scope, as text, to the number."""

    name: str
    kind: str
    help: str
    scope: Scope
    values: Mapping[str, Value]
    histogram: Histogram | None = None
    milliseconds: tuple[float, ...] = ()  # of a histogram: only these of its bounds, and not in seconds


def _cell(column: Column) -> Value:
    return lambda cells: cells[column]


def _microseconds(column: Column) -> Value:
    return lambda cells: round(cells[column] * 1e6, 0)


def _count(histogram: Histogram) -> Value:
    return lambda cells: sum(cells[histogram.buckets])


_HELP = """
nv_inference_request_success            Requests answered well; a request with a batch of images counts once.
nv_inference_request_failure            Requests that ended in an error, by cause.
nv_inference_count                      Images inferred; a request with a batch of n counts n times.
nv_inference_exec_count                 Executions of the model; nv_inference_count over this is the mean batch.
nv_inference_pending_request_count      Requests accepted and not yet executing.
nv_inference_request_duration_us        Time of all successful requests from end to end, in microseconds.
nv_inference_queue_duration_us          Time that requests waited for their batch, in microseconds.
nv_inference_compute_input_duration_us  Time to gather the inputs of a batch, counted for each of its requests, in microseconds.
nv_inference_compute_infer_duration_us  Time the model ran, counted for each request of the batch, in microseconds.
nv_inference_compute_output_duration_us Time to split the outputs of a batch, counted for each of its requests, in microseconds.
nv_model_load_duration_secs             Time it took to load the model, in seconds.
nv_cpu_utilization                      Share of the machine's processor time in use since the last scrape, 0 to 1.
nv_cpu_memory_total_bytes               Memory of the machine.
nv_cpu_memory_used_bytes                Memory of the machine that is not available.
nv_inference_first_response_histogram_ms Successful requests, from the last byte of the request to the first byte of the answer.
carpool_request_duration_seconds        Successful requests, from the last byte of the request to the first byte of the answer.
carpool_decode_duration_seconds         From picture bytes to a tensor.
carpool_queue_duration_seconds          Waiting for a batch.
carpool_infer_duration_seconds          Execution of the batch, once per request.
carpool_post_duration_seconds           From raw outputs to an answer.
carpool_batch_size                      Images per execution.
carpool_saturation                      Predicted wait of a new request over the wait its promise allows, 0 to 1.
carpool_speed_ratio                     Time that batches take over what was measured at loading; 0 for a model without a promise.
carpool_slo_seconds                     What the model promises; 0 for one without a promise.
carpool_out_of_memory_total             Batches that did not fit into their device's memory and were run in smaller ones.
carpool_shed_total                      Requests the scheduler chose not to run, by reason.
carpool_connections                     Open client connections.
carpool_bytes_received_total            Bytes read from clients.
carpool_bytes_sent_total                Bytes written to clients.
carpool_process_restarts_total          Processes that died and were started again, by kind.
carpool_up                              1 while the engine is ready, else 0.
carpool_build_info                      Always 1; the labels say what runs.
"""  # noqa: E501
_MEANINGS = dict(line.split(maxsplit=1) for line in _HELP.strip().splitlines())


def _one(name: str, kind: str, value: Value, scope: Scope = Scope.MODEL) -> Family:
    return Family(name, kind, _MEANINGS[name], scope, {"": value})


def _several(name: str, label: str, cells: Mapping[str, Column], scope: Scope = Scope.MODEL) -> Family:
    values = {f'{label}="{word}"': _cell(column) for word, column in cells.items()}
    return Family(name, "counter", _MEANINGS[name], scope, values)


def _observed(name: str, histogram: Histogram, milliseconds: tuple[float, ...] = ()) -> Family:
    return Family(name, "histogram", _MEANINGS[name], Scope.MODEL, {}, histogram, milliseconds)


def _host(name: str, field: str) -> Family:
    index = HostReading._fields.index(field)
    return _one(name, "gauge", lambda cells: cells[index], Scope.HOST)


_TRITON = (
    _one("nv_inference_request_success", "counter", _count(columns.REQUEST_SECONDS)),
    _several("nv_inference_request_failure", "reason", columns.FAILURES),
    _one("nv_inference_count", "counter", _cell(columns.BATCH_SIZE.sum)),
    _one("nv_inference_exec_count", "counter", _count(columns.BATCH_SIZE)),
    _one("nv_inference_pending_request_count", "gauge", _cell(columns.PENDING)),
    _one("nv_inference_request_duration_us", "counter", _microseconds(columns.REQUEST_SECONDS.sum)),
    _one("nv_inference_queue_duration_us", "counter", _microseconds(columns.QUEUE_SECONDS.sum)),
    _one("nv_inference_compute_input_duration_us", "counter", _microseconds(columns.INPUT_SECONDS)),
    _one("nv_inference_compute_infer_duration_us", "counter", _microseconds(columns.INFER_SECONDS.sum)),
    _one("nv_inference_compute_output_duration_us", "counter", _microseconds(columns.OUTPUT_SECONDS)),
    _one("nv_model_load_duration_secs", "gauge", _cell(columns.LOAD_SECONDS)),
    _host("nv_cpu_utilization", "cpu_utilization"),
    _host("nv_cpu_memory_total_bytes", "memory_total_bytes"),
    _host("nv_cpu_memory_used_bytes", "memory_used_bytes"),
)

_OWN = (
    _observed("carpool_request_duration_seconds", columns.REQUEST_SECONDS),
    _observed("carpool_decode_duration_seconds", columns.DECODE_SECONDS),
    _observed("carpool_queue_duration_seconds", columns.QUEUE_SECONDS),
    _observed("carpool_infer_duration_seconds", columns.INFER_SECONDS),
    _observed("carpool_post_duration_seconds", columns.POST_SECONDS),
    _observed("carpool_batch_size", columns.BATCH_SIZE),
    _one("carpool_saturation", "gauge", _cell(columns.SATURATION)),
    _one("carpool_speed_ratio", "gauge", _cell(columns.SPEED_RATIO)),
    _one("carpool_slo_seconds", "gauge", _cell(columns.SLO_SECONDS)),
    _one("carpool_out_of_memory_total", "counter", _cell(columns.OUT_OF_MEMORY)),
    _several("carpool_shed_total", "reason", columns.SHED),
    _one("carpool_connections", "gauge", _cell(columns.CONNECTIONS), Scope.SERVER),
    _one("carpool_bytes_received_total", "counter", _cell(columns.BYTES_RECEIVED), Scope.SERVER),
    _one("carpool_bytes_sent_total", "counter", _cell(columns.BYTES_SENT), Scope.SERVER),
    _several("carpool_process_restarts_total", "process", columns.RESTARTS, Scope.SERVER),
    _one("carpool_up", "gauge", _cell(columns.UP), Scope.SERVER),
    _one("carpool_build_info", "gauge", lambda _: 1.0, Scope.BUILD),
)

_FIRST_RESPONSE = _observed(
    "nv_inference_first_response_histogram_ms", columns.REQUEST_SECONDS, (100.0, 500.0, 2000.0, 5000.0)
)

FAMILIES: tuple[Family, ...] = (*_TRITON, *_OWN)
"""What is there unless somebody switches it off or on."""


def chosen(switches: Mapping[str, bool]) -> tuple[Family, ...]:
    """What Triton's switches leave on the page."""
    families = (*FAMILIES, _FIRST_RESPONSE) if switches["histogram_latencies"] else FAMILIES
    if switches["counter_latencies"]:
        return families
    return tuple(family for family in families if not family.name.endswith("_duration_us"))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labelled: TypeAlias = tuple[str, Cells]


class Exposition:
    """What a scrape answers. One per process that can be scraped."""

    def __init__(
        self, table: Table, version: str, host: Host | None = None, families: Sequence[Family] = FAMILIES
    ) -> None:
        self._table = table
        self._families = families
        self._host = Host() if host is None else host
        self._build = _labels(version=version, python=platform.python_version())

    def page(self) -> bytes:
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """The page in parts that each take little time; all of its numbers are read for the first."""
        rows: Mapping[Scope, Sequence[_Labelled]] = {
            Scope.MODEL: [
                (_labels(model=row.model, version=row.version), row.cells) for row in self._table.models()
            ],
            Scope.SERVER: [("", self._table.server())],
            Scope.HOST: [("", self._host.read())],
            Scope.BUILD: [(self._build, ())],
        }
        for family in self._families:
            for lines in _family(family, rows[family.scope]):
                yield ("\n".join(lines) + "\n").encode()


def _family(family: Family, rows: Sequence[_Labelled]) -> Iterator[list[str]]:
    if not rows:
        return
    yield [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
    histogram = family.histogram
    if histogram is not None and family.milliseconds:
        for labels, cells in rows:
            yield list(_coarser(family.name, labels, histogram, family.milliseconds, cells))
        return
    if histogram is not None:
        ends = [f',le="{bound}"}} ' for bound in (*histogram.bounds, "+Inf")]
        for labels, cells in rows:
            yield _histogram(family.name, labels, ends, cells[histogram.buckets], cells[histogram.sum])
        return
    for labels, cells in rows:
        yield [_line(family.name, labels, more, value(cells)) for more, value in family.values.items()]


def _line(name: str, labels: str, more: str, value: float) -> str:
    both = f"{labels},{more}" if labels and more else labels or more
    series = f"{name}{{{both}}}" if both else name
    return f"{series} {_number(value)}"


def _histogram(name: str, labels: str, ends: Sequence[str], counts: Cells, total: float) -> list[str]:
    """Buckets are kept apart in the table and cumulative on the page."""
    start = f"{name}_bucket{{{labels}"
    cumulative = list(accumulate(map(int, counts)))
    return [
        *[f"{start}{end}{count}" for end, count in zip(ends, cumulative, strict=True)],
        f"{name}_sum{{{labels}}} {_number(total)}",
        f"{name}_count{{{labels}}} {cumulative[-1]}",
    ]


def _coarser(
    name: str, labels: str, histogram: Histogram, bounds_ms: Sequence[float], cells: Cells
) -> Iterator[str]:
    """A histogram in milliseconds with some of the bounds of one in seconds."""
    cumulative = list(accumulate(map(int, cells[histogram.buckets])))
    for bound in bounds_ms:
        count = cumulative[histogram.bounds.index(bound / 1e3)]
        yield f'{name}_bucket{{{labels},le="{bound:g}"}} {count}'
    yield f'{name}_bucket{{{labels},le="+Inf"}} {cumulative[-1]}'
    yield f"{name}_sum{{{labels}}} {_number(round(cells[histogram.sum] * 1e3, 3))}"
    yield f"{name}_count{{{labels}}} {cumulative[-1]}"


def _labels(**values: str) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
