"""Defines when two requests are identical, and how quickly and reliably that is detected.

A fast digest finds candidates and a keyed digest confirms them. Only requests that are known already pay for
the second, and a client without the key cannot make two requests whose answers are confused. Every field of a
request is in the cache key or in the list of fields that change no answer; a test checks this.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable, Sequence
from hashlib import blake2b
from math import inf
from time import perf_counter
from typing import NamedTuple

import xxhash

from carpool.errors import InvalidInput
from carpool.vision.picture_answers import Options
from carpool.wire.head import Buffer, RequestHead

FORMAT = 2
"""Of keys and stored answers: another one shares nothing."""

IN_KEY = {
    "RequestHead": ("inputs", "outputs", "options", "binary_output"),
    "TensorHead": ("name", "datatype", "shape", "size", "framed"),
    "RequestedOutput": ("name", "binary", "classification"),
    "RequestOptions": ("custom",),
    "Options": (*("top_k", "score", "iou", "max_detections", "threshold", "format", "overlay", "extra"),),
}
NOT_CACHED = {
    "TensorHead": ("shared_memory",),  # its bytes can change at any time
    "RequestedOutput": ("shared_memory",),
    "RequestOptions": ("sequence_id", "sequence_start", "sequence_end"),
}
"""With any of these, a request is not looked up."""
CHANGES_NOTHING = {
    "RequestHead": ("id", "tail_size", "batch", "encoded", "plain", "regions"),  # most follow from the inputs
    "TensorHead": ("offset", "data"),  # where the bytes were: they themselves are in the key
    "RequestOptions": ("priority", "timeout", "source", "latest"),
}

_DIGEST_BYTES = 16
_TRIED_BYTES = 64 * 1024
_DIRECTIVE = re.compile(rb"\s*([a-z-]+)(?:\s*=\s*\"?([0-9]{1,9})\"?)?\s*")
CACHE_CONTROL = "Cache-Control"
WISH_FIELD = CACHE_CONTROL.lower().encode()


class Wish(NamedTuple):
    """Describes what a request says about caches."""

    look: bool = True
    keep: bool = True
    max_age: float = inf  # seconds


ANY = Wish()


def read_cache_control(field: bytes | None) -> Wish:
    """`no-store`, `no-cache` and `max-age`; what else a request may say there means nothing here."""
    if not field:
        return ANY
    look, keep, max_age = True, True, inf
    for part in field.lower().split(b","):
        found = _DIRECTIVE.fullmatch(part)
        if found is None:
            continue
        if found[1] == b"no-store":
            look = keep = False
        elif found[1] == b"no-cache":
            look = False
        elif found[1] == b"max-age":
            if found[2] is None:
                raise InvalidInput(f"{CACHE_CONTROL}: max-age needs a number of seconds", field=CACHE_CONTROL)
            max_age = float(found[2])
    return Wish(look, keep, max_age)


def describe(
    form: str,
    head: RequestHead,
    lengths: Sequence[int] = (),
    options: Options | None = None,
    drawn: str | None = None,
    *,
    sizes: bool = True,
) -> bytes | None:
    """All but the bytes of what is asked for: `form` is how it will be answered, `lengths` are those of its
    pictures, `options` the task's. Without `sizes`, other pictures may be longer. None for what is never
    looked up."""
    asked = head.options
    if asked.sequence_id or asked.sequence_start or asked.sequence_end:
        return None
    inputs, outputs = [], []
    for given in head.inputs:
        if given.shared_memory is not None:
            return None
        size = given.size if sizes else 0
        inputs.append((given.name, given.datatype.value, given.shape, size, given.framed))
    for wanted in head.outputs:
        if wanted.shared_memory is not None:
            return None
        outputs.append((wanted.name, wanted.binary, wanted.classification))
    said: list[object] = [form, inputs, outputs, head.binary_output, sorted(asked.custom.items()), lengths]
    if options is not None:
        own = [getattr(options, name) for name in IN_KEY["Options"][:-1]]
        said += [own, sorted(options.extra.items()), drawn]
    return repr(said).encode()


Keyed = Callable[[bytes, bytes, Sequence[Buffer]], bytes]
"""Of a key, what is asked for, and its bytes."""


def by_blake2b(key: bytes, said: bytes, pieces: Sequence[Buffer]) -> bytes:
    digest = blake2b(said, digest_size=_DIGEST_BYTES, key=key)
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def by_sha256(key: bytes, said: bytes, pieces: Sequence[Buffer]) -> bytes:
    digest = hmac.new(key, said, "sha256")
    for piece in pieces:
        digest.update(piece)
    return digest.digest()[:_DIGEST_BYTES]


def fastest_keyed() -> Keyed:
    """Returns the fastest on this machine: processors with instructions for sha256 are faster with that, the
    others are not."""
    tried = bytes(_TRIED_BYTES)

    def seconds(keyed: Keyed) -> float:
        times = []
        for _ in range(5):
            began = perf_counter()
            keyed(b"key", b"", (tried,))
            times.append(perf_counter() - began)
        return min(times)

    return min((by_blake2b, by_sha256), key=seconds)


class Said(NamedTuple):
    """Describes all but the bytes of what is asked for. Made once for requests that say the same."""

    text: bytes
    seed: int  # of the fast digest of the bytes


class Digests:
    """Makes the digests of one front end. With a `secret`, all that have the same one make the same keyed
    digests."""

    def __init__(self, secret: str = "") -> None:
        self._seed = secrets.randbits(64)
        self._keyed = by_blake2b if secret else fastest_keyed()  # those who share must not choose
        given = blake2b(secret.encode(), digest_size=32, person=b"carpool-cache").digest()
        self._key = given if secret else secrets.token_bytes(32)

    def said(self, text: bytes) -> Said:
        return Said(text, xxhash.xxh3_64_intdigest(text, self._seed))

    def fast(self, said: Said, pieces: Sequence[Buffer]) -> int:
        """Returns a fingerprint of 64 bits: more would not be worth their time, since what is found is always
        confirmed."""
        if len(pieces) == 1:
            return xxhash.xxh3_64_intdigest(pieces[0], said.seed)
        digest = xxhash.xxh3_64(seed=said.seed)
        for piece in pieces:
            digest.update(piece)
        return digest.intdigest()

    def sure(self, said: bytes, pieces: Sequence[Buffer]) -> bytes:
        return self._keyed(self._key, b"%d %b" % (len(said), said), pieces)
