"""Reads [cache] of model.toml: which answers are cached, for how long; and Triton's response_cache."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from carpool.config.declared_keys import read_declared
from carpool.config.model import ModelConfig, key
from carpool.config.redis_url import read_redis_url
from carpool.config.server import ServerSettings
from carpool.config.settings_part import SettingsPart, TritonPart
from carpool.config.table import TomlTable
from carpool.errors import ConfigError

if TYPE_CHECKING:
    from carpool.config.triton_text import TextSource

_DAY_S = 86400.0
SIMILAR_HASHES = ("blocks", "phash")
SCOPES = ("model", "source")


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Describes which responses are cached. `exact`: those to the same request; `similar`: those to a picture
    of the same source that shows the same scene."""

    exact: bool = True
    ttl_s: float = key(60.0, within=(0, _DAY_S), above=True)
    min_uses: int = key(2, within=(1, 2))  # equal requests after which the answer is stored
    similar: bool = False
    similar_ttl_s: float = key(2.0, within=(0, _DAY_S), above=True)
    similar_hash: str = key("blocks", *SIMILAR_HASHES)
    similar_grey: float = key(6.0, within=(0, 255))  # blocks: the largest change that is none
    similar_threshold: int = key(10, within=(0, 64))  # phash: so many bits of 64 may differ
    scope: str = key("model", *SCOPES)  # of exact answers; similar ones are always a source's own
    audit: float = key(0.01, within=(0, 1))  # of the similar hits
    audit_most: float = key(0.01, within=(0, 1))  # wrong more often than this: off for that source
    entry_kb: int = key(256, within=(1, 1 << 16))  # longer answers are not stored


_LIKE_TRITON = CacheSettings(min_uses=1)
"""What Triton's `response_cache` means: every response is cached."""


def cache_settings(config: ModelConfig) -> CacheSettings | None:
    """Returns a model's; None: nothing is cached."""
    settings = config.extra.get("cache")
    return settings if isinstance(settings, CacheSettings) else None


def _read(top: TomlTable) -> CacheSettings | None:
    table, as_in_triton = top.table("cache"), top.flag("response_cache")
    if table is None:
        return _LIKE_TRITON if as_in_triton else None
    settings = read_declared(table, CacheSettings)
    return settings if settings.exact or settings.similar else None


def _read_triton(source: TextSource) -> CacheSettings | None:
    return _LIKE_TRITON if source.message.response_cache.enable else None


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    """Checks the address under which servers share answers."""
    read_redis_url(settings.option("cache_url"), "cache_url", folders=False)
    for field, sentence in settings.redis_mistakes("cache_url"):
        raise ConfigError(sentence, field=field)
    return settings, ""


PART = SettingsPart(
    kind=CacheSettings,
    tables={"cache": tuple(each.name for each in fields(CacheSettings))},
    read=_read,
    triton=TritonPart(read=_read_triton, document=lambda _: {"response_cache": {"enable": True}}),
)
