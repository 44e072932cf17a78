"""Holds, in the engine's memory alone, where each project's Label Studio is and the token for its images.

All front ends answer on one port, so that one may hear of a token and another need it. A token counts for
the holder of the key that brought it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from carpool.engine.engine_parts import EnginePart, EngineServer

SETUP, ACCESS = "label_studio/setup", "label_studio/access"
_MOST = 1000  # projects; the oldest are forgotten


def engine(_server: EngineServer) -> EnginePart:
    access = LabelAccess()
    return EnginePart(questions={"setup": access.setup, "access": access.access})


class LabelAccess:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], tuple[str, str]] = OrderedDict()

    async def setup(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        project = str(asked["holder"]), str(asked["project"])
        self._known.pop(project, None)
        self._known[project] = str(asked["hostname"]), str(asked["token"])
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return {}

    async def access(self, asked: Mapping[str, Any]) -> dict[str, str]:
        hostname, token = self._known.get((str(asked["holder"]), str(asked["project"])), ("", ""))
        return {"hostname": hostname, "token": token}
