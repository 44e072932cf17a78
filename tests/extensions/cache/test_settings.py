"""The server's settings of caches, right and wrong; what is secret in them is never repeated."""

from __future__ import annotations

import pytest

from carpool.config.server import server_settings
from carpool.errors import ConfigError
from carpool.extensions.cache.settings import begin

SHARED = {"CARPOOL_CACHE_URL": "redis://:hunter2@h", "CARPOOL_CACHE_SECRET": "sixteen letters!"}


def test_settings_of_a_server_that_shares() -> None:
    settings, _ = server_settings({}, SHARED)
    assert begin(settings) == (settings, "")
    assert settings.option("cache_wait_ms") == 2.0
    assert "hunter2" not in repr(settings)
    assert "sixteen letters" not in repr(settings)
    settings, _ = server_settings({}, SHARED | {"CARPOOL_CACHE_SECRET": "short"})
    with pytest.raises(ConfigError, match="needs a cache_secret of 16 characters"):
        begin(settings)
    with pytest.raises(ConfigError, match=r"cache_wait_ms must be 0\.1 to 1000"):
        server_settings({"cache_wait_ms": 0.0}, {})


@pytest.mark.parametrize("address", ["localhost:6379", "file:/mnt/answers", "redis://:hunter2@h:port"])
def test_mistakes_name_the_setting_and_no_password(address: str) -> None:
    settings, _ = server_settings({}, SHARED | {"CARPOOL_CACHE_URL": address})
    with pytest.raises(ConfigError, match="cache_url must be an address like redis://") as caught:
        begin(settings)
    assert caught.value.field == "cache_url"
    assert "hunter2" not in caught.value.message
