"""What `carpool doctor` says of spans."""

from __future__ import annotations

import pytest

from carpool.config.server import ServerSettings
from carpool.extensions.tracing import doctor, settings
from carpool.lab.machine_check import State, check_machine


@pytest.mark.parametrize(
    ("endpoint", "missing", "state", "says"),
    [
        ("", False, State.FINE, "no collector is set"),
        ("", True, State.ABSENT, "is not installed"),
        ("http://c:4318", False, State.FINE, "0.01 of the requests go to http://c:4318/v1/traces"),
        ("http://c:4318", True, State.NOTE, "is not installed, but a collector is set"),
        ("c:4318", False, State.WRONG, "must be like http://localhost:4318"),
    ],
)
def test_where_spans_go(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, missing: bool, state: State, says: str
) -> None:
    for module in (doctor, settings):
        monkeypatch.setattr(module, "package_is_missing", lambda: missing)
    [finding] = doctor.findings(ServerSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint})
    assert finding.state is state
    assert says in finding.says
    assert ("carpool[otel]" in finding.advice) is missing


def test_it_is_asked_as_a_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carpool.lab.machine_check.kinds", dict)
    assert "OpenTelemetry" in {finding.name for finding in check_machine()}
