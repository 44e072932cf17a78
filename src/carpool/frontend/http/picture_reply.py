"""The fields of answers on the picture routes; and the answer to a picture that was answered lately, before
anything is read of it."""

from __future__ import annotations

from random import getrandbits
from time import monotonic
from typing import TYPE_CHECKING

from carpool.cache.answer_store import Entry
from carpool.frontend.cached_call import MOST_BYTES
from carpool.frontend.call import Times
from carpool.frontend.front_caches import Caches
from carpool.frontend.http.exchange import JSON_FIELDS
from carpool.frontend.http.infer_route import TIMING, VERSION
from carpool.frontend.pictures.sent_pictures import ASKED_ON_A_ROUTE
from carpool.observe.columns import CACHE_AGE, REQUEST_SECONDS

if TYPE_CHECKING:
    from carpool.frontend.http.image_reading import ImageHead
    from carpool.frontend.http.image_route import ImageTarget

FORM = "picture"
"""Of answers on the picture routes, by which those of other protocols are told apart."""

JSON_ANSWER = JSON_FIELDS + b"Vary: Accept\r\n" + TIMING
DRAWN_ANSWER = b"Content-Type: image/%b\r\nVary: Accept\r\n" + TIMING
_HIT = b"X-Carpool-Cache: hit; kind=exact; age=%.1f\r\nCache-Status: carpool; hit; ttl=%.0f\r\n"

Looked = tuple[int, Entry | None]


def look_for_picture(
    caches: Caches, target: ImageTarget, asked: ImageHead, picture: bytes | bytearray, arrived: float
) -> tuple[Looked | None, tuple[bytes, bytes] | None]:
    """What has the same digest, if it was looked for; and the answer, its fields and its body, if it is the
    same. One that is to be audited goes the way of all others, which ends in the same answer."""
    model, wish, drawn = caches.of(target.entry), asked.wish, target.drawn
    if not model.settings.exact or not wish.look or len(picture) > MOST_BYTES:
        return None, None
    said = model.said(FORM, ASKED_ON_A_ROUTE, target.options, drawn, asked.sender)
    if said is None:
        return None, None
    began, pieces = monotonic(), (picture,)
    looked = caches.look(said, pieces, wish, began)
    entry = looked[1]
    if entry is None or not entry.is_same(said.text, pieces) or model.is_audited(None, began):
        return looked, None
    now = monotonic()
    age = now - entry.at
    model.row.observe(CACHE_AGE, age)
    model.count("hit", now - began)
    target.row.observe(REQUEST_SECONDS, now - arrived)
    times = Times((now - arrived) * 1e3)
    fields = JSON_ANSWER % times if drawn is None else DRAWN_ANSWER % (drawn.encode(), *times)
    return looked, (fields + _HIT % (age, entry.ends - now), entry.kept.body)


def joined(fields: bytes, more: bytes) -> bytes:
    """More fields; or first the rest of the last one, where it goes on."""
    return fields[:-2] + more if more.startswith(b", ") else fields + more


def version_fields(version: str) -> bytes:
    """Who answered, and a name for the answer that says so too: for whoever has something to say about it."""
    return VERSION % version.encode() + b"X-Carpool-Id: %b-%016x\r\n" % (version.encode(), getrandbits(64))
