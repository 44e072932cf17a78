"""Defines the options that several verbs share: of curves, traffic and cores."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.lab.machine_share import Machine
    from carpool.sim.arrivals import Traffic
    from carpool.sim.step_simulation import StepPlan
from carpool.cli.verb_options import (
    CORES,
    MODEL,
    MOST_IN_A_BATCH,
    TRAFFIC,
    blamed_on,
    described,
    number,
    option,
    whole,
)

_CURVE = "Batch times: 4+1 (ms fixed + ms per image), or points 1:6.2,4:9.1,16:21 (batch:ms)."
MOST_STEPS = 32


def sizes(option: str, text: str | None, most: int = MOST_IN_A_BATCH) -> tuple[int, ...]:
    """Batch sizes like `4,8`, rising."""
    if text is None:
        return ()
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} must be batch sizes like 4,8, not {text!r}") from None
    if any(not 1 <= size <= most for size in found) or list(found) != sorted(set(found)):
        raise InvalidInput(f"{option} must be rising batch sizes from 1 to {most}, not {text!r}")
    return found


def numbers(
    option: str, text: str, *, example: str, at_most: str, above: float | None = None, most: float
) -> list[float]:
    """Reads them as in the `example`; `at_most` is how many, and perhaps of what."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise InvalidInput(f"{option} must be {example}, not {text!r}") from None
    if len(found) > int(at_most.split()[0]):
        raise InvalidInput(f"{option}: {at_most} at most, not {len(found)}")
    return [number(option, value, above=above, most=most) for value in found]


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    name, _, lengths = text.rpartition(":")
    try:
        shape = tuple(int(length) for length in lengths.split(","))
    except ValueError:
        shape = ()
    if not name or not shape or any(not 1 <= length <= 1 << 31 for length in shape):
        raise InvalidInput(f"--shape must be like image:1,3,224,224, not {text!r}")
    return name, shape


def batch_curve(text: str, max_batch: int | None, buckets: str | None) -> BatchCurve:
    if max_batch is not None:
        whole("--max-batch", max_batch, least=1, most=MOST_IN_A_BATCH)
    try:
        last = BatchCurve.parse(text, max_batch=1).points[-1][0]
        if last > MOST_IN_A_BATCH:
            raise CurveError(f"batch sizes must be at most {MOST_IN_A_BATCH}, not {last}")
        return BatchCurve.parse(text, max_batch, sizes("--buckets", buckets))
    except CurveError as error:
        raise InvalidInput(f"--curve: {error}") from None


def pipeline_steps(texts: list[str], max_batch: int | None) -> tuple[StepPlan, ...]:
    from carpool.sim.step_simulation import read_steps

    if max_batch is not None:
        whole("--max-batch", max_batch, least=1, most=MOST_IN_A_BATCH)
    if len(texts) > MOST_STEPS:
        raise InvalidInput(f"--step: {MOST_STEPS} at most, not {len(texts)}")
    with blamed_on("--step"):
        return read_steps(texts, max_batch)


def slo(slo_ms: float, curve: BatchCurve, steps: tuple[StepPlan, ...] = ()) -> float:
    """Returns it in seconds; below the time of a single image there is nothing to promise."""
    number("--slo-ms", slo_ms, above=0, most=1e7)
    alone = curve.times[1] * 1e3
    if steps:
        from carpool.sim.step_simulation import alone_through

        alone = alone_through(steps) * 1e3
    if slo_ms < alone:
        raise InvalidInput(
            f"--slo-ms {slo_ms:g} is below the {alone:g} ms that one image takes: give at least "
            f"{2 * alone:g}, because a request may have to wait for the one before it"
        )
    return slo_ms / 1e3


def drawing(path: Path | None) -> None:
    """Say so before the work, not after it."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"--plot must name a .png, .svg or .pdf file, not {path}")
    if not path.parent.is_dir():
        raise InvalidInput(f"--plot: there is no folder {path.parent}")


@dataclass(frozen=True, kw_only=True)
class HasCurve:
    """A verb about batches that take so long."""

    slo_ms: Annotated[float, described(MODEL, "The SLO: largest latency of a response, in ms.")]
    curve: str = option("", _CURVE, MODEL)
    max_batch: int | None = option(None, "Largest batch. Default: the curve's last point, or 64.", MODEL)
    buckets: str | None = option(
        None, "Batch sizes that the engine is built for, like 1,4,16,64. Other sizes are padded.", MODEL
    )
    step: list[str] | None = option(
        None,
        "A step of a pipeline, in place of --curve; repeatable. 3+0.22@4.2 gets 4.2 images per request on "
        "average. '2+0.5 after 1' follows step 1; by default, the previous one.",
        MODEL,
        metavar="CURVE[@IMAGES][ after N,…]",
    )
    one_device: bool = option(False, "Run all steps on one device.", MODEL)

    def curve_and_steps(self) -> tuple[BatchCurve, tuple[StepPlan, ...]]:
        """Returns the curve, and the steps of a pipeline, whose first it is."""
        if not self.step:
            if self.one_device:
                raise InvalidInput("--one-device is for the steps of a pipeline: give --step")
            if not self.curve:
                raise InvalidInput(f"Missing option '--curve': {_CURVE[0].lower()}{_CURVE[1:]}")
            return batch_curve(self.curve, self.max_batch, self.buckets), ()
        for name, given in (("--curve", self.curve), ("--buckets", self.buckets)):
            if given:
                raise InvalidInput(f"{name} is for one model, and --step for a pipeline: give one of them")
        steps = pipeline_steps(self.step, self.max_batch)
        return steps[0].curve, steps


@dataclass(frozen=True, kw_only=True)
class HasTraffic:
    """A verb that requests come to, or that makes them."""

    listed_last: ClassVar[bool] = True

    arrivals: str
    burst_factor: float = option(
        3.0, "bursty: rate of a surge, as a multiple of the rate around it.", TRAFFIC
    )
    burst_seconds: float = option(0.5, "bursty: length of a surge, in seconds.", TRAFFIC)
    burst_period: float = option(2.5, "bursty: time from one surge to the next, in seconds.", TRAFFIC)
    cameras: int | None = option(None, "cameras: number of cameras.", TRAFFIC)
    fps: float | None = option(None, "cameras: frames per second of each. Default: 10.", TRAFFIC)
    aligned: bool = option(False, "cameras: all of them send at the same moment.", TRAFFIC)

    def traffic(
        self, plain: Mapping[str, Traffic], read: Callable[[Path], Traffic], *, per_source: bool
    ) -> Traffic:
        """Returns the traffic by --arrivals: one that is `plain`, or those that need more to be said; `read`
        is for a trace."""
        from carpool.sim.arrivals import Bursty, Cameras

        if self.arrivals == "bursty":
            period = number("--burst-period", self.burst_period, least=0.01, most=1e6)
            factor = number("--burst-factor", self.burst_factor, least=1, most=1000)
            return Bursty(factor, number("--burst-seconds", self.burst_seconds, above=0, most=period), period)
        if self.arrivals == "cameras":
            if self.cameras is None:
                raise InvalidInput(
                    "--arrivals cameras needs --cameras, the number of cameras, like --cameras 100"
                )
            count = whole("--cameras", self.cameras, least=1, most=1_000_000)
            fps = number("--fps", 10.0 if self.fps is None else self.fps, above=0, most=10_000)
            return Cameras(count, fps, self.aligned, per_source)
        if self.arrivals.startswith("trace:"):
            return _read_trace(Path(self.arrivals.removeprefix("trace:")), read)
        if self.arrivals not in plain:
            kinds = ", ".join((*plain, "bursty", "cameras"))
            raise InvalidInput(f"--arrivals must be {kinds} or trace:FILE, not {self.arrivals!r}")
        return plain[self.arrivals]


def _read_trace(file: Path, read: Callable[[Path], Traffic]) -> Traffic:
    from carpool.sim.arrivals import Recording

    with blamed_on("--arrivals"):
        found = read(file)
    if isinstance(found, Recording) and found.cut_off:
        print(f"carpool: {file}: its last line is cut off and was left out", file=sys.stderr)
    return found


@dataclass(frozen=True, kw_only=True)
class SharesCores:
    """This is for verbs that plan replicas whose batches share cores with decoding and the protocol."""

    infer_cores: float = option(
        0.0,
        "Cores that batches of a CPU model keep busy, as printed by profile.",
        CORES,
    )
    decode_ms: float = option(0.0, "Time of one core to decode an image, in ms.", CORES)
    protocol_ms: float = option(0.0, "Time of one core per request in front end and engine, in ms.", CORES)

    def machine(self, cores: float, instances: int, measured: float = 0.0) -> Machine:
        """One replica's part; `measured` are the cores that batches kept busy, where nothing was typed."""
        from carpool.lab.machine_share import Machine

        busy = number("--infer-cores", self.infer_cores, most=1e6)
        if busy > cores:
            raise InvalidInput(
                f"--infer-cores: a batch that ran on {cores:g} cores cannot keep {busy:g} busy"
            )
        decode = number("--decode-ms", self.decode_ms, most=1e7)
        protocol = number("--protocol-ms", self.protocol_ms, most=1e7)
        return Machine(cores, busy or min(measured, cores), decode / 1e3, protocol / 1e3, instances)
