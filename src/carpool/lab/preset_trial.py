"""Runs one picture through one model with its own settings and under every preset, so that a person sees
which is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from carpool import backends
from carpool.backends.backend import Backend, Placement
from carpool.config.backend_kinds import kind_of
from carpool.config.model import ModelConfig
from carpool.config.presets import PRESETS, PictureChoice
from carpool.config.repository import ModelSource
from carpool.engine.loading.trial import Examined, examine, try_out
from carpool.errors import CarpoolError, ConfigError
from carpool.vision.plans.picture_plan import PicturePlan
from carpool.vision.plans.settings import describe

AS_CONFIGURED = "model.toml"
"""Stands in place of a preset for what the model's own settings say of pixels."""


@dataclass(frozen=True, slots=True)
class PresetAnswer:
    """Describes what the model says where its pixels are made by this preset. `drawn` is a JPEG, if it can be
    drawn."""

    preset: str
    task: str
    answer: dict[str, Any]
    drawn: bytes | None = None
    trouble: str = ""  # why there is no answer


class PresetTrial:
    """The model is opened once; again for each preset only where its device makes values of pixels."""

    def __init__(self, source: ModelSource, choice: PictureChoice) -> None:
        self._source, self._choice = source, choice
        self._open: Backend | None = None
        examined = examine(choice.applied(source.config), source.versions[-1])
        self._version = examined.version
        self._found = try_out(examined, self._load)

    def answers(self, picture: bytes) -> list[PresetAnswer]:
        config = self._source.config
        own = [] if config.preset is None and config.image is None else [AS_CONFIGURED]
        try:
            return [self._answer(preset, picture) for preset in (*own, *PRESETS)]
        finally:
            if self._open is not None:
                self._open.close()

    def _answer(self, preset: str, picture: bytes) -> PresetAnswer:
        chosen = None if preset == AS_CONFIGURED else preset
        config = replace(self._choice, preset=chosen).applied(self._source.config)
        found = examine(config, self._source.versions[-1])._replace(seen=self._found.seen)
        said = describe(found.config, found.signature, found.labels, found.seen)
        if said.vision is None:
            raise ConfigError(f"{config.name}: {said.ask or 'it takes no images'}")
        task = str(said.vision.task)
        try:
            plan = PicturePlan(said.vision, config.name)
            memory = bytearray(plan.bytes)
            geometry = plan.prepare(picture, memory)
            pixels = np.ndarray(plan.transform.shape, plan.transform.dtype, memory)
            outputs = self._run(found, plan.settings.input.name, pixels)
            drawn = plan.drawn(picture, outputs, geometry) if "overlay" in plan.answers.options else None
            return PresetAnswer(preset, task, plan.answer(outputs, geometry), drawn)
        except CarpoolError as error:
            return PresetAnswer(preset, task, {}, trouble=error.message)

    def _run(self, found: Examined, name: str, pixels: Any) -> dict[str, Any]:
        signature = found.signature
        whole = signature.max_batch > 0 or len(signature.input_named[name].shape) > pixels.ndim
        given = {name: pixels[None] if whole else pixels}
        if kind_of(found.config.backend).values_on_device:
            backend = self._load(found.config)
            try:
                answered = backend.run(given, ())
            finally:
                backend.close()
        else:
            self._open = self._open or self._load(found.config)
            answered = self._open.run(given, ())
        return {key: array[0] if signature.max_batch else array for key, array in answered.items()}

    def _load(self, config: ModelConfig) -> Backend:
        devices: Sequence[int] = backends.devices(config)
        placement = Placement(threads=1, gpu=devices[0] if devices else None, hurry=True)
        return backends.load(config, self._version, placement)
