"""How long a message may be: no more than the models that are loaded can take.

gRPC learns it when a server is made, and refuses longer ones at their first bytes.
"""

from __future__ import annotations

from carpool.config.server import ServerSettings
from carpool.frontend.http.largest_body import LargestBody
from carpool.link.door import Catalog

_ALWAYS = 4 << 20  # gRPC's own default
_LARGEST = 2**31 - 1  # what a message's length can be


def largest_message(catalog: Catalog, settings: ServerSettings) -> int:
    """A power of two, so that another model seldom needs another server, or the limit of all bodies."""
    limit = min(settings.max_body_bytes + settings.max_header_bytes, _LARGEST)
    if settings.model_control_mode == "explicit":
        return limit  # models come with a request, too
    entries = (*catalog.entries.values(), *catalog.leaving)
    needed = max((LargestBody(entry, settings.max_body_bytes).gathered() for entry in entries), default=0)
    if needed >= settings.max_body_bytes:
        return limit
    return min(limit, 1 << (max(needed, _ALWAYS) - 1).bit_length())
