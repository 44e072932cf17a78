"""The fields of answers on the picture routes; and the answer to a picture that was answered lately, before
anything is read of it."""

from __future__ import annotations

from random import getrandbits
from time import monotonic
from typing import TYPE_CHECKING, Final

from carpool.frontend.caches.front_caches import Caches, Looked, Question
from carpool.frontend.http.exchange import JSON_FIELDS
from carpool.frontend.http.infer_route import TIMING, VERSION
from carpool.frontend.pictures.sent_pictures import ASKED_ON_A_ROUTE, PictureModel
from carpool.link.step_times import Times
from carpool.observe.columns import CACHE_AGE, REQUEST_SECONDS

if TYPE_CHECKING:
    from carpool.frontend.http.image_reading import ImageHead
    from carpool.frontend.http.image_route import ImageTarget

FORM: Final = "picture"
"""Of answers on the picture routes, by which those of other protocols are told apart."""

JSON_ANSWER = JSON_FIELDS + b"Vary: Accept\r\n" + TIMING
DRAWN_ANSWER = b"Content-Type: image/%b\r\nVary: Accept\r\n" + TIMING
_ASSUMED = b"X-Carpool-Assumed: %b\r\n"


def look_for_picture(
    caches: Caches, target: ImageTarget, asked: ImageHead, picture: bytes | bytearray, arrived: float
) -> tuple[Looked | None, tuple[bytes, bytes] | None]:
    """Returns what was found; and the answer, its fields and body, if it is known. One that is to be audited
    goes the way of all others, which ends in the same answer."""
    entry, began = target.lane.entry, monotonic()
    model, given = caches.of(entry), (target.options, target.drawn)
    question = Question(FORM, ASKED_ON_A_ROUTE, (picture,), asked.sender, asked.wish, *given, is_picture=True)
    looked = caches.known(model, question, began)
    if looked is None or looked.hit is None or looked.audited:
        return looked, None
    hit, now = looked.hit, monotonic()
    model.row.observe(CACHE_AGE, hit.age)
    model.count(hit.status.kind, now - began)
    target.lane.row.observe(REQUEST_SECONDS, now - arrived)
    caches.from_cache(entry, arrived, 1, asked.sender.source)
    times, drawn = Times((now - arrived) * 1e3), target.drawn
    fields = JSON_ANSWER % times if drawn is None else DRAWN_ANSWER % (drawn.encode(), *times)
    return looked, (fields + target.assumed + hit.status.fields, hit.kept.body)


def assumed_fields(model: PictureModel) -> bytes:
    """Returns what every answer of a model says of whose pixels nothing is known."""
    return b"".join(_ASSUMED % ", ".join(names).encode() for names in model.assumed.values())


def version_fields(version: str) -> bytes:
    """Who answered, and a name for the answer that says so too: for whoever has something to say about it."""
    return VERSION % version.encode() + b"X-Carpool-Id: %b-%016x\r\n" % (version.encode(), getrandbits(64))
