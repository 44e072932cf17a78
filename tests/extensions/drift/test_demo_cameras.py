"""The demo's pictures as cameras see them: what is darkened, blurred, cropped or frozen is told by its name
within two windows, and nobody else is."""

from __future__ import annotations

import pytest

from extensions.drift.traffic import Change, Site, blurred, cropped, darkened
from later import first

CAMERAS = ("door", "yard", "gate")


@pytest.mark.parametrize(
    ("change", "cause", "state"),
    first(
        1,
        [
            (darkened, "brightness", "changed"),
            (blurred, "sharpness", "blurred"),
            (cropped, "size", "changed"),
        ],
    ),
)
def test_one_camera_changes(change: Change, cause: str, state: str) -> None:
    site = Site(CAMERAS)
    site.learn()
    site.window({"yard": change})
    assert site.states() == {}  # one window may be chance
    site.window({"yard": change})
    assert site.states() == {"yard": state}
    alarms = site.alarms()
    assert alarms["yard"][0] == cause
    assert alarms.keys() <= {"", "yard"}  # all pictures together may be another mixture now
    told = [event for event in site.events if event.name == "camera-state"]
    assert [(event.facts["source"], event.facts["state"]) for event in told] == [("yard", state)]
    site.window()
    assert site.states() == {}


def test_one_camera_freezes() -> None:
    site = Site(CAMERAS)
    site.learn()
    site.window(frozen="gate")
    assert site.states() == {"gate": "frozen"}
    site.window()
    assert site.states() == {}


@pytest.mark.conformance
def test_the_same_traffic_for_a_hundred_windows() -> None:
    site = Site(CAMERAS[:1])
    site.learn()
    for _ in range(100):
        site.window(each=301)
    assert len(site.events) <= 1
