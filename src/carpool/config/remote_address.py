"""Reads addresses of repositories that lie elsewhere: s3://bucket/models and its like."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

_SCHEMES = ("s3", "gs", "gcs", "hf", "https", "http", "memory")
_ADDRESS = re.compile(rf"({'|'.join(_SCHEMES)}):/+(.+)", re.DOTALL)
_HUB = re.compile(r"hf:([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:@[\w.-]+)?)")  # owner/name, and a revision


def remote_address(path: Path | str) -> str | None:
    """Returns the address that a path of the command line is, if it is one. As a path it has lost a slash."""
    hub = _HUB.fullmatch(str(path))
    if hub is not None:
        return f"hf://{hub[1]}"
    found = _ADDRESS.fullmatch(str(path))
    return None if found is None else f"{found[1]}://{found[2]}"


def shown_address(address: str) -> str:
    """Returns the address without a user's name, a password and a query, which may be a signature: fit for
    logs."""
    parts = urlsplit(address)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
