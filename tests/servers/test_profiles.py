"""The engine's answer to `profile`, and where the choices are shown."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from carpool.engine.engine import Engine
from carpool.errors import NotFound
from carpool.observe.counters import Table, table_bytes
from carpool.servers.door import Catalog
from carpool.servers.host import EngineHost
from carpool.servers.link.catalogs import read_catalog, write_catalog
from carpool.servers.live_document import LivePage
from carpool.servers.local_door import LocalDoor
from carpool.servers.profiles import teach_profiles
from engine import repositories


def story(tmp_path: Path, head: str, name: str = "fake") -> tuple[dict[str, Any], dict[str, Any], Catalog]:
    repositories.fake(tmp_path, curve="4+1", head=head)

    async def run() -> tuple[dict[str, Any], dict[str, Any], Catalog]:
        table = Table(bytearray(table_bytes(1)))
        async with Engine(tmp_path, table=table) as engine:
            host = EngineHost(engine)
            teach_profiles(host)
            host.set_ready(True)
            live = LivePage(table).document(LocalDoor(host, max_bytes=1 << 20), 0.0)
            return await host.ask("profile", {"name": name}), live["models"][0], host.catalog

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_promise_with_its_curve_its_fit_and_its_choices(tmp_path: Path) -> None:
    found, live, catalog = story(tmp_path, "slo_ms = 30")
    assert found["curve"] == [[1, 5.0], [8, 12.0]]
    assert found["fit"]["fixed_ms"] == pytest.approx(4)
    assert found["fit"]["per_image_ms"] == pytest.approx(1)
    assert found["speed"] == {"factor": 1.0, "told": 1.0, "instances": [[1.0, 1.1]]}
    assert found["promise"] == {
        "slo_ms": 30.0,
        "largest_batch": 8,
        "promised_batch": 8,
        "capacity_rps": pytest.approx(8 / 0.012),
    }
    assert any("Under load batches near 8" in choice for choice in found["choices"])
    assert live["choices"] == found["choices"]
    assert live["counts"]["speed_ratio"] == 1.0
    (entry,) = read_catalog(1, write_catalog(catalog), {}).entries.values()
    assert list(entry.choices) == found["choices"]


def test_without_a_promise(tmp_path: Path) -> None:
    found, live, _ = story(tmp_path, "")
    assert found["promise"] is None
    assert live["counts"]["speed_ratio"] == 0.0


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        story(tmp_path, "", name="nobody")
