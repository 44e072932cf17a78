"""The pictures or tensors that every form of a model is asked: some to calibrate with, others held back for
the proof."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import process_time
from typing import Any, Protocol

import numpy as np
import orjson

from carpool.config.rules import read_bytes
from carpool.engine.loading.trial import Examined
from carpool.errors import CarpoolError, ConfigError, InvalidInput
from carpool.types import DATATYPES, Array, Datatype
from carpool.vision.geometry import Geometry
from carpool.vision.plans.picture_plan import PicturePlan
from carpool.vision.plans.settings import describe

MOST_CALIBRATING = 128
LEAST_CALIBRATING, LEAST_HELD = 8, 20
_MOST_BYTES = 4 << 30  # of all inputs
_MOST_FILE_BYTES = 256 << 20
INPUTS = "inputs.bin"
_SEED = 1

Answer = dict[str, Any]


class Asked(Protocol):
    """Defines requests for one model, by their places."""

    task: str
    prepare_s: float  # seconds of a core to make an input of a picture

    @property
    def count(self) -> int:
        """Returns how many there are."""

    def feed(self, place: int) -> Mapping[str, Array]:
        """Returns the inputs of one request, as a batch of one."""

    def answer(self, place: int, outputs: Mapping[str, Array]) -> Answer:
        """Returns the answer that a client would get for a batch of one."""


@dataclass(slots=True)
class AskedPictures:
    """Each picture is prepared once, as the server prepares it, and its input kept in a file."""

    files: Sequence[Path]
    task: str
    prepare_s: float
    _plan: PicturePlan = field(repr=False)
    _inputs: Array = field(repr=False)
    _geometries: Sequence[Geometry] = field(repr=False)
    _options: Mapping[str, Any] = field(default_factory=dict)
    _whole: bool = True  # the model has a batch dimension, in its settings or its file

    @property
    def count(self) -> int:
        return len(self.files)

    def feed(self, place: int) -> Mapping[str, Array]:
        pixels = np.array(self._inputs[place])
        return {self._plan.settings.input.name: pixels[None] if self._whole else pixels}

    def answer(self, place: int, outputs: Mapping[str, Array]) -> Answer:
        own = {name: array[0] if self._whole else array for name, array in outputs.items()}
        options = self._plan.read_options(self._options)
        return self._plan.answer(own, self._geometries[place], options)


def picture_plan(found: Examined) -> PicturePlan:
    """Returns how the model sees pictures."""
    said = describe(found.config, found.signature, found.labels, found.seen)
    if said.vision is None:
        raise InvalidInput(
            f"{found.config.name}: {said.ask or 'it takes no images'}; for tensors, give --recording"
        )
    if said.vision.encoded:
        raise InvalidInput(f"{found.config.name} decodes images on its device, which optimize cannot compare")
    return PicturePlan(said.vision, found.config.name)


def asked_pictures(
    found: Examined,
    files: Sequence[Path],
    folder: Path,
    options: Mapping[str, Any],
    step: Callable[[], None] = lambda: None,
) -> AskedPictures:
    """Prepares all pictures. Those that cannot be read are left out."""
    plan = picture_plan(found)
    shape, dtype = plan.transform.shape, plan.transform.dtype
    if len(files) * plan.bytes > _MOST_BYTES:
        raise InvalidInput(
            f"{len(files)} inputs of {plan.bytes / 1e6:.3g} MB are more than {_MOST_BYTES >> 30} GB: "
            "give fewer images"
        )
    folder.mkdir(parents=True, exist_ok=True)
    inputs = np.memmap(folder / INPUTS, dtype, "w+", shape=(len(files), *shape))
    read: list[Path] = []
    geometries: list[Geometry] = []
    began = process_time()
    for file in files:
        step()
        memory = bytearray(plan.bytes)
        try:
            data = read_bytes(file, _MOST_FILE_BYTES, "too large for an image")
            geometries.append(plan.prepare(data, memory))
        except (CarpoolError, ConfigError):
            continue
        inputs[len(read)] = np.ndarray(shape, dtype, memory)
        read.append(file)
    if not read:
        raise InvalidInput(f"--pictures: none of the {len(files)} images could be read")
    seconds = (process_time() - began) / len(files)
    signature = found.signature
    spec = signature.input_named[plan.settings.input.name]
    whole = signature.max_batch > 0 or len(spec.shape) > len(shape)
    return AskedPictures(read, str(plan.task), seconds, plan, inputs, geometries, options, whole)


@dataclass(slots=True)
class AskedTensors:
    """Requests for a model that takes tensors. What it answers to each is compared as a vector."""

    requests: Sequence[Mapping[str, Array]]
    task: str = "embed"
    prepare_s: float = 0.0

    @property
    def count(self) -> int:
        return len(self.requests)

    def feed(self, place: int) -> Mapping[str, Array]:
        return self.requests[place]

    def answer(self, place: int, outputs: Mapping[str, Array]) -> Answer:
        del place
        vector = [
            output.astype(np.float64).ravel() for output in outputs.values() if output.dtype.kind in "fiu"
        ]
        return {"embedding": np.concatenate(vector) if vector else np.zeros(1)}


def read_requests(path: Path, found: Examined) -> AskedTensors:
    """Reads recorded requests: an .npz file with an array for each input, whose first axis are the requests,
    or a .jsonl file with the JSON of a v2 request on each line."""
    if path.suffix not in (".npz", ".jsonl") or not path.is_file():
        raise InvalidInput(
            f"--recording must be an .npz file with an array for each input, or a .jsonl file with a v2 "
            f"request on each line, not {path}"
        )
    specs = {spec.name: spec for spec in found.signature.inputs if not spec.optional}
    batched = found.signature.max_batch > 0
    requests = _from_npz(path) if path.suffix == ".npz" else _from_lines(path)
    for number, request in enumerate(requests, 1):
        if request.keys() != specs.keys():
            raise InvalidInput(
                f"--recording: request {number} of {path} has the inputs {', '.join(request)}; "
                f"{found.config.name} takes {', '.join(specs)}"
            )
        for name, array in request.items():
            wanted = specs[name].datatype
            if wanted is Datatype.BYTES:
                raise InvalidInput(f"--recording: the input {name} takes strings, which are not quantized")
            one = array if array.ndim == len(specs[name].shape) + batched else array[None]
            if batched and len(one) != 1:
                raise InvalidInput(f"--recording: request {number} of {path} must have a batch of one")
            request[name] = np.ascontiguousarray(one, wanted.dtype)
    return AskedTensors(requests)


def _from_npz(path: Path) -> list[dict[str, Array]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError) as error:
        raise InvalidInput(f"--recording: {path} cannot be read: {error}") from None
    lengths = {len(array) if array.ndim else 0 for array in found.values()}
    if len(lengths) != 1 or not min(lengths):
        raise InvalidInput(f"--recording: the arrays of {path} must have the same number of requests")
    return [{name: array[at] for name, array in found.items()} for at in range(lengths.pop())]


def _from_lines(path: Path) -> list[dict[str, Array]]:
    try:
        lines = read_bytes(path, _MOST_BYTES, "too large for a recording").splitlines()
    except ConfigError as error:
        raise InvalidInput(f"--recording: {error.message}") from None
    return [_from_line(line, f"--recording: {path}:{number}") for number, line in enumerate(lines, 1) if line]


def _from_line(line: bytes, where: str) -> dict[str, Array]:
    try:
        inputs = orjson.loads(line)["inputs"]
        return {
            one["name"]: np.array(one["data"], DATATYPES[one["datatype"]].dtype).reshape(one["shape"])
            for one in inputs
        }
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(f"{where}: no v2 request: {type(error).__name__}: {error}") from None


# ---- which are for what


@dataclass(frozen=True, slots=True)
class Split:
    """Holds places: no picture that is held back for the proof is seen by a quantizer."""

    calibrating: tuple[int, ...]
    held: tuple[int, ...]


def split(count: int, held: int, calibrating: int | None = None) -> Split:
    """Draws the held pictures among `count`, of which the last `calibrating` are for nothing else, where they
    were given apart."""
    order = list(range(count - (calibrating or 0)))
    random.Random(_SEED).shuffle(order)
    if calibrating is None:
        apart = min(MOST_CALIBRATING, max(LEAST_CALIBRATING, len(order) // 4, len(order) - held))
        left, kept = order[apart:], order[:apart]
    else:
        left, kept = order, list(range(count - calibrating, count))[:MOST_CALIBRATING]
    if len(kept) < LEAST_CALIBRATING or len(left) < LEAST_HELD:
        raise InvalidInput(
            f"there are {len(kept)} images or requests to calibrate with and {len(left)} for the proof: at "
            f"least {LEAST_CALIBRATING} and {LEAST_HELD} are needed, and 300 for the proof are better"
        )
    return Split(tuple(sorted(kept)), tuple(sorted(left[:held])))
