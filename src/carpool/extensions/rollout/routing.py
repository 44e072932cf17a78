"""Chooses which version of a model answers a request that names none, while one takes over from another.

The one place that chooses. What keeps to one side (a camera's name, a header) is hashed with the candidate's
digest: a camera in a share of a tenth is also in that of a half, and all replicas choose alike. A request
with nothing to keep to is drawn by the time at which its head came.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from hashlib import blake2b

from carpool.errors import NotFound
from carpool.extensions.rollout.split import RolloutSplit, splits_of
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.senders import Sender

_ALL = 1 << 64
_HEADER = "header:"
_LONGEST_KEY = 512
_FEWEST_TIMES, _MOST_TIMES = 50, 501


class Usual:
    """Measures how long something usually takes: the middle of the last times."""

    __slots__ = ("_last", "_sorted")

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._sorted: list[float] = []

    def learn(self, seconds: float) -> None:
        self._last.append(seconds)
        insort(self._sorted, seconds)
        if len(self._last) > _MOST_TIMES:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    @property
    def median(self) -> float | None:
        """None: too little is known."""
        return self._sorted[len(self._sorted) // 2] if len(self._sorted) >= _FEWEST_TIMES else None


class Split:
    """Describes two versions of one model, and which requests each one gets."""

    __slots__ = (
        *("_header", "_of_candidate", "_salt", "alike", "candidate", "route", "stable", "stable_s"),
        "usual",
    )

    def __init__(self, route: RolloutSplit, stable: ModelEntry, candidate: ModelEntry) -> None:
        self.route = route
        self.stable = stable
        self.candidate = candidate
        mine, its = stable.signature, candidate.signature
        self.alike = (mine.inputs, mine.outputs) == (its.inputs, its.outputs)  # tensors for one fit the other
        self.stable_s = 0.0  # what stable takes for an answer, learnt from those that it gives
        self.usual = Usual()  # the same, as the candidate is held against it
        self._of_candidate = int(route.share * _ALL)
        self._salt = route.salt.encode()[:64]
        sticky = route.sticky
        self._header = sticky.removeprefix(_HEADER).lower().encode() if sticky.startswith(_HEADER) else b""

    def choose(self, sender: Sender, at: float, headers: Mapping[bytes, bytes], wish: str = "") -> ModelEntry:
        if wish:
            return self.stable if wish == "stable" else self.candidate
        if not self._of_candidate:
            return self.stable
        if self._of_candidate >= _ALL:
            return self.candidate
        digest = blake2b(self._key(sender, at, headers), digest_size=8, key=self._salt).digest()
        return self.candidate if int.from_bytes(digest, "big") < self._of_candidate else self.stable

    def _key(self, sender: Sender, at: float, headers: Mapping[bytes, bytes]) -> bytes:
        named = b""
        if self._header:
            named = headers.get(self._header, b"")
        elif self.route.sticky == "source":
            named = sender.named.encode(errors="replace")
        return named[:_LONGEST_KEY] if named else b"\0%r" % at

    def spares(self, entry: ModelEntry) -> bool:
        """Returns whether what this version refuses or fails is run on stable instead."""
        return entry is self.candidate and self.route.fallback

    def other(self, entry: ModelEntry) -> ModelEntry:
        return self.stable if entry is self.candidate else self.candidate


class Routing:
    """Routes the requests of one front end, in its loop's thread only. `splits` is empty while nothing is
    rolled out."""

    def __init__(self) -> None:
        self.splits: dict[str, Split] = {}

    def follow(self, catalog: Catalog) -> None:
        """Takes the versions and their shares from a new catalogue."""
        before, self.splits = self.splits, {}
        for name, route in splits_of(catalog).items():
            stable, candidate = (
                catalog.entries.get((name, version)) for version in (route.stable, route.candidate)
            )
            if stable is None or candidate is None:
                continue  # one of them is being loaded: what serves is what the catalogue has without a route
            self.splits[name] = split = Split(route, stable, candidate)
            known = before.get(name)
            if known is not None:
                split.stable_s = known.stable_s
                if known.stable.version == stable.version:
                    split.usual = known.usual

    def split(self, name: str, wish: str = "", *, tensors: bool) -> Split | None:
        """Returns the two versions that requests for this model are divided between, if they are. With
        versions that take pictures of different sizes only pictures are: tensors were made for stable."""
        split = self.splits.get(name)
        if split is not None and tensors and not split.alike:
            split = None
        if split is None and wish == "candidate":
            raise NotFound(f"no version of '{name}' is being rolled out for this", reason="no-rollout")
        return split
