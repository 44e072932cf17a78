"""Proves at loading that requests may share a batch: different requests in one batch answer what each answers
alone.

A first axis that varies need not be that of a batch: a network may compare all images with all texts, read
rows by a number that the client sends, or normalise over the batch. Clients would get each other's answers.
Whichever engine runs it, the rows of a batch are compared with single requests, in values and shapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from carpool import backends
from carpool.backends.agreement import how_far
from carpool.backends.backend import AnswersEach, Backend, Gathers
from carpool.config.model import DEFAULT_MAX_BATCH, ModelConfig
from carpool.config.repository import ModelVersion
from carpool.config.settings_part import remembers
from carpool.engine.profile.model_profile import BatchProof
from carpool.errors import CarpoolError
from carpool.types import Array, Datatype, Signature, TensorSpec

RULE = 1
"""The number of this way of proving: what another one found is proven again."""

_BRIGHTNESS = (0.5, 2.0)  # exponents of noise, by row: no two rows have the same mean
_ROWS = len(_BRIGHTNESS)
_ENOUGH = 2  # sizes
_ANY_LENGTH = 64  # stands in for a dimension that varies, as when a model is measured
_SEED = 2
_CLOSE = 1e-4  # of the size of an output: what another kernel for another batch may change
_SHARE = 0.05  # of the distance between two rows: less than that is not the other row's answer
_FLOORS = {Datatype.FP64: 1e-9, Datatype.FP32: 1e-5, Datatype.FP16: 5e-3, Datatype.BF16: 3e-2}
_TIMES = 4.0  # as much as the noise that was measured
_RANDOM, _REPEATED = 2.0, 7  # as far as random answers are apart, and how often they are drawn
SLIGHT = 0.05
"""As a share of an answer: so little do other requests change where a file quantises all rows together."""
_NOISE = 0.05  # what an engine of low precision changes at most with the size of a batch
_SHAKE = 1e-3  # of an input: what a network that amplifies noise answers is others then, too
_LONGEST_ERROR = 1000  # characters
_IDS = re.compile(r"(?:.*_)?(?:input_?ids|ids|tokens?|text)(?:_\d+)?")
_NO_IDS = re.compile(r".*(?:type|position|index|class|image|batch).*")
_MASK = re.compile(r".*mask.*")


Request = Mapping[str, Array]
Answer = Mapping[str, Array]


class _Draw(NamedTuple):
    """Describes inputs to try: upper bounds of numbers that stand for words, and of other whole ones."""

    words: int
    others: int
    loud: float = 1.0  # the largest fraction


_QUIET, _LOUD = _Draw(8, 1), _Draw(8, 1, 255.0)
_DRAWS = (_Draw(8, 8), _Draw(8, 2), _Draw(2, 2), _QUIET, _Draw(1, 1), _LOUD)
_FRACTIONS = (_QUIET, _LOUD)
_ON_DEVICES = (_QUIET, _Draw(1, 1), _LOUD)
"""On a GPU a whole number beyond the end of a table breaks the process: only those of words are above 0."""


def asks_for_batches(given: ModelConfig, whole: ModelConfig, version: ModelVersion) -> bool:
    """Returns whether its author asks for batches: in the settings that are `given`, or in a Python file,
    even where that declares just the default size. `whole` are its settings with what the file says."""
    if (given.max_batch or 0) > 1 or (whole.max_batch or 0) not in (0, 1, DEFAULT_MAX_BATCH):
        return True
    return backends.asks_for_batches(whole, version)


def must_be_proven(backend: Backend, config: ModelConfig, *, declared: bool) -> bool:
    """Returns whether rows are stacked for it that others than its author stack. A model that is handed
    requests answers each by itself; Python code says with max_batch that it takes batches; one that remembers
    requests cannot be asked twice; a fake one answers nothing."""
    own = config.decoupled or config.backend == "fake" or (config.backend == "python" and declared)
    return (config.max_batch or 0) > 1 and not (isinstance(backend, AnswersEach) or own or remembers(config))


def prove(backend: Backend, signature: Signature, *, on_device: bool = False) -> BatchProof:
    """Compares batches of two sizes with single requests. Afterwards the backend may not be `alive`."""
    trial = BatchTrial(backend, signature, on_device=on_device)
    trial.begin()
    return trial.end()


def _in_words(error: Exception) -> str:
    """Returns one short line: models may raise anything, and it is kept in the profile and shown."""
    words = error.message if isinstance(error, CarpoolError) else f"{type(error).__name__}: {error}"
    line = " ".join(words[:_LONGEST_ERROR].split())
    return "".join(char if char.isprintable() else "?" for char in line)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Holds rows, and what each answers alone, once it ran."""

    draw: _Draw
    rows: Sequence[Request]
    singles: dict[int, Answer] = field(default_factory=dict)


class BatchTrial:
    """Compares batches of noise with what each row answers alone. What is measured anyway counts."""

    def __init__(self, backend: Backend, signature: Signature, *, on_device: bool = False) -> None:
        self._backend = backend
        self._signature = signature
        self._names = tuple(signature.output_named)
        self._takes_numbers = any(map(_is_number, signature.inputs))
        self._draws = iter(_ON_DEVICES if on_device else _DRAWS if self._takes_numbers else _FRACTIONS)
        self._sample: _Sample | None = None  # None: it could not be tried
        self._compared: set[int] = set()  # sizes of batches
        self._untried = ""
        self._differs = ""
        self._off = 1.0  # of what differs, as a share of the answer

    def begin(self) -> bool:
        """Finds noise that it takes. Returns whether batches can be compared."""
        return self._next_draw(both=self._takes_numbers)

    def _next_draw(self, *, both: bool) -> bool:
        """Goes on to the next noise that runs alone: one row of it, or `both`."""
        for draw in self._draws:
            sample = self._made(draw)
            try:
                for which in range(_ROWS if both else 1):
                    self._single(sample, which)
            except Exception as error:  # models may raise anything on noise
                self._untried = _in_words(error)
                if not self._backend.alive:
                    self._sample = None
                    return False
                continue
            self._sample = sample
            return True
        return False

    def requests(self, images: int) -> dict[str, Array]:
        """Returns a batch of this size, in which no row stands where it would alone."""
        rows = self._rows(images)
        return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}

    def heard(self, images: int, batch: Answer) -> None:
        """Compares what a batch answered."""
        assert self._sample is not None
        if images == 1:
            self._sample.singles.setdefault(_which(0), batch)
            return
        if self._differs:
            return
        self._compared.add(images)
        for name in self._names:
            self._differs = self._misshapen(self._sample, name, batch, images)
            self._differs = self._differs or self._wrong(self._sample, name, batch, images)
            if self._differs:
                break

    def failed(self, images: int, error: Exception) -> None:
        """Notes that a batch did not run, whose rows run alone; or not even one row of noise."""
        if images == 1:
            self._sample, self._untried = None, _in_words(error)
        else:
            self._differs = f"a batch of {images} fails, where single requests do not: {_in_words(error)}"

    def end(self) -> BatchProof:
        """Returns what was found, once two sizes were compared."""
        try:
            self._compare_all()
        except Exception as error:  # the second row alone
            self.failed(1, error)
        return BatchProof(RULE, self._differs, self._off, "" if self._sample else self._untried)

    def _compare_all(self) -> None:
        first = self._sample
        while first is not None and not self._differs and not self._shows():
            if not self._next_draw(both=True):
                self._sample = self._sample and first  # nothing shows, whatever it is asked
                break
        if self._sample is not first:
            self._compared.clear()
        for size in (2, 3, 4):
            if size <= self._signature.max_batch and size not in self._compared:
                self._compare(size)
        if self._sample is not None and self._sample.draw.others > 1 and not self._differs:
            self._sample = self._made(self._sample.draw._replace(others=1))
            self._compared.clear()
            self._compare(2)  # all point at row 0, where another row stands in the batch

    def _shows(self) -> bool:
        """Returns whether other inputs give other answers: else an answer could belong to any request."""
        return self._sample is not None and any(self._spread(self._sample, name) > 0 for name in self._names)

    def _compare(self, images: int) -> None:
        if self._differs or self._sample is None or len(self._compared) >= _ENOUGH:
            return
        for which in range(_ROWS):
            self._single(self._sample, which)
        try:
            batch = self._together(self._rows(images))
        except Exception as error:  # as above
            self.failed(images, error)
        else:
            self.heard(images, batch)

    def _rows(self, images: int) -> list[Request]:
        assert self._sample is not None
        return [self._sample.rows[_which(at)] for at in range(images)]

    def _made(self, draw: _Draw) -> _Sample:
        inputs = self._signature.inputs
        rows = [{spec.name: _values(spec, number, draw) for spec in inputs} for number in range(_ROWS)]
        return _Sample(draw, rows)

    def _single(self, sample: _Sample, which: int) -> Answer:
        """Returns what this row answers alone."""
        if which not in sample.singles:
            sample.singles[which] = self._together([sample.rows[which]])
        return sample.singles[which]

    # ---- one output -------------------------------------------------------------------------------------

    def _misshapen(self, sample: _Sample, name: str, batch: Answer, images: int) -> str:
        found = batch.get(name)
        for which in range(_ROWS):
            single = self._single(sample, which).get(name)
            if found is None or single is None:
                if found is not single:
                    return f'the output "{name}" is not always there'
                continue
            if single.shape[:1] != (1,) or found.shape != (images, *single.shape[1:]):
                return (
                    f'the output "{name}" is {list(found.shape)} for a batch of {images}, and '
                    f"{list(single.shape)} for one request"
                )
        return ""

    def _wrong(self, sample: _Sample, name: str, batch: Answer, images: int) -> str:
        """Returns what is wrong with the values, beyond the engine's own noise, which is measured where they
        differ at all."""
        limit = self._limit(sample, name)
        off = max(self._far(name, self._single(sample, _which(at)), batch, at) for at in range(images))
        if off <= limit:
            return ""
        pairs = [(self._single(sample, which), sample.rows[which]) for which in range(_ROWS)]
        noise = max(self._far(name, single, self._together([row])) for single, row in pairs)
        if noise > limit:  # it is random, or keeps a state
            more = (self._far(name, *each) for each in self._repeated(pairs))
            return "" if off <= _RANDOM * max(noise, *more) else _SIZE.format(name, images)
        if self._depends(name, batch, images):
            self._off = min(1.0, off)
            return f'in a batch of {images}, the output "{name}" depends on the other requests'
        if off <= _NOISE and self._signature.output_named[name].datatype in _FLOORS:
            return ""
        shaken = max(self._far(name, single, self._together([_shaken(row)])) for single, row in pairs)
        return "" if off <= _TIMES * shaken else _SIZE.format(name, images)

    def _repeated(self, pairs: Sequence[tuple[Answer, Request]]) -> Iterator[tuple[Answer, Answer]]:
        for _ in range(_REPEATED):
            for single, row in pairs:
                yield single, self._together([row])

    def _depends(self, name: str, batch: Answer, images: int) -> bool:
        """Returns whether a row answers otherwise beside other rows than beside its own like. Both are the
        same work for the engine, which hardly has any noise then."""
        floor = _FLOORS.get(self._signature.output_named[name].datatype, 0.0)
        for start in range(_ROWS):
            row = self._rows(images)[start]
            first, again = self._together([row] * images), self._together([row] * images)
            for at in range(start, images, _ROWS):
                noise = self._far(name, first, again, at, at)
                if self._far(name, first, batch, at, at) > max(floor, _TIMES * noise):
                    return True
        return False

    def _limit(self, sample: _Sample, name: str) -> float:
        """Returns how far two answers may be apart that are taken for the same."""
        floor = _FLOORS.get(self._signature.output_named[name].datatype)
        if floor is None:
            return 0.0
        return max(floor, min(_CLOSE, _SHARE * self._spread(sample, name)))

    def _spread(self, sample: _Sample, name: str) -> float:
        """Returns how far the answers to different rows are apart."""
        return self._far(name, self._single(sample, 0), self._single(sample, 1))

    def _far(self, name: str, right: Answer, found: Answer, at: int = 0, right_at: int = 0) -> float:
        if name not in right or name not in found:
            return 0.0
        return how_far(self._row(name, right, right_at), self._row(name, found, at))

    def _row(self, name: str, answer: Answer, at: int) -> Array:
        row: Array = answer[name][at : at + 1]
        if self._signature.output_named[name].datatype is Datatype.BF16:
            return (row.astype(np.uint32) << 16).view(np.float32)
        return row

    # ---- running ----------------------------------------------------------------------------------------

    def _together(self, rows: Sequence[Request]) -> Answer:
        """Runs them as requests run together in service."""
        if isinstance(self._backend, Gathers):
            return self._backend.run_parts(rows, [1] * len(rows), self._names)
        stacked = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
        return self._backend.run(stacked, self._names)


def _which(at: int) -> int:
    """Returns the number of the row that stands there in a batch."""
    return (at + 1) % _ROWS


_SIZE = 'the output "{}" is another in a batch of {} than alone'


def _is_number(spec: TensorSpec) -> bool:
    return spec.datatype.dtype.kind in "iu" and spec.datatype not in (Datatype.UINT8, Datatype.BF16)


def _values(spec: TensorSpec, number: int, draw: _Draw) -> Array:
    """Returns the values of one row."""
    shape = (1, *(_ANY_LENGTH if length < 0 else length for length in spec.shape))
    random = np.random.default_rng((_SEED, number))
    noise = random.random(shape, np.float32) ** np.float32(_BRIGHTNESS[number])
    datatype, name = spec.datatype, spec.name.lower()
    if datatype is Datatype.BYTES:
        return np.full(shape, b"ab"[number : number + 1], object)
    if datatype is Datatype.BF16:
        return ((noise * np.float32(draw.loud)).view(np.uint32) >> 16).astype(np.uint16)
    if datatype.dtype.kind == "f":
        return (noise * np.float32(draw.loud)).astype(datatype.dtype)
    if _MASK.fullmatch(name):
        return np.ones(shape, datatype.dtype)
    if datatype is Datatype.BOOL:
        return noise < np.float32(0.5)
    if datatype is Datatype.UINT8:
        return (noise * 255).astype(np.uint8)
    words = _IDS.fullmatch(name) and not _NO_IDS.fullmatch(name)
    return random.integers(0, draw.words if words else draw.others, shape).astype(datatype.dtype)


def _shaken(row: Request) -> Request:
    """Returns inputs that are nearly the same."""
    random = np.random.default_rng(_SEED)
    shaken: dict[str, Array] = {}
    for name, array in row.items():
        sign = random.choice((-1, 1), array.shape)
        if array.dtype.kind == "f":
            shaken[name] = (array * (1 + _SHAKE * sign)).astype(array.dtype)
        elif array.dtype == np.uint8:
            shaken[name] = np.clip(array.astype(np.int16) + sign, 0, 255).astype(np.uint8)
        else:
            shaken[name] = array
    return shaken
