"""The fields of answers on the picture routes; and the answer to a picture that was answered lately, before
anything is read of it."""

from __future__ import annotations

from random import getrandbits
from time import monotonic
from typing import TYPE_CHECKING

from carpool.cache.answer_store import Kept
from carpool.cache.similar import see
from carpool.frontend.cached_call import MOST_BYTES
from carpool.frontend.front_caches import LOOKED_AT_ONCE, Caches, Looked, ModelCache
from carpool.frontend.http.exchange import JSON_FIELDS
from carpool.frontend.http.infer_route import TIMING, VERSION
from carpool.frontend.pictures.sent_pictures import ASKED_ON_A_ROUTE, PictureModel
from carpool.link.step_times import Times
from carpool.observe.columns import CACHE_AGE, REQUEST_SECONDS

if TYPE_CHECKING:
    from carpool.frontend.http.image_reading import ImageHead
    from carpool.frontend.http.image_route import ImageTarget

_FORM = "picture"  # as `ImageCall.form`
"""Of answers on the picture routes, by which those of other protocols are told apart."""

JSON_ANSWER = JSON_FIELDS + b"Vary: Accept\r\n" + TIMING
DRAWN_ANSWER = b"Content-Type: image/%b\r\nVary: Accept\r\n" + TIMING
_ASSUMED = b"X-Carpool-Assumed: %b\r\n"
_HIT = b"X-Carpool-Cache: hit; kind=%b; age=%.1f\r\nCache-Status: carpool; hit; ttl=%.0f\r\n"


def look_for_picture(
    caches: Caches, target: ImageTarget, asked: ImageHead, picture: bytes | bytearray, arrived: float
) -> tuple[Looked | None, tuple[bytes, bytes] | None]:
    """What was found, where it was looked; and the answer, its fields and body, if it is known. One that is
    to be audited goes the way of all others, which ends in the same answer."""
    model, wish, began = caches.of(target.entry), asked.wish, monotonic()
    settings, looked = model.settings, None
    if not wish.look or len(picture) > MOST_BYTES:
        return None, None
    if settings.exact:
        said = model.said(_FORM, ASKED_ON_A_ROUTE, target.options, target.drawn, asked.sender)
        if said is None:
            return None, None
        pieces = (picture,)
        looked = Looked(*caches.look(said, pieces, wish, began))
        entry = looked.entry
        if entry is not None:
            if not entry.is_same(said.text, pieces) or model.is_audited(None, began):
                return looked, None
            return looked, _known(model, target, entry.kept, b"exact", entry.at, entry.ends, began, arrived)
        if looked.fast in caches.computing:
            return looked, None
    if settings.similar and target.drawn is None and asked.sender.named and len(picture) <= LOOKED_AT_ONCE:
        return _look_at_scene(caches, model, target, asked, picture, looked or Looked(), began, arrived)
    return looked, None


def _look_at_scene(
    caches: Caches,
    model: ModelCache,
    target: ImageTarget,
    asked: ImageHead,
    picture: bytes | bytearray,
    looked: Looked,
    began: float,
    arrived: float,
) -> tuple[Looked, tuple[bytes, bytes] | None]:
    source = caches.similar.source(model.way(_FORM, ASKED_ON_A_ROUTE, target.options, asked.sender))
    if not source.wants_a_look(began):
        return looked._replace(at_scene=True), None
    seen, found = see(picture, model.settings), None
    if seen is not None:
        found = caches.similar.look(source, seen, model.settings, began, asked.wish.max_age)
    if found is None or model.is_audited(source, began):
        return looked._replace(at_scene=True, source=source, seen=seen, likeness=found), None
    at, kind = found.frame.at, b"similar; change=%.1f" % found.change
    return looked, _known(
        model, target, found.frame.kept, kind, at, at + model.settings.similar_ttl_s, began, arrived
    )


def _known(
    model: ModelCache,
    target: ImageTarget,
    kept: Kept,
    kind: bytes,
    at: float,
    ends: float,
    began: float,
    arrived: float,
) -> tuple[bytes, bytes]:
    now = monotonic()
    age = now - at
    model.row.observe(CACHE_AGE, age)
    model.count("hit" if kind == b"exact" else "similar", now - began)
    target.row.observe(REQUEST_SECONDS, now - arrived)
    times, drawn = Times((now - arrived) * 1e3), target.drawn
    fields = JSON_ANSWER % times if drawn is None else DRAWN_ANSWER % (drawn.encode(), *times)
    return fields + assumed_fields(target.model) + _HIT % (kind, age, ends - now), kept.body


def joined(fields: bytes, more: bytes) -> bytes:
    """More fields; or first the rest of the last one, where it goes on."""
    return fields[:-2] + more if more.startswith(b", ") else fields + more


def assumed_fields(model: PictureModel) -> bytes:
    """What every answer of a model says of whose pixels nothing is known."""
    return b"".join(_ASSUMED % ", ".join(names).encode() for names in model.assumed.values())


def version_fields(version: str) -> bytes:
    """Who answered, and a name for the answer that says so too: for whoever has something to say about it."""
    return VERSION % version.encode() + b"X-Carpool-Id: %b-%016x\r\n" % (version.encode(), getrandbits(64))
