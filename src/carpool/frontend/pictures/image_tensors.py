"""Recognizes v2 requests with image files in their tensors."""

from __future__ import annotations

from carpool.link.catalog import ModelEntry
from carpool.types import Datatype
from carpool.wire.v2 import RequestHead

_MARK = b'"BYTES"'


def may_hold_pictures(json: bytes | bytearray) -> bool:
    """Takes a quick look at a head that is not read yet."""
    return _MARK in json


def sends_pictures(entry: ModelEntry, head: RequestHead) -> bool:
    return entry.vision is not None and any(tensor.datatype is Datatype.BYTES for tensor in head.inputs)
