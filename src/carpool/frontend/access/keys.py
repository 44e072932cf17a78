"""Holds who has a key, and what for. No part of a key is ever in an error or in the log."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Protocol
from weakref import WeakSet

_pepper = secrets.token_bytes(32)


class KeyStream(Protocol):
    """Defines an answer in pieces, which ends with the key that it was asked with."""

    def key_ended(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Principal:
    name: str
    digest: bytes
    admin: bool = False
    priority: int = 0  # the most urgent that its requests may be, and what they are by default; 0: no matter
    models: tuple[str, ...] = ()  # patterns of those it may use; none is all
    weight: float = 1.0  # its part of a busy device, beside those of others
    streams: WeakSet[KeyStream] = field(default_factory=WeakSet, compare=False, repr=False)
    """Answers in pieces that are under way, for as long as anything else holds them."""

    def may_use(self, model: str) -> bool:
        return not self.models or any(fnmatchcase(model, pattern) for pattern in self.models)


def holder(who: Principal | None) -> str:
    return "" if who is None else who.name


def asked_by(who: Principal | None) -> dict[str, object]:
    """Returns the fields that name a client to the engine, beside the client's request."""
    return {} if who is None else {"by": who.name, "admin": who.admin}


def digest_of(key: bytes) -> bytes:
    """Returns a digest keyed with a secret of this process: how long it takes to compare two of them, or to
    look one up, says nothing about the keys."""
    return hashlib.blake2b(key, key=_pepper, digest_size=32).digest()


class Keys:
    """Holds the keys of both files, as they were read together."""

    def __init__(self, principals: Iterable[Principal] = ()) -> None:
        self._by_digest = {principal.digest: principal for principal in principals}

    def find(self, key: bytes) -> Principal | None:
        digest = digest_of(key)
        found = self._by_digest.get(digest)
        return found if found is not None and hmac.compare_digest(found.digest, digest) else None

    def succeed(self, before: Keys) -> None:
        """These are in force now. What streams with a key of those before goes on if the key is here, too."""
        for digest, old in before._by_digest.items():
            found = self._by_digest.get(digest)
            if found is not None:
                self._by_digest[digest] = replace(found, streams=old.streams)
            else:
                for stream in list(old.streams):
                    stream.key_ended()

    def __len__(self) -> int:
        return len(self._by_digest)
