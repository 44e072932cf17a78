"""Writes the metrics page: Prometheus' text format 0.0.4, or OpenMetrics with exemplars, by hand.

prometheus-client shares numbers between processes through files of its own; ours already lie in one table,
and only the text is missing.
"""

from __future__ import annotations

import enum
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import isnan, nan
from time import monotonic as now
from typing import Any, TypeAlias

from carpool.extensions import installed
from carpool.observe import columns
from carpool.observe.columns import HistogramColumns
from carpool.observe.counters import Cells, CounterRow, ModelCells, Table
from carpool.observe.exemplars import Exemplar
from carpool.observe.gpu_readings import GpuReading, Gpus
from carpool.observe.host_reading import Host, HostReading

# Every metric on the page: its name, its meaning and which cells it is read from.
#
# The `nv_` names mean what they mean in Triton, so that its dashboards and autoscaling recipes keep working.
# Most of them are the counts and sums of our own histograms: one observation in the hot path feeds both.


Value: TypeAlias = Callable[[Cells], float]


class Scope(enum.Enum):
    """Names whose cells a family is read from, which also says what labels it has."""

    MODEL = "model"  # model, version
    SOME = "some"  # the same, of those models alone of which some number is not 0
    STEP = "step"  # model, version, step; "step:NAME" gives the first label another name
    SERVER = "server"
    HOST = "host"
    GPU = "gpu"  # gpu_uuid
    SOURCE = "source"  # model, source: of states that the catalogue has
    INDEX = "index"  # model, version, whether it is loaded or not
    BUILD = "build"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """Represents one metric. `values` maps the labels beyond those of the scope, as text, to the number."""

    name: str
    kind: str
    help: str
    scope: Scope
    values: Mapping[str, Value]
    histogram: HistogramColumns | None = None
    milliseconds: tuple[float, ...] = ()  # of a histogram: only these of its bounds, and not in seconds
    histograms: Mapping[str, HistogramColumns] = field(
        default_factory=dict
    )  # with labels beyond those of the scope
    of: str = "model"  # the label with the model's name, of scope step
    states: tuple[str, str] = ("", "")  # of scope source: the extension, and what these states are of


_TABLE = """
nv_inference_request_success             counter   model  count:REQUEST_SECONDS Successful requests; a request with a batch of images counts once.
nv_inference_request_failure             counter   model  reason:FAILURES       Requests that ended in an error, by cause.
nv_inference_count                       counter   model  sum:BATCH_SIZE        Images inferred; a request with a batch of n counts n times.
nv_inference_exec_count                  counter   model  count:BATCH_SIZE      Executions of the model; nv_inference_count divided by this is the mean batch size.
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
nv_gpu_utilization                       gauge     gpu    utilization           Share of the time that the GPU was busy, 0 to 1.
nv_gpu_memory_total_bytes                gauge     gpu    memory_total_bytes    Memory of the GPU.
nv_gpu_memory_used_bytes                 gauge     gpu    memory_used_bytes     Memory of the GPU in use.
nv_gpu_power_usage                       gauge     gpu    power_usage           Power that the GPU takes, in watts.
nv_gpu_power_limit                       gauge     gpu    power_limit           Power that the GPU may take, in watts.
nv_energy_consumption                    counter   gpu    energy                Energy consumed by the GPU since the first scrape, in joules.
carpool_request_duration_seconds         histogram model  all:REQUEST_SECONDS   Successful requests, from the last byte of the request to the first byte of the response.
carpool_decode_duration_seconds          histogram model  all:DECODE_SECONDS    From image bytes to a tensor.
carpool_queue_duration_seconds           histogram model  all:QUEUE_SECONDS     Waiting for a batch.
carpool_infer_duration_seconds           histogram model  all:INFER_SECONDS     Execution of the batch, once per request.
carpool_post_duration_seconds            histogram model  all:POST_SECONDS      From raw outputs to a response.
carpool_batch_size                       histogram model  all:BATCH_SIZE        Images per execution.
carpool_saturation                       gauge     model  cell:SATURATION       Predicted wait of a new request, as a share of the wait that its SLO allows, 0 to 1.
carpool_offered_images_total             counter   model  cell:OFFERED          Images offered, answered or not; a retry at another replica counts there.
carpool_capacity_images_per_second       gauge     model  known:CAPACITY        Images that the model can answer within its SLO, by its current speed; absent without an SLO.
carpool_load                             gauge     model  less:LOAD             Images offered in the last 5 s, divided by the capacity: 1.5 means 50 % over capacity; absent without an SLO.
carpool_speed_ratio                      gauge     model  cell:SPEED_RATIO      Time of batches, divided by the time measured at loading; 0 for a model without an SLO.
carpool_run_memory_bytes                 gauge     model  cell:RUN_MEMORY       Memory of batches besides the weights while all instances run, as measured at loading; 0 if the runtime does not report it.
carpool_unbatched                        gauge     model  cell:UNBATCHED        1 if each request runs alone, because a batch would not answer what its requests get alone; else 0.
carpool_slo_seconds                      gauge     model  cell:SLO_SECONDS      The SLO of the model; 0 for a model without one.
carpool_out_of_memory_total              counter   model  cell:OUT_OF_MEMORY    Batches that did not fit into the memory of their device and were split.
carpool_batch_sizes                      gauge     model  state:COMPILED_SIZES  Batch sizes of a model that is compiled while it serves: compiled, or still plain.
carpool_shed_total                       counter   model  reason:SHED           Requests that the scheduler chose not to run, by reason.
carpool_spare_total                      counter   model  result:BACKGROUND          Background work in free time: run, or skipped because there was none.
carpool_model_state                      gauge     index  state:MODEL_STATES    1 for the state of a version of a model, else 0; a model that failed before its versions were read has an empty version.
carpool_connections                      gauge     server cell:CONNECTIONS      Open client connections.
carpool_bytes_received_total             counter   server cell:BYTES_RECEIVED   Bytes read from clients.
carpool_bytes_sent_total                 counter   server cell:BYTES_SENT       Bytes written to clients.
carpool_process_restarts_total           counter   server process:RESTARTS      Processes that died and were restarted, by kind.
carpool_up                               gauge     server cell:UP               1 while the engine is ready, else 0.
carpool_build_info                       gauge     build  one                   Always 1; the labels have the versions.
nv_inference_first_response_histogram_ms histogram model  all:REQUEST_SECONDS   Successful requests, from the last byte of the request to the first byte of the response.
"""  # noqa: E501
"""Name, kind, scope, what is read, help. Of a histogram that is all of it, the count or the sum of what was
observed. `us` is a sum of seconds in microseconds; a label's name makes one line for each of its words, and
`cell:name=word+word` is the sum of some of them."""
_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"


def _read(line: str, extension: str = "") -> MetricFamily:
    name, kind, scope, source, meaning = line.split(maxsplit=4)
    how, _, cells = source.rpartition(":")
    column: Any = columns.OF_EXTENSIONS.get((extension, cells)) or getattr(columns, cells, None)
    scope, _, of = scope.partition(":")
    family = MetricFamily(name, kind, meaning, Scope(scope), {}, of=of or "model", states=(extension, cells))
    if "=" in cells:
        chosen = columns.summed(extension, cells)
        return replace(family, values={"": lambda read: sum(read[one] for one in chosen)})
    if how == "all":
        coarse = (100.0, 500.0, 2000.0, 5000.0) if name == _FIRST_RESPONSE else ()
        return replace(family, histogram=column, milliseconds=coarse)
    if how == "phase":
        return replace(family, histograms={_words(how, word): found for word, found in column.items()})
    if isinstance(column, Mapping) and how != "share":
        read = _one_less if how == "what" else _cell
        return replace(family, values={_words(how, word): read(found) for word, found in column.items()})
    values: Mapping[str, Value] = {
        "count": lambda read: sum(read[column.buckets]),
        "sum": lambda read: read[column.sum],
        "us": lambda read: round(read[getattr(column, "sum", column)] * 1e6, 0),
        "cell": lambda read: read[column],
        "known": lambda read: read[column] or nan,
        "less": lambda read: read[column] - 1.0 if read[column] else nan,
        "age": lambda read: max(0.0, now() - read[column]) if read[column] else nan,
        "share": lambda read: _share(read[column["same"]], read[column["differs"]]),
    }
    if family.scope in (Scope.HOST, Scope.GPU):
        fields = HostReading._fields if family.scope is Scope.HOST else GpuReading._fields
        return replace(family, values={"": _cell(fields.index(source))})
    return replace(family, values={"": values.get(how, lambda _: 1.0)})


def _words(labels: str, words: str) -> str:
    """Returns labels as text: one name for one word, or several for as many, with commas between."""
    listed = words.split(",")
    return ",".join(f'{label}="{word}"' for label, word in zip(labels.split(","), listed, strict=True))


def _cell(column: int) -> Value:
    return lambda cells: cells[column]


def _one_less(column: int) -> Value:
    """Reads cells where 0 is for what is not known."""
    return lambda cells: cells[column] - 1.0 if cells[column] else nan


def _share(same: float, differs: float) -> float:
    return same / (same + differs) if same + differs else nan


_KNOWN = (
    *map(_read, _TABLE.strip().splitlines()),
    *(_read(line, name) for name, one in installed().items() for line in one.metrics.strip().splitlines()),
)
FAMILIES = tuple(family for family in _KNOWN if family.name != _FIRST_RESPONSE)
"""The families that are shown unless settings switch them off, or others on."""


def chosen(switches: Mapping[str, bool]) -> tuple[MetricFamily, ...]:
    families = _KNOWN if switches["histogram_latencies"] else FAMILIES
    if switches["counter_latencies"]:
        return families
    return tuple(family for family in families if not family.name.endswith("_duration_us"))


_Labelled: TypeAlias = tuple[str, Cells]
_Examples: TypeAlias = Mapping[int, Exemplar]
"""By column: of one row."""
_NONE: _Examples = {}


class Exposition:
    """Writes what a scrape answers. One per process that can be scraped."""

    def __init__(
        self,
        table: Table,
        version: str,
        host: Host | None = None,
        families: Sequence[MetricFamily] = FAMILIES,
        gpus: Gpus | None = None,
        states: Callable[[str, str], Mapping[str, Mapping[str, str]]] = lambda _extension, _what: {},
        index: Callable[[], Iterable[tuple[str, str, str]]] = tuple,
    ) -> None:
        """`states` has those of an extension, by model and source; `index` has name, version and state of
        every model that is known."""
        self._states, self._index = states, index
        self._table = table
        self._families = families
        self._host = Host() if host is None else host
        self._gpus = Gpus() if gpus is None else gpus
        self._build = _labels(version=version, python=platform.python_version())

    def page(self, *, openmetrics: bool = False) -> bytes:
        return b"".join(self.pieces(openmetrics=openmetrics))

    def pieces(self, *, openmetrics: bool = False) -> Iterator[bytes]:
        """The page in parts that each take little time; all of its numbers are read for the first."""
        models = self._table.models()
        of_models = [(_labels(model=row.model, version=row.version), row.cells) for row in models]
        rows: Mapping[Scope, Sequence[_Labelled]] = {
            Scope.MODEL: of_models,
            Scope.SOME: of_models,
            Scope.SERVER: [("", self._table.server())],
            Scope.HOST: [("", self._host.read())],
            Scope.GPU: [(_labels(gpu_uuid=uuid), reading) for uuid, reading in self._gpus.read()],
            Scope.INDEX: [
                (_labels(model=model, version=version), [float(state == one) for one in columns.MODEL_STATES])
                for model, version, state in self._index()
            ],
            Scope.BUILD: [(self._build, ())],
        }
        steps = self._table.steps()
        examples = self._examples(models) if openmetrics else {}
        for family in self._families:
            head = _open_head(family) if openmetrics else _head(family.name, family.kind, family.help)
            if family.scope is Scope.SOURCE:
                read = self._sources(family)
            elif family.scope is Scope.STEP:
                read = _of_steps(family, steps)
            else:
                read = rows[family.scope]
            for lines in _family(family, read, head, examples):
                yield ("\n".join(lines) + "\n").encode()
        if openmetrics:
            yield b"# EOF\n"

    def _sources(self, family: MetricFamily) -> Sequence[_Labelled]:
        """Returns a row for each source; its cells are the states, of which at most one holds."""
        words = columns.by_word(*family.states)
        return [
            (_labels(model=model, source=source), [float(state == word) for word in words])
            for model, sources in self._states(*family.states).items()
            for source, state in sources.items()
        ]

    def _examples(self, models: Sequence[ModelCells]) -> Mapping[str, _Examples]:
        """Returns examples by the labels of their rows."""
        known = {row.slot: _labels(model=row.model, version=row.version) for row in models}
        found: dict[str, dict[int, Exemplar]] = {}
        for (row, generation, column), exemplar in self._table.exemplars().items():
            labels = known.get(CounterRow(row, generation))
            if labels is not None:
                found.setdefault(labels, {})[column] = exemplar
        return found


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]


def _of_steps(family: MetricFamily, steps: Iterable[ModelCells]) -> Sequence[_Labelled]:
    return [
        (_labels(**{family.of: row.model}, version=row.version, step=row.step), row.cells) for row in steps
    ]


def _open_head(family: MetricFamily) -> list[str]:
    """OpenMetrics wants counters that end in `_total`. Triton's do not, and keep the names by which
    dashboards know them: so they are of no type that it knows."""
    if family.kind != "counter":
        return _head(family.name, family.kind, family.help)
    name = family.name.removesuffix("_total")
    return _head(name, "unknown" if name == family.name else "counter", family.help)


def _family(
    family: MetricFamily, rows: Sequence[_Labelled], head: list[str], examples: Mapping[str, _Examples]
) -> Iterator[list[str]]:
    """Yields nothing, not even its name, where none of the rows has a number."""
    histogram = next(iter(family.histograms.values()), family.histogram)
    ends: list[tuple[str, int]] = []
    if histogram is not None:
        ends = [(str(bound), place) for place, bound in enumerate(histogram.bounds)]
        if family.milliseconds:
            ends = [(f"{bound:g}", histogram.bounds.index(bound / 1e3)) for bound in family.milliseconds]
    for labels, cells in rows:
        if family.histograms:
            ended = [*ends, ("+Inf", -1)]
            listed = family.histograms.items()
            lines = [
                line
                for more, one in listed
                for line in _histogram(family, one, f"{labels},{more}", ended, cells)
            ]
        elif histogram is not None:
            if family.scope is Scope.SOME and not any(cells[histogram.buckets]):
                continue
            shown = _NONE if family.milliseconds else examples.get(labels, _NONE)
            lines = _histogram(family, histogram, labels, [*ends, ("+Inf", -1)], cells, shown)
        else:
            numbers = [(more, value(cells)) for more, value in family.values.items()]
            if family.scope is Scope.SOME and not any(number for _, number in numbers):
                continue  # most models are not
            lines = [_line(family.name, labels, more, each) for more, each in numbers if not isnan(each)]
        if lines:
            yield head + lines
            head = []


def _line(name: str, labels: str, more: str, value: float) -> str:
    both = f"{labels},{more}" if labels and more else labels or more
    series = f"{name}{{{both}}}" if both else name
    return f"{series} {_number(value)}"


def _histogram(
    family: MetricFamily,
    histogram: HistogramColumns,
    labels: str,
    ends: Sequence[tuple[str, int]],
    cells: Cells,
    examples: _Examples = _NONE,
) -> list[str]:
    """Buckets are kept apart in the table and cumulative on the page."""
    name, total = family.name, cells[histogram.sum]
    cumulative = list(accumulate(map(int, cells[histogram.buckets])))
    return [
        *[
            f'{name}_bucket{{{labels},le="{end}"}} {cumulative[place]}{_example(examples, histogram, place)}'
            for end, place in ends
        ],
        f"{name}_sum{{{labels}}} {_number(round(total * 1e3, 3) if family.milliseconds else total)}",
        f"{name}_count{{{labels}}} {cumulative[-1]}",
    ]


def _example(examples: _Examples, histogram: HistogramColumns, place: int) -> str:
    found = examples.get(histogram.first + (place if place >= 0 else len(histogram.bounds)))
    if found is None:
        return ""
    labels = _labels(trace_id=found.trace.hex(), span_id=found.span.hex())
    return f" # {{{labels}}} {_number(found.value)} {found.at:.3f}"


def _labels(**values: str) -> str:
    escapes = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in values.items())


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() else repr(value)
