"""What holds for all tests."""

from __future__ import annotations

import gc
import os
import sys

from hypothesis import HealthCheck, settings

from later import many

# A machine may stand still for seconds: how long an example takes, or is made, says nothing about the code.
settings.register_profile(
    "carpool", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=many(100)
)
# What is to land is judged by the same examples each time; whoever develops looks at new ones with every run.
settings.register_profile("ci", settings.get_profile("carpool"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "carpool")

# Tests start hundreds of processes. Where bytecode must not be kept, each would compile the package anew, and
# each of pytest's workers would write the assertions of all files anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """What was imported stays: whoever collects garbage in a test need not look through all of it again."""
    gc.collect()
    gc.freeze()
