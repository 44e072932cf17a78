"""The metrics page: Prometheus' text format 0.0.4, written by hand.

prometheus-client shares numbers between processes through files of its own; ours already lie in one table,
and only the text is missing.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from carpool.observe import columns
from carpool.observe.columns import Histogram
from carpool.observe.counters import Cells, Table
from carpool.observe.gpu_readings import GpuReading, Gpus

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
        busy, total = self._ticks()
        elapsed = total - self._before[1]
        if elapsed > 0:  # else the clock has not ticked since, and the last answer still holds
            share = (busy - self._before[0]) / elapsed
            self._utilization = min(max(share, 0.0), 1.0)  # the kernel's idle time can run backwards
            self._before = busy, total
        sizes: dict[str, float] = {}
        for line in (self._proc / "meminfo").read_text("ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                sizes[name] = int(rest.split()[0]) * 1024.0
        total_bytes = sizes["MemTotal"]
        return HostReading(self._utilization, total_bytes, total_bytes - sizes["MemAvailable"])

    def _ticks(self) -> tuple[int, int]:
        with (self._proc / "stat").open(encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1 : 2 + _STEAL]]
        total = sum(fields)
        return total - fields[_IDLE] - fields[_IOWAIT], total


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
    GPU = "gpu"  # gpu_uuid
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


_TABLE = """
nv_inference_request_success             counter   model  count:REQUEST_SECONDS Requests answered well; a request with a batch of images counts once.
nv_inference_request_failure             counter   model  reason:FAILURES       Requests that ended in an error, by cause.
nv_inference_count                       counter   model  sum:BATCH_SIZE        Images inferred; a request with a batch of n counts n times.
nv_inference_exec_count                  counter   model  count:BATCH_SIZE      Executions of the model; nv_inference_count over this is the mean batch.
nv_inference_pending_request_count       gauge     model  cell:PENDING          Requests accepted and not yet executing.
nv_inference_request_duration_us         counter   model  us:REQUEST_SECONDS    Time of all successful requests from end to end, in microseconds.
nv_inference_queue_duration_us           counter   model  us:QUEUE_SECONDS      Time that requests waited for their batch, in microseconds.
nv_inference_compute_input_duration_us   counter   model  us:INPUT_SECONDS      Time to gather the inputs of a batch, counted for each of its requests, in microseconds.
nv_inference_compute_infer_duration_us   counter   model  us:INFER_SECONDS      Time the model ran, counted for each request of the batch, in microseconds.
nv_inference_compute_output_duration_us  counter   model  us:OUTPUT_SECONDS     Time to split the outputs of a batch, counted for each of its requests, in microseconds.
nv_model_load_duration_secs              gauge     model  cell:LOAD_SECONDS     Time it took to load the model, in seconds.
nv_cpu_utilization                       gauge     host   cpu_utilization       Share of the machine's processor time in use since the last scrape, 0 to 1.
nv_cpu_memory_total_bytes                gauge     host   memory_total_bytes    Memory of the machine.
nv_cpu_memory_used_bytes                 gauge     host   memory_used_bytes     Memory of the machine that is not available.
nv_gpu_utilization                       gauge     gpu    utilization           Share of the time that the GPU was at work, 0 to 1.
nv_gpu_memory_total_bytes                gauge     gpu    memory_total_bytes    Memory of the GPU.
nv_gpu_memory_used_bytes                 gauge     gpu    memory_used_bytes     Memory of the GPU in use.
nv_gpu_power_usage                       gauge     gpu    power_usage           Power that the GPU takes, in watts.
nv_gpu_power_limit                       gauge     gpu    power_limit           Power that the GPU may take, in watts.
nv_energy_consumption                    counter   gpu    energy                Energy that the GPU took since the first scrape, in joules.
carpool_request_duration_seconds         histogram model  all:REQUEST_SECONDS   Successful requests, from the last byte of the request to the first byte of the answer.
carpool_decode_duration_seconds          histogram model  all:DECODE_SECONDS    From picture bytes to a tensor.
carpool_queue_duration_seconds           histogram model  all:QUEUE_SECONDS     Waiting for a batch.
carpool_infer_duration_seconds           histogram model  all:INFER_SECONDS     Execution of the batch, once per request.
carpool_post_duration_seconds            histogram model  all:POST_SECONDS      From raw outputs to an answer.
carpool_batch_size                       histogram model  all:BATCH_SIZE        Images per execution.
carpool_saturation                       gauge     model  cell:SATURATION       Predicted wait of a new request over the wait its promise allows, 0 to 1.
carpool_speed_ratio                      gauge     model  cell:SPEED_RATIO      Time that batches take over what was measured at loading; 0 for a model without a promise.
carpool_slo_seconds                      gauge     model  cell:SLO_SECONDS      What the model promises; 0 for one without a promise.
carpool_out_of_memory_total              counter   model  cell:OUT_OF_MEMORY    Batches that did not fit into their device's memory and were run in smaller ones.
carpool_shed_total                       counter   model  reason:SHED           Requests the scheduler chose not to run, by reason.
carpool_spare_total                      counter   model  result:SPARE          Work that no client waits for, out of slack: run, or skipped for want of it.
carpool_connections                      gauge     server cell:CONNECTIONS      Open client connections.
carpool_bytes_received_total             counter   server cell:BYTES_RECEIVED   Bytes read from clients.
carpool_bytes_sent_total                 counter   server cell:BYTES_SENT       Bytes written to clients.
carpool_process_restarts_total           counter   server process:RESTARTS      Processes that died and were started again, by kind.
carpool_up                               gauge     server cell:UP               1 while the engine is ready, else 0.
carpool_build_info                       gauge     build  one                   Always 1; the labels say what runs.
nv_inference_first_response_histogram_ms histogram model  all:REQUEST_SECONDS   Successful requests, from the last byte of the request to the first byte of the answer.
"""  # noqa: E501
"""Name, kind, scope, what is read, help. Of a histogram that is all of it, the count or the sum of what was
observed. `us` is a sum of seconds in microseconds; a label's name makes one line for each of its words."""
_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def _read(line: str) -> Family:
    name, kind, scope, source, meaning = line.split(maxsplit=4)
    how, _, cells = source.rpartition(":")
    column: Any = getattr(columns, cells, None)
    family = Family(name, kind, meaning, Scope(scope), {})
    if how == "all":
        coarse = (100.0, 500.0, 2000.0, 5000.0) if name == _FIRST_RESPONSE else ()
        return replace(family, histogram=column, milliseconds=coarse)
    if isinstance(column, Mapping):
        return replace(family, values={f'{how}="{word}"': _cell(found) for word, found in column.items()})
    values: Mapping[str, Value] = {
        "count": lambda read: sum(read[column.buckets]),
        "sum": lambda read: read[column.sum],
        "us": lambda read: round(read[getattr(column, "sum", column)] * 1e6, 0),
        "cell": lambda read: read[column],
    }
    if family.scope in (Scope.HOST, Scope.GPU):
        fields = HostReading._fields if family.scope is Scope.HOST else GpuReading._fields
        return replace(family, values={"": _cell(fields.index(source))})
    return replace(family, values={"": values.get(how, lambda _: 1.0)})


def _cell(column: int) -> Value:
    return lambda cells: cells[column]


_KNOWN = tuple(map(_read, _TABLE.strip().splitlines()))
FAMILIES = tuple(family for family in _KNOWN if family.name != _FIRST_RESPONSE)
"""What is there unless somebody switches it off or on."""


def chosen(switches: Mapping[str, bool]) -> tuple[Family, ...]:
    families = _KNOWN if switches["histogram_latencies"] else FAMILIES
    if switches["counter_latencies"]:
        return families
    return tuple(family for family in families if not family.name.endswith("_duration_us"))


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labelled: TypeAlias = tuple[str, Cells]


class Exposition:
    """What a scrape answers. One per process that can be scraped."""

    def __init__(
        self,
        table: Table,
        version: str,
        host: Host | None = None,
        families: Sequence[Family] = FAMILIES,
        gpus: Gpus | None = None,
    ) -> None:
        self._table = table
        self._families = families
        self._host = Host() if host is None else host
        self._gpus = Gpus() if gpus is None else gpus
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
            Scope.GPU: [(_labels(gpu_uuid=uuid), reading) for uuid, reading in self._gpus.read()],
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
    if histogram is not None:
        ends = [(str(bound), place) for place, bound in enumerate(histogram.bounds)]
        if family.milliseconds:
            ends = [(f"{bound:g}", histogram.bounds.index(bound / 1e3)) for bound in family.milliseconds]
        for labels, cells in rows:
            yield _histogram(family, histogram, labels, [*ends, ("+Inf", -1)], cells)
        return
    for labels, cells in rows:
        numbers = [(more, value(cells)) for more, value in family.values.items()]
        lines = [_line(family.name, labels, more, number) for more, number in numbers if not isnan(number)]
        if lines:
            yield lines


def _line(name: str, labels: str, more: str, value: float) -> str:
    both = f"{labels},{more}" if labels and more else labels or more
    series = f"{name}{{{both}}}" if both else name
    return f"{series} {_number(value)}"


def _histogram(
    family: Family, histogram: Histogram, labels: str, ends: Sequence[tuple[str, int]], cells: Cells
) -> list[str]:
    """Buckets are kept apart in the table and cumulative on the page."""
    name, total = family.name, cells[histogram.sum]
    cumulative = list(accumulate(map(int, cells[histogram.buckets])))
    return [
        *[f'{name}_bucket{{{labels},le="{end}"}} {cumulative[place]}' for end, place in ends],
        f"{name}_sum{{{labels}}} {_number(round(total * 1e3, 3) if family.milliseconds else total)}",
        f"{name}_count{{{labels}}} {cumulative[-1]}",
    ]


def _labels(**values: str) -> str:
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in values.items())


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
