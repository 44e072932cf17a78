"""Which instance runs on which GPU, and how many there are: as the settings say, else as trying says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isinf

from carpool import backends
from carpool.backends.backend import Backend, SharesDevice
from carpool.config.backend_kinds import kind_of
from carpool.config.model import Kind, ModelConfig
from carpool.core.arbiter import Arbiter, Turn
from carpool.core.curve import BatchCurve, slo_capacity
from carpool.core.instance import Instance
from carpool.core.numerals import numeral
from carpool.core.policy import Promise
from carpool.core.scheduler import Scheduler
from carpool.core.shares import Intake
from carpool.engine.profile.instance_layout import (
    Chosen,
    Layout,
    Trying,
    choose_by_capacity,
    choose_threads,
)
from carpool.engine.profile.measuring import Effort, Measuring
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.observe.logs import logger

log = logger("engine")

_MOST_STREAMS = 6  # instances on one GPU that are tried
_WORTH_ANOTHER = 1.1  # times the rate without it: each takes memory, and makes single images slower
_TRIAL = Effort(seconds=0.1, warm_up=0.3, total=1.0)

OpenOne = Callable[[int], Backend]


def instance_count(config: ModelConfig) -> int:
    """Without a GPU, groups that ask for one run on the CPU: the counts add up."""
    return max(1, sum(group.count * max(1, len(group.gpus)) for group in config.instances))


def places(config: ModelConfig, devices: Sequence[int]) -> list[int]:
    """The GPU of each instance that the settings ask for: one on each device, where they ask for nothing."""
    found: list[int] = []
    for group in config.instances:
        if group.kind is Kind.CPU:
            raise ConfigError(
                f"{config.name}: its instances run on GPUs or on the CPU, not on both: change instances"
            )
        for gpu in group.gpus or devices:
            if gpu not in devices:
                raise ConfigError(
                    f"{config.name}: an instance asks for GPU {gpu}, and the model runs on "
                    f"{', '.join(map(str, devices))}"
                )
            found += [gpu] * group.count
    return found


def choose_on_cpu(
    config: ModelConfig, cores: int, trying: Trying, tell: Callable[[str], None] = lambda _: None
) -> Chosen:
    """Instances and threads, which share the cores."""
    count = instance_count(config)
    shared = backends.default_threads(count, cores)
    told = config.onnxruntime.intra_op_threads
    if not kind_of(config.backend).threaded or told or config.onnxruntime.providers or cores == 1:
        return Chosen(Layout(count, told or shared), f"threads as the settings say: {told}" if told else "")
    tell("trying instances and threads")
    policy = config.policy
    try:
        if isinstance(policy, Promise) and not any(group.given for group in config.instances):
            return choose_by_capacity(cores, policy.slo, trying)
        if shared > 1:
            return choose_threads(count, shared, trying)
    except CarpoolError:  # it cannot be tried on zeros; what is wrong is told later, if it matters
        log.debug("not-tried", model=config.name)
    return Chosen(Layout(count, shared))


def choose_on_gpus(
    config: ModelConfig,
    gpus: Sequence[int],
    slo: float,
    open_one: OpenOne,
    measuring: Callable[[Sequence[Backend], Effort], Measuring],
) -> Chosen:
    """As many as the settings say; else one more on every GPU for as long as that clearly brings more. The
    first ones are kept: an instance is slow to prepare."""
    if any(group.given for group in config.instances):
        return Chosen(Layout(len(gpus), 1))
    devices = len(gpus)
    opened: list[Backend] = []
    tried: list[tuple[int, float]] = []
    ended = ""
    try:
        for per_device in range(1, _MOST_STREAMS + 1):
            before = len(opened)
            try:
                opened += _open(open_one, range(before, per_device * devices))
            except ModelError as error:
                if not tried:
                    raise
                ended = f"; no more, since {error.message}"
                break
            tried.append(
                (
                    per_device * devices,
                    _rate(measuring(opened, _TRIAL), len(opened), slo, config.max_batch or 1),
                )
            )
            if len(tried) > 1 and tried[-1][1] < _WORTH_ANOTHER * tried[-2][1]:
                _close(opened[before:])
                del opened[before:]
                break
    except BaseException:
        _close(opened)
        raise
    against = ", ".join(f"{numeral(rate)} images/s with {count}" for count, rate in tried)
    return Chosen(Layout(len(opened), 1), f"{against}{ended}", opened)


def _open(open_one: OpenOne, numbers: Sequence[int]) -> list[Backend]:
    opened: list[Backend] = []
    try:
        opened.extend(open_one(number) for number in numbers)
    except BaseException:
        _close(opened)
        raise
    return opened


def _rate(measuring: Measuring, instances: int, slo: float, largest: int) -> float:
    """Images per second that all of them can promise together, or do at all."""
    points = {1: measuring.point(1).seconds}
    size = largest
    while size > 1 and (points.setdefault(size, measuring.point(size).seconds)) > slo / 2:
        del points[size]
        size //= 2
    curve = BatchCurve.measured(sorted(points.items()), largest)
    promised = 0.0 if isinf(slo) else slo_capacity(curve, slo)
    return instances * (promised or curve.throughput(size))


def _close(opened: Sequence[Backend]) -> None:
    for backend in opened:
        backend.close()


class Devices:
    """Of one engine. A device is known by its name, and for as long as somebody uses it."""

    def __init__(self) -> None:
        self._arbiters: dict[str, Arbiter] = {}
        self._users: dict[str, int] = {}
        self._intake = Intake()

    def join(
        self, scheduler: Scheduler, backends: Sequence[object], weight: float, wake: Callable[[], None]
    ) -> Callable[[], None]:
        """These are the instances of one model; call what this returns when they are gone."""
        scheduler.entrance = self._intake.join()
        placed: dict[str, list[Instance]] = {}
        for instance, backend in zip(scheduler.instances, backends, strict=True):
            if isinstance(backend, SharesDevice) and backend.device:
                placed.setdefault(backend.device, []).append(instance)
        turns = [
            (device, self._of(device).join(scheduler, instances, weight, wake))
            for device, instances in placed.items()
        ]

        def leave() -> None:
            while turns:
                self._leave(*turns.pop())

        return leave

    def _of(self, device: str) -> Arbiter:
        self._users[device] = self._users.get(device, 0) + 1
        return self._arbiters.setdefault(device, Arbiter())

    def _leave(self, device: str, turn: Turn) -> None:
        self._arbiters[device].leave(turn)
        self._users[device] -= 1
        if not self._users[device]:
            del self._users[device], self._arbiters[device]
