"""Addresses of Redis servers, right and wrong; what is secret in them is never repeated."""

from __future__ import annotations

import pytest

from carpool.config.redis_url import RedisUrl, read_redis_url
from carpool.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("redis://localhost", RedisUrl("localhost", 6379, False, "", "", 0, "")),
        ("redis://:p%40ss@10.0.0.1:7000/3", RedisUrl("10.0.0.1", 7000, False, "", "p@ss", 3, "")),
        ("rediss://me:you@[::1]/0", RedisUrl("::1", 6379, True, "me", "you", 0, "")),
        ("rediss://h?ssl_ca_certs=/ca.pem&db=2", RedisUrl("h", 6379, True, "", "", 2, "/ca.pem")),
        ("unix:///run/redis.sock?db=4", RedisUrl("/run/redis.sock", 0, False, "", "", 4, "")),
        ("unix://:pass@/run/a%20b.sock", RedisUrl("/run/a b.sock", 0, False, "", "pass", 0, "")),
    ],
)
def test_addresses(text: str, found: RedisUrl) -> None:
    assert read_redis_url(text, "shared_profiles") == found
    if found.password:
        assert found.password not in repr(found)
        assert found.password not in found.where


@pytest.mark.parametrize(
    "text",
    [
        *(
            "localhost:6379",
            "http://:hunter2@host",
            "redis://",
            "redis://:hunter2@",
            "redis://:hunter2@h:99999",
        ),
        *(
            "redis://:hunter2@h:port",
            "redis://:hunter2@h/first",
            "redis://:hunter2@h/1/2",
            "unix://:hunter2@x",
        ),
        *("redis://:hunter2@h?timeout=3", "redis://:hunter2@h?ssl_ca_certs=/x", "redis://:hunter2@h#x"),
        *("redis://:hunter2@h\n", "redis://:hunter2@[::1", "redis://:hunter2@h?db=-1", " redis://:hunter2@h"),
    ],
)
def test_mistakes_name_the_setting_and_no_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_redis_url(text, "shared_profiles")
    assert caught.value.field == "shared_profiles"
    assert "shared_profiles" in caught.value.message
    assert "hunter2" not in caught.value.message
