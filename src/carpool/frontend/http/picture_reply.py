"""Writes the fields of answers on the picture routes."""

from __future__ import annotations

from random import getrandbits
from time import monotonic
from typing import Final

from carpool.frontend.calls.reused_answer import AnswerNote
from carpool.frontend.http.exchange import JSON_FIELDS
from carpool.frontend.http.infer_route import TIMING, VERSION
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.step_times import Times
from carpool.observe.columns import REQUEST_SECONDS
from carpool.observe.counters import Row

FORM: Final = "picture"
"""Names the form of answers on the picture routes, which distinguishes them from other protocols' answers."""

JSON_ANSWER = JSON_FIELDS + b"Vary: Accept\r\n" + TIMING
DRAWN_ANSWER = b"Content-Type: image/%b\r\nVary: Accept\r\n" + TIMING
_ASSUMED = b"X-Carpool-Assumed: %b\r\n"


def early_fields(
    row: Row, drawn: str | None, assumed: bytes, note: AnswerNote | None, arrived: float
) -> bytes:
    """Returns the fields of an answer that needed no request, and counts it. `drawn` is the format of a
    drawing."""
    seconds = monotonic() - arrived
    row.observe(REQUEST_SECONDS, seconds)
    times = Times(seconds * 1e3)
    fields = JSON_ANSWER % times if drawn is None else DRAWN_ANSWER % (drawn.encode(), *times)
    return fields + assumed + (b"" if note is None else note.fields)


def assumed_fields(model: PictureModel) -> bytes:
    """Returns what every answer of a model says of whose pixels nothing is known."""
    return b"".join(_ASSUMED % ", ".join(names).encode() for names in model.assumed.values())


def version_fields(version: str) -> bytes:
    """Returns the fields that name the model version, and the answer: clients refer to it in feedback."""
    return VERSION % version.encode() + b"X-Carpool-Id: %b-%016x\r\n" % (version.encode(), getrandbits(64))
