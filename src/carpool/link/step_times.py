"""Records where the time of a request went, also of one that went through several models: on the link, and in
a header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import orjson

from carpool.link.records import ProtocolError
from carpool.types import PartTiming, RequestedOutput, StepTiming, Tensor, Timing

_MOST = 4096  # steps, of ensembles in ensembles
_LENGTH = 4


class Times(NamedTuple):
    """Records where a request's time went, in the words and units of `Server-Timing`: milliseconds, and the
    number of images in the batch."""

    decode: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    post: float = 0.0
    batch: int = 0


def write_steps(timing: Timing) -> bytes:
    assert isinstance(timing, StepTiming)
    steps = timing.steps[:_MOST]
    listed = [(name, t.queue, t.input, t.infer, t.output, t.batch, t.number) for name, t in steps]
    document = orjson.dumps(listed)
    return document + len(document).to_bytes(_LENGTH, "little")


def read_steps(timing: Timing, payload: bytes) -> tuple[StepTiming, bytes]:
    """Returns the times with those of the steps, and the payload without them."""
    length = int.from_bytes(payload[-_LENGTH:], "little")
    end = len(payload) - _LENGTH
    if length > end:
        raise ProtocolError("times of steps that reach beyond their record")
    listed = orjson.loads(payload[end - length : end])
    steps = tuple((name, Timing(*times, number=number)) for name, *times, number in listed)
    sums = timing.queue, timing.input, timing.infer, timing.output, timing.batch
    return StepTiming(*sums, steps), payload[: end - length]


def there(requested: Sequence[RequestedOutput], tensors: Sequence[Tensor]) -> Sequence[RequestedOutput]:
    """Returns, of the outputs that were asked for, those that the steps gave: the others are left out."""
    given = {tensor.name for tensor in tensors}
    return [output for output in requested if output.name in given]


def in_words(timing: Timing) -> str:
    """Returns them as `Server-Timing` has it: a name for each part of each step, in milliseconds."""
    assert isinstance(timing, StepTiming)
    parts = []
    for name, each in timing.steps:
        if isinstance(each, PartTiming):
            if not each.images and not each.batch:
                parts.append(f"{name};dur={each.output * 1e3:.3f}")  # of the answers, and of no model
                continue
            parts += [f'{name}.images;desc="{each.images}"', f"{name}.cut;dur={each.cut * 1e3:.3f}"]
        parts += [
            f"{name}.queue;dur={each.queue * 1e3:.3f}",
            f"{name}.infer;dur={(each.input + each.infer + each.output) * 1e3:.3f}",
            f'{name}.batch;desc="{each.batch}"',
        ]
    return ", ".join(parts)
