"""From a version's file to instances that are warm and measured. All of it runs off the loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from carpool import backends
from carpool.backends.backend import Backend
from carpool.config.model import ModelConfig, TensorConfig
from carpool.config.repository import ModelVersion
from carpool.core.curve import BatchCurve
from carpool.core.policy import Promise
from carpool.engine.labels import read_labels
from carpool.engine.warmup import measure, run_time
from carpool.errors import CarpoolError, ConfigError, ModelError
from carpool.observe.logs import logger
from carpool.types import DATATYPES, Signature, TensorSpec
from carpool.vision.input_form import read_form
from carpool.vision.lookup import lookup_tables
from carpool.vision.settings import VisionSettings, describe

log = logger("engine")

_CLEARLY_FASTER = 0.8
_SHORT_S = 0.001  # next to what a request costs anyway: a second core is better used for the next one


@dataclass(slots=True)
class Ready:
    """What loading produced, before it serves."""

    config: ModelConfig
    signature: Signature
    curve: BatchCurve
    backends: list[Backend]
    labels: Mapping[str, Sequence[str]]  # by output
    vision: VisionSettings | None  # how it answers pictures, if it does

    def close(self) -> None:
        for backend in self.backends:
            backend.close()


class Loading:
    """Loads one version: all of its instances, and later one that replaces a lost one."""

    def __init__(self, config: ModelConfig, version: ModelVersion) -> None:
        self._config = config
        self._version = version
        self._threads: int | None = None

    def prepare(self, progress: Callable[[str], None]) -> Ready:
        config = backends.describe(self._config, self._version)
        count = instance_count(config)
        signature = signature_of(config)
        labels = read_labels(config)
        vision = _vision(config, signature, labels)  # what is wrong there is told before anything is loaded
        loaded: list[Backend] = []
        try:
            for index in range(count):
                progress(f"loading instance {index + 1} of {count}")
                loaded.append(self.backend(config, index, count))
            curve = _warm_up(config, loaded, signature, progress)
            return Ready(config, signature, curve, loaded, labels, vision)
        except BaseException:
            for backend in loaded:
                backend.close()
            raise

    def backend(self, config: ModelConfig, index: int, count: int) -> Backend:
        if self._threads is None:
            self._threads = self._choose_threads(config, count)
        return backends.load(config, self._version, instance=index, threads=self._threads)

    def _choose_threads(self, config: ModelConfig, count: int) -> int:
        """Several threads for one run only where they clearly shorten it: small models only pay for them."""
        shared = backends.default_threads(count, len(os.sched_getaffinity(0)))
        if shared == 1 or config.backend != "onnxruntime" or config.onnxruntime.intra_op_threads:
            return shared
        alone = self._try(config, 1)
        if alone is not None and alone < _SHORT_S:
            return 1
        together = self._try(config, shared)
        if alone is None or together is None:
            return shared  # it cannot be tried on zeros; what is wrong is told later, if it matters
        return shared if together < _CLEARLY_FASTER * alone else 1

    def _try(self, config: ModelConfig, threads: int) -> float | None:
        """Seconds for one image with so many threads."""
        backend = backends.load(config, self._version, threads=threads)
        try:
            return run_time(backend, signature_of(config), 1)
        except CarpoolError:
            return None
        finally:
            backend.close()


def _vision(
    config: ModelConfig, signature: Signature, labels: Mapping[str, Sequence[str]]
) -> VisionSettings | None:
    """How the model answers pictures; raises what its settings say and its tensors cannot be."""
    vision, notes = describe(config, signature, labels)
    try:
        if vision is not None:
            form = read_form(vision.image, vision.input, config.name)
            lookup_tables(vision.image, form, vision.input.datatype, config.name)
    except ConfigError as error:
        if config.task is not None or config.image is not None:
            raise
        vision, notes = None, [f"it has no image route: {error.message}"]  # nobody asked for one
    for note in notes:
        log.info("pictures", model=config.name, note=note)
    return vision


def _warm_up(
    config: ModelConfig,
    loaded: list[Backend],
    signature: Signature,
    progress: Callable[[str], None],
) -> BatchCurve:
    try:
        curve = measure(config, loaded[0], signature, lambda n: progress(f"measuring a batch of {n}"))
        if config.fake is None:
            for backend in loaded[1:]:
                run_time(backend, signature, max(1, signature.max_batch))
    except ModelError as error:
        if isinstance(config.policy, Promise):
            raise ModelError(
                f"{config.name}: a promise needs a measured model, and warming up failed: {error.message}"
            ) from error
        if not all(backend.alive for backend in loaded):
            raise
        log.warning("warm-up-failed", model=config.name, error=error.message)
        curve = BatchCurve.linear(0.001, 0.001, max(1, signature.max_batch))
    if isinstance(config.policy, Promise) and curve.times[1] > config.policy.slo:
        alone = curve.times[1] * 1e3
        raise ConfigError(
            f"{config.name}: one image takes {alone:.3g} ms here, so slo_ms = "
            f"{config.policy.slo * 1e3:g} cannot be kept; promise at least {2.2 * alone:.3g} ms"
        )
    return curve


def instance_count(config: ModelConfig) -> int:
    """Without a GPU, groups that ask for one run on the CPU: the counts add up."""
    return max(1, sum(group.count * max(1, len(group.gpus)) for group in config.instances))


def signature_of(config: ModelConfig) -> Signature:
    def specs(tensors: Sequence[TensorConfig]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(t.name, DATATYPES[t.datatype], t.dims) for t in tensors)

    return Signature(config.name, specs(config.inputs), specs(config.outputs), config.max_batch or 0)
