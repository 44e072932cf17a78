"""Triton's restricted APIs: groups of routes that take a header of the operator's choice.

As Triton spells it, `--http-restricted-api=model-repository,logging:admin-key=SECRET`. Over gRPC the header
is called `triton-grpc-protocol-admin-key`.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from carpool.config.rules import nearest, shown
from carpool.errors import ConfigError, Forbidden

APIS = (
    "health",
    "metadata",
    "inference",
    "shared-memory",
    "model-config",
    "model-repository",
    "statistics",
    "trace",
    "logging",
)
GRPC_PREFIX = "triton-grpc-protocol-"

_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,128}")
_VALUE = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")


class Wanted(NamedTuple):
    header: str  # in lower case
    value: bytes


Restrictions = dict[str, Wanted]
"""By the name of the API."""


def read_restrictions(given: Sequence[str], option: str, prefix: str = "") -> Restrictions:
    """`given` may have been split at the commas between APIs; raises `ConfigError` without the value."""
    found: Restrictions = {}
    apis: list[str] = []
    for part in ",".join(given).split(","):
        api, colon, rest = part.partition(":")
        if not part:
            continue
        if api not in APIS:
            raise ConfigError(f"{option}: unknown API {shown(api)}; {nearest(api, APIS)}", field=option)
        if api in found or api in apis:
            raise ConfigError(f"{option}: {api} is restricted twice", field=option)
        apis.append(api)
        if not colon:
            continue
        header, equals, value = rest.partition("=")
        if not equals or not _HEADER.fullmatch(header) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{option} must be like model-repository,logging:header=value", field=option)
        found |= dict.fromkeys(apis, Wanted((prefix + header).lower(), value.encode()))
        apis = []
    if apis:
        raise ConfigError(f"{option}: {', '.join(apis)} must be followed by :header=value", field=option)
    return found


def check_restricted(restrictions: Restrictions, api: str, field: Callable[[str], bytes | None]) -> None:
    """Raise `Forbidden`, in Triton's words, unless the header is there; `field` finds one by its name."""
    wanted = restrictions.get(api)
    if wanted is None:
        return
    value = field(wanted.header)
    if value is None or not hmac.compare_digest(value, wanted.value):
        raise Forbidden(f"This API is restricted, expecting header '{wanted.header}'")
