"""[cache] of model.toml: which answers are kept, and for how long. Triton's response_cache is part of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_DAY_S = 86400.0
SIMILAR_HASHES = ("blocks", "phash")
SCOPES = ("model", "source")


def _key(default: Any, *choices: str, **said: Any) -> Any:
    return field(default=default, metadata={"choices": choices, **said})


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Holds `exact`: the same request again; and `similar`: a picture of the same source that shows the same
    scene. `similar`: a picture of the same source that shows the same scene."""

    exact: bool = True
    ttl_s: float = _key(60.0, within=(0, _DAY_S), above=True)
    min_uses: int = _key(2, within=(1, 2))  # equal requests after which the answer is kept
    similar: bool = False
    similar_ttl_s: float = _key(2.0, within=(0, _DAY_S), above=True)
    similar_hash: str = _key("blocks", *SIMILAR_HASHES)
    similar_grey: float = _key(6.0, within=(0, 255))  # blocks: the largest change that is none
    similar_threshold: int = _key(10, within=(0, 64))  # phash: so many bits of 64 may differ
    scope: str = _key("model", *SCOPES)  # of exact answers; similar ones are always a source's own
    audit: float = _key(0.01, within=(0, 1))  # of the similar hits
    audit_most: float = _key(0.01, within=(0, 1))  # wrong more often than this: off for that source
    entry_kb: int = _key(256, within=(1, 1 << 16))  # longer answers are not kept
