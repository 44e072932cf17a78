"""Chooses how many instances of a model run with how many threads each: on a CPU both share the cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from carpool import backends
from carpool.backends.backend import SharesDevice
from carpool.config.backend_kinds import kind_of
from carpool.config.model import InstanceKind, ModelConfig
from carpool.core.instance import Instance
from carpool.core.intake import Intake
from carpool.core.numerals import numeral
from carpool.core.objectives import Promise
from carpool.core.scheduler import Scheduler
from carpool.engine.profile.layouts import MOST_STREAMS, SHORT_S, Chosen, Layout, Trying, close_all, too_short
from carpool.engine.run.executor import LoopTime
from carpool.errors import CarpoolError, ConfigError
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.core.arbiter import Arbiter, ModelTurn
    from carpool.core.background import BackgroundTurn

_CLEARLY_FASTER = 0.8

log = logger("engine")


def choose_threads(instances: int, shared: int, trying: Trying) -> Chosen:
    """Chooses several threads for one run only where they clearly shorten it: small models only pay for
    them."""
    times = []
    for threads in (1, shared):
        opened = trying.open(Layout(1, threads))
        try:
            with trying.turn:
                times.append(trying.measuring(opened).shortest(1))
        finally:
            close_all(opened)
        if times[0] < SHORT_S:
            return Chosen(Layout(instances, 1), too_short(times[0]))
    alone, together = times
    threaded = f"one image takes {numeral(together * 1e3)} ms with {shared} threads"
    compared = f"{threaded}, {numeral(alone * 1e3)} ms with one"
    return Chosen(Layout(instances, shared if together < _CLEARLY_FASTER * alone else 1), compared)


def instance_count(config: ModelConfig) -> int:
    """Without a GPU, groups that ask for one run on the CPU: the counts add up."""
    return max(1, sum(group.count * max(1, len(group.gpus)) for group in config.instances))


def places(config: ModelConfig, devices: Sequence[int]) -> list[int]:
    """Returns the GPU of each instance that the settings ask for: one on each device, where they ask for
    nothing."""
    found: list[int] = []
    for group in config.instances:
        if group.kind is InstanceKind.CPU:
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


def is_possible(layout: Layout, config: ModelConfig, cores: int, gpus: int) -> bool:
    """Returns whether this layout can have been chosen here, for so many places on GPUs: what a file says may
    be anything, and each instance takes memory and threads."""
    count, given = instance_count(config), any(group.given for group in config.instances)
    if gpus:
        most = gpus if given else MOST_STREAMS * gpus
        return layout.instances <= most and layout.threads == 1
    told = config.onnxruntime.intra_op_threads or backends.default_threads(count, cores)
    return (
        layout.instances <= (count if given else max(count, cores))
        and layout.threads <= max(cores, told)
        and layout.instances * layout.threads <= max(cores, count * told)
    )


def choose_on_cpu(
    config: ModelConfig, cores: int, trying: Trying, tell: Callable[[str], None] = lambda _: None
) -> Chosen:
    """Chooses instances and threads, which share the cores."""
    count = instance_count(config)
    shared = backends.default_threads(count, cores)
    told = config.onnxruntime.intra_op_threads
    if not kind_of(config.backend).threaded or told or config.onnxruntime.providers or cores == 1:
        return Chosen(Layout(count, told or shared), f"threads as the settings say: {told}" if told else "")
    tell("trying instances and threads")
    policy = config.policy
    try:
        if isinstance(policy, Promise) and not any(group.given for group in config.instances):
            from carpool.engine.profile.layout_trials import choose_by_capacity

            return choose_by_capacity(cores, policy.slo, trying)
        if shared > 1:
            return choose_threads(count, shared, trying)
    except CarpoolError:  # it cannot be tried on zeros; an error is reported later, if it matters
        log.debug("not-tried", model=config.name)
    return Chosen(Layout(count, shared))


@dataclass(slots=True)
class _Member:
    """Describes a model, and where its instances are."""

    model: str
    scheduler: Scheduler
    weight: float
    wake: Callable[[], None]
    placed: dict[str, list[Instance]]  # by device
    turns: list[tuple[str, ModelTurn]] = field(default_factory=list)
    background: tuple[str, BackgroundTurn] | None = None


class Devices:
    """Holds the devices of one engine. A device is known by its name, and for as long as a model uses it.

    Models on processors take no turns. Only when a model has background work do its versions get an arbiter,
    which keeps that work out of the way of their requests.
    """

    def __init__(self) -> None:
        self._arbiters: dict[str, Arbiter] = {}
        self._users: dict[str, int] = {}
        self._members: dict[Scheduler, _Member] = {}
        self._intake = Intake()
        self.loop_time = LoopTime()

    def join(
        self,
        scheduler: Scheduler,
        backends: Sequence[object],
        weight: float,
        wake: Callable[[], None],
        model: str = "",
    ) -> None:
        """These are the instances of one model, until it leaves."""
        scheduler.entrance = self._intake.join()
        placed: dict[str, list[Instance]] = {}
        for instance, backend in zip(scheduler.instances, backends, strict=True):
            if isinstance(backend, SharesDevice) and backend.device:
                placed.setdefault(backend.device, []).append(instance)
        member = self._members[scheduler] = _Member(model, scheduler, weight, wake, placed)
        for device, instances in placed.items():
            self._take_place(member, device, instances)
        if not placed and _processors(model) in self._arbiters:
            self._take_place(member, _processors(model), list(scheduler.instances))

    def join_background(self, scheduler: Scheduler) -> None:
        """From now on this model may have background work, on the first device that it is on."""
        member = self._members[scheduler]
        if not member.placed:
            for other in self._members.values():
                if other.model == member.model and not other.turns:
                    self._take_place(other, _processors(member.model), list(other.scheduler.instances))
        device, turn = member.turns[0]
        arbiter = self._of(device)
        scheduler.background = arbiter.join_background(scheduler, turn.instances, member.wake)
        member.background = (device, scheduler.background)

    def _take_place(self, member: _Member, device: str, instances: list[Instance]) -> None:
        turn = self._of(device).join(member.scheduler, instances, member.weight, member.wake)
        member.turns.append((device, turn))

    def _of(self, device: str) -> Arbiter:
        self._users[device] = self._users.get(device, 0) + 1
        arbiter = self._arbiters.get(device)
        if arbiter is None:
            from carpool.core.arbiter import Arbiter  # of GPUs, and of background work

            takes_turns = not device.startswith(_processors(""))
            arbiter = self._arbiters[device] = Arbiter(exclusive=takes_turns)
        return arbiter

    def leave(self, scheduler: Scheduler) -> None:
        member = self._members.pop(scheduler, None)
        if member is None:
            return
        if member.background is not None:
            device, background = member.background
            self._arbiters[device].leave_background(background)
            scheduler.background = None
            self._drop(device)
        for device, turn in member.turns:
            self._arbiters[device].leave(turn)
            self._drop(device)

    def _drop(self, device: str) -> None:
        self._users[device] -= 1
        if not self._users[device]:
            del self._users[device], self._arbiters[device]


def _processors(model: str) -> str:
    """Returns, for all versions of one model that are on no device, a name that no device has."""
    return f"\0{model}"
