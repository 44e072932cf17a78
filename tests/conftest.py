"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A machine may stand still for seconds: how long an example takes, or is made, says nothing about the code.
settings.register_profile("carpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("carpool")
