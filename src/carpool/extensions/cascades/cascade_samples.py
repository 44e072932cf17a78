"""A sample for a cascade: both of its models are shown the same pictures; or one that was kept."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import orjson

from carpool.client.client import in_order
from carpool.config.rules import read_bytes
from carpool.core.curve import BatchCurve, promised_batch
from carpool.engine.engine import Engine
from carpool.errors import CarpoolError, ConfigError, InvalidInput
from carpool.extensions.cascades.cascade_tuning import Costs, Sampled
from carpool.lab.evaluate.labelled_data import NamedPictures, plain
from carpool.lab.evaluate.scores import Naming
from carpool.lab.evaluate.subjects import asked_engine, running
from carpool.vision.certainty import CLASSES_NEEDED, LOWEST_SCORE, MEASURES, certainty
from carpool.vision.compare_settings import CompareSettings
from carpool.vision.plans.compare import compare_answers

_MOST_BYTES = 256 << 20
_ALL = max(CLASSES_NEEDED.values())

Answer = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TwoModels:
    """Describes the models of a cascade: their names, and where the repository is that has them."""

    repository: Path
    cheap: str
    big: str
    slo: float = math.inf  # of the whole


@dataclass(frozen=True, slots=True)
class Sample:
    pictures: Sequence[Sampled]
    labelled: bool
    costs: Costs | None
    failed: Mapping[str, str]  # by picture: why it does not count

    def document(self) -> bytes:
        """Returns it as `read_sample` takes it: a line about all, and one for each picture."""
        head: dict[str, Any] = {"labelled": self.labelled}
        if self.costs is not None:
            head |= {"cheap_ms": self.costs.cheap * 1e3, "big_ms": self.costs.big * 1e3}
        lines = [
            {"certainty": dict(one.certainty), "cheap": one.cheap, "big": one.big} for one in self.pictures
        ]
        return b"".join(orjson.dumps(line) + b"\n" for line in (head, *lines))


def read_sample(path: Path) -> Sample:
    try:
        data = read_bytes(path, _MOST_BYTES, f"larger than {_MOST_BYTES} bytes, too large for a sample")
    except ConfigError as error:
        raise InvalidInput(error.message) from None
    found: list[Sampled] = []
    head: Mapping[str, Any] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            one = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise InvalidInput(f"{path}:{number}: no JSON") from None
        if not isinstance(one, dict):
            raise InvalidInput(f"{path}:{number}: must be an object")
        if number == 1 and "certainty" not in one:
            head = one
        else:
            found.append(_sampled(one, f"{path}:{number}"))
    costs = [head.get(name) for name in ("cheap_ms", "big_ms")]
    known = [float(ms) / 1e3 for ms in costs if isinstance(ms, int | float) and 0 < ms < math.inf]
    return Sample(found, head.get("labelled") is True, Costs(*known) if len(known) == 2 else None, {})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _sampled(one: Mapping[str, Any], where: str) -> Sampled:
    given = one.get("certainty")
    if not isinstance(given, dict) or not all(
        _is_number(value) and 0 <= value <= 1 for value in given.values()
    ):
        raise InvalidInput(f'{where}: certainty must be like {{"margin": 0.8}}, from 0 to 1')
    if not all(isinstance(one.get(name), bool) for name in ("cheap", "big")):
        raise InvalidInput(f"{where}: cheap and big must be true or false (whether that model was right)")
    return Sampled({name: float(given[name]) for name in MEASURES if name in given}, one["cheap"], one["big"])


# ---- who was right


Judge: TypeAlias = Callable[[int, Answer, Answer], tuple[bool, bool]]
"""Of the picture at this place, whether the cheap and the big model's answers were."""


def agreement(task: str) -> Judge:
    """Without labels, what the big model says is right."""

    def judge(_: int, cheap: Answer, big: Answer) -> tuple[bool, bool]:
        if "text" in big:
            return cheap.get("text") == big["text"], True
        return not compare_answers(task, cheap, big, CompareSettings()).differs, True

    return judge


class Labels:
    """Each picture has a class, or the text that it shows."""

    def __init__(self, data: NamedPictures) -> None:
        self._names = data.names
        self._naming = Naming(sorted(set(data.names)), {})
        self._classes = sorted(set(data.names))

    def __call__(self, place: int, cheap: Answer, big: Answer) -> tuple[bool, bool]:
        return self._right(place, cheap), self._right(place, big)

    def _right(self, place: int, answer: Answer) -> bool:
        truth = self._names[place]
        if "text" in answer:
            return bool(answer["text"] == truth)
        if "classes" not in answer:
            raise InvalidInput(f"--labels are classes or texts, and the model answers {', '.join(answer)}")
        best = answer["classes"][0]["label"] if answer["classes"] else ""
        found = self._naming.place(best)
        return plain(best) == plain(truth) if found is None else self._classes[found] == truth


# ---- both models


def sampled(
    models: TwoModels,
    files: Sequence[Path],
    labels: Labels | None,
    cache_dir: Path | None,
    *,
    at_once: int,
    step: Callable[[], None] = lambda: None,
) -> Sample:
    """Shows every picture to both. Those that either does not answer do not count."""
    with _both(models, cache_dir) as (engine, loop):
        tasks = [_task(engine, name) for name in (models.cheap, models.big)]
        if tasks[0] != tasks[1]:
            raise InvalidInput(f"{models.cheap} is for {tasks[0]}, and {models.big} for {tasks[1]}")
        judge = labels or agreement(tasks[0])
        counts = getattr(getattr(engine.find(models.cheap).vision, "table", None), "score", None) or 0.5
        ask_cheap, ask_big = (asked_engine(engine, loop, name) for name in (models.cheap, models.big))
        options, failed = _options(tasks[0]), {}

        def ask(place: int) -> tuple[int, Sampled | None]:
            step()
            try:
                cheap, big = ask_cheap(files[place], options), ask_big(files[place], options)
            except CarpoolError as error:
                failed[str(files[place])] = error.message
                return place, None
            right = judge(place, cheap, big)
            found = {by: certainty(cheap, by, counts) for by in MEASURES}
            return place, Sampled({by: value for by, value in found.items() if value is not None}, *right)

        pictures = [one for _, one in in_order(ask, range(len(files)), at_once) if one is not None]
        costs = Costs(*(_seconds(engine, name, models.slo) for name in (models.cheap, models.big)))
    return Sample(pictures, labels is not None, costs, failed)


def _both(
    models: TwoModels, cache_dir: Path | None
) -> AbstractContextManager[tuple[Engine, asyncio.AbstractEventLoop]]:
    places = [models.repository / name for name in (models.cheap, models.big)]
    for place in places:
        if not place.is_dir():
            raise InvalidInput(f"there is no model {place}")
    return running(Engine(*places, cache_dir=cache_dir))


def _task(engine: Engine, name: str) -> str:
    vision = engine.find(name).vision
    if vision is None:
        raise InvalidInput(f"{name} takes tensors, not images")
    return str(vision.task)


def _options(task: str) -> dict[str, Any]:
    """Returns the options with which an answer has all scores that its certainty is computed from."""
    if task == "classify":
        return {"top_k": _ALL}
    return {"score": LOWEST_SCORE} if task == "detect" else {}


def _seconds(engine: Engine, name: str, slo: float) -> float:
    """Returns the seconds of the machine, for one picture, in the batches that the promise allows."""
    scheduler = engine.find(name).scheduler
    assert scheduler is not None  # it is loaded, and answers in batches
    return batch_cost(scheduler.curve, slo) / len(scheduler.instances)


def batch_cost(curve: BatchCurve, slo: float) -> float:
    batch = promised_batch(curve, slo) or 1
    return curve.times[batch] / batch
