"""Defines how a verb declares its options, those that several share, and the checks of what was typed."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from carpool.core.curve import BatchCurve, CurveError
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    import asyncio

    from carpool.client.client import Client
    from carpool.lab.load.facts import Trust
    from carpool.lab.machine_share import Machine
    from carpool.sim.arrivals import Traffic
    from carpool.sim.step_simulation import StepPlan

MODEL, TRAFFIC, DEVICE, RUN, SERVER = "The model", "Traffic", "The device", "The run", "The server"
FLEET, CORES = "The fleet", "The cores"
"""Panels of the help."""
KEY_VARIABLE = "CARPOOL_API_KEY"
_KEY = re.compile(r"[!-~]{1,512}")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """Describes one argument or option of a verb, beside its field's type and default."""

    help: str
    panel: str | None = None  # of the help
    name: str = ""  # of the option, where it is not the field's; `--on/--no-on` is a flag that has both
    metavar: str = ""  # what the help calls its value
    envvar: str = ""  # the variable that sets it
    min: float | None = None
    max: float | None = None
    show_default: bool | str = True  # or what the help says in place of the default
    is_argument: bool = False  # it stands without a name


def option(
    default: Value, words: str, panel: str | None = None, *, name: str | None = None, **more: Any
) -> Value:
    """Returns a field of a verb's dataclass: its default, and what the help says of it."""
    return field(default=default, metadata={"option": _shared(panel, words, name or "", **more)})


def argument(words: str, *, default: Any = MISSING, **more: Any) -> Any:
    """As `option`, for what stands without a name; it is needed unless it has a default."""
    return field(
        default=default,
        metadata={"option": Declared(help=words, is_argument=True, show_default=False, **more)},
    )


def _shared(panel: str | None, words: str, name: str = "", **more: Any) -> Declared:
    return Declared(help=words, panel=panel, name=name, **more)


Noise = Annotated[float, _shared(DEVICE, "Variation of batch times: sigma of a lognormal factor.")]
Seed = Annotated[int, _shared(RUN, "Random seed; the same seed gives the same run.")]
Json = Annotated[bool, _shared(RUN, "Print one JSON object.", "--json")]
URL_VARIABLE = "CARPOOL_URL"
DEFAULT_URL = "http://localhost:8000"
ServerUrl = Annotated[str, Declared(help="Address of the server.", envvar=URL_VARIABLE, metavar="URL")]
_CURVE = "Batch times: 4+1 (ms fixed + ms per image), or points 1:6.2,4:9.1,16:21 (batch:ms)."

MOST_IN_A_BATCH = 4096


def number(
    option: str, value: float, *, above: float | None = None, least: float = 0.0, most: float = 1e9
) -> float:
    """Returns the value, if it lies strictly `above`, or else from `least`, up to `most`."""
    low_enough = value > above if above is not None else value >= least
    if isfinite(value) and low_enough and value <= most:
        return value
    valid = f"above {above:g} and at most" if above is not None else f"from {least:g} to"
    raise InvalidInput(f"{option} must be {valid} {most:,.9g}, not {value:g}")


def whole(option: str, value: int, *, least: int, most: int) -> int:
    if least <= value <= most:
        return value
    raise InvalidInput(f"{option} must be a whole number from {least} to {most:,}, not {value}")


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


MOST_STEPS = 32


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


def stop_on_signal(again: Callable[[], object]) -> asyncio.Event:
    """Set by Ctrl-C, in a running loop; the second one calls `again`."""
    import asyncio

    stop = asyncio.Event()

    def interrupted() -> None:
        if stop.is_set():
            again()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted)
    return stop


@contextmanager
def blamed_on(option: str) -> Iterator[None]:
    """What is wrong inside was asked for by this option."""
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"{option}: {error.message}") from None


def drawing(path: Path | None) -> None:
    """Say so before the work, not after it."""
    if path is None:
        return
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise InvalidInput(f"--plot must name a .png, .svg or .pdf file, not {path}")
    if not path.parent.is_dir():
        raise InvalidInput(f"--plot: there is no folder {path.parent}")


def trust(
    api_key_file: Path | None, ca: Path | None, insecure: bool, environ: Mapping[str, str] | None = None
) -> Trust:
    """A key is never an option: other users of the machine see those."""
    from carpool.lab.load.facts import Trust  # not needed to show the help

    key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "").strip()
    if api_key_file is not None:
        key = _read_key(api_key_file)
    if key and not _KEY.fullmatch(key):
        where = api_key_file or KEY_VARIABLE
        raise InvalidInput(f"the key in {where} must be up to 512 printable characters")
    return Trust("" if ca is None else str(ca), insecure, key)


def _read_key(file: Path) -> str:
    """The key alone, or the first line 'name key …' of a file as the server has it."""
    try:
        lines = file.read_text("ascii").splitlines()
    except (OSError, UnicodeDecodeError):
        raise InvalidInput(f"--api-key-file {file} cannot be read") from None
    for line in lines:
        words = line.split()
        if words and not words[0].startswith("#"):
            return words[0] if len(words) == 1 else words[1]
    raise InvalidInput(f"--api-key-file {file} holds no key")


# ---- options that several verbs have


@dataclass(frozen=True, kw_only=True)
class HasCurve:
    """A verb about batches that take so long."""

    slo_ms: Annotated[float, _shared(MODEL, "The SLO: largest latency of a response, in ms.")]
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


@dataclass(frozen=True, kw_only=True)
class AsksServer:
    """Defines a verb that may ask a running server."""

    as_json: Json = False
    api_key_file: Path | None = option(
        None,
        f"File with the server's API key. Default: the variable {KEY_VARIABLE}.",
        SERVER,
        metavar="FILE",
    )
    ca: Path | None = option(None, "CA certificate of the server, for https://.", SERVER, metavar="FILE")
    insecure: bool = option(False, "Accept any certificate (for tests only).", SERVER)

    def trust(self) -> Trust:
        return trust(self.api_key_file, self.ca, self.insecure)

    def client(self, option: str, url: str, patience_s: float, connections: int) -> Client:
        """Returns a client for the server that was named by this option."""
        from carpool.client.client import Client

        known = self.trust()
        with blamed_on(option):
            return Client(
                url,
                api_key=known.key,
                ca=known.ca,
                insecure=known.insecure,
                patience_s=patience_s,
                connections=connections,
            )


LISTED_LAST = (HasTraffic, AsksServer)
"""Their options are listed after a verb's own."""
