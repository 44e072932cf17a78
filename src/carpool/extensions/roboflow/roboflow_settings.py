"""Reads the settings of this protocol: other names of models."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.config.api_settings import api_table, wrong
from carpool.config.server import ServerSettings

_NAME = "roboflow"


def begin(settings: ServerSettings) -> tuple[ServerSettings, str]:
    aliases(settings)
    return settings, ""


def aliases(settings: ServerSettings) -> Mapping[str, str]:
    """Returns names of models here by the ids that clients send, as in `"coco/3" = "nanodet"`."""
    found = api_table(settings.api_settings, _NAME, ("aliases",)).get("aliases", {})
    if not isinstance(found, dict) or not all(isinstance(name, str) and name for name in found.values()):
        raise wrong(settings.api_settings, _NAME, 'aliases must be a table like {"coco/3" = "nanodet"}')
    return found
