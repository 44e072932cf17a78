"""Pictures of cameras in virtual time, as far as drift sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from random import Random
from typing import Any

import cv2
import numpy as np

from carpool.extensions.drift.measures import answer_values
from carpool.extensions.drift.model_drift import DriftEvent, ModelDrift, SampledAnswer
from carpool.extensions.drift.samples import picture_values
from carpool.extensions.drift.settings import DriftSettings
from carpool.types import Array
from carpool.vision.decode import Decoded

HOUR = 3600.0
SETTINGS = DriftSettings(reference="first-2h")
VARIANTS = 40
PICTURES = ("astronaut", "chelsea", "coffee")

Change = Callable[[Array], Array]


def same(scene: Array) -> Array:
    return scene


def darkened(scene: Array) -> Array:
    return (scene * 0.45).astype(np.uint8)


def blurred(scene: Array) -> Array:
    return cv2.GaussianBlur(scene, (0, 0), 3.0)  # type: ignore[return-value]


def cropped(scene: Array) -> Array:
    return np.ascontiguousarray(scene[24:-24, 32:-32])


@cache
def scene_of(name: str) -> Array:
    data = (resources.files("carpool.demo") / "pictures" / f"{name}.jpg").read_bytes()
    found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(found, (320, 240), interpolation=cv2.INTER_AREA)  # type: ignore[return-value]


@cache
def variants(name: str, change: Change) -> Sequence[tuple[dict[str, Any], str, bool]]:
    """A scene as its camera sees it: other light, and another noise, each time."""
    draw = np.random.default_rng(len(name))
    seen = []
    for _ in range(VARIANTS):
        scene = change(scene_of(name))
        light = draw.uniform(0.85, 1.15)
        noise = draw.normal(0.0, 3.0, scene.shape)
        pixels = np.clip(scene * light + noise, 0, 255).astype(np.uint8)
        height, width = pixels.shape[:2]
        size = len(cv2.imencode(".jpg", pixels[..., ::-1])[1])
        seen.append(picture_values(Decoded(pixels, width, height), size))
    return seen


def answer(draw: Random) -> dict[str, Any]:
    labels = [draw.choice(("cat", "cup", "person")) for _ in range(draw.randint(0, 3))]
    boxes = [[0.0, 0.0, draw.uniform(20, 200), draw.uniform(20, 200)] for _ in labels]
    return {
        "image": {"width": 320, "height": 240},
        "detections": [
            {"label": label, "score": draw.uniform(0.4, 0.95), "box": box}
            for label, box in zip(labels, boxes, strict=True)
        ],
    }


@cache
def answered(name: str, change: Change) -> Sequence[tuple[dict[str, Any], str, bool]]:
    """With answers, any of them to any picture."""
    draw = Random(name)
    return [
        ({**values, **answer_values(answer(draw))}, look, black)
        for _ in range(10)
        for values, look, black in variants(name, change)
    ]


class Site:
    """A model and its cameras, with a clock."""

    def __init__(self, cameras: Sequence[str], settings: DriftSettings = SETTINGS, seed: int = 1) -> None:
        self.model = ModelDrift("detector", settings)
        self.cameras = cameras
        self.now = 277_778 * HOUR
        self.draw = Random(seed)
        self.events: list[DriftEvent] = []

    def window(self, changes: Mapping[str, Change] | None = None, frozen: str = "", each: int = 320) -> None:
        """An hour with so many pictures of each camera."""
        begun = self.now
        for number in range(each):
            self.now = begun + HOUR * ((number + 1) / each)
            for place, camera in enumerate(self.cameras):
                change = (changes or {}).get(camera, same)
                pool = answered(PICTURES[place % len(PICTURES)], change)
                values, look, black = self.draw.choice(pool)
                look = camera if camera == frozen else look
                self.model.take("1", "labels", SampledAnswer(camera, values, look, black), self.now)
            if number % 40 == 39:
                self.events += self.model.look(self.now)
        self.events += self.model.look(self.now)

    def learn(self) -> None:
        for _ in range(3):
            self.window()
        assert [event.name for event in self.events] == ["drift-reference-learned"]
        self.events.clear()

    def states(self) -> dict[str, str]:
        return {name: state for name, state in self.model.versions["1"].states.items() if state}

    def alarms(self) -> dict[str, tuple[str, ...]]:
        streams = self.model.versions["1"].streams
        return {name: stream.alarms for name, stream in streams.items() if stream.alarms}
