"""Describes the settings of a cascade: the step with `escalate`, which pipelines read."""

from __future__ import annotations

from carpool.config.settings_part import SettingsPart
from carpool.extensions.pipelines.settings import EscalateSettings

PART = SettingsPart(kind=EscalateSettings)
