"""What perf_analyzer is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from live.server import Live


@dataclass(frozen=True)
class Run:
    """One run: a model, a protocol and a way to make load."""

    protocol: str
    model: str
    what: str
    options: tuple[str, ...]

    def arguments(self, server: Live) -> list[str]:
        port = server.grpc_port if self.protocol == "grpc" else server.port
        given = [option.format(metrics=f"127.0.0.1:{server.metrics_port}/metrics") for option in self.options]
        return ["-m", self.model, "-i", self.protocol, "-u", f"127.0.0.1:{port}", *given]


_ONE_AND_EIGHT = ("--concurrency-range", "1:8:7")
_EIGHT = ("--concurrency-range", "8")
_RATES = ("--request-rate-range", "50:150:100")
_METRICS = ("--collect-metrics", "--metrics-url", "{metrics}", "--metrics-interval", "100")

_BOTH: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("closed loop, 1 and 8", _ONE_AND_EIGHT),
    ("closed loop, --async", (*_EIGHT, "--async")),
    ("--request-rate-range", _RATES),
    ("--request-rate-range, poisson", (*_RATES, "--request-distribution", "poisson")),
    ("-b 4", (*_EIGHT, "-b", "4")),
    ("--shared-memory system", (*_EIGHT, "--shared-memory", "system")),
    ("--shared-memory system, -b 4, --async", (*_EIGHT, "--shared-memory", "system", "-b", "4", "--async")),
    ("--collect-metrics", (*_EIGHT, *_METRICS)),
)
_GRPC: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("--streaming", (*_EIGHT, "--streaming")),
    ("--streaming, --shared-memory system", (*_EIGHT, "--streaming", "--shared-memory", "system")),
    ("gzip", (*_EIGHT, "--grpc-compression-algorithm", "gzip")),
)
_SEQUENCES = (*_EIGHT, "--sequence-length", "10", "--sequence-id-range", "1:100000")
_JSON = ("--input-tensor-format", "json", "--output-tensor-format", "json")


def every_run() -> list[Run]:
    found = []
    for protocol, own in (("http", ()), ("grpc", _GRPC)):
        found += [Run(protocol, "vision", what, options) for what, options in (*_BOTH, *own)]
        found += [Run(protocol, "pretend", "closed loop, 1 and 8", _ONE_AND_EIGHT)]
        found += [Run(protocol, "mean", "closed loop, 1 and 8", _ONE_AND_EIGHT)]
        found += [Run(protocol, "pair", "an ensemble, closed loop, 1 and 8", _ONE_AND_EIGHT)]
        found += [Run(protocol, "pair", "an ensemble, -b 4", (*_EIGHT, "-b", "4"))]
    found.append(Run("http", "pretend", "tensors as JSON", (*_EIGHT, *_JSON)))
    found += [Run(protocol, "sums", "sequences, 8 at a time", _SEQUENCES) for protocol in ("http", "grpc")]
    found.append(Run("grpc", "sums", "sequences, --streaming", (*_SEQUENCES, "--streaming")))
    by_rate = ("--request-rate-range", "100", "--num-of-sequences", "4")
    found.append(Run("grpc", "sums", "sequences at a rate", (*by_rate, "--sequence-length", "10")))
    return found
