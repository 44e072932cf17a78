"""Reports to `carpool doctor` whether spans can be made, and where they go."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError
from carpool.extensions.tracing.settings import otel_warning, package_is_missing, read_otel
from carpool.lab.machine_check import Finding, State


def findings(settings: ServerSettings, environ: Mapping[str, str]) -> list[Finding]:
    return [_collector(settings, environ)]


def _collector(settings: ServerSettings, environ: Mapping[str, str]) -> Finding:
    missing = package_is_missing()
    advice = "pip install 'carpool[otel]'" if missing else ""
    try:
        otel = read_otel(settings, environ)
        wanted = otel_warning(settings, environ)
    except CarpoolError as error:
        return Finding("tracing", "OpenTelemetry", State.WRONG, error.message, advice)
    if otel is not None:
        says = f"spans of {otel.sample:.4g} of the requests go to {otel.url}"
        return Finding("tracing", "OpenTelemetry", State.FINE, says)
    if wanted:
        return Finding(
            "tracing", "OpenTelemetry", State.NOTE, "is not installed, but a collector is set", advice
        )
    if missing:
        return Finding("tracing", "OpenTelemetry", State.ABSENT, "is not installed", advice)
    return Finding("tracing", "OpenTelemetry", State.FINE, "is installed; no collector is set")
