"""The engine's answer to `profile`, and where the choices are shown."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from carpool.core.curve import BatchCurve
from carpool.core.job import Job
from carpool.engine.control.engine_questions import answer_profile_questions
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.engine.run.batch import BatchResult
from carpool.errors import NotFound
from carpool.frontend.documents import LivePage
from carpool.link.catalog import Catalog
from carpool.link.catalog_changes import CatalogReader, CatalogWriter
from carpool.link.engine_client import EngineClient
from carpool.link.records import TO_FRONTEND
from carpool.observe.counters import Table, table_bytes
from engine import repositories

X = np.zeros((1, 4), np.float32)


def story(tmp_path: Path, head: str, name: str = "fake") -> tuple[dict[str, Any], dict[str, Any], Catalog]:
    repositories.fake(tmp_path, curve="4+1", head=head)

    async def run() -> tuple[dict[str, Any], dict[str, Any], Catalog]:
        table = Table(bytearray(table_bytes(1)))
        host = EngineHost(partial(Engine, tmp_path, table=table))
        async with host.engine:
            answer_profile_questions(host)
            host.set_ready(True)
            live = LivePage(table).document(
                cast(EngineClient, SimpleNamespace(catalog=host.catalog, serving=True)), 0.0
            )
            return await host.ask("profile", {"name": name}), live["models"][0], host.catalog

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_a_promise_with_its_curve_its_fit_and_its_choices(tmp_path: Path) -> None:
    found, live, catalog = story(tmp_path, "slo_ms = 30")
    assert found["curve"] == [[1, 5.0], [8, 12.0]]
    assert found["fit"]["fixed_ms"] == pytest.approx(4)
    assert found["fit"]["per_image_ms"] == pytest.approx(1)
    speed = {"factor": 1.0, "told": 1.0, "relearned": False, "handover_ms": 0.0, "instances": [[1.0, 1.1]]}
    assert found["speed"] == speed
    assert found["believed"] == [[1, 5.0], [8, 12.0]]
    assert (found["mode"], found["max_batch"], found["knobs"]) == ("promise", 8, None)
    assert found["recent"] == {"seconds": 10, "batches": 0, "mean_batch": None, "mean_ms": None, "sizes": []}
    assert found["promise"] == {
        "slo_ms": 30.0,
        "largest_batch": 8,
        "promised_batch": 8,
        "capacity_rps": pytest.approx(8 / 0.012),
    }
    assert any("Under load, batches of about 8" in choice for choice in found["choices"])
    assert live["choices"] == found["choices"]
    assert live["counts"]["speed_ratio"] == 1.0
    written = CatalogWriter(catalog).whole()
    (entry,) = CatalogReader().end(1, written[TO_FRONTEND.size :]).entries.values()
    assert list(entry.published.choices) == found["choices"]


def test_without_a_promise(tmp_path: Path) -> None:
    found, live, _ = story(tmp_path, "")
    assert found["promise"] is None
    assert found["mode"] == "eager"
    assert found["knobs"]["max_batch"] == 8
    assert found["knobs"]["max_delay_ms"] == 0
    assert live["counts"]["speed_ratio"] == 0.0


def test_what_ran_and_what_was_learned_is_told(tmp_path: Path) -> None:
    repositories.fake(tmp_path, curve="1+1", head="slo_ms = 60000")

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        host = EngineHost(partial(Engine, tmp_path))
        async with host.engine as engine:
            answer_profile_questions(host)
            await engine.infer("fake", X)
            before = await host.ask("profile", {"name": "fake"})
            scheduler = engine.find("fake").scheduler
            scheduler.belief.adopt(BatchCurve([(1, 0.004), (8, 0.018)], 8, [2, 8]), 0.5)
            scheduler.curve = scheduler.belief.curve
            scheduler.instances.refresh()
            return before, await host.ask("profile", {"name": "fake"})

    before, after = asyncio.run(asyncio.wait_for(run(), 60))
    assert before["recent"]["batches"] == 1
    assert before["recent"]["mean_batch"] == 1
    assert before["recent"]["mean_ms"] >= 2
    assert before["recent"]["sizes"] == [[1, 1, before["recent"]["mean_ms"]]]
    assert after["speed"]["relearned"]
    assert after["speed"]["handover_ms"] == 0.0, "it is short beside this model's batches"
    assert after["fit"] == before["fit"], "the line is that of what was loaded"
    slower = after["speed"]["instances"][0][0]
    times = [[1, 6.0], [2, 6.0], [3, 18.0], [8, 18.0]]  # padded sizes at their cost
    assert after["believed"] == [[size, pytest.approx(ms * slower)] for size, ms in times]


def test_each_kind_of_work_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    repositories.fake(tmp_path, curve="4+1", head="slo_ms = 100")

    async def run() -> None:
        async with Engine(tmp_path) as engine:
            served = engine.find("fake")
            scheduler, now = served.scheduler, monotonic()
            for shape, factor in 2 * ((None, 3.0), ("encoded", 2.0)):
                scheduler.offer(Job(now, shape=shape), now)
                batch = scheduler.decide(now).batch
                assert batch is not None
                for number in range(100):
                    took = factor * scheduler.trend.profile.times[1]
                    batch.belief.trend.ran(1, took, batch.belief.curve, now - 10 + number / 10)
                scheduler.finished(batch, now)
                served.runtime.batch_ended(BatchResult([], 0.0), batch)

    asyncio.run(asyncio.wait_for(run(), 60))
    told = [str(record.msg) for record in caplog.records if str(record.msg).startswith("profile-drift")]
    assert len(told) == 2, "once each, however often they take turns"
    assert "shape" not in told[0]
    assert "shape=encoded" in told[1]


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        story(tmp_path, "", name="nobody")
