"""Keeps profiles from one start to the next, one JSON file each, in the user's cache folder.

A file is only a hint. One that cannot be read, or was made for another model, machine or setting, is ignored
with a warning; one that fits is checked against a few runs before it is believed.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from carpool.backends import device_names
from carpool.config.backend_kinds import BackendKind, kind_of
from carpool.config.fingerprint import content_digest
from carpool.config.model import ModelConfig, values_on_device
from carpool.config.regular_file import read_regular
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve, promised_batch, shape_of, slo_capacity
from carpool.core.numerals import apart, numeral
from carpool.core.objectives import Promise
from carpool.engine.profile.contention import Contention
from carpool.engine.profile.hardware import Hardware, hardware
from carpool.engine.profile.layouts import Layout
from carpool.engine.profile.measuring import Measured, Point
from carpool.engine.profile.profile_folder import MOST_BYTES, MOST_FILES, SUFFIX, ProfileFolder, SharedFiles
from carpool.engine.profile.run_memory import MUCH_MEMORY, REST_S, RunMemory
from carpool.errors import CarpoolError, ConfigError
from carpool.link.typed_json import as_json, from_json
from carpool.observe.logs import logger

LEAST = 2.2
"""Times a single image: who arrives just after another began waits for that one, and a little is lost."""


def keepable(config: ModelConfig, curve: BatchCurve, *, provisional: bool = False) -> tuple[ModelConfig, str]:
    """Returns the settings to serve with, and in words what became of the promise. Raises where it cannot be
    kept."""
    policy = config.policy
    if not isinstance(policy, Promise):
        return config, ""
    alone, slo = curve.times[1], policy.slo
    if config.slo_may_grow:
        return grown(config, alone, "one image", provisional=provisional)
    said = cannot_keep(config.name, slo, alone, "one image")
    if said:
        raise ConfigError(said)
    return config, ""


def cannot_keep(name: str, slo: float, alone: float, what: str) -> str:
    """Why this SLO cannot be kept where `what` takes so long alone; empty where it can."""
    if alone <= slo:
        return ""
    return (
        f"{name}: {what} takes {numeral(alone * 1e3)} ms here, so slo_ms = {slo * 1e3:g} cannot be met; "
        f"use at least {numeral(LEAST * alone * 1e3)} ms"
    )


def grown(
    config: ModelConfig, alone: float, what: str, *, provisional: bool = False
) -> tuple[ModelConfig, str]:
    """Returns the settings with the promise that can be kept where this takes so long alone, and that in
    words; as it is, if its promise is long enough. A promise does not grow because others used the
    machine: by `provisional` times it does so only where it could not even be kept for one who finds the
    model idle."""
    policy = config.policy
    if not isinstance(policy, Promise) or policy.slo >= (1.0 if provisional else LEAST) * alone:
        return config, ""
    slo = _rounded_up(LEAST * alone)
    takes = f"{what} takes {numeral(alone * 1e3)} ms here"
    said = f"SLO: {numeral(slo * 1e3)} ms instead of {numeral(policy.slo * 1e3)}, since {takes}."
    return replace(config, policy=replace(policy, slo=slo)), said


def _rounded_up(seconds: float) -> float:
    """To two digits: a promise is a number that people say."""
    step = 10.0 ** (floor(log10(seconds)) - 1)
    return ceil(seconds / step) * step


_MOST_COUNT = 1 << 20
_MOST_POINTS, _MOST_SECONDS, _MOST_MEMORY, _MOST_TEXT = 512, 1e7, 1 << 50, 20_000
_WORTH_IT = 0.85  # a piece must be this much cheaper per image before large batches are run in pieces
_ABOUT_AS_CHEAP = 1.03  # per image: so much dearer a piece may be where it spares much memory


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from the start of the engine's process, of the last start of a server; 0: not measured."""

    ready_s: float = 0.0
    full_speed_s: float = 0.0  # until every batch size was compiled, where that goes on behind the traffic


@dataclass(frozen=True, slots=True)
class BatchProof:
    """Describes what comparing batches with single requests found. Both sentences empty: they are equal."""

    rule: int = 0  # by which it was proven; 0: it was not
    differs: str = ""  # why a batch is not what its requests are alone
    off: float = 1.0  # by how much, as a share of the answer
    untried: str = ""  # why that could not be found out


@dataclass(frozen=True, slots=True)
class Profile:
    """`points` are empty for a model that could not be run on zeros, and for a fake one."""

    layout: Layout
    layout_reason: str = ""
    measured: Measured = field(default_factory=Measured)
    measured_at: str = ""  # UTC, ISO 8601
    reused: str = ""  # what the check of an older profile found
    memory: RunMemory = field(default_factory=RunMemory)
    elsewhere: bool = False  # another replica measured it, and a second look can follow in service
    started: StartTimes = field(default_factory=StartTimes)
    compiled: tuple[Point, ...] = ()  # of sizes that were compiled while it served; the others are plain
    proof: BatchProof = BatchProof()

    @property
    def points(self) -> tuple[Point, ...]:
        return self.measured.points

    @property
    def provisional(self) -> str:
        """Returns what disturbed the machine while it was measured; empty: it was calm."""
        return self.measured.provisional


def read_profile(document: object) -> Profile:
    """Reads what `as_json` made of one. Raises ValueError, KeyError or TypeError for what cannot be right."""
    profile: Profile = from_json(Profile, document)
    counts = [
        profile.layout.instances,
        profile.layout.threads,
        *(p.size for p in profile.points + profile.compiled),
    ]
    if not all(1 <= count <= _MOST_COUNT for count in counts) or len(counts) > _MOST_POINTS:
        raise ValueError("a count that cannot be")
    _check_rest(profile)
    BatchCurve.measured([(point.size, point.seconds) for point in profile.points])
    if profile.compiled:
        BatchCurve.measured([(point.size, point.seconds) for point in profile.compiled])
    return profile


def _check_rest(profile: Profile) -> None:
    """Looks at what is shown and counted: who can write a profile is not trusted with a terminal, either."""
    measured, memory, started = profile.measured, profile.memory, profile.started
    times = [point.seconds for point in profile.points + profile.compiled]
    times += [point.spread for point in profile.points + profile.compiled]
    if not all(0 <= seconds <= _MOST_SECONDS for seconds in (*times, started.ready_s, started.full_speed_s)):
        raise ValueError("a time that cannot be")
    if not all(0 <= count <= _MOST_MEMORY for count in (memory.measuring, memory.service)):
        raise ValueError("an amount of memory that cannot be")
    said = [measured.ended, measured.provisional, profile.layout_reason, profile.measured_at, profile.reused]
    said += [profile.proof.differs, profile.proof.untried]
    if sum(map(len, said)) > _MOST_TEXT or not all(c.isprintable() or c in "\n\t" for c in "".join(said)):
        raise ValueError("a text that cannot be")


def best_piece(curve: BatchCurve, kind: BackendKind, memory: int = 0) -> int:
    """Returns the size in which a large batch is run: the whole, unless pieces are clearly cheaper per image,
    or about as cheap where large batches take much `memory`: then the smallest that is."""
    whole = curve.max_batch
    if not kind.in_pieces:
        return whole
    each = {size: curve.times[size] / size for size in (*(size for size, _ in curve.points), whole)}
    best = min(each, key=each.__getitem__)
    if memory >= MUCH_MEMORY:
        return min(size for size, one in each.items() if one <= _ABOUT_AS_CHEAP * each[best])
    least, most = each[best], _WORTH_IT * each[whole]
    if least >= most:
        return whole
    alone = curve.times[1]  # as it lies, while several are copied together first: that was not measured
    return 1 if alone < most and _WORTH_IT * alone < least else best


def choices(
    profile: Profile, curve: BatchCurve, piece: int, slo: float | None, measured_with: str = ""
) -> tuple[str, ...]:
    """Returns what was chosen and why, a sentence each."""
    said = []
    if profile.layout_reason:
        said.append(f"{profile.layout}: {profile.layout_reason}.")
    if profile.points:
        sizes = ", ".join(str(point.size) for point in profile.points)
        why = f"; no larger ones, since {profile.measured.ended}" if profile.measured.ended else ""
        how = f", {measured_with}" if measured_with else ""
        said.append(f"Measured and warm: batches of {sizes}{how}{why}.")
    if profile.provisional:
        said.append(
            f"Provisional: {profile.provisional}; the times are what is left without the waiting for a core, "
            "and it is measured again when the machine is calm."
        )
    if slo is not None:
        said += _promised(curve, slo, profile.layout.instances)
    elif profile.points:
        knee = shape_of(curve.points).knee
        said.append(f"A batch of {knee} reaches 90 % of the highest throughput. There is no SLO.")
    if piece < curve.max_batch:
        saved = 1 - curve.times[piece] / piece / (curve.times[curve.max_batch] / curve.max_batch)
        why = f"{saved:.0%} less time for each image" if saved > 0 else "less memory, about the same time"
        said.append(f"Large batches run in pieces of {piece}: {why}.")
    if profile.memory.service >= MUCH_MEMORY:
        said.append(
            f"Batches take {profile.memory.service / 1e6:,.0f} MB beside the weights while all instances "
            f"run. It is kept from batch to batch, and given back after {REST_S:g} s without requests."
        )
    if profile.reused:
        said.append(profile.reused)
    return tuple(said)


def _promised(curve: BatchCurve, slo: float, instances: int) -> list[str]:
    """Numbers are given with as many digits as show that they justify the sentence."""
    largest = max(1, curve.fits(slo))
    takes = (
        curve.times[min(largest + 1, curve.max_batch)] if largest < curve.max_batch else curve.times[largest]
    )
    said_takes, said_slo = apart(takes * 1e3, slo * 1e3)
    if largest < curve.max_batch:
        said = [
            f"Largest batch: {largest} of {curve.max_batch}. A batch of {largest + 1} takes {said_takes} ms, "
            f"longer than the SLO of {said_slo} ms."
        ]
    else:
        said = [f"Largest batch: {largest}. It takes {said_takes} ms, within the SLO of {said_slo} ms."]
    batch = promised_batch(curve, slo)
    if not batch:
        said.append(
            f"The SLO of {numeral(slo * 1e3, 4)} ms is not certain under load: one image takes "
            f"{numeral(curve.times[1] * 1e3, 4)} ms, and a request may wait for the running batch first. "
            f"An SLO of {numeral(LEAST * curve.times[1] * 1e3, 4)} ms can be kept."
        )
        return said
    each = numeral(curve.times[batch] * 1e3, 4)
    said.append(
        f"Under load, batches of about {batch}: a request waits for the running batch ({each} ms) and then "
        f"for its own ({each} ms), within the SLO of {apart(2e3 * curve.times[batch], slo * 1e3)[1]} ms. "
        f"Sustained throughput: {numeral(slo_capacity(curve, slo, instances))} images/s."
    )
    return said


log = logger("engine")

SURELY_FALSE = 10.0  # no replica on the same hardware can have measured what is off by this factor
STILL_TRUE = 1.3  # times in a kept profile may be off by this factor, for machines are never quite quiet

FORMAT = 4

Key = Mapping[str, Any]


def profile_key(config: ModelConfig, version: ModelVersion, machine: Hardware | None = None) -> Key | None:
    """Returns everything that a profile depends on, as JSON; None for a model without files. It reads them
    all."""
    if version.file is None:
        return None
    slo = config.policy.slo if isinstance(config.policy, Promise) else None
    runtime, image, detect = config.onnxruntime, config.image, config.detect
    fixed = [[group.count, group.kind.value, list(group.gpus)] for group in config.instances if group.given]
    return {
        "format": FORMAT,
        "model": content_digest(version.file),
        "backend": [config.backend, _version_of(config.backend)],
        "settings": {
            "slo": slo,
            "max_batch": config.max_batch,
            "tensors": [[t.name, t.datatype, list(t.dims)] for t in config.inputs + config.outputs],
            "instances": fixed,
            "onnxruntime": [
                [*runtime.providers, *config.accelerators],
                runtime.intra_op_threads,
                runtime.inter_op_threads,
            ],
            "pytorch": _pytorch(config, version.file),
            "on device": [
                image.decode if image else None,
                detect.nms if detect else None,
            ],  # takes time
            "parameters": dict(sorted(config.parameters.items())),
        },
        "hardware": {**asdict(machine := machine or hardware()), "gpus": list(machine.gpus)},
    }


def key_text(key: Key | None) -> str:
    """Returns the same text for the same key."""
    return json.dumps(key, sort_keys=True)


def _pytorch(config: ModelConfig, file: Path) -> dict[str, Any] | None:
    """Returns its settings as they were settled, the code of its network, and the devices by name."""
    if not kind_of(config.backend).values_on_device:
        return None
    used = asdict(config.pytorch)
    code = None if config.pytorch.module is None else file.parent / config.pytorch.module.partition(":")[0]
    image = config.image if values_on_device(config) else None
    return {
        **used,
        "buckets": list(config.pytorch.buckets),
        "code": content_digest(code) if code is not None and code.is_file() else "",
        "values": [] if image is None else [image.scale, list(image.mean), list(image.std), image.layout],
        "devices": list(device_names(config)),
    }


def _version_of(backend: str | None) -> str:
    try:
        return importlib.metadata.version(kind_of(backend).package or str(backend))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return platform.python_version()


class ProfileStore:
    """Reads and writes; nothing that goes wrong with it keeps a model from being served. What other replicas
    measured lies in `shared`."""

    def __init__(
        self,
        cache_dir: Path | None,
        shared: SharedFiles | None = None,
        *,
        looks_again: bool = False,
        restarted: bool = False,
    ) -> None:
        """`looks_again`: models are measured a second time in service, where a profile is in doubt.
        `restarted`: an engine of this server has just served by these profiles, and clients wait."""
        self._restarted = restarted and looks_again
        self.whose = "the last engine" if self._restarted else "another replica"
        self.cache_dir = cache_dir
        self._own = own = None if cache_dir is None else ProfileFolder(cache_dir / "profiles")
        self._places: list[SharedFiles] = [place for place in (own, shared) if place is not None]
        self._shared = shared if looks_again else None
        self.place = self.secret = ""  # where servers share profiles, and how they know each other's

    @classmethod
    def of(
        cls,
        cache_dir: Path | None,
        shared: str = "",
        secret: str = "",
        *,
        looks_again: bool = False,
        restarted: bool = False,
    ) -> ProfileStore | None:
        """Returns None where nothing is to be kept."""
        if cache_dir is None and not shared:
            return None
        places = None
        if shared:
            from carpool.engine.profile.shared_profiles import shared_files

            places = shared_files(shared, secret)
        store = cls(cache_dir, places, looks_again=looks_again, restarted=restarted)
        if shared:
            store.place, store.secret = shared, secret
        return store

    def read(self, key: Key) -> Profile | None:
        """Returns the first that was measured on a calm machine, else any."""
        name, found = _file_name(key), None
        for place in self._places:
            profile = self._read(place, name, key)
            if profile is not None and not profile.provisional:
                return profile
            found = found or profile
        return found

    def _read(self, place: SharedFiles, name: str, key: Key) -> Profile | None:
        try:
            data = place.read(name)
            if data is None:
                return None
            if len(data) > MOST_BYTES:
                raise ValueError("it is too large")
            document = json.loads(data)
            if document["key"] != key:
                raise ValueError("it was made for something else")
            return replace(
                read_profile(document["profile"]), elsewhere=self._restarted or place is self._shared
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            where = f"{place.where}/{name}"
            log.warning("profile-unreadable", file=where, error=f"{type(error).__name__}: {error}")
            return None

    def write(self, key: Key, profile: Profile) -> None:
        name = _file_name(key)
        data = json.dumps({"key": key, "profile": as_json(profile)}, indent=1).encode()
        for place in self._places:
            try:
                place.write(name, data)
            except OSError as error:
                where = f"{place.where}/{name}"
                log.warning("profile-not-stored", file=where, error=error.strerror or str(error))

    def note_start(self, key: str, started: StartTimes) -> None:
        """Writes it into this machine's own profile with the key of this text, if there is one: the rest of
        it stays as it was measured."""
        own, name = self._own, _named(key)
        profile = None if own is None or not key else self._read(own, name, json.loads(key))
        if own is None or profile is None:
            return
        document = {"key": json.loads(key), "profile": as_json(replace(profile, started=started))}
        try:
            own.write(name, json.dumps(document, indent=1).encode())
        except OSError as error:
            log.warning("profile-not-stored", file=f"{own.where}/{name}", error=error.strerror or str(error))


def last_start(cache_dir: Path, version: ModelVersion) -> StartTimes | None:
    """Returns the last start of these files on this hardware, with whatever settings; None if there is no
    record of one."""
    if version.file is None:
        return None
    model, here = content_digest(version.file), {**asdict(hardware()), "gpus": list(hardware().gpus)}
    found: list[tuple[float, StartTimes]] = []
    for path in sorted((cache_dir / "profiles").glob(f"*{SUFFIX}"))[:MOST_FILES]:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(read_regular(path, MOST_BYTES))
            key, started = document["key"], read_profile(document["profile"]).started
            if key["model"] == model and key["hardware"] == here and started.ready_s > 0:
                found.append((path.stat().st_mtime, started))
    return max(found, key=lambda one: one[0])[1] if found else None


def _file_name(key: Key) -> str:
    """Returns a name by all that the profile depends on, the hardware too."""
    return _named(key_text(key))


def _named(key: str) -> str:
    return f"{sha256(key.encode()).hexdigest()[:40]}{SUFFIX}"


# ---- the profile of one version


class KeptProfile:
    """Reads and writes the profile of one version, if there is a store for it."""

    def __init__(self, store: ProfileStore | None) -> None:
        self.store = store
        self.key: Key | None = None  # by which it is kept, once `read` was called

    @property
    def name(self) -> str:
        """Returns the key as text; empty: it is not kept."""
        return "" if self.key is None else key_text(self.key)

    @property
    def whose(self) -> str:
        """Returns who else measures for this server, in words."""
        return "another replica" if self.store is None else self.store.whose

    def read(self, config: ModelConfig, version: ModelVersion) -> Profile | None:
        """Returns what was measured of a version like this one."""
        if self.store is None:
            return None
        try:
            self.key = profile_key(config, version)
        except (OSError, CarpoolError) as error:
            log.warning("profile-not-stored", model=config.name, error=str(error))
            return None
        return None if self.key is None else self.store.read(self.key)

    def write(self, profile: Profile) -> None:
        """Keeps a profile for the next start."""
        if self.key is not None and self.store is not None and profile.points:
            self.store.write(self.key, profile)


def judged(
    kept: Profile, off: float, busy: Contention, *, model: str, whose: str, most: float
) -> Profile | None:
    """Returns the profile that the version is served with, where batches take `off` times what it says; None:
    it is measured again. `most` is how far off one of another replica may be."""
    far = max(off, 1 / off)
    if kept.elsewhere and far <= most:
        return _as_elsewhere(kept, off, whose)
    if kept.provisional and not busy.why:  # models that run elsewhere have no other second look
        log.debug("profile-measured-again", model=model, ratio=round(off, 3), of=kept.measured_at)
        return None
    said = f"The profile of {kept.measured_at} was used again: batches take {off:.3g} × what it says"
    if busy.why and off > STILL_TRUE >= off * (1 - busy.waited):  # the machine is slow, not the model
        log.debug("profile-reused", model=model, ratio=round(off, 3), of=kept.measured_at, busy=busy.why)
        return replace(kept, reused=f"{said}, since {busy.why}.")
    if far > STILL_TRUE:
        log.warning("profile-outdated", model=model, ratio=round(off, 3), of=kept.measured_at)
        return None
    log.debug("profile-reused", model=model, ratio=round(off, 3), of=kept.measured_at)
    return replace(kept, reused=f"{said}.")


def _as_elsewhere(kept: Profile, off: float, whose: str) -> Profile:
    """Returns a profile that another replica of the same hardware measured, or this server's engine before it
    was restarted. It is not measured again before this one serves. Where it does not fit, that is looked into
    in service, once the machine is calm."""
    log.debug("profile-reused", ratio=round(off, 3), of=kept.measured_at, elsewhere=True)
    said = f"{whose[0].upper()}{whose[1:]}'s profile of {kept.measured_at} was used: batches take "
    said += f"{off:.3g} × what it says."
    doubt = kept.provisional
    if max(off, 1 / off) > STILL_TRUE:
        doubt = f"batches took {off:.3g} × what {whose} measured"
    return replace(kept, reused=said, measured=replace(kept.measured, provisional=doubt), elsewhere=False)
