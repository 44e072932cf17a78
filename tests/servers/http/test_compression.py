"""Which encoding an answer gets, and that it can be undone."""

from __future__ import annotations

import gzip
import zlib

import pytest

from carpool.servers.http.compression import choose_encoding, compress


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (None, None),
        (b"", None),
        (b"identity", None),
        (b"br", None),
        (b"gzip", b"gzip"),
        (b"x-gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"GZIP;q=0.5, deflate", b"deflate"),
        (b"gzip, deflate, br", b"gzip"),
        (b"gzip;q=0, deflate;q=0.1", b"deflate"),
        (b"gzip;q=0", None),
        (b"*", b"gzip"),
        (b"*;q=0.5, gzip;q=0", b"deflate"),
        (b"identity, gzip;q=0.5", None),
        (b"gzip;q=nonsense", None),
        (b"gzip; level=9", b"gzip"),
    ],
)
def test_the_clients_preference_decides(accepted: bytes | None, chosen: bytes | None) -> None:
    assert choose_encoding(accepted) == chosen


def test_what_was_compressed_can_be_read_back() -> None:
    body = b"the same again " * 100
    assert gzip.decompress(compress(body, b"gzip")) == body
    assert zlib.decompress(compress(body, b"deflate", level=1)) == body
