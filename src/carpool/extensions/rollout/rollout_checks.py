"""What is looked at before a candidate gets any traffic: which versions there are, whether it is another
model in disguise, and how fast it is; and what is reported of it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

from carpool.config.fingerprint import content_digest
from carpool.config.model import LatestVersions, ModelConfig, SpecificVersions
from carpool.config.repository import version_folders
from carpool.core.curve import slo_capacity
from carpool.core.objectives import Promise
from carpool.engine.fleet.model_state import ModelState
from carpool.engine.models.served import Served
from carpool.errors import ConfigError
from carpool.extensions.rollout import counted
from carpool.extensions.rollout.capacity import Carrier
from carpool.extensions.rollout.rollout_file import Record
from carpool.extensions.rollout.rollout_guards import GuardResult
from carpool.extensions.rollout.rollout_states import Rollout, Traffic
from carpool.extensions.rollout.settings import RolloutSettings, rollout_settings
from carpool.extensions.rollout.split import RolloutSplit
from carpool.extensions.rollout.state_claims import Held
from carpool.observe import columns
from carpool.observe.counters import Row, Table
from carpool.observe.process_tree import anonymous_bytes, family
from carpool.types import TensorSpec

_SCALES_WITH_THE_PICTURE = ("detect", "segment", "pose", "obb", "depth", "text_regions")


def pinned(
    config: ModelConfig,
    folder: Path,
    rollout: Rollout | None,
    *,
    by_hand: bool = False,
    serving: Collection[int] = (),
    sent_back: Collection[int] = (),
    held: Held | None = None,
) -> ModelConfig:
    """Returns the settings with the versions that a rollout wants loaded: the one that serves first, and
    alone until it does, so that no request waits for a candidate which does not load. For any thread."""
    present = version_folders(folder)
    wanted: tuple[int, ...] = ()
    if rollout is None:
        if held is not None and held.serving and int(held.serving) in present:
            wanted = (int(held.serving),)
        elif "rollout" in config.extra and "registry" not in config.extra:
            there = [version for version in serving if version in present]  # what serves goes on
            wanted = tuple(filter(None, (max(there, default=None) or first_pair(config, present)[0],)))
    elif "registry" in config.extra or not swapped_in(config, rollout, by_hand, present, sent_back):
        if "registry" not in config.extra and int(rollout.serving) not in present:
            return _without_serving(config, rollout, {*present} - {*sent_back}, serving)
        versions = [int(version) for version in rollout.wanted if int(version) in present]
        wanted = tuple(versions[:1] if versions and versions[0] not in serving else versions)
    if not wanted:
        by_policy = "rollout" not in config.extra or "registry" in config.extra
        return config if by_policy else replace(config, versions=LatestVersions())
    return replace(config, versions=SpecificVersions(tuple(sorted(wanted))))


def swapped_in(
    config: ModelConfig,
    rollout: Rollout,
    by_hand: bool,
    versions: Collection[int],
    sent_back: Collection[int],
) -> bool:
    """Returns whether the newest of these serves as if there had been no rollout: the last one was asked for
    by hand and is over, the settings ask for none, and what came since was not sent back."""
    newest = max(versions, default=0)
    known = rollout.over and newest > int(rollout.candidate) and newest not in sent_back
    return known and by_hand and "rollout" not in config.extra


def _without_serving(
    config: ModelConfig, rollout: Rollout, unjudged: Collection[int], loaded: Collection[int]
) -> ModelConfig:
    """The version that answers is not in its folder any more. What is in memory goes on, and else stable, or
    any other, is served, but for those that did not take over: a request for one of them has to name it."""
    if isinstance(config.versions, SpecificVersions):
        return config
    over = rollout.stable == rollout.candidate
    others = [number for number in unjudged if number != int(rollout.candidate)]
    if not others or (int(rollout.serving) in loaded and not over):
        judged = "" if over else f", and version {rollout.candidate} is {rollout.state}"
        raise ConfigError(
            f"{config.name}: version {rollout.serving}, which serves, is not in its folder{judged}: "
            "restore it, or set another in versions and remove [rollout]"
        )
    stable = int(rollout.stable)  # of a candidate that had taken over, and is gone
    return replace(config, versions=SpecificVersions((stable if stable in others else max(others),)))


def first_pair(config: ModelConfig, present: Collection[int]) -> tuple[int | None, int | None]:
    """Stable and candidate of a model that nothing is known of: the candidate is the one that is named, or
    the newest, and stable the newest besides it."""
    settings = rollout_settings(config)
    assert settings is not None
    candidate = settings.candidate or max(present, default=None)
    others = [number for number in present if number != candidate]
    older = [number for number in others if candidate is None or number < candidate]
    stable = max(older or others, default=None)
    return (stable, candidate) if stable is not None else (candidate, None)


def digest_of(folder: Path, version: str) -> str:
    """Returns a digest of a version's content. One without files is known by its number. Not for the loop's
    thread."""
    home = version_folders(folder).get(int(version))
    if home is None or not any(path.is_file() for path in home.rglob("*")):
        return blake2b(f"{folder.name}/{version}".encode(), digest_size=20).hexdigest()
    return content_digest(home / "model")  # a version's folder counts as a whole


def not_for_two(model: ModelState | None) -> str:
    """Returns why requests of this model cannot be divided between two versions, or sent to both. Empty: they
    can."""
    for served in () if model is None else model.serving.values():
        if served.config.asks("sequences"):
            return "it takes sequences, whose requests cannot go to two versions"
        if served.writes:
            return "it writes token by token, and such responses are not compared"
        if served.config.decoupled:
            return "it is decoupled, and several responses to a request are not compared"
        if served.runs_nothing:
            return "its versions have the same steps; roll out the models that are its steps"
    return ""


def differences(stable: Served, candidate: Served) -> list[str]:
    """Returns what clients of one would notice about the other, in words. Labels may grow; and where clients
    send pictures, their size does not matter."""
    return list(_differences(stable, candidate))


def _differences(stable: Served, candidate: Served) -> Iterator[str]:
    mine, its = stable.vision, candidate.vision
    tasks = [None if vision is None else str(vision.task) for vision in (mine, its)]
    if tasks[0] != tasks[1]:
        yield f"its task is {tasks[1] or 'none'}, not {tasks[0] or 'none'}"
    resized = mine is not None and its is not None and mine.input.shape != its.input.shape
    pictures = resized and len(stable.signature.inputs) == len(candidate.signature.inputs) == 1
    yield from _tensors("input", stable.signature.inputs, candidate.signature.inputs, any_shape=pictures)
    scales = pictures and tasks[0] in _SCALES_WITH_THE_PICTURE
    yield from _tensors("output", stable.signature.outputs, candidate.signature.outputs, any_shape=scales)
    batches = stable.signature.max_batch, candidate.signature.max_batch
    if batches[1] < batches[0]:
        yield f"its largest batch is {batches[1]}, not {batches[0]}"
    labels = [_labels(served) for served in (stable, candidate)]
    for place, label in enumerate(labels[0]):
        given = labels[1][place] if place < len(labels[1]) else "missing"
        if given != label:
            yield f"its label {place} is {given!r}, not {label!r}"
            break


def _labels(served: Served) -> tuple[str, ...]:
    if served.vision is not None and served.vision.labels:
        return tuple(served.vision.labels)
    return next((tuple(lines) for lines in served.labels.values() if lines), ())


def _tensors(
    side: str, mine: Collection[TensorSpec], its: Collection[TensorSpec], *, any_shape: bool
) -> Iterator[str]:
    given = {spec.name: spec for spec in its}
    for spec in mine:
        other = given.pop(spec.name, None)
        if other is None:
            yield f"{side} '{spec.name}' is missing"
        elif other.datatype is not spec.datatype:
            yield f"{side} '{spec.name}' is {other.datatype.value}, not {spec.datatype.value}"
        elif len(other.shape) != len(spec.shape) or (other.shape != spec.shape and not any_shape):
            yield f"{side} '{spec.name}' has the shape {list(other.shape)}, not {list(spec.shape)}"
    for name in given:
        yield f"{side} '{name}' is new"


def carrier(served: Served) -> Carrier:
    scheduler = served.scheduler
    assert scheduler is not None  # `not_for_two` saw to it
    return Carrier(served.version, scheduler.belief.runs, len(scheduler.instances), served.config.policy)


def curve_document(served: Served) -> dict[str, Any]:
    """Returns the batch times of a version, in ms."""
    one = carrier(served)
    policy = one.policy
    promise = policy if isinstance(policy, Promise) else None
    return {
        "points": [[size, seconds * 1e3] for size, seconds in one.curve.points],
        "instances": one.instances,
        "slo_ms": None if promise is None else promise.slo * 1e3,
        "capacity_rps": None if promise is None else slo_capacity(one.curve, promise.slo, one.instances),
    }


def status_document(
    record: Record, now: float, route: RolloutSplit | None, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what `GET …/rollout` answers: rich enough for a page that draws it. `route` is what front ends
    do."""
    rollout, plan = record.rollout, record.plan
    traffic = rollout.traffic(plan)
    if route is None and rollout.serving == rollout.stable:  # the candidate is not loaded, or may not answer
        traffic = Traffic()
    return {
        "model": record.model,
        "state": str(rollout.state),
        "step": rollout.step,
        "steps": len(plan.canary),
        "stable": rollout.stable,
        "candidate": rollout.candidate,
        "share": traffic.share,
        "shadow": traffic.mirrored,
        "paused_in": None if rollout.before is None else str(rollout.before),
        "why": rollout.why,
        "elapsed_s": round(rollout.elapsed(now), 3),
        "counts": record.counts.as_document(),
        "capacity": record.capacity,
        "curves": record.curves,
        "rates": record.rates,
        "digests": record.digests,
        "rollbacks": record.rollbacks,
        **more,
    }


def route_of(record: Record, epoch: int) -> RolloutSplit:
    """Returns what front ends do for it."""
    rollout, plan = record.rollout, record.plan
    traffic = rollout.traffic(plan)
    return RolloutSplit(
        rollout.stable,
        rollout.candidate,
        traffic.share,
        record.salt,
        plan.sticky,
        traffic.mirrored,
        traffic.compared,
        plan.fallback,
        epoch,
        bool(plan.keep.folder),
        asdict(plan.compare),
        plan.guards.slower or 0.0,
    )


def requests_so_far(table: Table) -> dict[str, float]:
    """Returns them by model: all that came since the counters began, answered or not."""
    totals: dict[str, float] = {}
    for row in table.models():
        came = sum(row.cells[columns.REQUEST_SECONDS.buckets])
        came += sum(row.cells[column] for column in columns.FAILURES.values())
        totals[row.model] = totals.get(row.model, 0.0) + came
    return totals


def resident_gb() -> float:
    """Returns the memory that this process and those that it started have for themselves."""
    return sum(map(anonymous_bytes, family(os.getpid()))) / 1e9


def write_row(row: Row, rollout: Rollout, plan: RolloutSettings, guards: Iterable[GuardResult]) -> None:
    """Writes what the metrics page says of a candidate."""
    traffic = rollout.traffic(plan)
    for word, column in counted.STATE.items():
        row.set(column, float(word == rollout.state))
    row.set(counted.SHARE["answers"], traffic.share)
    row.set(counted.SHARE["shadow"], traffic.mirrored)
    for guard in guards:
        row.set(counted.BOUND[f"{guard.name},low"], guard.low)
        row.set(counted.BOUND[f"{guard.name},high"], guard.high if isfinite(guard.high) else -1.0)
